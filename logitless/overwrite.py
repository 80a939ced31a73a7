"""A loss whose gradient takes the place of its logits: cross_entropy(..., inplace=True).

Loss and gradient are made in one visit, at forward, for an upstream gradient of 1; backward scales the
gradient by the upstream it meets, on the device. Autograd is told that the logits are gone: whoever
saved them before, or uses them after, raises in backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from .stats import Measured, Reading, Upstream, measure

Formula = Callable[[Measured, Tensor | None], Tensor]


def overwrite(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...)
    row_weight: Tensor | None,  # (...)
    formula: Formula,  # statistics, row_weight -> loss, scalar or (...)
    options: dict,  # of measure
) -> Tensor:
    """formula(measure(logits, target), row_weight), leaving d_logits in logits if they require it."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and logits.requires_grad):
        return formula(measure(logits, target, **options), row_weight)
    _checks.overwritable(logits)
    owner, guarded = _owner(logits)
    loss, *_ = _Overwrite.apply(owner, row_weight, logits.shape, target, formula, options, guarded)
    return loss


def _owner(logits: Tensor) -> tuple[Tensor, bool]:
    """The tensor that autograd can be told is overwritten, and whether later uses can be caught.

    Autograd lets a function of several results overwrite a whole tensor, not a view: of a view that
    only reshapes, its base. A leaf, or a part of a larger tensor, is only marked as changed.
    """
    base = logits._base if logits._is_view() else logits
    if base.is_leaf:
        return logits, False
    whole = base.numel() == logits.numel() and base.is_contiguous() and logits.is_contiguous()
    return (base, True) if whole else (logits, logits is base)


class _Overwrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, owner, row_weight, shape, target, formula, options, guarded):
        logits = owner.detach().view(shape) if guarded else owner.detach()
        stats = measure(logits, target, **options)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (stats.log_s, stats.picked)]
            total = None if stats.total is None else stats.total.detach().requires_grad_()
            rows = None if row_weight is None else row_weight.detach().requires_grad_()
            stats = stats._replace(log_s=leaves[0], picked=leaves[1], total=total)
            loss = formula(stats, rows)
            # fp16 cannot hold p / rows: keep the sum's gradient and divide in backward.
            ctx.gain = float(target.numel()) if logits.dtype == torch.float16 else 1.0
            d_log_s, d_picked, d_total, ctx.d_rows = _gradients(
                loss, [*leaves, total, rows], ctx.gain
            )
        reading = Reading.of(
            logits, target, options["weight"], options["temperature"],
            options["softcap"], options["ignore_index"],
        )  # fmt: skip
        upstream = Upstream.of(d_log_s, d_picked, None, d_total, None)
        backend(logits).stats_bwd(
            logits, *reading, stats.shift, leaves[0].detach(), None, *upstream, inplace=True
        )
        ctx.set_materialize_grads(False)
        if guarded:
            ctx.mark_dirty(owner)
            ctx.save_for_backward(owner)
            return loss.detach(), owner
        torch.autograd.graph.increment_version(owner)
        ctx.save_for_backward(owner)
        return (loss.detach(),)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, d_later=None):
        if d_later is not None:
            raise RuntimeError(
                "logits must not be used after cross_entropy(..., inplace=True), which overwrote"
                " them with their gradient; pass inplace=False to keep them."
            )
        (gradient,) = ctx.saved_tensors  # raises if this is the second backward
        gradient = gradient.detach()
        d_rows = None if ctx.d_rows is None else ctx.d_rows * (d_loss / ctx.gain)
        backend(gradient).scale_rows_(gradient, d_loss / ctx.gain if ctx.gain != 1 else d_loss)
        torch.autograd.graph.increment_version(gradient)
        return gradient, d_rows, None, None, None, None, None


def _gradients(loss: Tensor, leaves: list[Tensor | None], gain: float) -> list[Tensor | None]:
    """d loss / d leaf at an upstream gradient of `gain`, None for a leaf that is None or unused."""
    given = [t for t in leaves if t is not None]
    found = iter(torch.autograd.grad(loss, given, torch.full_like(loss, gain), allow_unused=True))
    return [None if t is None else next(found) for t in leaves]
