"""Every statistic of a row, and its gradient."""

import torch

WANTS = {"entropy": True, "total": True, "argmax": True, "rank": True}


def grads(f, x, *args, **how):
    """The statistics of row_stats, and the gradient of each for a random upstream gradient."""
    leaf = x.detach().requires_grad_()
    stats = f(leaf, *args, **how)
    out = {"argmax": stats.argmax}
    for name in ("lse", "picked", "entropy", "total"):
        value = getattr(stats, name)
        generator = torch.Generator().manual_seed(3)
        upstream = torch.randn(value.shape, generator=generator).to(value)
        out[name] = value.detach()
        (out[f"d_{name}"],) = torch.autograd.grad(value, leaf, upstream, retain_graph=True)
    return out
