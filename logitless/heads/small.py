"""Computes a loss over a small head from all logits at once, in one autograd function.

A head is small if a loss over this head takes longer on the host than on the device
(plan.is_small). Therefore the functions of this module call as few operations as possible. The
GEMMs include ignored rows, because dropping ignored rows would make the host wait for the number of
rows that count. The gradient of the logits overwrites the logits.

For a mean or sum, forward computes the loss and all gradients, and backward multiplies the
gradients by the upstream gradient. For results per row, the logits stay in memory until backward. A
second backward computes the logits and the gradients again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core import evaluate
from ..core.autograd import Node, refuse_second
from ..core.call import backend_of
from ..core.loss import RowLoss
from .head import Head
from .products import gemm, padded_logits, without_autocast

Gradients = tuple[Tensor | None, ...]


def evaluate_small(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Returns the weighted and reduced loss over a small head."""
    inputs, drop = head.tensors, head.drop_ignored
    rows = loss.row_inputs if row_weight is None else (*loss.row_inputs, row_weight)
    by_row = reduction == "none" or any(t.requires_grad for t in rows)
    needs = by_row or any(t is not None and t.requires_grad for t in inputs)
    if not (needs and torch.is_grad_enabled()):
        with torch.no_grad():
            x = _logits(*inputs)
        return evaluate.evaluate_on(head.backend(), x, loss, reduction, row_weight)
    if not by_row:
        return _small_total(*inputs, row_weight, loss, reduction, drop)
    outputs = _small_rows(*inputs, loss, drop, *loss.row_inputs)
    return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


class SmallTotal(Node):
    """The mean or sum of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, loss, reduction, drop):
        needs, ctx.how = ctx.needs_input_grad[:3], (reduction, drop)
        outputs, ctx.gradients = _total(
            hidden, weight, bias, row_weight, loss, reduction, drop, needs
        )
        tensors, ctx.loss = loss.flatten(recompute=True)
        ctx.save_for_backward(hidden, weight, bias, row_weight, *tensors)
        if len(outputs) == 1:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, upstream, *_):
        Node.refuse_vmap((upstream,))
        hidden, *rest = saved = ctx.saved_tensors
        gradients, ctx.gradients = ctx.gradients, None  # a second backward computes new gradients
        with torch.no_grad():
            if gradients is None:
                weight, bias, row_weight, *tensors = rest
                loss, (reduction, drop) = ctx.loss.rebuild(tensors), ctx.how
                _, gradients = _total(
                    hidden, weight, bias, row_weight, loss, reduction, drop,
                    ctx.needs_input_grad[:3],
                )  # fmt: skip
            backend = backend_of(hidden)
            for t in gradients:
                if t is not None:
                    backend.scale_(t.view(1, -1) if t.dim() == 1 else t, upstream)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (*saved, upstream))
        return *gradients, None, None, None, None


class SmallRows(Node):
    """The results per row of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, drop, *row_inputs):
        ctx.logits, ctx.drop = _logits(hidden, weight, bias), drop
        outputs, tensors = evaluate.begin(ctx, ctx.logits, backend_of(hidden), loss, None, None)
        ctx.save_for_backward(hidden, weight, bias, *tensors)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        Node.refuse_vmap(upstream)
        hidden, weight, bias, *tensors = saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        with torch.no_grad():
            x, ctx.logits = ctx.logits, None
            if x is None:
                x = _logits(hidden, weight, bias)
            loss, dz, d_rows = evaluate.finish(ctx, x, tensors, upstream, any(needs), x)
            gradients = (None,) * 3
            if dz is not None:
                gradients = _gradients(hidden, weight, bias, loss, dz, ctx.drop, needs)
            gradients = (*gradients, *d_rows)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (*saved, *upstream))
        return *gradients[:3], None, None, *gradients[3:]


# These two functions skip code of Function.apply that is needed only under torch.func.
# core/evaluate.py does the same.
_small_total: Any = super(torch.autograd.Function, SmallTotal).apply  # pyright: ignore[reportAttributeAccessIssue]
_small_rows: Any = super(torch.autograd.Function, SmallRows).apply  # pyright: ignore[reportAttributeAccessIssue]


def _total(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, row_weight: Tensor | None, loss: RowLoss,
    reduction: str, drop: bool, needs: Sequence[bool],
) -> tuple[tuple[Tensor, ...], Gradients]:  # fmt: skip
    """Returns (value, *extras), and the gradients of hidden, weight and bias."""
    backend, x = backend_of(hidden), _logits(hidden, weight, bias)
    outputs, dz = evaluate.total_and_gradient(backend, x, loss, row_weight, reduction, x)
    return outputs, _gradients(hidden, weight, bias, loss, dz, drop, needs)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the logits (..., V). Gradients must be disabled."""
    with without_autocast(hidden.device):
        if hidden.dim() == 2:
            return padded_logits(hidden, weight, bias, hidden.dtype)
        x = padded_logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias, hidden.dtype)
        return x.view(*hidden.shape[:-1], len(weight))


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, loss: RowLoss, dz: Tensor, drop: bool,
    needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Returns the gradients of hidden, weight and bias, where dz is the gradient of the logits."""
    d_hidden = d_weight = d_bias = None
    h = hidden
    if h.dim() != 2:
        h, dz = h.reshape(-1, h.shape[-1]), dz.view(-1, dz.shape[-1])
    if needs[0]:
        d_hidden = gemm(dz, weight, torch.empty_like(h, memory_format=torch.contiguous_format))
        d_hidden = d_hidden if h is hidden else d_hidden.view(hidden.shape)
    if needs[1]:
        if drop:  # an ignored row adds 0 · h, which is NaN if h is NaN or infinite
            h = backend_of(hidden).zero_ignored(h, loss.reading)
        d_weight = gemm(dz.t(), h, torch.empty_like(weight))
    if needs[2] and bias is not None:
        d_bias = dz.sum(0, dtype=PRECISION[bias.dtype]).to(bias.dtype)
    return d_hidden, d_weight, d_bias
