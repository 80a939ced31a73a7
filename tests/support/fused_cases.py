"""Cases of fused models whose head ColwiseParallel shards, for rank_processes.py.

Each case trains a small model, or computes gradients, on a mesh and in one process.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.rank_processes import Case, apart, mesh_of

D, V, TOKENS = 6, 11, 8

# The arguments output_layouts and use_local_output of ColwiseParallel.
WAYS = {"whole rows": ("Replicate", True), "columns": ("Shard", True), "DTensor": ("Shard", False)}


def model(vocab: int = V) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, vocab)).double()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(count, TOKENS, D, generator=g, dtype=torch.float64)
    target = torch.randint(V, (count, TOKENS), generator=g)
    target[:, [1, TOKENS // 2 + 1]] = -100  # one token of each half is ignored
    return list(zip(x, target, strict=True))


def fused(way: str, mesh, tokens_cut: bool = False, vocab: int = V, **options) -> nn.Sequential:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import logitless as ll

    layout, local = WAYS[way]
    style = ColwiseParallel(
        input_layouts=Shard(0) if tokens_cut else Replicate(),
        output_layouts=Replicate() if layout == "Replicate" else Shard(-1),
        use_local_output=local,
    )
    found = ll.fuse(model(vocab), head="2", **options)
    parallelize_module(found, mesh, {"2": style})
    return found


def loss_of(z: Tensor, target: Tensor, way: str, mesh, vocab: int = V) -> Tensor:
    """The loss by PyTorch's function, as in a model. Columns of a rank need our function."""
    import logitless as ll

    if way == "columns":
        return ll.cross_entropy(ll.VocabShard(z, mesh, vocab=vocab), target)
    return F.cross_entropy(z.view(-1, vocab), target)


def parameters(one: nn.Module) -> list[Tensor]:
    found = [p.detach() for p in one.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found]  # pyright: ignore


def trained_in_one_process() -> list[Tensor]:
    one = model()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for x, target in batches():
        optimizer.zero_grad()
        F.cross_entropy(one(x), target).backward()
        optimizer.step()
    return parameters(one)


def trained(way: str, shape: tuple[int, ...], tokens_cut: bool) -> float:
    """Training with a head over the last mesh dimension. Tokens may be sharded before the head."""
    mesh = mesh_of(*shape)["model"]
    one = fused(way, mesh, tokens_cut)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for x, target in batches():
        optimizer.zero_grad()
        hidden = one[1](one[0](x))
        if tokens_cut:
            hidden = hidden.chunk(mesh.size())[mesh.get_local_rank()]
        z = one[2](hidden)
        assert type(z.recipe.head.hidden) is Tensor  # the gather from other ranks has finished
        loss_of(z, target, way, mesh).backward()
        if tokens_cut:  # each rank has the gradient of its own tokens only
            for p in one[0].parameters():
                dist.all_reduce(p.grad, group=mesh.get_group())
        assert one[2].weight.grad.placements == one[2].weight.placements
        optimizer.step()
    return apart(parameters(one), trained_in_one_process())


def with_fsdp(alone: bool) -> float:
    """Training under FSDP2. If `alone`, FSDP2 frees the head's weight after the head's forward."""
    from torch.distributed.fsdp import fully_shard

    mesh, way = mesh_of(2, 2), "whole rows"
    one = fused(way, mesh["model"])
    if alone:
        fully_shard(one[2], mesh=mesh["data"], reshard_after_forward=True)
    fully_shard(one, mesh=mesh["data"])
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for batch in batches():
        x, target = (t.chunk(2)[mesh["data"].get_local_rank()] for t in batch)
        optimizer.zero_grad()
        loss_of(one(x), target, way, mesh["model"]).backward()
        optimizer.step()
    return apart(parameters(one), trained_in_one_process())


def uses(z: Tensor, z_teacher: Tensor, target: Tensor) -> list[Tensor]:
    """Losses that models and trainers compute from logits. The last two materialise the logits."""
    import logitless as ll

    log_p = z.log_softmax(-1)
    return [
        log_p.gather(-1, target.clamp(min=0).unsqueeze(-1)).sum(),
        F.nll_loss((30 * torch.tanh(z / 30)).log_softmax(-1), target),
        ll.kl_div(z / 2, z_teacher / 2, direction="forward"),
        ll.row_loss(lambda stats: stats.entropy, z[1:5], entropy=True),
        ll.cross_entropy(z.flip(0), target, label_smoothing=0.1),
        (z.softmax(-1) ** 2).sum() + z[:, :3].logsumexp(-1).sum(),
    ]


def used(way: str) -> float:
    """Losses and gradients of many operations on lazy logits of whole rows."""
    import logitless as ll

    x, target = batches(1)[0]
    found = []
    for spread in (False, True):
        mesh = mesh_of(2, 2)["model"]
        one, other = (fused(way, mesh), fused(way, mesh)) if spread else (model(), model())
        with torch.no_grad(), ll.lazy_logits():
            z_teacher = other(x + 1)
        results = []
        for i in range(6):
            one.zero_grad()
            loss = uses(one(x), z_teacher, target)[i]
            loss.backward()
            results += [loss.detach(), *(p.grad for p in one.parameters())]
        topk = ll.capture_topk(one(x), 3)
        results += [topk.ids, topk.logprobs]
        found.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in results])
    return apart(*found)


def compared(way: str) -> float:
    """Training with LOGITLESS_CHECK=1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOGITLESS_CHECK", "1")
        return trained(way, (2, 2), tokens_cut=False)


class Widest(TorchDispatchMode):
    """Records the largest number of rows among results with one of the given widths."""

    def __init__(self, *widths: int):
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if type(t) is not Tensor or not t.dim() or func is torch.ops.aten.t.default:
                continue  # aten.t transposes the weight
            real = t.untyped_storage().size() >= t.numel() * t.element_size()  # not expanded
            if real and t.shape[-1] in self.widths:
                self.rows = max(self.rows, t.shape[:-1].numel())
        return found


def materialised(way: str) -> float:
    """Forward and backward must not compute more rows of logits than the workspace holds."""
    mesh, (x, target) = mesh_of(2, 2)["model"], batches(1)[0]
    one = fused(way, mesh, vocab=2 * 24, workspace=2 * 24 * 8)  # holds two rows of a rank in fp64
    z = one(x)
    with Widest(24, 2 * 24) as made:
        loss_of(z, target, way, mesh, 2 * 24).backward()
    assert 1 <= made.rows <= 2
    return 0.0


def layout_that_is_made() -> float:
    """An output sharded by tokens materialises the logits, and gives one warning."""
    from torch.distributed.tensor import Shard

    from logitless.lazy import report

    mesh, (x, _) = mesh_of(2, 2)["model"], batches(1)[0]
    one = fused("DTensor", mesh)
    report._warned.clear()
    z = one(x).redistribute(placements=[Shard(0)])
    assert any("output_layouts is (Shard(dim=0),)" in said for said in report._warned)
    return apart([z.full_tensor()], [model()(x)])


def made_exactly() -> float:
    """Materialised logits have the head's logits_dtype, with and without gradients."""
    from torch.distributed.tensor import Shard

    mesh, x = mesh_of(2, 2)["model"], batches(1)[0][0].bfloat16()
    one = fused("DTensor", mesh, logits_dtype=torch.float32).bfloat16()
    plain = model().bfloat16()
    want = F.linear(plain[:2](x).double(), plain[2].weight.double(), plain[2].bias.double())  # pyright: ignore
    far = 0.0
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            z = one(x).redistribute(placements=[Shard(0)])
        assert z.dtype == torch.float32
        far = max(far, float((z.full_tensor() - want).abs().max()))
    assert far < 1e-6  # the error of sums in fp32; bf16 logits would have an error of 1e-3
    return 0.0


def columns_of_cut_tokens() -> float:
    """A head that gets a DTensor sharded by tokens returns this rank's columns of all tokens."""
    from torch.distributed.tensor import Shard, distribute_tensor

    import logitless as ll
    from logitless.lazy.fused_head import head_logits

    mesh, (x, target) = mesh_of(2, 2)["model"], batches(1)[0]
    head: nn.Linear = fused("DTensor", mesh)[2]  # pyright: ignore
    hidden = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    z = head_logits(head, hidden, {})
    ll.cross_entropy(ll.VocabShard(z.to_local(), mesh), target).backward()
    assert hidden.grad.placements == hidden.placements
    plain, leaf = model()[2], x.clone().requires_grad_()
    F.cross_entropy(plain(leaf), target).backward()
    got = [hidden.grad, head.weight.grad, head.bias.grad]
    return apart([t.full_tensor() for t in got], [leaf.grad, plain.weight.grad, plain.bias.grad])


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for i, way in enumerate(WAYS):
        for cut in (False, True):
            shape = ((4,), (2, 2))[(i + cut) % 2]
            at = f"fused, {way}, {shape[-1]} ranks{', tokens cut' * cut}"
            found[at] = lambda how=(way, shape, cut): trained(*how)
        found[f"fused, {way}, compared"] = lambda way=way: compared(way)
        found[f"fused, {way}, what is made"] = lambda way=way: materialised(way)
    for alone in (False, True):
        found[f"fused, FSDP2{', the head alone' * alone}"] = lambda alone=alone: with_fsdp(alone)
    for way in ("whole rows", "DTensor"):
        found[f"fused, {way}, used"] = lambda way=way: used(way)
    found["fused, by tokens"] = layout_that_is_made
    found["fused, logits_dtype"] = made_exactly
    found["fused, columns of cut tokens"] = columns_of_cut_tokens
    return found
