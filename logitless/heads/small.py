"""Computes a loss over a small head from all logits at once, in one autograd function.

A head is small if its logits take at most 1 MiB on a CPU, or on a GPU at most 512 MiB with a loss
in about 2 ms or less (choose_cut.is_small). The host then takes longer than the device, so these
functions call as few operations as possible, and the GEMMs include ignored rows, whose number the
host would have to wait for.

For a mean or sum, forward also computes the gradients (small_total.py). For results per row,
autograd saves the logits for backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import eager
from ..core import evaluate
from ..core.autograd import Node, refuse_second, refuse_tangents
from ..core.choose_backend import backend_of
from ..core.evaluate import GradientInBackward
from ..core.loss import RowLoss
from ..core.source import needs_grad
from .gemms import UNCHANGED, autocasts, flat, is_aligned, padded_logits, without_autocast
from .head import Head
from .small_total import evaluate_total, gradients_of


def evaluate_small(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
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
        return evaluate_total(head, loss, reduction, row_weight)
    outputs = _small_rows(*inputs, loss, *loss.row_inputs)
    return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


def evaluate_traced(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    hidden = head.hidden
    counted = eager.zero_ignored(flat(hidden), loss.reading).view(hidden.shape)
    x = head.replace(hidden=counted).logits()
    return evaluate.evaluate(x, loss, reduction, row_weight)


class SmallRows(Node):
    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, *row_inputs):
        x = padded_logits(hidden, weight, bias, None, hidden.dtype)
        outputs = GradientInBackward.forward(ctx, x, backend_of(hidden), loss, None, None)
        counted = None
        if ctx.needs_input_grad[1]:
            # In forward, because Python code is slower in autograd's backward thread.
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
                # Rows padded like those of x; torch.empty_like would not pad.
                z = flat(x)
                into = torch.empty_strided(z.shape, z.stride(), device=z.device, dtype=z.dtype)
            dz, d_rows = evaluate.finish(ctx, x, tensors, upstream, wanted, into)
            if dz is not None:
                aligned = is_aligned(weight, x.dtype)
                needs = ctx.needs_input_grad
                d_head = gradients_of(needs, aligned, hidden, counted, weight, bias, dz)
        gradients = (*d_head, *d_rows)
        if differentiable:
            gradients = refuse_second(gradients, (*saved, *upstream))
        return *gradients[:3], None, *gradients[3:]


_small_rows: Any = super(torch.autograd.Function, SmallRows).apply  # pyright: ignore[reportAttributeAccessIssue]
