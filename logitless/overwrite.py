"""A loss whose gradient takes the place of its logits: cross_entropy(..., inplace=True).

Loss and gradient are made in one visit, at forward, for an upstream gradient of 1; backward scales
the gradient by the upstream it meets, on the device. Autograd is told that the logits are gone:
whoever saved them before raises in backward, and so does whoever uses them after, unless they are a
leaf or a part of a larger tensor, which autograd cannot watch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from ._node import is_lent, is_watched, repay
from .stats import Reading, RowStats, Upstream, measure

Formula = Callable[[RowStats, Tensor | None], Tensor]


def overwrite(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...)
    row_weight: Tensor | None,  # (...)
    formula: Formula,  # statistics, row_weight -> loss, scalar or (...)
    options: dict,  # of measure, but for total
    *,
    total: bool,
    linear: bool,  # whether the loss is linear in log p[target], and of nothing else
    bare: bool,  # whether it is just -log p[target], summed, but for row_weight
    mean: bool,  # whether it is a mean over rows
) -> Tensor:
    """formula(measure(logits, target), row_weight), leaving d_logits in logits if wanted."""
    if is_watched() or not (torch.is_grad_enabled() and logits.requires_grad):
        return formula(measure(logits, target, **options, total=total), row_weight)
    _checks.overwritable(logits)
    owner, guarded = _owner(logits)
    reading = Reading.of(logits, target, **options)
    loss, *_ = _Overwrite.apply(
        owner, row_weight, logits.shape, reading, total, formula, linear, bare, mean, guarded
    )
    if is_lent(logits) and not (mean and logits.dtype == torch.float16):
        repay(logits)
    return loss


def _owner(logits: Tensor) -> tuple[Tensor, bool]:
    """The tensor that autograd can be told is overwritten, and whether later uses can be caught.

    Autograd lets a function of several results overwrite a whole tensor, not a view: of a view that
    only reshapes, its base. A leaf, or a part of a larger tensor, is only marked as changed.
    """
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or base.is_leaf:
        return logits, False
    whole = base.numel() == logits.numel() and base.is_contiguous() and logits.is_contiguous()
    return (base, True) if whole else (logits, logits is base)


class _Overwrite(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, owner, row_weight, shape, reading, total, formula, linear, bare, mean, guarded
    ):
        logits = owner.detach().view(shape) if guarded else owner.detach()
        _checks.ids_in_range(reading.ids, shape[-1], reading.ignore_index)
        # fp16 cannot hold the gradient of a mean, p / rows: keep the sum's, and divide in backward.
        ctx.gain = None
        if mean and logits.dtype == torch.float16:
            ctx.gain = (reading.ids != reading.ignore_index).sum().clamp(min=1).float()
        one_visit = linear and not (row_weight is not None and row_weight.requires_grad)
        if one_visit and backend(logits).can_visit(logits):
            ctx.d_rows = None
            if bare and (row_weight is None or not any(row_weight.stride())):
                loss = _visit_bare(logits, row_weight, reading, mean, ctx.gain)
            else:
                loss = _visit(logits, row_weight, reading, formula, ctx.gain)
        else:
            loss, ctx.d_rows = _look_twice(logits, row_weight, reading, total, formula, ctx.gain)
        ctx.set_materialize_grads(False)
        ctx.shape = shape
        if guarded:
            ctx.mark_dirty(owner)
            ctx.save_for_backward(owner)
            return loss, owner
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits)
        return (loss,)

    @staticmethod
    def backward(ctx, d_loss, d_later=None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy(..., inplace=True) must not be differentiated with"
                " create_graph=True: its gradient takes the place of its logits."
            )
        if d_later is not None:
            raise RuntimeError(
                "logits must not be used after cross_entropy(..., inplace=True), which overwrote"
                " them with their gradient; pass inplace=False to keep them."
            )
        (gradient,) = ctx.saved_tensors  # raises if this is the second backward
        gradient = gradient.detach()
        scale = d_loss if ctx.gain is None else d_loss / ctx.gain
        backend(gradient).scale_rows_(gradient.view(ctx.shape), scale)
        torch.autograd.graph.increment_version(gradient)
        d_rows = None if ctx.d_rows is None else ctx.d_rows * scale
        return gradient, d_rows, *(None,) * 8


def _visit(logits, row_weight, reading, formula, gain) -> Tensor:
    """A loss linear in log p[target] has its gradient's coefficients before any logit is read."""
    unknown = torch.zeros(reading.ids.shape, device=logits.device)
    d_picked = _gradients(lambda p: formula(RowStats(None, p, None, None, None), row_weight),
                          [unknown], gain)[1][0]  # fmt: skip
    lse, picked = backend(logits).visit(logits, *reading, g_id=d_picked)
    return formula(RowStats(lse, picked, None, None, None), row_weight)


def _visit_bare(logits, row_weight, reading, mean, gain) -> Tensor:
    """The same where all rows share one coefficient, in fewer launches."""
    run, ids, ignored = backend(logits), reading.ids, reading.ignore_index
    _, d_picked = run.mean_nll(ids, None, ignored, mean)
    common = None if row_weight is None else row_weight.as_strided((), ()).to(d_picked.dtype)
    for factor in (gain, common):
        d_picked = d_picked if factor is None else d_picked * factor
    _, picked = run.visit(logits, *reading, g_id=d_picked)
    loss, _ = run.mean_nll(ids, picked, ignored, mean)
    return loss if common is None else loss * common


def _look_twice(logits, row_weight, reading, total, formula, gain) -> tuple[Tensor, Tensor | None]:
    """Any loss: statistics, then the gradient from them. Also the gradient of row_weight."""
    kernels = backend(logits)
    shift, log_s, lse, picked, _, c, *_ = kernels.stats_fwd(logits, *reading, False, total, False)
    loss, (d_lse, d_picked, d_total, d_rows) = _gradients(
        lambda lse, picked, c, rows: formula(RowStats(lse, picked, None, c, None), rows),
        [lse, picked, c, row_weight],
        gain,
    )
    upstream = Upstream.of(logits, reading, None, None, d_lse, d_picked, None, d_total)
    kernels.stats_bwd(logits, *reading, shift, log_s, None, *upstream, inplace=True)
    return loss, d_rows


def _gradients(
    f: Callable[..., Tensor], inputs: list[Tensor | None], gain: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """f(*inputs) and its gradients at an upstream of `gain`, None for what has none."""
    with torch.enable_grad():
        leaves = [None if t is None else t.detach() for t in inputs]
        given = [t.requires_grad_() for t in leaves if t is not None and t.is_floating_point()]
        value = f(*leaves)
    upstream = torch.ones_like(value) if gain is None else torch.ones_like(value) * gain
    found = iter(torch.autograd.grad(value, given, upstream, allow_unused=True))
    return value.detach(), [
        next(found) if t is not None and t.requires_grad else None for t in leaves
    ]
