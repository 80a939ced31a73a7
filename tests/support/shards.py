"""Calls over columns of several ranks that are threads."""

import torch

import logitless as ll
from tests.support.calls import normal
from tests.support.meanings import excess
from tests.support.rank_threads import Simulated, on_ranks


def shard_of(ranks: Simulated, x: torch.Tensor, widths) -> torch.Tensor:
    start = sum(widths[: ranks.index])
    return x[..., start : start + widths[ranks.index]].detach().clone().requires_grad_()


def differentiated(call, source, leaf):
    """Results of a call, and the gradient of its leaf for random ones of the results."""
    found = [t for t in call(source) if t is not None]
    used = [t for t in found if t.requires_grad]
    upstream = [normal(t.numel(), seed=11, dtype=t.dtype).view(t.shape) for t in used]
    d = torch.autograd.grad(used, leaf, upstream) if used else (torch.zeros_like(leaf),)
    return [t.detach() for t in found], d[0]


def on_shards(call, x, widths):
    """The same of each rank's columns: results of all ranks, and the gradient of all columns."""

    def work(ranks):
        leaf = shard_of(ranks, x, widths)
        return differentiated(call, ll.VocabShard(leaf * 1.0, ranks), leaf), ranks.calls

    found = on_ranks(len(widths), work)
    results = [results for (results, _), _ in found]
    for others in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], others, strict=True))
    return results[0], torch.cat([d for (_, d), _ in found], -1), [calls for _, calls in found]


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def plainly(call, x):
    leaf = x.clone().requires_grad_()
    return differentiated(call, leaf * 1.0, leaf)


def close(got, want, torchs):
    """fp64 to 1e-9; fp32 to twice PyTorch's own error and a few roundings."""
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
    if got.dtype == torch.float32:
        assert excess(got, torchs, want) <= 1
    else:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
