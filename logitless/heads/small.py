"""Computes a loss over a small head from all logits at once, in one autograd function.

A head is small if a GPU computes its loss in about 2 ms or less (plan.is_small). For so little
work, the time on the host matters. Therefore the functions of this module call as few operations as
possible. The GEMMs include ignored rows, because dropping ignored rows would make the host wait for
the number of rows that count.

For a mean or sum, forward computes the loss and the gradient of the logits, which overwrites the
logits. Backward computes the GEMMs of the other gradients, and multiplies them by the upstream
gradient. For results per row, autograd saves the logits until backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import eager
from ..contract import PRECISION, Reading
from ..core import evaluate
from ..core.autograd import Node, refuse_second, refuse_tangents
from ..core.call import backend_of, under_transform
from ..core.loss import RowLoss
from .head import Head
from .products import gemm, padded_logits, padded_memory, without_autocast

Gradients = tuple[Tensor | None, ...]


def evaluate_small(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Returns the weighted and reduced loss over a small head."""
    if under_transform():
        return evaluate.evaluate(_traced_logits(head, loss), loss, reduction, row_weight)
    inputs = head.tensors
    refuse_tangents(*inputs)
    rows = loss.row_inputs if row_weight is None else (*loss.row_inputs, row_weight)
    by_row = reduction == "none" or any(t.requires_grad for t in rows)
    needs = by_row or any(t is not None and t.requires_grad for t in inputs)
    with without_autocast(head.device):
        if not (needs and torch.is_grad_enabled()):
            with torch.no_grad():
                x = _logits(*inputs)
            return evaluate.evaluate_on(head.backend(), x, loss, reduction, row_weight)
        if not by_row:
            return _small_total(*inputs, row_weight, loss, reduction)
        outputs = _small_rows(*inputs, loss, *loss.row_inputs)
        return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


class SmallTotal(Node):
    """The mean or sum of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, loss, reduction):
        x = _logits(hidden, weight, bias)
        backend = backend_of(hidden)
        outputs, dz = evaluate.total_and_gradient(backend, x, loss, row_weight, reduction, x)
        ctx.reading = loss.reading.without_tensors()
        ctx.save_for_backward(dz, hidden, weight, bias, loss.reading.label)
        if len(outputs) == 1:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, upstream, *_):
        Node.refuse_vmap((upstream,))
        dz, hidden, weight, bias, label = saved = ctx.saved_tensors
        reading, needs = ctx.reading._replace(label=label), ctx.needs_input_grad
        with torch.no_grad(), without_autocast(hidden.device):
            gradients = _gradients(hidden, weight, bias, reading, dz, needs, upstream)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (*saved, upstream))
        return *gradients, None, None, None


class SmallRows(Node):
    """The results per row of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, *row_inputs):
        x = _logits(hidden, weight, bias)
        outputs, tensors = evaluate.begin(ctx, x, backend_of(hidden), loss, None, None)
        ctx.save_for_backward(x, hidden, weight, bias, *tensors)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        Node.refuse_vmap(upstream)
        x, hidden, weight, bias, *tensors = saved = ctx.saved_tensors
        needs, gradients = ctx.needs_input_grad[:3], (None,) * 3
        with torch.no_grad(), without_autocast(hidden.device):
            into = _memory_like(x)
            loss, dz, d_rows = evaluate.finish(ctx, x, tensors, upstream, any(needs), into)
            if dz is not None:
                gradients = _gradients(hidden, weight, bias, loss.reading, dz, needs)
        gradients = (*gradients, *d_rows)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (*saved, *upstream))
        return *gradients[:3], None, *gradients[3:]


_small_total: Any = super(torch.autograd.Function, SmallTotal).apply  # pyright: ignore[reportAttributeAccessIssue]
_small_rows: Any = super(torch.autograd.Function, SmallRows).apply  # pyright: ignore[reportAttributeAccessIssue]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the logits of shape (..., V). Gradients must be disabled."""
    h = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    x = padded_logits(h, weight, bias, h.dtype)
    return x if h is hidden else x.view(*hidden.shape[:-1], len(weight))


def _memory_like(x: Tensor) -> Tensor:
    """Allocates memory for the gradient of logits from `_logits`."""
    rows = x.shape[:-1].numel()
    return padded_memory(rows, x.shape[-1], x, x.dtype).view(x.shape)


def _traced_logits(head: Head, loss: RowLoss) -> Tensor:
    """Returns differentiable logits, for a dispatch mode such as FakeTensorMode."""
    hidden = head.hidden
    flat = eager.zero_ignored(hidden.reshape(-1, hidden.shape[-1]), loss.reading)
    return head.replace(hidden=flat.view(hidden.shape)).logits()


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, reading: Reading, dz: Tensor,
    needs: Sequence[bool], upstream: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Returns the gradients of hidden, weight and bias, times `upstream`.

    dz is the gradient of the logits. Multiplying dz by `upstream` would round all gradients of a
    row in the same direction. Therefore `upstream` multiplies d_hidden, and hidden in the GEMM of
    d_weight.
    """
    d_hidden = d_weight = d_bias = None
    h, backend = hidden, backend_of(hidden)
    if h.dim() != 2:
        h, dz = h.reshape(-1, h.shape[-1]), dz.view(-1, dz.shape[-1])
    if needs[0]:
        d_hidden = gemm(dz, weight)
        if upstream is not None:
            backend.scale_(d_hidden, upstream)
        d_hidden = d_hidden if hidden.dim() == 2 else d_hidden.view(hidden.shape)
    if needs[1]:
        # The gradient of an ignored row is 0, but 0 times NaN or infinity is NaN.
        d_weight = gemm(dz.t(), backend.zero_ignored(h, reading, upstream))
    if needs[2] and bias is not None:
        d_bias = dz.sum(0, dtype=PRECISION[bias.dtype])
        d_bias = (d_bias if upstream is None else d_bias * upstream).to(bias.dtype)
    return d_hidden, d_weight, d_bias
