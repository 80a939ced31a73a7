"""Computes the results per row of a loss over a head, in two to four GEMMs.

Backward recomputes the logits from the statistics that forward saved: four GEMMs. If all logits fit
into the workspace that the caller gave, autograd saves them: three. If only `hidden` needs a
gradient and each row has one result, the row's gradient is linear in the upstream gradient: forward
computes the gradient for an upstream of 1, and backward scales its rows: two. A mean or sum takes
three GEMMs, or two over a frozen head (total.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core.autograd import Node, refuse_second
from ..core.evaluate import without_unit
from ..core.loss import Saved
from .choose_cut import Cut
from .chunks import Chunks
from .gradient_sums import HeadGradients, RowInputGradients
from .on_chip import chunks_of
from .total import (
    Call,
    in_shape,
    needs_of,
    outputs_of_no_rows,
    put_outputs,
    values_and_gradients,
)


def forward(
    call: Call, keeps: bool = False
) -> tuple[tuple[Tensor, ...], list[Saved], Tensor | None]:
    """Returns the outputs of all rows, and the tensors that backward needs for each tile.

    The third result holds the logits of all rows if `keeps` is True.
    """
    loss, chunks = call.loss, _chunks(call, True, keeps)
    known, results, shape = [], [], call.loss.results(call.head.lead)
    for tile in chunks.tiles(loss):
        outputs, saved = tile.loss.forward(chunks.backend, tile.logits)
        known.append(() if loss.saves_gradient else saved)
        put_outputs(results, outputs, tile.results, shape.numel())
    if not results:  # all rows are ignored
        put_outputs(results, outputs_of_no_rows(call), slice(0, 0), call.head.rows)
    return in_shape(results, shape), known, chunks.kept if keeps else None


def forward_of_ones(call: Call) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Returns the outputs of all rows, and what `scaled` multiplies by the upstream gradient."""
    head, shape, factor, later = call.head, call.loss.results(call.head.lead), None, None
    if call.scales_in_backward:
        factor, later = without_unit(call.loss, None, head.hidden)
    values = torch.zeros(shape.numel(), device=head.device, dtype=PRECISION[head.hidden.dtype])
    extras: list[Tensor] = []
    ones = values_and_gradients(call, factor, values, extras)
    return in_shape([values, *extras], shape), (later, ones.hidden, *ones.row_inputs)


def scaled(call: Call, ones: tuple[Tensor | None, ...], upstream: tuple) -> HeadGradients:
    """Multiplies the gradients for upstream gradients of 1 by the upstream gradient."""
    (g,), loss = (g for g in upstream if g is not None), call.loss
    later, hidden, *of_inputs = ones
    assert hidden is not None
    g = g.reshape(-1) if later is None else g.reshape(-1) * later
    by_row, ignored = loss.of_rows(g), loss.reading.ignored_rows()
    if ignored is not None:  # the upstream gradient of an ignored row can be NaN
        by_row = torch.where(ignored.reshape(-1), 0.0, by_row)
    flat, out = hidden.view(-1, hidden.shape[-1]), torch.empty_like(hidden)
    torch.mul(flat, by_row.unsqueeze(-1), out=out.view(flat.shape))
    of_inputs = tuple(
        None if d is None else loss.times_input(i, d, g).to(d.dtype)
        for i, d in enumerate(of_inputs)
    )
    return HeadGradients(hidden=out, row_inputs=of_inputs).like(call.head.inputs)


def backward(
    call: Call,
    known: list[Saved] | None,
    upstream: tuple,
    keeps: bool = False,
    logits: Tensor | None = None,
) -> HeadGradients:
    """Returns the gradients of `hidden`, `weight`, `bias` and `row_inputs`.

    `known` holds the tensors that forward saved for each tile. If `known` is None, backward
    recomputes the statistics from chunks of whole rows. `keeps` and `logits` are those of forward;
    the gradient overwrites `logits`. Without them, the memory of the logits has been freed when
    `backward` returns.
    """
    head, loss, lead = call.head, call.loss, call.head.lead
    flat = [None if g is None else g.reshape(head.rows, *g.shape[len(lead) :]) for g in upstream]
    chunks = _chunks(call, known is not None, keeps, logits)
    backend, sums = chunks.backend, chunks.gradients(call.needs, head.main_grad)
    row_inputs = RowInputGradients(loss, call.needs.row_inputs) if loss.row_inputs else None
    for tile in chunks.tiles(loss, sums, known or ()):
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


def _chunks(call: Call, saved: bool, keeps: bool = False, logits: Tensor | None = None) -> Chunks:
    """Returns the chunks of the head for forward or backward.

    If `saved` is True, backward reads the statistics that forward saved, so forward and backward
    use the same chunks. If `saved` is False, backward recomputes the statistics of each chunk, so a
    chunk always consists of whole rows. If `keeps` is True, one chunk holds all rows.
    """
    head, loss = call.head, call.loss
    if keeps:
        cut = Cut(max(head.rows, 1), whole=True)
        return Chunks(head, cut, head.rows_that_count(loss), kept=logits)
    merges, ids = loss.merges and saved, loss.reading.ids_per_row
    return chunks_of(head, loss, head.work(merges, sums=call.needs.weight, ids=ids))


@dataclass
class Kept:
    """The data that an autograd function keeps for backward, besides the saved tensors."""

    call: Call  # without tensors
    known: list[Saved]
    count: int  # the number of saved tensors that belong to the call
    scales: bool  # whether autograd saved the gradients for upstream gradients of 1
    keeps: bool  # whether autograd saved the logits
    overwritten: bool = False  # whether a backward has overwritten the saved logits

    @staticmethod
    def of(ctx, call: Call, grad: bool) -> tuple[tuple[Tensor, ...], "Kept"]:
        """Runs the forward of an autograd function. `grad` is whether gradients are enabled.

        Returns the outputs, and a `Kept` for backward.
        """
        call = call.steady()
        scales = grad and call.only_scales
        keeps = grad and not scales and call.needs.head and call.head.keeps_logits()
        known: list[Saved] = []
        with call.head.ready(call.loss):
            if scales:
                outputs, more = forward_of_ones(call)
            else:
                outputs, known, logits = forward(call, keeps)
                more = (logits,) if keeps else ()
        tensors, blank = call.flatten()
        # Saved by autograd, so that hooks of saved tensors and checkpointing see these tensors.
        ctx.save_for_backward(*tensors, *more)
        ctx.mark_non_differentiable(*call.loss.without_gradient(outputs))
        ctx.set_materialize_grads(False)
        return outputs, Kept(blank, known, len(tensors), scales, keeps)

    def rebuild(self, tensors: tuple) -> Call:
        """Returns the call. `tensors` are the tensors that forward saved."""
        return self.call.rebuild(tensors[: self.count])

    def gradients_of(self, tensors: tuple, upstream: tuple) -> HeadGradients:
        """Returns the gradients of the autograd function's inputs.

        `tensors` are the tensors that forward saved.
        """
        Node.refuse_vmap(upstream)
        call, more = self.rebuild(tensors), tensors[self.count :]
        if all(g is None for g in upstream):
            return HeadGradients(row_inputs=(None,) * len(call.loss.row_inputs))
        with torch.no_grad(), call.head.ready(call.loss):
            if self.scales:
                gradients = scaled(call, more, upstream)
            else:
                logits = None
                if self.keeps and not self.overwritten:
                    # `.data` has no version: a second backward computes the logits again.
                    logits, self.overwritten = more[0].data, True
                gradients = backward(call, self.known, upstream, self.keeps, logits)
        if torch.is_grad_enabled():
            return gradients.through(lambda g: refuse_second(g, (*tensors, *upstream)))
        return gradients


class PerRowLoss(Node):
    """The results per row of a loss over a head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_rank, head, loss, grad, *row_inputs):
        needs = needs_of((hidden, weight, bias, low_rank), None, row_inputs, True)
        outputs, ctx.kept = Kept.of(ctx, Call(head, loss, None, "none", needs), grad)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        d = ctx.kept.gradients_of(ctx.saved_tensors, upstream)
        return *d.tensors, None, None, None, *d.row_inputs
