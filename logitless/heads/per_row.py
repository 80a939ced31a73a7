"""Computes the results per row of a loss over a head, in four GEMMs.

Forward saves the statistics of each row, and backward recomputes the logits. A mean or sum takes
only three GEMMs (total.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.autograd import Node, refuse_second
from ..core.loss import Saved
from .chunks import Chunks
from .gradient_sums import HeadGradients, RowInputGradients
from .on_chip import chunks_of
from .total import Call, in_shape, needs_of, outputs_of_no_rows, put_outputs


def forward(call: Call) -> tuple[tuple[Tensor, ...], list[Saved]]:
    """Returns the outputs of all rows, and the tensors that backward needs for each tile."""
    loss, chunks = call.loss, _chunks(call, True)
    known, results = [], []
    for tile in chunks.tiles(loss):
        outputs, saved = tile.loss.forward(chunks.backend, tile.logits)
        known.append(() if loss.saves_gradient else saved)
        put_outputs(results, outputs, tile.rows, call.head.rows)
    if not results:  # all rows are ignored
        put_outputs(results, outputs_of_no_rows(call), slice(0, 0), call.head.rows)
    return in_shape(results, call.head.lead), known


def backward(call: Call, known: list[Saved] | None, upstream: tuple) -> HeadGradients:
    """Returns the gradients of `hidden`, `weight`, `bias` and `row_inputs`.

    `known` holds the tensors that forward saved for each tile. If `known` is None, backward
    recomputes the statistics from chunks of whole rows. When `backward` returns, the memory of the
    logits has been freed.
    """
    head, loss, lead = call.head, call.loss, call.head.lead
    flat = [None if g is None else g.reshape(head.rows, *g.shape[len(lead) :]) for g in upstream]
    chunks = _chunks(call, known is not None)
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


def _chunks(call: Call, saved: bool) -> Chunks:
    """Returns the chunks of the head for forward or backward.

    If `saved` is True, backward reads the statistics that forward saved, so forward and backward
    use the same chunks. If `saved` is False, backward recomputes the statistics of each chunk, so a
    chunk always consists of whole rows.
    """
    merges, ids = call.loss.merges and saved, call.loss.reading.ids_per_row
    return chunks_of(call.head, call.loss, call.head.work(merges, sums=call.needs.weight, ids=ids))


@dataclass
class Kept:
    """The data that an autograd function keeps for backward, besides the saved tensors."""

    call: Call  # without tensors
    known: list[Saved]

    @staticmethod
    def of(ctx, call: Call) -> tuple[tuple[Tensor, ...], "Kept"]:
        """Runs the forward of an autograd function.

        Returns the outputs, and a `Kept` for backward.
        """
        call = call.steady()
        with call.head.ready(call.loss):
            outputs, known = forward(call)
        tensors, blank = call.flatten()
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*call.loss.without_gradient(outputs))
        ctx.set_materialize_grads(False)
        return outputs, Kept(blank, known)

    def gradients_of(self, tensors: tuple, upstream: tuple) -> HeadGradients:
        """Returns the gradients of the autograd function's inputs.

        `tensors` are the tensors that forward saved.
        """
        Node.refuse_vmap(upstream)
        call = self.call.rebuild(tensors)
        if all(g is None for g in upstream):
            return HeadGradients(row_inputs=(None,) * len(call.loss.row_inputs))
        with torch.no_grad(), call.head.ready(call.loss):
            gradients = backward(call, self.known, upstream)
        if torch.is_grad_enabled():
            return gradients.through(lambda g: refuse_second(g, (*tensors, *upstream)))
        return gradients


class PerRowLoss(Node):
    """The results per row of a loss over a head."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, low_rank, head, loss, *row_inputs):
        needs = needs_of((hidden, weight, bias, low_rank), None, row_inputs, True)
        outputs, ctx.kept = Kept.of(ctx, Call(head, loss, None, "none", needs))
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        d = ctx.kept.gradients_of(ctx.saved_tensors, upstream)
        return *d.tensors, None, None, *d.row_inputs
