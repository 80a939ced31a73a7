"""`global_mean`, the mean of a loss over ranks that have different rows."""

import torch
from torch import Tensor

from ..core.call import named
from . import checks
from .ranks import ranks_of


@named()
def global_mean(
    loss_sum: Tensor, count: Tensor | int, group=None, *, averaged: bool = True
) -> Tensor:
    """Computes the mean loss per token over all ranks of a group: (Σ loss_sum) / (Σ count).

    Every token has the same weight, where an average of the ranks' means would weigh ranks with few
    tokens as much as others. `loss_sum` is this rank's sum, a scalar tensor (reduction="sum"), and
    `count` its number of tokens that are not ignored. The result is the same on all ranks (0 if all
    counts are 0), and the gradient on a rank covers only its own rows. Pass averaged=True if
    gradients are averaged over the group afterwards, as DDP and FSDP do, and False if they are
    summed. `group` is a process group or a DeviceMesh of one dimension, by default all ranks.

    >>> loss = global_mean(cross_entropy(logits, target, reduction="sum"), (target != -100).sum())
    """
    checks.mean(loss_sum, count)
    return _GlobalMean.apply(loss_sum, count, ranks_of(group), averaged)


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_sum, count, ranks, averaged):
        full = torch.promote_types(loss_sum.dtype, torch.float32)
        count = torch.as_tensor(count, device=loss_sum.device).to(torch.float64)
        both = ranks.gather(torch.stack((loss_sum.double(), count))).sum(0)
        share = torch.where(both[1] == 0, 1.0, 1.0 / both[1])
        ctx.scale = (share * ranks.count if averaged else share).to(full)
        return (both[0] * share).to(full)

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.scale, None, None, None
