"""Results of a head a row, in four GEMMs, where a mean or sum takes three (Total in
heads/linear.py).
"""

import torch
from torch import Tensor

from ..core.autograd import Node, refuse_second
from ..core.loss import RowLoss
from .chunks import Chunks, RowGradients, as_parts


class Each(Node):
    """Forward keeps statistics of the rows, and backward makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, source, loss, *others):
        ctx.needs = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        ctx.others = [t.requires_grad for t in others]
        ctx.known = []  # of the rows, part by part: what backward would read the logits for
        with source.ready(loss):
            results = Each.results(ctx, source, loss)
        source.save(ctx, loss, None)
        lead = source.shape[:-1]
        shaped = tuple(t.view((*lead, *t.shape[1:])).clone() for t in results)
        ctx.mark_non_differentiable(*(t for t in shaped if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return shaped

    @staticmethod
    def results(ctx, source, loss) -> list[Tensor]:
        """What the loss gives of all rows, (N, ...)."""
        lead, results = source.shape[:-1], []
        chunks = _chunks_of(ctx, source, loss)

        def visit(some, _saved, rows, z, _into):
            found, saved = some.forward(chunks.run, z)
            ctx.known.append(() if loss.saves_gradient else saved)
            if not results:
                results.extend(_unread(t, lead.numel()) for t in found)
            for result, t in zip(results, found, strict=True):
                result[rows] = t

        chunks.walk(loss, visit)
        if not results:  # no row counts: shapes and dtypes are those of a loss of no rows
            nothing = chunks.hidden.new_empty((0, len(chunks.weight)), dtype=source.dtype)
            found, _ = loss.take(slice(0, 0), lead).forward(source.backend(), nothing)
            results = [_unread(t, lead.numel()) for t in found]
        return results

    @staticmethod
    def backward(ctx, *upstream):
        Node.each_by_itself(upstream)
        source, _, loss = ctx.source.saved(ctx)
        parts = source.inputs
        if all(g is None for g in upstream):
            return (None,) * (5 + len(loss.others))
        with torch.no_grad(), source.ready(loss):
            found = Each.compute(ctx, upstream, source, loss)
        if torch.is_grad_enabled():
            found = refuse_second(tuple(found), (*parts, *loss.tensors, *upstream))
        return *found[:3], None, None, *found[3:]

    @staticmethod
    def compute(ctx, upstream, source, loss) -> list:
        """Gradients of the parts and of the loss's other tensors."""
        others = RowGradients(loss, ctx.others)
        found = Each.gradients(ctx, upstream, source, loss, others)
        if source.main_grad is not None:  # to which the weight's was added
            found[1] = None
        return [*as_parts(found, source.inputs), *others.found]

    @staticmethod
    def gradients(ctx, upstream, source, loss, others) -> list:
        """Gradients of the parts, while others are filled.

        On return the memory of the logits is free.
        """
        lead = source.shape[:-1]
        given = [None if g is None else g.reshape(lead.numel(), *g.shape[len(lead) :])
                 for g in upstream]  # fmt: skip
        chunks = _chunks_of(ctx, source, loss)
        run, sums = chunks.run, chunks.gradients(ctx.needs, source.accumulate, source.main_grad)

        def visit(some, saved, rows, z, into):
            own = tuple(None if g is None else g[rows] for g in given)
            saved = saved or some.forward(run, z)[1]
            dz = some.backward(run, z, saved, own, None, into)
            if loss.others:
                others.add(rows, some, saved, own[0])
            return dz

        chunks.walk(loss, visit, sums, ctx.known or ())
        return sums.found()


def _chunks_of(ctx, source, loss: RowLoss) -> Chunks:
    """The same in forward and backward; whole rows where backward has no saved statistics."""
    merges = loss.merges and ctx.known is not None
    return source.chunks(loss, source.work(merges, sums=ctx.needs[1]))


def _unread(t: Tensor, rows: int) -> Tensor:
    """What ignored rows have: zeros, and no class."""
    fill = 0.0 if t.is_floating_point() else -1
    return torch.full((rows, *t.shape[1:]), fill, device=t.device, dtype=t.dtype)
