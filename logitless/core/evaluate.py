"""Evaluates a loss over a tensor of logits, by the first route whose condition holds:

    source                the logits are no plain tensor (source.py)
    compiled              a compiler, a dispatch mode or torch.func is active (operators.py); inside
                          `invariant`, torch.compile breaks the graph instead
    in place              inplace=True, and a gradient is needed (in_place.py)
    single rows           `invariant` on the backend `eager`: each row as a batch of one row
    values alone          no gradient is needed
    gradient in forward   the loss has saves_gradient=True, or a mean or sum of few logits on a GPU
    gradient in backward  otherwise: backward reads the logits again

A gradient in forward or in place is for an upstream gradient of 1, by which backward multiplies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract import PRECISION, TEACHER
from .autograd import Node, refuse_second, refuse_tangents
from .backend import Backend
from .call import check_values, under_transform
from .choose_backend import backend_of, on_gpu
from .invariant import aligned, aligned_memory, computes_single_rows, uncompiled
from .loss import RowLoss, flat_rows
from .source import source_of

# Up to SMALL logits are read and written faster than one kernel launches, and a backward that only
# scales a saved gradient (fp32) takes half the host time of one that computes the gradient.
SMALL = 1 << 20


def evaluate(
    logits,  # a Tensor (..., V), or a Source
    loss: RowLoss,
    reduction: str = "none",
    row_weight: Tensor | None = None,  # (...)
):
    """Returns the weighted and reduced loss: the value, (value, *extras), or all outputs."""
    if logits.__class__ is not Tensor:
        source = source_of(logits)
        if source is not None:
            return source.evaluate(loss, reduction, row_weight)
    if loss.groups is not None:
        return by_statistics(evaluate, logits, loss, reduction)
    if under_transform():
        if loss.reading.invariant and torch.compiler.is_compiling():
            return uncompiled(evaluate)(logits, loss, reduction, row_weight)
        return evaluate_traced(logits, loss, reduction, row_weight)
    if forward_ad._current_level >= 0:
        refuse_tangents(logits)
    check_values(loss)
    if loss.reading.invariant:
        return evaluate_invariant(backend_of(logits), logits, loss, reduction, row_weight)
    return evaluate_on(backend_of(logits), logits, loss, reduction, row_weight)


def by_statistics(run, x, loss: RowLoss, reduction: str):
    """Evaluates a formula over groups under autograd, from the statistics of all rows.

    It works for every source. run(x, loss, reduction, row_weight) evaluates a loss. A head whose
    groups fit into its workspace saves a GEMM with chunks of whole groups.
    """
    outputs = loss.traced(x, lambda read, x: run(x, read, "none", None))
    return loss.reduce(outputs, reduction, None)


def evaluate_on(
    backend: Backend, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None
):
    """Like `evaluate`, with a given backend. x can be a shard that has only some columns."""
    by_row = reduction == "none" or (row_weight is not None and row_weight.requires_grad)
    reduced_here = (None, None) if by_row else (row_weight, reduction)
    row_inputs = loss.row_inputs
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in row_inputs)):
        small = x.numel() <= SMALL and on_gpu(x) and not loss.reading.invariant
        if loss.saves_gradient or (small and not by_row and not row_inputs):
            outputs = _gradient_in_forward(x, backend, loss, *reduced_here)
        else:
            outputs = _gradient_in_backward(x, backend, loss, *reduced_here, *row_inputs)
    else:
        outputs, _, _ = _forward(backend, x, loss, *reduced_here)
    if not by_row or loss.multiple_outputs:
        return outputs
    return loss.reduce(outputs, reduction, row_weight)


def evaluate_invariant(
    backend: Backend, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None
):
    if x.numel() == 0:
        return evaluate_on(backend, x, loss, reduction, row_weight)
    if computes_single_rows(backend):
        return _by_single_rows(backend, x, loss, reduction, row_weight)
    loss = loss.map_tensors({TEACHER: aligned})
    return evaluate_on(backend, aligned(x), loss, reduction, row_weight)


def _by_single_rows(
    backend: Backend, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None
):
    lead = x.shape[:-1]
    inputs = [flat_rows(t, lead).split(1) for t in loss.row_inputs]
    results = []
    for i, row in enumerate(x.reshape(-1, x.shape[-1]).split(1)):
        one = single_row(loss, i, lead).replace(row_inputs=tuple(t[i] for t in inputs))
        # copied, so that every row has the same alignment
        result = evaluate_on(backend, row.clone(), one, "none", None)
        results.append(result if isinstance(result, tuple) else (result,))
    outputs = tuple(
        torch.cat(rows).view(*lead, *rows[0].shape[1:]) for rows in zip(*results, strict=True)
    )
    return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


def single_row(loss: RowLoss, row: int, lead: torch.Size) -> RowLoss:
    """The loss of a batch of this row alone; the teacher's row is copied for its alignment."""
    one = loss.rows(slice(row, row + 1), lead)
    return one.map_tensors({TEACHER: lambda t: t.clone(memory_format=torch.contiguous_format)})


def evaluate_traced(x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Like `evaluate`, but calls an operator, for compilers, dispatch modes and torch.func."""
    outputs = loss.traced(x)
    return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


def _forward(backend: Backend, x: Tensor, loss: RowLoss, row_weight, reduction: str | None):
    """Returns the outputs, the factor of each row's gradient, and the tensors to save."""
    outputs, saved = loss.forward(backend, x)
    value, *extras = outputs
    if reduction is None:
        return outputs if extras or loss.multiple_outputs else value, None, saved
    value, factor = _reduced(backend, x, loss, value, row_weight, reduction)
    return (value, *extras) if extras else value, factor, saved


def total_and_gradient(
    backend: Backend, x: Tensor, loss: RowLoss, row_weight, reduction: str, into: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Returns (value, *extras) of a sum or mean, and the gradient for an upstream gradient of 1.

    The gradient is written to `into` if possible.
    """
    mean = reduction == "mean"
    count = loss.results(x.shape[:-1]).numel()
    mass, factor = mass_and_share(backend, x, count, loss) if mean else (None, None)
    if row_weight is not None:
        weight = row_weight.detach().reshape(-1).to(PRECISION[x.dtype])
        factor = weight if factor is None else weight * factor
    (value, *extras), gradient, _ = loss.value_and_gradient(backend, x, factor, into)
    value, _ = backend.reduce(value, loss.counted, row_weight, mass, mean)
    return (value, *extras), gradient


def mass_and_share(
    backend: Backend, like: Tensor, count: int, loss: RowLoss
) -> tuple[Tensor | None, Tensor]:
    """Returns `mass` (RowLoss.mass), and 1 / the divisor of a mean over `count` results."""
    weighted = loss.reading.class_weight is not None
    mass = loss.mass(backend, like.dtype) if weighted else None
    return mass, backend.share(loss.counted, mass, count, like)


def without_unit(
    loss: RowLoss, factor: Tensor | None, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns `factor` / unit, and the unit: the largest number that multiplies a row's gradient.

    An fp16 gradient computed in forward would underflow if small weights multiplied it before the
    upstream gradient, such as the scale of a GradScaler, is known. So backward multiplies by the
    unit. `factor` has one number per row. Both results are None if nothing multiplies.
    """
    if loss.reading.invariant:  # the unit depends on the batch
        return factor, None
    reading, full = loss.reading, PRECISION[like.dtype]
    t, v = reading.any_temperature, reading.class_weight
    inverse = 1 / t.detach().reshape(-1).to(full) if isinstance(t, Tensor) else 1 / (t or 1.0)
    gain = loss.gain(inverse)
    if factor is None and v is None and not isinstance(gain, Tensor) and gain == 1:
        return None, None
    unit = torch.ones((), device=like.device, dtype=full) if factor is None else factor.abs()
    unit, ignored = unit * gain, reading.ignored_rows()
    if unit.dim():
        unit = unit if ignored is None else unit.masked_fill(ignored.reshape(-1), 0.0)
        unit = unit.amax() if len(unit) else unit.sum()
    if v is not None:
        unit = unit * v.detach().abs().amax().to(full)
    # Without a largest number that is positive and finite, the gradient is computed as it is.
    unit = torch.where((unit > 1e-30) & (unit < 1e30), unit, 1.0)
    return (1 if factor is None else factor) / unit, unit


def _reduced(backend: Backend, x: Tensor, loss: RowLoss, value: Tensor, row_weight, reduction: str):
    mean, mass = reduction == "mean", None
    if mean and loss.reading.class_weight is not None:
        mass = loss.mass(backend, x.dtype)
    return backend.reduce(value, loss.counted, row_weight, mass, mean)


def scaled(
    gradient: Tensor,  # (..., V), for an upstream gradient of 1, in fp32 or fp64
    x: Tensor,
    upstream: Tensor,  # () or (...)
    factor: Tensor | None,  # one number, or one number per row
) -> Tensor:
    """Returns `gradient * upstream * factor`, rounded once to the dtype of x."""
    scale = upstream if factor is None else upstream * factor
    if scale.dim():
        scale = scale.reshape(*x.shape[:-1], 1)
    if gradient.dtype == x.dtype:
        return gradient * scale
    into = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.mul(gradient, scale, out=into)


class GradientInForward(Node):
    @staticmethod
    def forward(ctx, x, backend, loss, row_weight, reduction):
        factor, extras = None, ()
        if loss.saves_gradient:
            result, factor, (gradient,) = _forward(backend, x, loss, row_weight, reduction)
        else:
            result, dense = None, torch.contiguous_format
            gradient = torch.empty_like(x, dtype=PRECISION[x.dtype], memory_format=dense)
            total = None if row_weight is not None else loss.in_one_launch(backend, reduction)
            if total is not None:
                result = loss.launch_total(total, backend, x, gradient)
            if result is None:
                outputs, gradient, _ = loss.value_and_gradient(backend, x, None, gradient)
                value, *extras = outputs
                result, factor = _reduced(backend, x, loss, value, row_weight, reduction)
        ctx.save_for_backward(x, gradient, factor)
        if not extras:
            return result
        ctx.mark_non_differentiable(*extras)
        return result, *extras

    @staticmethod
    def backward(ctx, upstream, *_):
        Node.refuse_vmap((upstream,))
        x, gradient, factor = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return scaled(gradient, x, upstream, factor), None, None, None, None
        with torch.no_grad():
            d_x = scaled(gradient, x, upstream, factor)
        return *refuse_second((d_x,), (x, upstream)), None, None, None, None


class GradientInBackward(Node):
    """Saves all that backward reads, so autograd raises if one of the tensors changes before."""

    @staticmethod
    def forward(ctx, x, backend, loss, row_weight, reduction, *row_inputs):
        outputs, factor, saved = _forward(backend, x, loss, row_weight, reduction)
        tensors, ctx.loss = loss.flatten()
        ctx.backend, ctx.count = backend, len(tensors) + 1
        ctx.save_for_backward(x, factor, *tensors, *saved)
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*loss.without_gradient(outputs))
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        Node.refuse_vmap(upstream)
        # read once: activation checkpointing allows no second access
        x, *tensors = ctx.saved_tensors
        if not torch.is_grad_enabled():
            d_x, d_rows = finish(ctx, x, tensors, upstream, ctx.needs_input_grad[0])
        else:
            with torch.no_grad():
                d_x, d_rows = finish(ctx, x, tensors, upstream, ctx.needs_input_grad[0])
            d_x, *d_rows = refuse_second((d_x, *d_rows), (x, *tensors, *upstream))
        return d_x, None, None, None, None, *d_rows


def finish(
    ctx, x: Tensor, tensors: Sequence, upstream: tuple, wanted: bool, into: Tensor | None = None
) -> tuple[Tensor | None, tuple]:
    """Returns the gradients of the logits (None if not `wanted`) and of row_inputs.

    `tensors` holds all that forward saved, except x.
    """
    factor, saved = tensors[0], tuple(tensors[ctx.count :])
    loss = ctx.loss.rebuild(tensors[1 : ctx.count])
    d_x, d_rows = None, (None,) * len(loss.row_inputs)
    if any(d is not None for d in upstream):
        if wanted:
            if into is None and loss.reading.invariant and not computes_single_rows(ctx.backend):
                into = aligned_memory(x)
            d_x = loss.backward(ctx.backend, x, saved, upstream, factor, into)
            if d_x.shape != x.shape:
                d_x = d_x.view(x.shape)
        if loss.row_inputs:
            scale = upstream[0] if factor is None else upstream[0] * factor
            d_rows = loss.d_row_inputs(saved, scale)
    return d_x, d_rows


# The `apply` of the base class is faster: torch.autograd.Function.apply adds what only torch.func
# needs, and torch.func goes to `evaluate_traced`.
_gradient_in_forward = super(torch.autograd.Function, GradientInForward).apply  # type: ignore
_gradient_in_backward = super(torch.autograd.Function, GradientInBackward).apply  # type: ignore
