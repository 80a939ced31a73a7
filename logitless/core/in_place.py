"""Losses whose gradient overwrites the logits, for cross_entropy(..., inplace=True).

Forward writes the gradient for an upstream gradient of 1, and backward scales it. Autograd knows of
the overwrite: an earlier operation that saved the logits raises in its backward, and so does the
loss if a later operation used the overwritten logits. Only for a leaf, or a slice of a larger
tensor, such a later use stays undetected.
"""

import torch
from torch import Tensor

from ..contract import PRECISION
from . import tensor_checks
from .autograd import Node
from .backend import Backend
from .call import check_values, under_transform
from .choose_backend import backend_of
from .evaluate import evaluate, single_row, without_unit
from .invariant import aligned, computes_single_rows
from .loss import RowLoss, rows_in
from .source import source_of


def evaluate_in_place(
    logits, loss: RowLoss, reduction: str = "none", row_weight: Tensor | None = None
):
    source = source_of(logits)
    if source is not None:
        return source.evaluate_in_place(loss, reduction, row_weight)
    if not torch.is_grad_enabled() or not logits.requires_grad or under_transform():
        return evaluate(logits, loss, reduction, row_weight)
    check_values(loss)
    return overwrite_on(backend_of(logits), logits, loss, reduction, row_weight)


def overwrite_on(
    backend: Backend, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None
):
    """Like `evaluate_in_place`, with a given backend. x can be a shard of some columns."""
    owner, guarded = _owner(x)
    tensor_checks.overwritable(x, owner)
    value, *extras = GradientInPlace.apply(
        owner, row_weight, backend, x.shape, loss, reduction, guarded
    )
    if guarded:
        extras.pop()  # the last output is the overwritten tensor of logits
    return (value, *extras) if extras else value


def _owner(logits: Tensor) -> tuple[Tensor, bool]:
    """Returns the overwritten tensor, and whether autograd can mark it as overwritten.

    An autograd function with several outputs may overwrite a base tensor, but no view. So a view of
    all elements is replaced by its base; for a leaf or a slice, only the version counter increases.
    """
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or base.is_leaf:
        return logits, False
    whole = base.numel() == logits.numel() and base.is_contiguous() and logits.is_contiguous()
    return (base, True) if whole else (logits, logits is base)


def _overwrite(
    backend: Backend, x: Tensor, loss: RowLoss, factor: Tensor | None
) -> tuple[Tensor, ...]:
    if not loss.reading.invariant or not x.numel():
        return loss.value_and_gradient(backend, x, factor, x)[0]
    if not computes_single_rows(backend):
        same = aligned(x)
        outputs, gradient, _ = loss.value_and_gradient(backend, same, factor, same)
        if gradient.data_ptr() != x.data_ptr():
            x.copy_(gradient)
        return outputs
    lead, results, gradients = x.shape[:-1], [], []
    for i, row in enumerate(x.reshape(-1, x.shape[-1]).split(1)):
        one, own = single_row(loss, i, lead), row.clone()
        scale = factor[i : i + 1] if factor is not None and factor.dim() else factor
        outputs, gradient, _ = one.value_and_gradient(backend, own, scale, own)
        results.append(outputs)
        gradients.append(gradient)
    x.copy_(torch.cat(gradients).view(x.shape))
    return tuple(
        torch.cat(rows).view(*lead, *rows[0].shape[1:]) for rows in zip(*results, strict=True)
    )


class GradientInPlace(Node):
    @staticmethod
    def forward(ctx, owner, row_weight, backend, shape, loss, reduction, guarded):
        logits = owner.detach().view(shape) if guarded else owner.detach()
        mean, reading = reduction == "mean", loss.reading
        mass = loss.mass(backend, logits.dtype) if mean else None
        share = backend.share(reading, mass, rows_in(shape[:-1]), logits) if mean else None
        factor = ctx.later = None
        if row_weight is not None:
            factor = row_weight.detach().reshape(-1).to(PRECISION[logits.dtype])
        if logits.dtype == torch.float16:
            # The number of rows and small weights underflow in fp16: backward multiplies by them.
            factor, unit = without_unit(loss, factor, logits)
            ctx.later = share if unit is None else unit if share is None else unit * share
        elif share is not None:
            factor = share if factor is None else factor * share
        value, *extras = _overwrite(backend, logits, loss, factor)
        ctx.d_row_weight = None
        if row_weight is not None and row_weight.requires_grad:
            ctx.d_row_weight = value if share is None else value * share
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*extras)
        ctx.backend, ctx.shape, ctx.ignore_index = backend, shape, reading.ignore_index
        if reduction == "none":
            result = loss.reduce(value, reduction, row_weight)
        else:
            result, _ = backend.reduce(value, reading, row_weight, mass, mean)
        if guarded:
            ctx.mark_dirty(owner)
            ctx.save_for_backward(owner, reading.label)
            return result, *extras, owner
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(logits, reading.label)
        return result, *extras

    @staticmethod
    def backward(ctx, upstream, *others):
        Node.refuse_vmap((upstream,))
        if torch.is_grad_enabled():
            raise RuntimeError(
                "cross_entropy(..., inplace=True) must not be differentiated with"
                " create_graph=True, because its gradient overwrites its logits."
            )
        if any(d is not None for d in others):  # the logits were used after the loss
            raise RuntimeError(
                "logits must not be used after cross_entropy(..., inplace=True), which overwrote"
                " the logits with their gradient; pass inplace=False to keep the logits."
            )
        gradient, label = ctx.saved_tensors  # this access raises an error in a second backward
        if upstream is None:
            return (None,) * 7
        if upstream.dim():  # in ignored rows, an infinite upstream gradient times 0 would be NaN
            upstream = torch.where(label == ctx.ignore_index, 0.0, upstream)
        gradient = gradient.detach()
        d_row_weight = None if ctx.d_row_weight is None else ctx.d_row_weight * upstream
        scale = upstream if ctx.later is None else upstream * ctx.later
        ctx.backend.scale_(gradient.view(ctx.shape), scale)
        torch.autograd.graph.increment_version(gradient)
        return gradient, d_row_weight, *(None,) * 5
