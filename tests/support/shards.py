"""Calls over shards of logits on several ranks, which are threads of one process."""

import torch

import logitless as ll
from tests.support.calls import normal
from tests.support.meanings import excess
from tests.support.rank_threads import Simulated, on_ranks


def shard_of(ranks: Simulated, x: torch.Tensor, widths) -> torch.Tensor:
    start = sum(widths[: ranks.index])
    return x[..., start : start + widths[ranks.index]].detach().clone().requires_grad_()


def differentiated(call, source, leaves):
    """The results of a call, and the gradients of its leaves for random upstream gradients."""
    found = [t for t in call(source) if t is not None]
    used = [t for t in found if t.requires_grad]
    upstream = [normal(t.numel(), seed=11, dtype=t.dtype).view(t.shape) for t in used]
    d = torch.autograd.grad(used, leaves, upstream) if used else map(torch.zeros_like, leaves)
    return [t.detach() for t in found], [*d]


def on_shards(call, x, widths):
    """The results of a call over shards, the gradient of all columns, and the collectives."""

    def work(ranks):
        leaf = shard_of(ranks, x, widths)
        return differentiated(call, ll.VocabShard(leaf * 1.0, ranks), [leaf]), ranks.calls

    found = on_ranks(len(widths), work)
    results = [results for (results, _), _ in found]
    for others in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], others, strict=True))
    return results[0], torch.cat([d for (_, (d,)), _ in found], -1), [calls for _, calls in found]


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def plainly(call, x):
    leaf = x.clone().requires_grad_()
    results, (d,) = differentiated(call, leaf * 1.0, [leaf])
    return results, d


def close(got, want, torchs):
    """Asserts that fp64 agrees to 1e-9, and fp32 to twice PyTorch's error plus a few roundings."""
    if not got.is_floating_point():
        assert torch.equal(got, want)
        return
    if got.dtype == torch.float32:
        assert excess(got, torchs, want) <= 1
    else:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
