"""A loss whose gradient takes the place of its logits: cross_entropy(..., inplace=True).

Loss and gradient are made in forward, for an upstream gradient of 1; backward scales the gradient
by the upstream it meets, on the device. Autograd is told that the logits are gone: whoever saved
them before raises in backward, and so does whoever uses them after, unless they are a leaf or a
part of a larger tensor, which autograd cannot watch.
"""

import torch
from torch import Tensor

from ..contract import PRECISION
from . import call as _call
from . import checks as _checks
from .autograd import Node
from .call import backend, under_transform
from .later import later
from .loss import RowLoss, evaluate, reduced


def evaluate_in_place(
    source, loss: RowLoss, reduction: str = "none", row_weight: Tensor | None = None
) -> Tensor:
    """evaluate(...), leaving the gradient of the logits in their memory if one is wanted."""
    if hasattr(source, "evaluate_in_place"):
        return source.evaluate_in_place(loss, reduction, row_weight)
    if hasattr(source, "evaluate"):
        return evaluate(source, loss, reduction, row_weight)
    if hasattr(source, "placements"):
        return later.evaluate_dtensor(evaluate_in_place, source, loss, reduction, row_weight)
    if not torch.is_grad_enabled() or not source.requires_grad or under_transform():
        return evaluate(source, loss, reduction, row_weight)
    _call.values(loss, source.shape[-1])
    return overwrite_on(backend(source), source, loss, reduction, row_weight)


def overwrite_on(
    run, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None
) -> Tensor:
    """The same by a backend, of logits that may be some columns of a vocabulary."""
    owner, guarded = _owner(x)
    _checks.overwritable(x, owner)
    value, *_ = _InPlace.apply(owner, row_weight, run, x.shape, loss, reduction, guarded)
    return value


def _owner(logits: Tensor) -> tuple[Tensor, bool]:
    """The tensor that autograd can be told is overwritten, and whether later uses can be caught.

    Autograd lets a function of several results overwrite a whole tensor, not a view: of a view that
    only reshapes, its base. A leaf, or a part of a larger tensor, is only noted as changed.
    """
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or base.is_leaf:
        return logits, False
    whole = base.numel() == logits.numel() and base.is_contiguous() and logits.is_contiguous()
    return (base, True) if whole else (logits, logits is base)


class _InPlace(Node):
    @staticmethod
    def forward(ctx, owner, row_weight, run, shape, loss, reduction, guarded):
        logits = owner.detach().view(shape) if guarded else owner.detach()
        mean = reduction == "mean"
        mass = loss.mass(run, logits.dtype) if mean else None
        # fp16 cannot hold the gradient of a mean, p / rows: keep the sum's, and divide in backward.
        late = mean and logits.dtype == torch.float16
        share = run.share(loss.reading, mass, shape[:-1].numel(), logits) if mean else None
        ctx.share = share if late else None
        factor = None
        if row_weight is not None:
            factor = row_weight.detach().reshape(-1).to(PRECISION[logits.dtype])
        if share is not None and not late:
            factor = share if factor is None else factor * share
        value, *_ = loss.at_once(run, logits, factor, logits)
        ctx.value = None
        if row_weight is not None and row_weight.requires_grad:
            ctx.value = value if share is None else value * share
        ctx.set_materialize_grads(False)
        ctx.run, ctx.shape, ctx.reduction = run, shape, reduction
        if reduction == "none":
            result = reduced(value, loss.reading, row_weight, mass, reduction)
        else:
            result, _ = run.reduce(value, loss.reading, row_weight, mass, mean)
        ctx.ignore_index = loss.reading.ignore_index
        if guarded:
            ctx.mark_dirty(owner)
            ctx.save_for_backward(owner, loss.reading.label)
            return result, owner
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits, loss.reading.label)
        return (result,)

    @staticmethod
    def backward(ctx, upstream, d_later=None):
        Node.each_by_itself((upstream,))
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
        gradient, label = ctx.saved_tensors  # raises if this is the second backward
        if upstream is None:
            return (None,) * 7
        if upstream.dim():  # 0 · inf is not 0
            upstream = torch.where(label == ctx.ignore_index, 0.0, upstream)
        gradient = gradient.detach()
        d_weight = None if ctx.value is None else ctx.value * upstream
        scale = upstream if ctx.share is None else upstream * ctx.share
        ctx.run.scale_(gradient.view(ctx.shape), scale)
        torch.autograd.graph.increment_version(gradient)
        return gradient, d_weight, *(None,) * 5
