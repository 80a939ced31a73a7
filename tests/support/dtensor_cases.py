"""Cases of DTensors for rank_processes.py: logits, heads, PyTorch's loss, and errors."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_processes import GROUPS, WORLD, Case, apart, calls, differentiated, mesh_of


def logits(name: str, shape: tuple[int, ...]) -> float:
    """DTensor logits, sharded over the last mesh dimension. The gradient must be a DTensor."""
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
    return apart([*got, d_got], [*want, d_want])


def head(name: str, tokens_cut: bool) -> float:
    """A head whose weight is a DTensor, as with ColwiseParallel."""
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
    return apart([*got, *(d.full_tensor() for d in d_got)], [*want, *d_want])


def as_loss_parallel(reduction: str) -> float:
    """Our loss over DTensor logits must equal PyTorch's own loss."""
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
    return apart(*found)


def exchanged_once() -> float:
    """The columns of DTensor logits follow from their placement, so that ranks send only states."""
    from torch.distributed.tensor import Shard, distribute_tensor

    import logitless as ll
    from logitless.parallel.ranks import Ranks

    sent, gather = [], Ranks.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "gather", lambda self, t: sent.append(t.shape) or gather(self, t))
        for vocab in (10, 11, 10, 11):
            x = distribute_tensor(torch.zeros(3, vocab), mesh_of(WORLD), [Shard(1)])
            torch.testing.assert_close(ll.entropy(x), torch.full((3,), float(vocab)).log())
    assert len(sent) == 2 + 4, sent
    return 0.0


def refused() -> float:
    """Unsupported placements must raise an error that names the placement."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    import logitless as ll

    mesh, x = mesh_of(WORLD), torch.randn(4, 8, dtype=torch.float64)
    target, W, h = torch.zeros(4, dtype=torch.long), torch.randn(8, 4), torch.randn(4, 4)

    def spread(t, *placements):
        return distribute_tensor(t, mesh, list(placements))

    for given, words in (
        (lambda: ll.logsumexp(spread(x, Shard(0))),
         "logits must be replicated, or have a single placement Shard(1)"),
        (lambda: ll.logsumexp(DTensor.from_local(x, mesh, [Partial()])), "Partial"),
        (lambda: ll.cross_entropy(spread(x, Shard(1)), spread(target, Shard(0))),
         "tensors other than the logits must be plain tensors or replicated DTensors, got a"),
        (lambda: ll.kl_div(x, spread(x, Shard(1)), direction="forward"),
         "teacher must be a plain Tensor like student, got a DTensor."),
        (lambda: ll.LinearLogits(h, spread(W, Shard(0))), "hidden must be a DTensor on the mesh"),
        (lambda: ll.LinearLogits(spread(h, Shard(1)), spread(W, Shard(0))),
         "hidden must be replicated, or sharded by tokens over the ranks that shard weight"),
        (lambda: ll.LinearLogits(spread(h, Replicate()), spread(W, Shard(1))), "weight must be re"),
        (lambda: ll.LinearLogits(spread(h, Replicate()), spread(W, Replicate())),
         "weight must be sharded on dimension"),
        (lambda: ll.LinearLogits(
            spread(h, Replicate()), spread(W, Shard(0)), spread(W[:, 0], Replicate())),
         "bias must have the placements of weight"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=re.escape(words)):
            given()
    uneven = DTensor.from_local(x, mesh, [Shard(1)], run_check=False, shape=(4, 36), stride=(36, 1))
    with pytest.raises(
        ValueError, match="a sharded DTensor must have 9 columns on this rank, as after"
    ):
        ll.logsumexp(uneven)
    if dist.get_rank() == 3:
        with pytest.raises(
            ValueError, match="group must contain this rank, got a group without this rank"
        ):
            ll.VocabShard(x, GROUPS[2])
    whole = spread(x, Replicate()).requires_grad_()
    with_teacher = ll.kl_div(whole, spread(x + 1, Shard(1)), direction="forward")
    return apart([ll.logsumexp(whole), with_teacher], [ll.logsumexp(x), 0 * x[0, 0]])


def cases(short: tuple[str, ...]) -> dict[str, Case]:
    found = {}
    for i, name in enumerate(short):
        shape = ((4,), (2, 2))[i % 2]
        at = f"DTensor, mesh {shape}: {name}"
        found[at] = lambda name=name, shape=shape: logits(name, shape)
    for name in ("mean", "rows"):
        for cut in (False, True):
            at = f"DTensor head, {name}{', tokens cut' * cut}"
            found[at] = lambda name=name, cut=cut: head(name, cut)
    for reduction in ("mean", "sum", "none"):
        found[f"loss_parallel, {reduction}"] = lambda how=reduction: as_loss_parallel(how)
    found["DTensor, columns exchanged once"] = exchanged_once
    found["placements refused"] = refused
    return found
