"""The plain loss, -log p[target] summed, with as little around its kernels as there can be.

losses.py says the same in formulas; on a GPU each of their operators takes the host as long as a
kernel here takes the GPU. So this one loss is a node of its own: statistics, their mean, and back.
"""

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from .stats import Reading, Upstream


def nll(logits: Tensor, reading: Reading, *, mean: bool) -> Tensor:
    """-Σ log p[ids] over the rows that count, divided by their number if `mean`."""
    return _NLL.apply(logits, mean, *reading)


class _NLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mean, ids, *how):
        _checks.ids_in_range(ids, x.shape[-1], how[4])
        run = backend(x)
        shift, log_s, _, picked, *_ = run.stats_fwd(x, ids, *how, False, False, False)
        loss, d_picked = run.mean_nll(ids, picked, how[4], mean)
        ctx.save_for_backward(x, ids, how[1], shift, log_s, d_picked)
        ctx.how = how
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        return _backward(ctx, d_loss, *ctx.saved_tensors)


@torch.autograd.function.once_differentiable
def _backward(ctx, d_loss, x, ids, row_temperature, shift, log_s, d_picked):
    """x is named so that a second differentiation raises even where d_loss is a constant."""
    weight, _, *rest = ctx.how
    d_x = backend(x).stats_bwd(
        x, ids, weight, row_temperature, *rest,
        shift, log_s, None, *Upstream(None, None, d_picked, None), gain=d_loss,
    )  # fmt: skip
    return d_x, *(None,) * 10
