"""Computes the mean or sum of a loss over a small head.

Forward computes the logits, the loss and all gradients, that of the logits in their memory;
backward multiplies the gradients by the upstream gradient, and a second backward computes
everything again.

A plan computes the loss and the gradients: a `TotalPlan` any loss, a faster `MeanPlan` some means,
with one kernel launch for the mean and the gradient of the logits. If the weight needs a gradient
and rows can be ignored, the same launch copies the hidden states for its GEMM, with 0 in these
rows.

The host takes longer than the GPU, and without plans, a quarter to a third of the time is Python
code that checks arguments and chooses kernels. Its results depend on the Signature of the arguments
(core/call.py), the layout of the head (`layout_of`) and settings such as `impl`. So the Signature
keeps one MeanPlan per layout, which a later call repeats if all of these are equal.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract import PRECISION, is_capturing
from ..core.autograd import Node, refuse_second
from ..core.backend import Backend
from ..core.call import check_values, reads_values, under_transform
from ..core.choose_backend import backend_of
from ..core.evaluate import total_and_gradient
from ..core.invariant import is_invariant
from ..core.loss import RowLoss
from . import choose_cut
from .gemms import (
    autocasts,
    flat,
    gemm,
    is_aligned,
    padded_logits,
    padded_width,
    without_autocast,
)
from .gradient_sums import HeadGradients
from .head import Head

REMEMBERED = 16  # largest number of plans per Signature; one more plan replaces all of them
Computed = tuple[tuple[Tensor, ...], HeadGradients]


def evaluate_total(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    inputs, backend = (head.hidden, head.weight, head.bias), backend_of(head.hidden)
    if reduction == "mean" and row_weight is None and loss.mean_in_one_pass(backend):
        plan = mean_plan(head, loss, backend)
        if plan is not None:
            label, temperature = loss.reading.label, loss.reading.row_temperature
            keep(plan, head, loss)
            return _small_total(*inputs, plan, label, temperature)
    tensors, blank = loss.flatten(recompute=True)
    plan = TotalPlan(backend, reduction, blank, loss)
    return _small_total(*inputs, plan, row_weight, *tensors)


def keep(plan: "MeanPlan", head: Head, loss: RowLoss) -> None:
    """Keeps a plan in the Signature of the call, if later calls can repeat it.

    Not with temperatures per row, for which `repeat` has no argument, nor while a CUDA graph is
    captured, whose tensors the plan can hold.
    """
    by_row = loss.reading.row_temperature is not None
    if loss.signature is None or head.signature is None or by_row or is_capturing():
        return
    plans = loss.signature.kept
    if plans is None or len(plans) >= REMEMBERED:
        plans = loss.signature.kept = {}
    plans[layout_of(head)] = plan


def repeat(plans: dict[tuple, "MeanPlan"], head: Head, label: Tensor) -> Tensor | None:
    """The mean by a plan of an earlier call, or None if none fits the layout and settings."""
    hidden, weight = head.hidden, head.weight
    if (
        under_transform()
        or forward_ad._current_level >= 0
        or not torch.is_grad_enabled()
        or is_invariant()
        or choose_cut.forced is not None
    ):
        return None
    plan = plans.get(layout_of(head))
    if (
        plan is None
        or plan.backend is not backend_of(hidden)
        or not plan.launch.is_current
        or not weight.untyped_storage().nbytes()  # FSDP has freed the weight
    ):
        return None
    if autocasts(hidden.device):
        with without_autocast(hidden.device):
            return repeat(plans, head, label)
    if reads_values(label):
        reading = plan.loss.reading._replace(label=label)
        check_values(plan.loss.replace(reading=reading))
    return _small_total(hidden, weight, head.bias, plan, label, None)


def layout_of(head: Head) -> tuple:
    """What a MeanPlan depends on.

    The Signature also has shapes, dtypes and requires_grad, but a tensor can change after the
    check, and a kernel must not read or write memory beyond it.
    """
    hidden, weight = head.hidden, head.weight
    return (
        head.signature, hidden.shape, hidden.stride(), hidden.dtype, hidden.data_ptr() % 16,
        weight.shape, weight.requires_grad,
    )  # fmt: skip


class SmallTotal(Node):
    """The mean or sum of a loss over a small head. `tensors` are those of the loss."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, plan, *tensors):
        needs = ctx.needs_input_grad
        outputs, ctx.gradients = plan.compute(needs, hidden, weight, bias, *tensors)
        ctx.plan = plan
        ctx.save_for_backward(hidden, weight, bias, *tensors)
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
            with without_autocast(upstream.device):
                _, gradients = ctx.plan.compute(ctx.needs_input_grad, *ctx.saved_tensors)
        try:
            gradients.scale_(ctx.plan.backend, upstream)
        except RuntimeError:
            # A batched tensor of vmap cannot scale a gradient in place. Asked only after an error,
            # because Python code is slow in autograd's backward thread.
            Node.refuse_vmap((upstream,))
            raise
        others = len(ctx.needs_input_grad) - 3
        return gradients.hidden, gradients.weight, gradients.bias, *(None,) * others


_small_total: Any = super(torch.autograd.Function, SmallTotal).apply  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class TotalPlan:
    """Computes the mean or sum of any loss over a small head."""

    backend: Backend
    reduction: str
    blank: RowLoss  # the loss without tensors
    # With tensors; None after forward, because autograd saves the tensors.
    loss: RowLoss | None

    def compute(
        self, needs: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None,
        row_weight: Tensor | None, *tensors: Tensor | None,
    ) -> Computed:  # fmt: skip
        """(value, *extras), and the gradients for an upstream gradient of 1."""
        loss, self.loss = self.loss, None
        if loss is None:  # in a second backward
            loss = self.blank.rebuild(tensors)
        backend = self.backend
        h, aligned = flat(hidden), is_aligned(weight, hidden.dtype)
        x = logits_of(aligned, h, weight, bias)
        if h is not hidden:
            x = x.view(*hidden.shape[:-1], x.shape[-1])
        outputs, dz = total_and_gradient(backend, x, loss, row_weight, self.reduction, x)
        counted = backend.zero_ignored(h, loss.reading) if needs[1] else None
        d = gradients_of(needs, aligned, hidden, counted, weight, bias, dz)
        return outputs, HeadGradients(*d)


class MeanPlan(NamedTuple):
    """Computes the mean of a loss over every small head with the same layout (`layout_of`)."""

    backend: Backend
    loss: RowLoss  # without tensors
    launch: Any  # the result of the backend's `plan_mean`
    aligned: bool  # see `is_aligned`

    def compute(
        self, needs: tuple[bool, ...], hidden: Tensor, weight: Tensor, bias: Tensor | None,
        label: Tensor, temperature: Tensor | None,
    ) -> Computed:  # fmt: skip
        h = flat(hidden)
        x = logits_of(self.aligned, h, weight, bias)
        mean, counted = self.launch(x, label, h, temperature)
        d = gradients_of(needs, self.aligned, hidden, counted, weight, bias, x)
        return (mean,), HeadGradients(*d)


def mean_plan(head: Head, loss: RowLoss, backend: Backend) -> MeanPlan | None:
    """The plan for this head, or None if one kernel launch is not possible."""
    h, weight = flat(head.hidden), head.weight
    stride = padded_width(weight.shape[0], h, h.dtype)
    launch = loss.plan_mean(backend, h.shape[0], stride, h, weight.requires_grad)
    if launch is None:
        return None
    blank = loss.flatten()[1].replace(signature=None)
    return MeanPlan(backend, blank, launch, is_aligned(weight, h.dtype))


def logits_of(aligned: bool, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits (N, V) of h (N, D), in padded rows if `aligned` is False."""
    if aligned:  # without `padded_logits`, the host takes less time
        return torch.nn.functional.linear(h, weight, bias)
    return padded_logits(h, weight, bias, None, h.dtype)


def gradients_of(
    needs: tuple[bool, ...],  # whether `hidden`, `weight` and `bias` need gradients
    aligned: bool,  # see `is_aligned`
    hidden: Tensor,
    # (N, D) with 0 in ignored rows; can be None if needs[1] is False
    counted: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dz: Tensor,  # the gradient of the logits
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `hidden`, `weight` and `bias`.

    That of the weight reads `counted`: the logits of an ignored row have a gradient of 0, which
    times a NaN or infinity in `hidden` would be NaN.
    """
    needs_hidden, needs_weight, needs_bias, *_ = needs
    d_hidden = d_weight = d_bias = None
    multiply = torch.mm if aligned else gemm
    dz = flat(dz)
    if needs_hidden:
        d_hidden = multiply(dz, weight)
        d_hidden = d_hidden if hidden.dim() == 2 else d_hidden.view(hidden.shape)
    if needs_weight:
        assert counted is not None
        d_weight = multiply(dz.t(), counted)
    if needs_bias and bias is not None:
        d_bias = dz.sum(0, dtype=PRECISION[bias.dtype]).to(bias.dtype)
    return d_hidden, d_weight, d_bias
