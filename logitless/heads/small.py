"""Computes a loss over a small head from all logits at once, in one autograd function.

On a GPU, a head is small if its logits take at most 512 MiB and the GPU computes the loss in about
2 ms or less. On a CPU, a head is small if its logits take at most 1 MiB (choose_cut.is_small). For
such a small head, the host takes longer than the device. Therefore the functions of this module
call as few operations as possible. The GEMMs include ignored rows. To drop ignored rows, the host
would have to wait until the GPU has counted the other rows.

For a mean or sum, forward computes the loss and all gradients, and backward multiplies the
gradients by the upstream gradient. The gradient of the logits overwrites the logits. For a mean,
`RowLoss.mean_and_gradient` computes the loss and the gradient of the logits in one kernel launch,
if the loss and the logits support this. The same launch copies the hidden states, with 0 in ignored
rows, for the GEMM of the weight's gradient. A second backward computes the logits and the gradients
again. For results per row, backward reads the logits, so autograd saves the logits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import eager
from ..contract import PRECISION
from ..core import evaluate
from ..core.autograd import Node, refuse_second, refuse_tangents
from ..core.choose_backend import backend_of
from ..core.evaluate import GradientInBackward
from ..core.loss import RowLoss
from ..core.source import needs_grad
from .gemms import UNCHANGED, autocasts, flat, gemm, is_aligned, padded_logits, without_autocast
from .gradient_sums import HeadGradients
from .head import Head


def evaluate_small(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Returns the weighted and reduced loss over a small head."""
    hidden = head.hidden
    inputs = (hidden, head.weight, head.bias)
    if autocasts(hidden.device):
        with without_autocast(hidden.device):
            return evaluate_small(head, loss, reduction, row_weight)
    if forward_ad._current_level >= 0:
        refuse_tangents(*inputs)
    rows = loss.row_inputs if row_weight is None else (*loss.row_inputs, row_weight)
    by_row = reduction == "none" or (rows != () and needs_grad(*rows))
    if not (torch.is_grad_enabled() and (by_row or needs_grad(*inputs))):
        with torch.no_grad():
            x = padded_logits(*inputs, None, hidden.dtype)
        return evaluate.evaluate_on(head.backend(), x, loss, reduction, row_weight)
    if not by_row:
        return _small_total(*inputs, row_weight, loss, reduction)
    outputs = _small_rows(*inputs, loss, *loss.row_inputs)
    return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


def evaluate_traced(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Like `evaluate_small`, but for a dispatch mode such as FakeTensorMode."""
    hidden = head.hidden
    counted = eager.zero_ignored(flat(hidden), loss.reading).view(hidden.shape)
    x = head.replace(hidden=counted).logits()
    return evaluate.evaluate(x, loss, reduction, row_weight)


class SmallTotal(Node):
    """The mean or sum of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, loss, reduction):
        ctx.backend, ctx.reduction = backend_of(hidden), reduction
        outputs, ctx.gradients = _total(ctx, hidden, weight, bias, row_weight, loss)
        tensors, ctx.loss = loss.flatten(recompute=True)
        ctx.save_for_backward(hidden, weight, bias, row_weight, *tensors)
        if len(outputs) == 1:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, upstream, *_):
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = SmallTotal.backward(ctx, upstream)
            return refuse_second(gradients, (*ctx.saved_tensors, upstream))
        gradients, ctx.gradients = ctx.gradients, None  # a second backward computes new gradients
        if gradients is None:
            hidden, weight, bias, row_weight, *tensors = ctx.saved_tensors
            with without_autocast(hidden.device):
                loss = ctx.loss.rebuild(tensors)
                _, gradients = _total(ctx, hidden, weight, bias, row_weight, loss)
        try:
            gradients.scale_(ctx.backend, upstream)
        except RuntimeError:
            # A batched tensor of vmap cannot scale a gradient in place. `refuse_vmap` is called
            # only after an error, because Python code is slow in autograd's backward thread.
            Node.refuse_vmap((upstream,))
            raise
        return gradients.hidden, gradients.weight, gradients.bias, None, None, None


class SmallRows(Node):
    """The results per row of a loss over a small head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, *row_inputs):
        x = padded_logits(hidden, weight, bias, None, hidden.dtype)
        outputs = GradientInBackward.forward(ctx, x, backend_of(hidden), loss, None, None)
        counted = None
        if ctx.needs_input_grad[1]:
            # `counted` is computed in forward, because Python code is slower in autograd's backward
            # thread.
            counted = ctx.backend.zero_ignored(flat(hidden), loss.reading)
        # ctx.to_save holds the tensors that GradientInBackward.forward saved.
        ctx.save_for_backward(hidden, counted, weight, bias, *ctx.to_save)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        Node.refuse_vmap(upstream)
        hidden, counted, weight, bias, x, *tensors = saved = ctx.saved_tensors
        differentiable = torch.is_grad_enabled()
        d_head = (None, None, None)
        with torch.no_grad() if differentiable else UNCHANGED, without_autocast(hidden.device):
            wanted = any(ctx.needs_input_grad[:3])
            into = None
            if wanted:
                # The rows of `into` are padded like the rows of x. torch.empty_like would not pad.
                z = flat(x)
                into = torch.empty_strided(z.shape, z.stride(), device=z.device, dtype=z.dtype)
            dz, d_rows = evaluate.finish(ctx, x, tensors, upstream, wanted, into)
            if dz is not None:
                aligned = is_aligned(weight, x.dtype)
                d_head = _gradients(ctx, aligned, hidden, counted, weight, bias, dz)
        gradients = (*d_head, *d_rows)
        if differentiable:
            gradients = refuse_second(gradients, (*saved, *upstream))
        return *gradients[:3], None, *gradients[3:]


_small_total: Any = super(torch.autograd.Function, SmallTotal).apply  # pyright: ignore[reportAttributeAccessIssue]
_small_rows: Any = super(torch.autograd.Function, SmallRows).apply  # pyright: ignore[reportAttributeAccessIssue]


def _total(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_weight: Tensor | None,
    loss: RowLoss,
) -> tuple[tuple[Tensor, ...], HeadGradients]:  # fmt: skip
    """Returns (value, *extras), and the gradients for an upstream gradient of 1."""
    backend, reduction = ctx.backend, ctx.reduction
    h, aligned = flat(hidden), is_aligned(weight, hidden.dtype)
    if aligned:  # without `padded_logits`, the host takes less time
        x = torch.nn.functional.linear(h, weight, bias)
    else:
        x = padded_logits(h, weight, bias, None, h.dtype)
    if h is not hidden:
        x = x.view(*hidden.shape[:-1], x.shape[-1])
    copied = h if ctx.needs_input_grad[1] else None
    result = None
    if reduction == "mean" and row_weight is None:
        result = loss.mean_and_gradient(backend, x, x, copied)
    if result is not None:
        value, counted = result
        outputs, dz = (value,), x
    else:
        outputs, dz = evaluate.total_and_gradient(backend, x, loss, row_weight, reduction, x)
        counted = None if copied is None else backend.zero_ignored(copied, loss.reading)
    return outputs, HeadGradients(*_gradients(ctx, aligned, hidden, counted, weight, bias, dz))


def _gradients(
    ctx: Any,
    aligned: bool,  # see `is_aligned`
    hidden: Tensor,
    # The hidden states (N, D) with 0 in ignored rows; None if the weight needs no gradient.
    counted: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dz: Tensor,  # the gradient of the logits
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of `hidden`, `weight` and `bias`.

    The logits of an ignored row have a gradient of 0. In the GEMM for the weight's gradient, 0
    times a NaN or infinity in `hidden` would be NaN. Therefore this GEMM reads `counted`.
    """
    needs_hidden, _, needs_bias, *_ = ctx.needs_input_grad
    d_hidden = d_weight = d_bias = None
    multiply = torch.mm if aligned else gemm
    two_dims = hidden.dim() == 2
    if not two_dims:
        dz = dz.view(-1, dz.shape[-1])
    if needs_hidden:
        d_hidden = multiply(dz, weight)
        d_hidden = d_hidden if two_dims else d_hidden.view(hidden.shape)
    if counted is not None:
        d_weight = multiply(dz.t(), counted)
    if needs_bias and bias is not None:
        d_bias = dz.sum(0, dtype=PRECISION[bias.dtype]).to(bias.dtype)
    return d_hidden, d_weight, d_bias
