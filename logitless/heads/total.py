"""Computes the mean or sum of a loss over a head, and its gradients, in three GEMMs.

`forward` computes the loss and all gradients for an upstream gradient of 1. The logits, d_hidden
and d_weight take one GEMM each. If the head is split by columns, most logits are computed twice.
`backward` multiplies the gradients by the upstream gradient. `forward` and `backward` are plain
functions of a `Call`. ReducedLoss, lazy/loss_nodes.py and operators.py save and unpack tensors, and
call `forward` and `backward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION, TEACHER
from ..core.autograd import Node, refuse_second
from ..core.choose_backend import backend_of
from ..core.evaluate import mass_and_share, without_unit
from ..core.loss import RowLoss, ignored_value
from .gradient_sums import HeadGradients, Needs, RowInputGradients
from .head import Head, Rows, steady_teacher
from .on_chip import chunks_of


class Call(NamedTuple):
    """The arguments of one evaluation of a loss over a head."""

    head: Head
    loss: RowLoss
    row_weight: Tensor | None
    reduction: str
    needs: Needs

    def flatten(self) -> tuple[tuple[Tensor | None, ...], "Call"]:
        """Returns the tensors that backward reads, and the same call without tensors."""
        of_head, head = self.head.flatten()
        of_loss, loss = self.loss.flatten(recompute=True)
        call = self._replace(head=head, loss=loss, row_weight=None)
        return (self.row_weight, *of_head, *of_loss), call

    def rebuild(self, tensors: Sequence[Tensor | None]) -> "Call":
        row_weight, *of_head = tensors[:6]
        head, of_loss = self.head.rebuild(of_head), tensors[6:]
        return self._replace(head=head, loss=self.loss.rebuild(of_loss), row_weight=row_weight)

    def steady(self) -> "Call":
        """Makes the head and the teachers of this call invariant, if the loss is invariant.

        Returns the changed copy, or this call if the loss is not invariant.
        """
        if not self.loss.reading.invariant:
            return self
        loss = self.loss.map_tensors({TEACHER: steady_teacher})
        return self._replace(head=self.head.replace(invariant=True), loss=loss)

    @property
    def only_scales(self) -> bool:
        """Whether backward of results per row only scales gradients that forward has computed.

        This holds if the result of a row is one number, and no gradient sums over rows.
        """
        needs, head, loss = self.needs, self.head, self.loss
        if needs.weight or needs.bias or needs.low_rank or head.own_hidden is not None:
            return False
        return needs.hidden and loss.only_scales and head.reduces(loss)

    @property
    def scales_in_backward(self) -> bool:
        """Whether backward, instead of forward, multiplies by numbers that all gradients share.

        These numbers are 1 / divisor of a mean, and the unit of the factors (see `without_unit`).
        In fp16, they could cause underflow in forward.
        """
        return self.head.hidden.dtype == torch.float16


class Result(NamedTuple):
    value: Tensor  # ()
    later: Tensor | None  # the number by which backward multiplies the gradients; None for 1
    gradients: HeadGradients  # for an upstream gradient of 1
    extras: tuple[Tensor, ...]  # (...), see core/loss.py


def needs_of(inputs: tuple, row_weight: Any, row_inputs: Sequence[Tensor], grad: bool) -> Needs:
    """Returns one flag per tensor, which is True if the tensor needs a gradient."""
    hidden, weight, bias, low_rank, rows = (
        grad and t is not None and t.requires_grad for t in (*inputs, row_weight)
    )
    by_row = tuple(grad and t.requires_grad for t in row_inputs)
    return Needs(hidden, weight, bias, rows, by_row, low_rank)


def forward(call: Call) -> Result:
    """Computes the loss and its gradients. On return, the memory of the logits has been freed."""
    head, loss, row_weight, needs = call.head, call.loss, call.row_weight, call.needs
    backend, shape = head.backend(), loss.results(head.lead)
    full, mean = PRECISION[head.hidden.dtype], call.reduction == "mean"
    mass = share = factor = later = None
    if mean:
        mass, share = mass_and_share(backend, head.hidden, shape.numel(), loss)
    if row_weight is not None:
        factor = row_weight.detach().reshape(-1).to(full)
    if call.scales_in_backward:
        factor, unit = without_unit(loss, factor, head.hidden)
        later = share if unit is None else unit if share is None else unit * share
    elif share is not None:
        factor = share if factor is None else factor * share
    values = torch.zeros(shape.numel(), device=head.hidden.device, dtype=full)
    extras: list[Tensor] = []
    gradients = values_and_gradients(call, factor, values, extras)
    value, _ = backend.reduce(values, loss.counted, row_weight, mass, mean)
    if needs.row_weight:
        d_row_weight = values if share is None else values * share
        d_row_weight = d_row_weight.view(shape).to(row_weight.dtype)
        gradients = gradients._replace(row_weight=d_row_weight)
    return Result(value, later, gradients, in_shape(extras, shape) if extras else ())


def values_and_gradients(
    call: Call, factor: Tensor | None, values: Tensor, extras: list[Tensor]
) -> HeadGradients:
    """Writes the loss of each row to `values`, and the extras of each row to `extras`.

    Returns the gradients of `hidden`, `weight`, `bias` and `row_inputs`.
    """
    head, loss, needs = call.head, call.loss, call.needs
    wanted = needs.head
    work = head.work(
        loss.merges, gemms=int(wanted), sums=needs.weight, keeps=needs.weight,
        ids=loss.reading.ids_per_row,
    )  # fmt: skip
    chunks = chunks_of(head, loss, work)
    backend, sums = chunks.backend, chunks.gradients(needs) if wanted else None
    row_inputs = RowInputGradients(loss, needs.row_inputs) if any(needs.row_inputs) else None
    for tile in chunks.tiles(loss, sums):
        rows, z = tile.rows, tile.logits
        scale = factor if factor is None or factor.dim() == 0 else factor[rows]
        if wanted:
            into = tile.into
            # An invariant loss must have the same bits with and without gradients. Without
            # gradients, the method `forward` computes the loss. So `forward` also computes the loss
            # if gradients are needed. The kernel that computes loss and gradient in one pass is not
            # used.
            both = RowLoss if head.invariant else type(loss)
            outputs, tile.gradient, saved = both.value_and_gradient(
                tile.loss, backend, z, scale, into
            )
        else:
            outputs, saved = tile.loss.forward(backend, z)
        values[tile.results] = outputs[0]
        if len(outputs) > 1:
            put_outputs(extras, outputs[1:], tile.results, len(values))
        if row_inputs is not None:
            by_row = values.new_ones(()) if scale is None else scale
            row_inputs.add(tile.results, tile.loss, saved, by_row)
    if not chunks.slices and loss.groups is None and (loss.extras != () or loss.multiple_outputs):
        put_outputs(extras, outputs_of_no_rows(call)[1:], slice(0, 0), head.rows)
    gradients = HeadGradients() if sums is None else sums.result()
    blank = (None,) * len(needs.row_inputs)
    d_row_inputs = blank if row_inputs is None else tuple(row_inputs.gradients)
    return gradients._replace(row_inputs=d_row_inputs)


def put_outputs(results: list[Tensor], outputs: Sequence[Tensor], rows: Rows, count: int) -> None:
    """Writes the outputs of some rows to `results`, a list of tensors with `count` rows.

    The first call allocates `results`. Dropped rows keep the initial value `ignored_value`.
    """
    if not results:
        for t in outputs:
            shape, fill = (count, *t.shape[1:]), ignored_value(t.dtype)
            results.append(torch.full(shape, fill, device=t.device, dtype=t.dtype))
    for result, t in zip(results, outputs, strict=True):
        result[rows] = t


def outputs_of_no_rows(call: Call) -> tuple[Tensor, ...]:
    """Returns outputs with zero rows.

    The outputs of every other batch have the same dtypes and trailing dimensions.
    """
    head, loss = call.head, call.loss
    nothing = head.hidden.detach().new_empty((0, len(head.weight)), dtype=head.dtype)
    return loss.rows(slice(0, 0), head.lead).forward(head.backend(), nothing)[0]


def in_shape(results: Sequence[Tensor], lead: torch.Size) -> tuple[Tensor, ...]:
    """Reshapes the first dimension (N rows) of each result to the leading shape of the logits.

    The results are copied, because PyTorch forbids some in-place operations on a view that an
    autograd function returns.
    """
    return tuple(t.view((*lead, *t.shape[1:])).clone() for t in results)


def backward(call: Call, later: Tensor | None, gradients: HeadGradients, upstream: Tensor):
    """Multiplies the gradients in place by the upstream gradient, and returns the gradients.

    If the head has a main_grad, the weight's gradient is added to main_grad, and the returned
    gradient of the weight is None.
    """
    head, backend = call.head, backend_of(call.head.hidden)
    scale = upstream if later is None else upstream * later
    if head.main_grad is not None and gradients.weight is not None:
        head.main_grad.addcmul_(gradients.weight, scale)
        gradients = gradients._replace(weight=None)
    gradients.scale_(backend, scale)
    gradients = gradients.like(head.inputs)
    row_weight, row_inputs = gradients.row_weight, gradients.row_inputs
    return gradients._replace(
        row_weight=None if row_weight is None else row_weight * upstream,
        row_inputs=tuple(None if t is None else t * scale.to(t.dtype) for t in row_inputs),
    )


@dataclass
class Kept:
    """The data that an autograd function keeps for backward, besides the saved tensors."""

    call: Call  # without tensors
    later: Tensor | None  # see `Result`
    gradients: HeadGradients | None

    @staticmethod
    def of(ctx, call: Call) -> tuple[Any, "Kept"]:
        """Runs the forward of an autograd function.

        Returns the result and a `Kept` for backward. The result is the value, or (value, *extras).
        """
        call = call.steady()
        tensors, blank = call.flatten()
        ctx.save_for_backward(*tensors)
        with call.head.ready(call.loss):
            value, later, gradients, extras = forward(call)
        if not (call.scales_in_backward or call.head.main_grad is not None):
            gradients = gradients.like(call.head.inputs)
        if extras:
            ctx.mark_non_differentiable(*extras)
        return (value, *extras) if extras else value, Kept(blank, later, gradients)

    def gradients_of(self, tensors: tuple, upstream: Tensor) -> HeadGradients:
        """Returns the gradients of the autograd function's inputs.

        `tensors` are the tensors that forward saved. A second backward computes the gradients
        again.
        """
        Node.refuse_vmap((upstream,))
        call = self.call.rebuild(tensors)
        gradients, self.gradients = self.gradients, None  # a second backward computes new gradients
        with torch.no_grad():
            if gradients is None:
                with call.head.ready(call.loss):
                    gradients = forward(call).gradients
            gradients = backward(call, self.later, gradients, upstream)
        if torch.is_grad_enabled():
            return gradients.through(lambda g: refuse_second(g, (*tensors, upstream)))
        return gradients


class ReducedLoss(Node):
    """The mean or sum of a loss over the rows of a head."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, low_rank, row_weight, head, loss, reduction, grad, *row_inputs
    ):
        needs = needs_of((hidden, weight, bias, low_rank), row_weight, row_inputs, grad)
        result, ctx.kept = Kept.of(ctx, Call(head, loss, row_weight, reduction, needs))
        return result

    @staticmethod
    def backward(ctx, upstream, *_):
        d = ctx.kept.gradients_of(ctx.saved_tensors, upstream)
        return *d.tensors, d.row_weight, None, None, None, None, *d.row_inputs
