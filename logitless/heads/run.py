"""Evaluates a loss over a head: one loop over pieces of rows, for every loss and reduction.

    result                  forward                                  backward              GEMMs
    mean, sum               logits, values, gradients                scales gradients      3
    per row, only scaled    the same, for upstream gradients of 1    scales their rows     2
    per row, logits kept    logits, values                           gradients             3
    per row                 logits, values                           logits, gradients     4

Results per row are "only scaled" if nothing but `hidden` needs a gradient and each row has one
result, and their logits are kept if the caller's own workspace holds all of them. A frozen weight
saves a GEMM. A second backward of a retained graph computes again what the first has overwritten.

A piece is a chunk of rows or of whole groups (chunks.py), or a group of rows in blocks of columns
or on the chip (blocks.py, on_chip.py). A small head is one piece, with a straight body of its own:
the host then takes longer than the device, so nothing is dropped, sliced or summed, and for some
losses, one launch computes a mean and the gradient of the logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..contract import PRECISION, TEACHER, has_values, is_capturing
from ..core import invariant as invariance
from ..core.autograd import Node, refuse_second, refuse_tangents
from ..core.backend import Backend
from ..core.call import reads_values, under_transform
from ..core.choose_backend import backend_of
from ..core.evaluate import evaluate_on, mass_and_share, total_and_gradient, without_unit
from ..core.loss import RowLoss, Saved, ignored_value
from ..core.source import is_dense, needs_grad
from . import choose_cut
from .choose_cut import Cut
from .chunks import Chunks
from .gemms import (
    autocasts,
    flat,
    gemm,
    is_aligned,
    padded_logits,
    padded_width,
    without_autocast,
)
from .gradient_sums import HeadGradients, Needs, RowInputGradients
from .head import Head, Rows, steady_teacher
from .on_chip import chunks_of
from .quantized import PLAIN


class Call(NamedTuple):
    """The arguments of one evaluation of a loss over a head."""

    head: Head
    loss: RowLoss
    row_weight: Tensor | None
    reduction: str
    needs: Needs

    @property
    def by_row(self) -> bool:
        return self.reduction == "none"

    def flatten(self) -> tuple[tuple[Tensor | None, ...], "Call"]:
        """Returns the tensors that backward reads, and the same call without tensors."""
        of_head, head = self.head.flatten()
        of_loss, loss = self.loss.flatten(recompute=True)
        call = self._replace(head=head, loss=loss, row_weight=None)
        return (self.row_weight, *of_head, *of_loss), call

    def rebuild(self, tensors: Sequence[Any]) -> "Call":
        head, loss = self.head.rebuild(tensors[1:6]), self.loss.rebuild(tensors[6:])
        return self._replace(head=head, loss=loss, row_weight=tensors[0])

    def steady(self) -> "Call":
        """The same call with invariant head and teachers, if the loss is invariant."""
        if not self.loss.reading.invariant:
            return self
        loss = self.loss.map_tensors({TEACHER: steady_teacher})
        return self._replace(head=self.head.replace(invariant=True), loss=loss)

    @property
    def only_scales(self) -> bool:
        """Whether forward computes gradients for upstream gradients of 1, which backward scales."""
        needs, head, loss = self.needs, self.head, self.loss
        if not self.by_row:
            return needs.head
        if needs.weight or needs.bias or needs.low_rank or head.own_hidden is not None:
            return False
        return needs.hidden and loss.only_scales and head.reduces(loss)

    @property
    def scales_in_backward(self) -> bool:
        """Whether backward multiplies by the numbers that all gradients share.

        These are 1 / divisor of a mean, and the unit of the factors (see `without_unit`), which in
        fp16 could cause underflow in forward.
        """
        return self.head.hidden.dtype == torch.float16


def needs_of(inputs: tuple, row_weight: Any, row_inputs: Sequence[Tensor], grad: bool) -> Needs:
    """Which tensors need a gradient."""
    if not grad:
        return Needs(False, False, False, False, (False,) * len(row_inputs))
    hidden, weight, bias, low_rank = inputs
    return Needs(
        hidden.requires_grad,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
        row_weight is not None and row_weight.requires_grad,
        tuple([t.requires_grad for t in row_inputs]) if row_inputs else (),
        low_rank is not None and low_rank.requires_grad,
    )


def run(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> Any:
    """Returns the weighted and reduced loss, computed in pieces."""
    by_row = reduction == "none" or not head.reduces(loss)
    inside = None if by_row else row_weight
    needs = needs_of(head.inputs, inside, loss.row_inputs, torch.is_grad_enabled())
    call = Call(head, loss, inside, "none" if by_row else reduction, needs)
    outputs = HeadLoss.apply(*head.inputs, inside, call, *loss.row_inputs)
    if not by_row or loss.multiple_outputs:
        return outputs
    return loss.reduce(outputs, reduction, row_weight)


# --- the loop


class Done(NamedTuple):
    """What `forward` computes."""

    outputs: tuple[Tensor, ...]  # (value, *extras) of a mean or sum, or the outputs of all rows
    ones: HeadGradients | None = None  # the gradients for upstream gradients of 1
    later: Tensor | None = None  # the number by which backward multiplies them; None for 1
    known: Sequence[Saved] = ()  # the tensors that backward needs for each piece
    logits: Tensor | None = None  # the logits of all rows, if they are kept


def forward(call: Call, keeps: bool = False) -> Done:
    """Computes the results, and the gradients that backward only scales.

    With `keeps`, the logits of all rows stay in memory until backward.
    """
    head, loss, row_weight, needs, by_row = *call[:3], call.needs, call.by_row
    backend, shape, scales = head.backend(), loss.results(head.lead), call.only_scales
    mean, mass, share, factor, later = call.reduction == "mean", None, None, None, None
    if mean:
        mass, share = mass_and_share(backend, head.hidden, shape.numel(), loss)
    if row_weight is not None:
        factor = row_weight.detach().reshape(-1).to(PRECISION[head.hidden.dtype])
    if call.scales_in_backward and (scales or not by_row):
        factor, unit = without_unit(loss, factor, head.hidden)
        later = share if unit is None else unit if share is None else unit * share
    elif share is not None:
        factor = share if factor is None else factor * share
    pieces = pieces_of(call, keeps=keeps)
    sums, row_inputs = pieces.gradients(needs) if scales else None, None
    if True in needs.row_inputs and (scales or not by_row):
        row_inputs = RowInputGradients(loss, needs.row_inputs)
    results: list[Tensor] = []
    known: list[Saved] = []
    for tile in pieces.tiles(loss, sums):
        scale = factor if factor is None or factor.dim() == 0 else factor[tile.rows]
        if scales:
            # An invariant loss has the same bits without gradients, from the method `forward`, so
            # it does not use the kernel that computes loss and gradient in one pass.
            kind = RowLoss if head.invariant else type(loss)
            outputs, tile.gradient, saved = kind.value_and_gradient(
                tile.loss, pieces.backend, tile.logits, scale, tile.into
            )
        else:
            outputs, saved = tile.loss.forward(pieces.backend, tile.logits)
            known.append(() if loss.saves_gradient or not by_row else saved)
        put_outputs(results, outputs, tile.results, shape.numel())
        if row_inputs is not None:
            by = outputs[0].new_ones(()) if scale is None else scale
            row_inputs.add(tile.results, tile.loss, saved, by)
    if not results:  # all rows are ignored
        put_outputs(results, outputs_of_no_rows(call), slice(0, 0), shape.numel())
    ones = None
    if scales or not by_row:
        ones = HeadGradients() if sums is None else sums.result(late=not by_row)
        none = (None,) * len(needs.row_inputs)
        ones = ones._replace(row_inputs=none if row_inputs is None else tuple(row_inputs.gradients))
    if by_row:
        kept = pieces.kept if keeps else None
        return Done(in_shape(results, shape), ones, later, known, kept)
    values, *extras = results
    value, _ = backend.reduce(values, loss.counted, row_weight, mass, mean)
    if needs.row_weight:
        d = values if share is None else values * share
        ones = ones._replace(row_weight=d.view(shape).to(row_weight.dtype))
    return Done((value, *in_shape(extras, shape)), ones, later)


def pieces_of(
    call: Call, keeps: bool = False, logits: Tensor | None = None, whole_rows: bool = False
) -> Chunks:
    """The pieces of a call. With `keeps`, one holds all rows; `logits` are those of forward."""
    head, loss, needs = call.head, call.loss, call.needs
    if keeps:
        cut = Cut(max(head.rows, 1), whole=True)
        return Chunks(head, cut, head.rows_that_count(loss), kept=logits)
    once = call.only_scales or not call.by_row  # whether forward computes the gradients
    work = head.work(
        loss.merges and not whole_rows, gemms=int(once and needs.head), sums=needs.weight,
        keeps=once and needs.weight, ids=loss.reading.ids_per_row,
    )  # fmt: skip
    return chunks_of(head, loss, work)


def put_outputs(results: list[Tensor], outputs: Sequence[Tensor], rows: Rows, count: int) -> None:
    """Writes the outputs of some rows to `results`, tensors with `count` rows that it allocates.

    Dropped rows keep the initial value `ignored_value`. The outputs of all rows are the results, so
    nobody may write into these.
    """
    if isinstance(rows, slice) and rows == slice(0, count):
        results.extend(outputs)
        return
    if not results:
        for t in outputs:
            shape, fill = (count, *t.shape[1:]), ignored_value(t.dtype)
            results.append(torch.full(shape, fill, device=t.device, dtype=t.dtype))
    for result, t in zip(results, outputs, strict=True):
        result[rows] = t


def outputs_of_no_rows(call: Call) -> tuple[Tensor, ...]:
    """Outputs with zero rows, whose dtypes and trailing dimensions are those of every batch."""
    head, loss = call.head, call.loss
    nothing = head.hidden.detach().new_empty((0, len(head.weight)), dtype=head.dtype)
    return loss.rows(slice(0, 0), head.lead).forward(head.backend(), nothing)[0]


def in_shape(results: Sequence[Tensor], lead: torch.Size) -> tuple[Tensor, ...]:
    """Reshapes the first dimension (N rows) of each result to the leading shape of the logits.

    The results are copied, because PyTorch forbids some in-place operations on a view that an
    autograd function returns.
    """
    return tuple(t.view((*lead, *t.shape[1:])).clone() for t in results)


def scaled(
    call: Call, later: Tensor | None, ones: HeadGradients, upstream: Tensor
) -> HeadGradients:
    """Multiplies the gradients of a mean or sum in place by the upstream gradient.

    The gradient of a weight with a main_grad is added to it instead.
    """
    head, backend = call.head, backend_of(call.head.hidden)
    scale = upstream if later is None else upstream * later
    if head.main_grad is not None and ones.weight is not None:
        head.main_grad.addcmul_(ones.weight, scale)
        ones = ones._replace(weight=None)
    ones.scale_(backend, scale)
    return ones.like(head.inputs).times_rows(upstream, scale)


def scaled_rows(call: Call, ones: Sequence[Tensor | None], upstream: tuple) -> HeadGradients:
    """Multiplies `ones`, (later, d_hidden, *d_row_inputs), by each row's upstream gradient."""
    (g,), loss = (g for g in upstream if g is not None), call.loss
    later, hidden, *of_inputs = ones
    assert hidden is not None
    g = g.reshape(-1) if later is None else g.reshape(-1) * later
    by_row, ignored = loss.of_rows(g), loss.reading.ignored_rows()
    if ignored is not None:  # the upstream gradient of an ignored row can be NaN
        by_row = torch.where(ignored.reshape(-1), 0.0, by_row)
    rows, out = hidden.view(-1, hidden.shape[-1]), torch.empty_like(hidden)
    torch.mul(rows, by_row.unsqueeze(-1), out=out.view(rows.shape))
    of_inputs = tuple(
        None if d is None else loss.times_input(i, d, g).to(d.dtype)
        for i, d in enumerate(of_inputs)
    )
    return HeadGradients(hidden=out, row_inputs=of_inputs).like(call.head.inputs)


def backward(
    call: Call,
    known: Sequence[Saved] | None,
    upstream: tuple,
    keeps: bool = False,
    logits: Tensor | None = None,
) -> HeadGradients:
    """The gradients of results per row, if upstream gradients do not only scale them.

    `known` are those of `Done`; without them, backward recomputes the statistics from chunks of
    whole rows. The gradient overwrites `logits`.
    """
    head, loss, lead = call.head, call.loss, call.head.lead
    flat = [None if g is None else g.reshape(head.rows, *g.shape[len(lead) :]) for g in upstream]
    pieces = pieces_of(call, keeps, logits, whole_rows=known is None)
    backend, sums = pieces.backend, pieces.gradients(call.needs, head.main_grad)
    row_inputs = RowInputGradients(loss, call.needs.row_inputs) if loss.row_inputs else None
    for tile in pieces.tiles(loss, sums, known or ()):
        g = tuple(None if g is None else g[tile.rows] for g in flat)
        saved = tile.saved or tile.loss.forward(backend, tile.logits)[1]
        tile.gradient = tile.loss.backward(backend, tile.logits, saved, g, None, tile.into)
        if row_inputs is not None:
            row_inputs.add(tile.rows, tile.loss, saved, g[0])
    gradients = sums.result()
    if head.main_grad is not None:  # the weight's gradient was added to main_grad
        gradients = gradients._replace(weight=None)
    d_row_inputs = () if row_inputs is None else tuple(row_inputs.gradients)
    return gradients.like(head.inputs)._replace(row_inputs=d_row_inputs)


class HeadLoss(Node):
    """A loss over a head: a mean, a sum, or results per row."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_rank, row_weight, call, *row_inputs):
        call = call.steady()
        head, loss, by_row = call.head, call.loss, call.by_row
        ctx.scales = by_row and call.only_scales
        ctx.keeps = by_row and call.needs.head and not ctx.scales and head.keeps_logits()
        with head.ready(loss):
            outputs, ones, ctx.later, ctx.known, logits = forward(call, ctx.keeps)
        more: tuple = ()
        if ctx.scales:
            more, ones = (ctx.later, ones.hidden, *ones.row_inputs), None
        elif ctx.keeps:
            more, ctx.overwritten = (logits,), False
        elif not (by_row or call.scales_in_backward or head.main_grad is not None or ones.rest):
            ones = ones.like(head.inputs)
        tensors, ctx.call = call.flatten()
        ctx.count, ctx.ones = len(tensors), ones
        # Saved by autograd, so that hooks of saved tensors and checkpointing see these tensors.
        ctx.save_for_backward(*tensors, *more)
        ctx.set_materialize_grads(not by_row)
        ctx.mark_non_differentiable(*(loss.without_gradient(outputs) if by_row else outputs[1:]))
        return outputs if by_row or outputs[1:] else outputs[0]

    @staticmethod
    def backward(ctx, *upstream):
        upstream = upstream if ctx.call.by_row else upstream[:1]
        Node.refuse_vmap(upstream)
        saved = ctx.saved_tensors
        with torch.no_grad():
            d = HeadLoss.gradients(ctx, saved, upstream)
        if torch.is_grad_enabled():
            d = d.through(lambda g: refuse_second(g, (*saved, *upstream)))
        return d.hidden, d.weight, d.bias, d.low_rank, d.row_weight, None, *d.row_inputs

    @staticmethod
    def gradients(ctx, saved: tuple, upstream: tuple[Tensor | None, ...]) -> HeadGradients:
        """The gradients of the inputs. `saved` are the tensors that autograd saved."""
        call, more = ctx.call.rebuild(saved[: ctx.count]), saved[ctx.count :]
        if all(g is None for g in upstream):
            return HeadGradients(row_inputs=(None,) * len(call.loss.row_inputs))
        if not call.by_row:
            ones, ctx.ones = ctx.ones, None  # a second backward computes new gradients
            if ones is None or ones.rest is not None:
                with call.head.ready(call.loss):
                    ones = ones or forward(call).ones
                    if ones.rest is not None:
                        ones.rest()
            return scaled(call, ctx.later, ones, upstream[0])
        if ctx.scales:
            return scaled_rows(call, more, upstream)
        logits = None
        if ctx.keeps and not ctx.overwritten:
            # `.data` has no version: a second backward computes the logits again.
            logits, ctx.overwritten = more[0].data, True
        with call.head.ready(call.loss):
            return backward(call, ctx.known, upstream, ctx.keeps, logits)


# --- small heads


@dataclass(slots=True)
class Plan:
    """What all calls over a small head of one layout share: facts and launches, never a loss."""

    backend: Backend
    aligned: bool  # see `is_aligned`
    launches: dict[tuple, Any]  # by the Signature of a loss's arguments, see `launch_of`


REMEMBERED = 1024  # largest number of plans; one more replaces all of them
_plans: dict[tuple, Plan | None] = {}


def plan_of(head: Head) -> Plan | None:
    """The plan of a small head, or None for a head that is computed in pieces."""
    hidden, weight = head.hidden, head.weight
    kept = head.signature is not None and choose_cut.forced is None
    if not kept or type(weight) not in PLAIN or not has_values(hidden):
        return _plan(head)
    key = (
        head.signature, hidden.shape, hidden.stride(), hidden.dtype, hidden.data_ptr() % 16,
        weight.shape, weight.untyped_storage().nbytes() > 0, backend_of(hidden),
    )  # fmt: skip
    try:
        return _plans[key]
    except KeyError:
        if len(_plans) >= REMEMBERED:
            _plans.clear()
        plan = _plans[key] = _plan(head)
        return plan


def _plan(head: Head) -> Plan | None:
    if not head.is_small():
        return None
    return Plan(backend_of(head.hidden), is_aligned(head.weight, head.hidden.dtype), {})


def is_straight(head: Head, loss: RowLoss, reduction: str) -> bool:
    """Whether the straight body can evaluate this loss over a small head."""
    if head.hidden.dtype == torch.float16 and reduction != "none":
        return False  # the gradient of the weight stays fp32 until backward divides
    # the rows of an invariant loss must not meet in a GEMM; only pieces read a teacher's head
    return not loss.reading.invariant and (not loss.teachers or all(map(is_dense, loss.teachers)))


def run_small(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None, plan: Plan):
    """Returns the weighted and reduced loss over a small head."""
    hidden, weight, bias, grad = head.hidden, head.weight, head.bias, torch.is_grad_enabled()
    if autocasts(hidden.device):
        with without_autocast(hidden.device):
            return run_small(head, loss, reduction, row_weight, plan)
    if forward_ad._current_level >= 0:
        refuse_tangents(hidden, weight, bias)
    rows = loss.row_inputs if row_weight is None else (*loss.row_inputs, row_weight)
    by_row = reduction == "none" or (rows != () and needs_grad(*rows))
    if not (grad and (by_row or needs_grad(hidden, weight, bias))):
        with torch.no_grad():
            x = logits_of(plan.aligned, hidden, weight, bias)
        return evaluate_on(plan.backend, x, loss, reduction, row_weight)
    if by_row:
        outputs = _small_rows(hidden, weight, bias, plan, loss, *loss.row_inputs)
        return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)
    launch = None if row_weight is not None else launch_of(plan, head, loss, reduction)
    if launch is not None:
        reading = loss.reading
        return _small_total(
            hidden, weight, bias, plan, launch, reading.label, reading.row_temperature
        )
    tensors, blank = loss.flatten(recompute=True)
    body = Body(plan.backend, reduction, weight.requires_grad, blank, loss)
    return _small_total(hidden, weight, bias, plan, body, row_weight, *tensors)


def launch_of(plan: Plan, head: Head, loss: RowLoss, reduction: str) -> Any:
    """A launch for the loss and its gradient (kernels/cross_entropy/one_pass.py), or None.

    The plan keeps it for `repeated`, but not while a CUDA graph is captured, whose tensors it can
    hold, and not with temperatures per row, for which `repeated` has no argument.
    """
    total = loss.in_one_launch(plan.backend, reduction)
    if total is None:
        return None
    h, weight = flat(head.hidden), head.weight
    stride = padded_width(weight.shape[0], h, h.dtype)
    copies = weight.requires_grad
    launch = loss.plan_total(total, plan.backend, h.shape[0], stride, h, copies)
    if launch is None or loss.signature is None or is_capturing():
        return launch
    if loss.reading.row_temperature is None:
        if len(plan.launches) >= REMEMBERED:
            plan.launches.clear()
        plan.launches[loss.signature, copies] = launch
    return launch


def repeated(head: Head, signature: Any, label: Tensor) -> Tensor | None:
    """The loss by the launch of an earlier call with equal arguments, or None.

    The host takes longer than the GPU, and a quarter to a third of its time would be Python code
    whose results depend only on the key of a plan and on `signature`.
    """
    hidden, weight = head.hidden, head.weight
    if (
        not _plans
        or under_transform()
        or forward_ad._current_level >= 0
        or not torch.is_grad_enabled()
        or invariance.depth
        or autocasts(hidden.device)
        or reads_values(label)
    ):
        return None
    plan = plan_of(head)
    launch = None if plan is None else plan.launches.get((signature, weight.requires_grad))
    if launch is None or not launch.is_current:
        return None
    return _small_total(hidden, weight, head.bias, plan, launch, label, None)


def logits_of(aligned: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits (..., V), in padded rows if `aligned` is False."""
    if not aligned:
        return padded_logits(hidden, weight, bias, None, hidden.dtype)
    if hidden.dim() == 2:
        return torch.nn.functional.linear(hidden, weight, bias)
    x = torch.nn.functional.linear(flat(hidden), weight, bias)
    return x.view(*hidden.shape[:-1], x.shape[-1])


def gradients_of(
    needs: Sequence[bool],  # whether `hidden`, `weight` and `bias` need gradients
    aligned: bool,
    hidden: Tensor,
    counted: Tensor | None,  # (N, D) with 0 in ignored rows, because 0 · NaN would be NaN
    weight: Tensor,
    bias: Tensor | None,
    dz: Tensor,
) -> HeadGradients:
    """The gradients of a small head from dz, the gradient of the logits."""
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
    return HeadGradients(d_hidden, d_weight, d_bias)


@dataclass(slots=True)
class Body:
    """Computes a mean or sum and the gradient of the logits x, like a launch, for any loss."""

    backend: Backend
    reduction: str
    copies: bool  # whether the weight needs a gradient
    blank: RowLoss  # the loss without tensors
    loss: RowLoss | None  # with tensors; None after forward, because autograd saves the tensors

    def __call__(self, x: Tensor, h: Tensor, row_weight: Tensor | None, *tensors: Tensor | None):
        loss, self.loss = self.loss, None
        if loss is None:  # in a second backward
            loss = self.blank.rebuild(tensors)
        outputs, dz = total_and_gradient(self.backend, x, loss, row_weight, self.reduction, x)
        return outputs, dz, self.backend.zero_ignored(h, loss.reading) if self.copies else None


class SmallTotal(Node):
    """A mean or sum over a small head, whose gradients forward computes and backward scales.

    by(logits, hidden, *tensors) is a launch or a `Body`. It returns the outputs, the gradient of
    the logits, and the hidden states with 0 in ignored rows if the weight needs a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, plan, by, *tensors):
        ctx.plan, ctx.by = plan, by
        ctx.save_for_backward(hidden, weight, bias, *tensors)
        outputs, ctx.gradients = SmallTotal.computed(ctx, hidden, weight, bias, *tensors)
        if len(outputs) == 1:
            return outputs[0]
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def computed(ctx, hidden, weight, bias, *tensors) -> tuple[tuple[Tensor, ...], HeadGradients]:
        """The outputs, and the gradients for an upstream gradient of 1."""
        aligned = ctx.plan.aligned
        x = logits_of(aligned, hidden, weight, bias)
        outputs, dz, counted = ctx.by(x, flat(hidden), *tensors)
        needs = ctx.needs_input_grad
        return outputs, gradients_of(needs, aligned, hidden, counted, weight, bias, dz)

    @staticmethod
    def backward(ctx, upstream, *_):
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = SmallTotal.backward(ctx, upstream)
            return refuse_second(gradients, (*ctx.saved_tensors, upstream))
        gradients, ctx.gradients = ctx.gradients, None  # a second backward computes new gradients
        if gradients is None:
            with without_autocast(upstream.device):
                _, gradients = SmallTotal.computed(ctx, *ctx.saved_tensors)
        try:
            gradients.scale_(ctx.plan.backend, upstream)
        except RuntimeError:
            # A batched tensor of vmap cannot scale a gradient in place. Asked only after an error,
            # because Python code is slow in autograd's backward thread.
            Node.refuse_vmap((upstream,))
            raise
        others = len(ctx.needs_input_grad) - 3
        return gradients.hidden, gradients.weight, gradients.bias, *(None,) * others


class SmallRows(Node):
    """Results per row over a small head. Autograd saves the logits for backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, plan, loss, *row_inputs):
        x, backend, counted = logits_of(plan.aligned, hidden, weight, bias), plan.backend, None
        outputs, saved = loss.forward(backend, x)
        if ctx.needs_input_grad[1]:
            # In forward, because Python code is slower in autograd's backward thread.
            counted = backend.zero_ignored(flat(hidden), loss.reading)
        tensors, ctx.loss = loss.flatten()
        ctx.plan, ctx.count = plan, len(tensors) + 5
        ctx.save_for_backward(hidden, counted, weight, bias, x, *tensors, *saved)
        if len(outputs) == 1 and not loss.multiple_outputs:
            return outputs[0]
        ctx.mark_non_differentiable(*loss.without_gradient(outputs))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        if torch.is_grad_enabled():
            with torch.no_grad():
                gradients = SmallRows.backward(ctx, *upstream)
            return refuse_second(gradients, (*ctx.saved_tensors, *upstream))
        Node.refuse_vmap(upstream)
        # read once, because activation checkpointing allows no second access
        hidden, counted, weight, bias, x, *tensors = ctx.saved_tensors
        loss, saved = ctx.loss.rebuild(tensors[: ctx.count - 5]), tuple(tensors[ctx.count - 5 :])
        d, d_rows = HeadGradients(), (None,) * len(loss.row_inputs)
        with without_autocast(hidden.device):
            if any(g is not None for g in upstream):
                needs, plan = ctx.needs_input_grad, ctx.plan
                if any(needs[:3]):
                    # Rows padded like those of x; torch.empty_like would not pad.
                    z = flat(x)
                    into = torch.empty_strided(z.shape, z.stride(), device=z.device, dtype=z.dtype)
                    dz = loss.backward(plan.backend, x, saved, upstream, None, into)
                    d = gradients_of(needs, plan.aligned, hidden, counted, weight, bias, dz)
                if d_rows:
                    d_rows = loss.d_row_inputs(saved, upstream[0])
        return d.hidden, d.weight, d.bias, None, None, *d_rows


# The `apply` of the base class is faster: torch.autograd.Function.apply adds what only torch.func
# needs, under which a head raises.
_small_total: Any = super(torch.autograd.Function, SmallTotal).apply  # type: ignore
_small_rows: Any = super(torch.autograd.Function, SmallRows).apply  # type: ignore
