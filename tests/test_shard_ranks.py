"""A vocabulary over 2, 3 and 4 processes gives what one process gives: by gloo, on one machine.

All cases in one run of four processes, for starting them takes a while; test_shard.py has more
cases, over ranks that are threads.
"""

import json
import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

WORLD = 4
WIDTHS = {2: (20, 17), 3: (9, 0, 28), 4: (0, 5, 31, 1)}
SHORT = ("cross_entropy", "cross_entropy, every option", "score", "kl_div", "topk_distill", "jsd")


def calls():
    """Late: it imports what a process may not have set up yet."""
    import calls

    return calls


def logits(name: str, ranks: int, dtype: torch.dtype) -> float:
    """How far a call over shards of logits is from one process: values and gradients."""
    from logitless import VocabShard

    c, widths = calls(), WIDTHS[ranks]
    x, index = c.normal(c.N, c.V, seed=1, dtype=dtype), dist.get_rank()
    leaf = x.clone().requires_grad_()
    want, (d_want,) = differentiated(c.CALLS[name], leaf * 1, [leaf])
    if index >= ranks:
        return 0.0
    start = sum(widths[:index])
    part = x.narrow(-1, start, widths[index]).clone().requires_grad_()
    got, (d_got,) = differentiated(c.CALLS[name], VocabShard(part * 1, GROUPS[ranks]), [part])
    return apart(got, want, [d_got], [d_want.narrow(-1, start, widths[index])])


def heads(name: str, ranks: int, dtype: torch.dtype, sequence_parallel: bool = False) -> float:
    """The same of shards of a head, several rows at a time."""
    from logitless import LinearLogits, VocabShard

    c, widths, index = calls(), WIDTHS[ranks], dist.get_rank()
    sizes = [(c.N, c.D), (c.V, c.D), (c.V,)]
    parts = [c.normal(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]
    leaves = [t.clone().requires_grad_() for t in parts]
    want, d_want = differentiated(c.CALLS[name], LinearLogits(*leaves), leaves)
    if index >= ranks:
        return 0.0
    own = (sum(widths[:index]), widths[index])
    tokens = (c.N // ranks * index, c.N // ranks) if sequence_parallel else (0, c.N)
    mine = [tokens, own, own]
    local = [t.narrow(0, *at).clone().requires_grad_() for t, at in zip(parts, mine, strict=True)]
    head = LinearLogits(*local, workspace=3 * 32 * dtype.itemsize)
    shard = VocabShard(head, GROUPS[ranks], sequence_parallel=sequence_parallel)
    got, d_got = differentiated(c.CALLS[name], shard, local)
    return apart(got, want, d_got, [d.narrow(0, *at) for d, at in zip(d_want, mine, strict=True)])


def differentiated(call, source, leaves):
    found = [t for t in call(source) if t is not None]
    used = [t for t in found if t.requires_grad]
    scalar = sum((t.double() * (i + 1)).sum() for i, t in enumerate(used))
    d = torch.autograd.grad(scalar, leaves) if used else [torch.zeros_like(t) for t in leaves]
    return [t.detach() for t in found], d


def apart(got, want, d_got, d_want) -> float:
    pairs = zip((*got, *d_got), (*want, *d_want), strict=True)
    return max(float((a.double() - b.double()).abs().max()) if a.numel() else 0 for a, b in pairs)


def mesh_of(*shape: int):
    from torch.distributed.device_mesh import init_device_mesh

    names = ("data", "model")[-len(shape) :]
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return MESHES[shape]


def dtensor_logits(name: str, shape: tuple[int, ...]) -> float:
    """DTensor logits, sharded over the last dimension of a mesh; their gradient is a DTensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    c, mesh = calls(), mesh_of(*shape)
    placements = [Replicate()] * (len(shape) - 1) + [Shard(1)]
    x = c.normal(c.N, c.V, seed=1, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    want, (d_want,) = differentiated(c.CALLS[name], leaf * 1, [leaf])
    spread = distribute_tensor(x, mesh, placements).requires_grad_()
    got, (d_got,) = differentiated(c.CALLS[name], spread * 1, [spread])
    if got[0].is_floating_point() and name not in c.NOT_DIFFERENTIABLE:
        assert d_got.placements == tuple(placements), d_got.placements
        d_got = d_got.full_tensor()
    return apart(got, want, [d_got], [d_want])


def dtensor_head(name: str, tokens_cut: bool) -> float:
    """A head whose weight is a DTensor, as ColwiseParallel makes it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import logitless as ll

    c, mesh = calls(), mesh_of(WORLD)
    sizes = [(8, c.D), (c.V, c.D), (c.V,)]
    parts = [c.normal(*size, seed=i, dtype=torch.float64) for i, size in enumerate(sizes)]
    target, leaves = torch.arange(8) * 4, [t.clone().requires_grad_() for t in parts]
    call = {
        "mean": lambda x: (ll.cross_entropy(x, target, label_smoothing=0.1),),
        "rows": lambda x: ll.score(x, target),
    }[name]
    want, d_want = differentiated(call, ll.LinearLogits(*leaves), leaves)
    places = [Shard(0) if tokens_cut else Replicate(), Shard(0), Shard(0)]
    spread = [
        distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(parts, places, strict=True)
    ]
    got, d_got = differentiated(call, ll.LinearLogits(*spread, workspace=2000), spread)
    assert [d.placements for d in d_got] == [(p,) for p in places]
    return apart(got, want, [d.full_tensor() for d in d_got], d_want)


def as_loss_parallel(reduction: str) -> float:
    """PyTorch's own loss over DTensor logits."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    import logitless as ll

    c, mesh = calls(), mesh_of(WORLD)
    x = c.normal(c.N, 40, seed=1, dtype=torch.float64)
    target = c.TARGET.clamp(max=39)
    found = []
    for loss in (ll.cross_entropy, torch.nn.functional.cross_entropy):
        leaf = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            value = loss(leaf, target, reduction=reduction)
            value.sum().backward()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert leaf.grad.placements == (Shard(1),)
        found.append((value.detach(), leaf.grad.full_tensor()))
    (ours, d_ours), (theirs, d_theirs) = found
    return apart([ours], [theirs], [d_ours], [d_theirs])


def colwise_head() -> float:
    """A fused model whose head ColwiseParallel shards, trained for a few steps; under FSDP2 too."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import logitless as ll

    far = 0.0
    for fsdp in (False, True):
        mesh = mesh_of(2, 2) if fsdp else mesh_of(WORLD)
        data = mesh["data"].get_local_rank() if fsdp else 0
        found = []
        for parallel in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11)).double()
            if parallel:
                ll.fuse(model, head="2")
                how = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
                parallelize_module(model, mesh["model"], {"2": how})
                if fsdp:
                    fully_shard(model, mesh=mesh["data"])
            g = torch.Generator().manual_seed(2)
            batches = torch.randn(3, 2, 5, 6, generator=g, dtype=torch.float64)
            labels = torch.randint(11, (3, 2, 5), generator=g)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for x, target in zip(batches, labels, strict=True):
                if parallel:
                    x, target = (
                        (x[data], target[data]) if fsdp else (x.flatten(0, 1), target.flatten())
                    )
                else:
                    x, target = x.flatten(0, 1), target.flatten()
                optimizer.zero_grad()
                ll.cross_entropy(model(x), target).backward()
                optimizer.step()
            ps = [p.detach() for p in model.parameters()]
            found.append([p.full_tensor() if hasattr(p, "full_tensor") else p for p in ps])
        far = max(far, apart(found[1], found[0], [], []))
    return far


def refused() -> float:
    """Placements that are not understood, by name."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import logitless as ll

    mesh, x = mesh_of(WORLD), torch.randn(4, 8)
    target, W, h = torch.zeros(4, dtype=torch.long), torch.randn(8, 4), torch.randn(4, 4)

    def spread(t, *placements):
        return distribute_tensor(t, mesh, list(placements))

    for given, words in (
        (lambda: ll.logsumexp(spread(x, Shard(0))),
         "logits must be replicated, or sharded once and on dimension 1"),
        (lambda: ll.logsumexp(DTensor.from_local(x, mesh, [Partial()])), "Partial"),
        (lambda: ll.cross_entropy(spread(x, Shard(1)), spread(target, Shard(0))),
         "what is given beside logits must be plain tensors, or replicated, got a"),
        (lambda: ll.kl_div(x, spread(x, Shard(1)), direction="forward"),
         "teacher must be a plain Tensor like student, got a DTensor."),
        (lambda: ll.LinearLogits(h, spread(W, Shard(0))), "hidden must be a DTensor on the mesh"),
        (lambda: ll.LinearLogits(spread(h, Shard(1)), spread(W, Shard(0))),
         "hidden must be replicated, or sharded by tokens over the ranks that share weight"),
        (lambda: ll.LinearLogits(spread(h, Replicate()), spread(W, Shard(1))), "weight must be re"),
        (lambda: ll.LinearLogits(spread(h, Replicate()), spread(W, Replicate())),
         "weight must be sharded on dimension"),
        (lambda: ll.LinearLogits(
            spread(h, Replicate()), spread(W, Shard(0)), spread(W[:, 0], Replicate())),
         "bias must have the placements of weight"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(words)):
            given()
    if dist.get_rank() == 3:
        with pytest.raises(ValueError, match="group must have this rank in it, got one without it"):
            ll.VocabShard(x, GROUPS[2])
    whole = spread(x, Replicate()).requires_grad_()
    with_teacher = ll.kl_div(whole, spread(x + 1, Shard(1)), direction="forward")
    return apart([ll.logsumexp(whole), with_teacher], [ll.logsumexp(x), 0 * x[0, 0]], [], [])


def global_mean() -> float:
    """Each rank's tokens, of which not all count; gradients added up, or averaged as DDP does."""
    import logitless as ll

    c = calls()
    x, targets = c.normal(WORLD, c.N, c.V, seed=1), c.IDS[:, :1].expand(c.N, WORLD).T.clone()
    for rank in range(WORLD):
        targets[rank, : rank + 1] = -100
    whole = x.clone().requires_grad_()
    want = ll.cross_entropy(whole, targets)
    want.backward()
    far, rank = (
        float(
            (
                ll.logsumexp(ll.VocabShard(x[0], mesh_of(WORLD)))
                - ll.logsumexp(x[0].repeat(1, WORLD))
            )
            .abs()
            .max()
        ),
        dist.get_rank(),
    )
    for averaged, share in ((True, WORLD), (False, 1)):
        leaf, target = x[rank].clone().requires_grad_(), targets[rank]
        total = ll.cross_entropy(leaf, target, reduction="sum")
        got = ll.global_mean(total, (target != -100).sum(), averaged=averaged)
        got.backward()
        far = max(
            far, apart([got.detach()], [want.detach()], [leaf.grad / share], [whole.grad[rank]])
        )
    nothing = ll.global_mean(torch.zeros(()), 0)
    return max(far, float(nothing))


def differing_calls() -> float:
    """With LOGITLESS_CHECK=1, every rank says what another calls."""
    import logitless as ll

    rank, x = dist.get_rank(), torch.zeros(2, 3)
    target = torch.zeros(2, dtype=torch.long)
    os.environ["LOGITLESS_CHECK"] = "1"
    try:
        for call in (
            lambda: ll.cross_entropy(ll.VocabShard(x), target, label_smoothing=0.1 * (rank == 2)),
            lambda: ll.cross_entropy(ll.VocabShard(x), target + 4 * (rank == 1)),
            lambda: ll.cross_entropy(ll.VocabShard(x.double() if rank == 3 else x), target),
            lambda: ll.logsumexp(ll.VocabShard(x[: 2 - (rank == 0)])),
            lambda: ll.logsumexp(ll.VocabShard(x)) if rank else ll.entropy(ll.VocabShard(x)),
        ):
            words = "ranks must call one loss with the same arguments, got on rank 0"
            with pytest.raises(ValueError, match=words):
                call()
        ll.cross_entropy(ll.VocabShard(x), target)
    finally:
        del os.environ["LOGITLESS_CHECK"]
    return 0.0


def cases() -> dict[str, Callable[[], float]]:
    """By name; each gives how far it is from one process."""
    found = {}
    for ranks in WIDTHS:
        for name in calls().CALLS:
            if ranks > 2 and name not in SHORT:
                continue
            for dtype in (torch.float64, torch.float32):
                how = (name, ranks, dtype)
                bits = str(dtype)[6:]
                found[f"{bits} {ranks} ranks, logits: {name}"] = lambda how=how: logits(*how)
                found[f"{bits} {ranks} ranks, head: {name}"] = lambda how=how: heads(*how)
    for name in ("cross_entropy", "score"):
        how = (name, 3, torch.float64, True)
        found[f"float64 3 ranks, tokens cut: {name}"] = lambda how=how: heads(*how)
    for name in SHORT:
        for shape in ((4,), (2, 2)):
            at = f"float64 DTensor, mesh {shape}: {name}"
            found[at] = lambda name=name, shape=shape: dtensor_logits(name, shape)
    for name in ("mean", "rows"):
        for cut in (False, True):
            at = f"float64 DTensor head, {name}{', tokens cut' * cut}"
            found[at] = lambda name=name, cut=cut: dtensor_head(name, cut)
    for reduction in ("mean", "sum", "none"):
        found[f"float64 loss_parallel, {reduction}"] = lambda how=reduction: as_loss_parallel(how)
    found["float64 ColwiseParallel head"] = colwise_head
    found["float32 placements refused"] = refused
    found["float32 global_mean"] = global_mean
    found["float32 calls that differ"] = differing_calls
    return found


GROUPS: dict[int, dist.ProcessGroup] = {}
MESHES: dict[tuple[int, ...], Any] = {}


def on_the_device(names: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    """Those of two ranks in fp32, which run on a GPU where there is one."""
    found = {}
    for name in names:
        how = (name, 2, torch.float32)
        found[f"logits: {name}"] = lambda how=how: logits(*how)
        found[f"head: {name}"] = lambda how=how: heads(*how)
    return found


def in_process(rank: int, world: int, which: str) -> None:
    """What each process does: says of each case how far it is from one process, or its error."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for ranks in WIDTHS:
        if ranks <= world:
            GROUPS[ranks] = dist.new_group(list(range(ranks)))
    for name, work in eval(which).items():
        try:
            far = work()
        except Exception:
            far = traceback.format_exc()
        print(json.dumps([name, far]), flush=True)
    dist.destroy_process_group()


def run(world: int, which: str) -> list[dict[str, float | str]]:
    """What each of so many processes says."""
    here = Path(__file__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(here.parent.parent), str(here.parent)]),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    code = f"import sys, test_shard_ranks as t; t.in_process(int(sys.argv[1]), {world}, {which!r})"
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", code, str(rank)], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=300) for rank in ranks]
    found = [dict(json.loads(line) for line in out.splitlines()) for out, _ in said]
    count = len(eval(which))
    assert all(len(one) == count for one in found), [error[-2000:] for _, error in said]
    return found


@pytest.fixture(scope="module")
def outcomes():
    return run(WORLD, "cases()")


@pytest.mark.parametrize("name", cases())
def test_as_one_process(name, outcomes):
    for rank, found in enumerate(outcomes):
        far = found[name]
        assert not isinstance(far, str), f"rank {rank}: {far}"
        assert far < (1e-9 if name.startswith("float64") else 2e-5), f"rank {rank}"
