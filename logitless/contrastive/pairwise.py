"""A loss over all pairs of rows of `a` and `b`: chunk by chunk, alone or over a ring of ranks.

An `Objective` computes the losses of the rows, and the gradients of their sum, in passes over the
similarities. For a mean or sum, forward computes the gradients if the objective can (`early`), and
backward scales them. Otherwise, and in a second backward, backward computes the similarities again.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core.autograd import Node, refuse_second
from ..eager.contrastive import Block
from ..heads.gemms import without_autocast
from .ring import Ring
from .similarities import Chunk, Gradients, Similarities, times


class How(NamedTuple):
    ring: Ring
    reduction: str
    averaged: bool
    workspace: int | None
    ignore_index: int | None = None  # None: every row counts
    symmetric: bool = False


class Sums(NamedTuple):
    """The gradients of the sum of all losses, before `_scaled`."""

    a: Tensor | None
    b: Tensor | None
    numbers: tuple[Tensor | None, ...]  # of `scale` and, if there is one, `bias`


class Needs(NamedTuple):
    """What needs a gradient."""

    a: bool
    b: bool
    numbers: tuple[bool, ...]

    @staticmethod
    def of(ctx) -> "Needs":
        _, _, a, b, *numbers = ctx.needs_input_grad[: 4 + ctx.count]
        return Needs(a, b, tuple(numbers))


class Pairs(NamedTuple):
    """The tensors of a call."""

    a: Tensor
    b: Tensor
    numbers: tuple[Tensor, ...]  # the scale and, if there is one, the bias: () in fp32 or fp64
    positives: Tensor | None  # int64, -1 for ignored rows
    ignored: Tensor | None  # (N,), bool
    bad: Tensor | None  # (N,), bool; rows that are ignored, or whose positive is out of range
    mask: Tensor | None
    labels: tuple[Tensor, ...]  # () or (labels of a, labels of b)
    ring: Ring

    @staticmethod
    def of(a, b, numbers, positives, mask, of_a, of_b, how: How) -> "Pairs":
        ignored = bad = None
        if positives is not None:
            positives = positives.long()
            if how.ignore_index is not None:
                # ignored rows of `a` become 0, because they can be inf or NaN
                ignored = positives == how.ignore_index
                positives = torch.where(ignored, -1, positives)
                a = torch.where(ignored.unsqueeze(1), 0.0, a)
            bad = (positives < 0) | (positives >= len(b))
        labels = () if of_a is None else (of_a.long(), of_b.long())
        numbers = tuple(t.detach().reshape(()).to(PRECISION[a.dtype]) for t in numbers)
        return Pairs(a, b, numbers, positives, ignored, bad, mask, labels, how.ring)

    @property
    def scale(self) -> Tensor:
        return self.numbers[0]

    def block(self, owner: int, labels: Sequence[Tensor] = ()) -> Block:
        """Pairs this rank's rows of `a` with the rows of `b` on rank `owner`."""
        own, mask = owner == self.ring.index, self.mask
        if mask is not None:
            start = self.ring.columns_before(owner)
            mask = mask[:, start : start + self.ring.columns[owner]]
        return Block(
            self.scale,
            self.positives if own else None,
            0 if own and self.positives is None else None,
            mask,
            (self.labels[0], labels[0]) if labels else None,
        )


class Objective:
    """One contrastive loss, as the passes over its similarities."""

    def early(self, how: How) -> bool:
        """Whether forward can compute the gradients of a mean or sum."""
        raise NotImplementedError

    def losses(
        self, similarities: Similarities, pairs: Pairs, how: How, needs: Needs | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...], Sums | None]:
        """The loss of each row, what `sums` needs of this pass, and the gradients for `needs`."""
        raise NotImplementedError

    def sums(
        self, similarities: Similarities, pairs: Pairs, how: How, needs: Needs,
        saved: Sequence[Tensor | None], by_row: Tensor | None,
    ) -> Sums:  # fmt: skip
        """The gradients, where `by_row` (N,) is the upstream gradient, or None for ones."""
        raise NotImplementedError


def evaluate(
    objective: Objective, how: How, a: Tensor, b: Tensor, numbers: Sequence[Any],
    positives: Tensor | None, mask: Tensor | None = None, of_a=None, of_b=None,
) -> Tensor:  # fmt: skip
    full = PRECISION[a.dtype]
    numbers = [
        t if isinstance(t, Tensor) else torch.full((), float(t), device=a.device, dtype=full)
        for t in numbers
    ]
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, *numbers))
    early = grad and how.reduction != "none" and objective.early(how)
    return Pairwise.apply(objective, (how, early), a, b, *numbers, positives, mask, of_a, of_b)


class Pairwise(Node):
    @staticmethod
    def forward(ctx, objective, options, a, b, *rest):
        how, early = options
        *numbers, positives, mask, of_a, of_b = rest
        ctx.count = len(numbers)
        with without_autocast(a.device):
            pairs = Pairs.of(a, b, numbers, positives, mask, of_a, of_b, how)
            similarities = Similarities(pairs.a, how.ring.largest, how.workspace)
            needs = Needs.of(ctx) if early else None
            losses, saved, ctx.sums = objective.losses(similarities, pairs, how, needs)
        ctx.objective, ctx.how, ctx.share, ctx.backend = objective, how, None, similarities.backend
        if how.reduction != "none":
            losses, ctx.share = _reduced(losses, pairs.ignored, how)
        ctx.save_for_backward(a, b, *rest, *saved)
        return losses

    @staticmethod
    def backward(ctx, upstream):
        Node.refuse_vmap((upstream,))
        a, b, *rest = ctx.saved_tensors
        how, needs, count = ctx.how, Needs.of(ctx), ctx.count
        numbers, given, saved = rest[:count], rest[count : count + 4], rest[count + 4 :]
        sums, ctx.sums = ctx.sums, None  # a second backward computes the sums again
        with torch.no_grad(), without_autocast(a.device):
            pairs = Pairs.of(a, b, numbers, *given, how)
            if sums is None:
                similarities = Similarities(pairs.a, how.ring.largest, how.workspace, ctx.backend)
                by_row = _of_counted(upstream, pairs) if ctx.share is None else None
                sums = ctx.objective.sums(similarities, pairs, how, needs, saved, by_row)
            gradients = _scaled(sums, pairs, how, ctx.share, upstream, numbers)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (a, b, *numbers, upstream))
        return None, None, *gradients, None, None, None, None


def _of_counted(upstream: Tensor, pairs: Pairs) -> Tensor:
    """`upstream` (N,) with 0 in ignored rows, where inf · 0 would be NaN."""
    if pairs.ignored is not None:
        upstream = torch.where(pairs.ignored, 0.0, upstream)
    return upstream.contiguous()


def _reduced(losses: Tensor, ignored: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """The sum or mean of the losses of all ranks, and the factor (1, or 1 / count) of each loss."""
    if how.ignore_index is None:  # the host knows the count
        total = how.ring.total(losses.sum().double())
        share = 1 / max(sum(how.ring.rows), 1) if how.reduction == "mean" else 1.0
        return (total * share).to(losses.dtype), losses.new_full((), share)
    count = torch.full((), len(losses), device=losses.device, dtype=torch.float64)
    if ignored is not None:
        count = (~ignored).sum().double()
    total, count = how.ring.total(torch.stack((losses.sum().double(), count)))
    share = torch.ones_like(total) if how.reduction == "sum" else 1 / count.clamp(min=1)
    return (total * share).to(losses.dtype), share.to(losses.dtype)


def _scaled(
    sums: Sums, pairs: Pairs, how: How, share: Tensor | None, upstream: Tensor, numbers: Sequence
) -> tuple[Tensor | None, ...]:
    factor = pairs.scale.new_full((), 0.5 if how.symmetric else 1.0)
    if share is not None:
        factor = factor * share * upstream
        if how.averaged:
            factor = factor * pairs.ring.count
    factored = factor * pairs.scale
    d_a, d_b = times(sums.a, factored, pairs.a), times(sums.b, factored, pairs.b)
    if d_a is not None and pairs.ignored is not None:
        d_a = d_a.masked_fill_(pairs.ignored.unsqueeze(1), 0.0)
    d_numbers = (
        None if d is None else (d * factor).to(t.dtype).reshape(t.shape)
        for d, t in zip(sums.numbers, numbers, strict=True)
    )  # fmt: skip
    return d_a, d_b, *d_numbers


def around(
    similarities: Similarities, pairs: Pairs, needs: Needs | None, given: Sequence[Tensor],
    sums: Sequence[Tensor], visit: Callable[[Chunk, Sequence[Tensor], Sequence[Tensor]], None],
) -> tuple[list[Tensor], "Gradients | None", Tensor | None]:  # fmt: skip
    """Calls visit(chunk, given, sums) for every chunk of this rank's rows of `a`.

    `given` and `sums` have one entry per row of `b`, and travel with it (ring.py). With `needs`,
    `visit` overwrites the chunk with its gradient, which is added to those of `a` and `b`. Returns
    the sums, and the gradients of `a` and `b`.
    """
    gradients = None if needs is None else Gradients(similarities, needs.a)
    own = [gradients.zeros_like(pairs.b)] if gradients is not None and needs and needs.b else []

    def at_block(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        b, *given = given
        labels, given = given[: len(pairs.labels[1:])], given[len(pairs.labels[1:]) :]
        d_b, sums = (sums[0], sums[1:]) if own else (None, sums)
        block, overwritten = pairs.block(owner, labels), gradients is not None
        for chunk in similarities.chunks(owner, b, block, overwritten):
            visit(chunk, given, sums)
            if gradients is not None:
                gradients.add(chunk, b, d_b)

    given = (similarities.working(pairs.b), *pairs.labels[1:], *given)
    found = pairs.ring.around(given, (*own, *sums), at_block)
    return found[len(own) :], gradients, found[0] if own else None
