"""Draws ids from softmax(z)^proposal of each row, by inverting its cumulative distribution.

The mass of an id is the integer round(2^40 · e^((y - max y) · proposal / temperature)), where y are
the logits after the softcap. With the sum S of a row's masses and u in [0, 1], the drawn id is the
smallest whose cumulative mass exceeds floor(u · S). Sums of integers have no rounding errors, so
the draws do not depend on how the columns are split over programs or ranks. An id whose p^proposal
is below 2^-41 of the row's largest has the mass 0, and is never drawn.

Both backends use `draw`, with their own `Parts`. The uniform numbers of a row ascend; then so do
the drawn ids, and equal ids are adjacent.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from .rows import capped, chunks

ONE = 2.0**40  # the mass of the most probable id of a row
MOST_COLUMNS = 1 << 22  # the sum of this many masses fits into 63 bits


class Sampling(NamedTuple):
    proposal: float
    temperature: float
    softcap: float | None
    invariant: bool = False  # whether the results of a row must have the same bits in every batch

    @property
    def rate(self) -> float:
        """Masses are proportional to e^(rate · (y - max y))."""
        return self.proposal / self.temperature


class Parts(NamedTuple):
    """The functions with which a backend samples from logits x (..., V), N rows.

    top(x, how)             the max of y of each row (N,), NaN if a logit is NaN
    ends(x, top, how)       cumulative masses, int64 (N, B) for B blocks of columns, and top, which
                            it computes if the argument is None
    columns(x, top, how, ends, targets)
                            the drawn columns, and y - top there (None if the proposal is 1), like
                            targets (N, n) in [0, S)
    distinct                like `distinct` below
    """

    top: Callable[..., Tensor]
    ends: Callable[..., tuple[Tensor, Tensor]]
    columns: Callable[..., tuple[Tensor, Tensor | None]]
    distinct: Callable[..., tuple[Tensor, Tensor, Tensor]]


def sampled(
    x: Tensor,  # (..., V)
    uniforms: Tensor,  # (N, n), fp64 in [0, 1], in ascending order
    how: Sampling,
    join: Callable[[Tensor], Tensor] | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws ids. Returns each row's distinct ids, their log-weights, and a mask.

    If ranks share the columns, `start` is the id of the first of x, and `join` an all-gather.
    """
    return draw(Parts(_top, _ends, _columns, distinct), x, uniforms, how, join, start)


def draw(
    parts: Parts,
    x: Tensor,
    uniforms: Tensor,
    how: Sampling,
    join: Callable[[Tensor], Tensor] | None,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws n ids per row, and returns the results of `distinct` in shape (..., n).

    If the columns are sharded over ranks, x holds this rank's, `start` is the index of the first,
    and `join` is an all-gather.
    """
    (N, n), V = uniforms.shape, x.shape[-1]
    empty = V == 0 or N == 0
    top = None
    if empty:
        top = torch.full((N,), -torch.inf, device=x.device, dtype=PRECISION[x.dtype])
    if join is not None:
        top = join((parts.top(x, how) if top is None else top)[:, None])[..., 0].amax(0)
    if empty:
        ends = torch.zeros((N, 1), device=x.device, dtype=torch.int64)
    else:
        ends, top = parts.ends(x, top, how)
    total = here = ends[:, -1:]
    before = None  # the total mass of the columns before `start`; other ranks hold these columns
    if join is not None:
        each, starts = join(torch.cat((here, torch.full_like(here, start)), 1)).unbind(-1)
        total, before = each.sum(0)[:, None], torch.where(starts < start, each, 0).sum(0)[:, None]

    targets = (uniforms * total).long().minimum(total - 1)
    if before is not None:
        targets -= before
    at = torch.zeros_like(targets)
    relative = None if how.proposal == 1 else torch.zeros_like(uniforms)
    if not empty:
        inside = targets.minimum(here - 1).clamp_min_(0)
        at, relative = parts.columns(x, top, how, ends, inside)
    if join is not None:
        mine = (targets >= 0) & (targets < here)
        at = join(torch.where(mine, at + start, 0)).sum(0)  # one rank holds each drawn column
        if relative is not None:
            relative = join(torch.where(mine, relative.double(), 0.0)).sum(0)
    found = parts.distinct(at, relative, top, how)
    return tuple(t.view(*x.shape[:-1], n) for t in found)


def distinct(
    ids: Tensor,  # (N, n), in ascending order
    relative: Tensor | None,  # (N, n), y - top of each id; None if the proposal is 1
    top: Tensor,  # (N,), the max of y of each row
    how: Sampling,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the distinct ids of each row, their log-weights, and a mask, each of shape (N, n).

    Slots after the last distinct id are masked, with id 0 and log-weight -inf, as are all slots of
    a row that is all -inf. A row with a logit of NaN or +inf has one unmasked slot, of log-weight
    NaN.
    """
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    slot = first.cumsum(1) - 1
    counts = torch.zeros_like(ids).scatter_add_(1, slot, torch.ones_like(ids))
    ids = torch.zeros_like(ids).scatter_(1, slot, ids)
    if relative is None:
        logprobs = logprobs_of_counts(counts, ids.shape[1])
    else:
        z = torch.zeros_like(counts, dtype=torch.float64).scatter_(1, slot, relative.double())
        weights = counts.double().log() + z * ((1 - how.proposal) / how.temperature)
        logprobs = weights - weights.logsumexp(1, keepdim=True)

    ok, bad = top.isfinite()[:, None], (top.isnan() | (top == torch.inf))[:, None]
    mask = (counts > 0) & ok
    ids, logprobs = torch.where(mask, ids, 0), torch.where(mask, logprobs, -torch.inf)
    mask[:, :1] |= bad
    logprobs[:, :1].masked_fill_(bad, torch.nan)
    return ids, logprobs.to(top.dtype), mask


def logprobs_of_counts(counts: Tensor, n: int) -> Tensor:
    """Returns log(counts / n) in fp64, whose rounding to fp32 is the same on every device."""
    return (counts.double() / n).log()


def _top(x: Tensor, how: Sampling) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    found = [capped(flat[rows], how.softcap)[0].amax(1) for rows in chunks(flat, None)]
    return torch.cat(found)


def _ends(x: Tensor, top: Tensor | None, how: Sampling) -> tuple[Tensor, Tensor]:
    top = _top(x, how) if top is None else top
    return torch.cat([masses.sum(1, keepdim=True) for _, _, masses in _masses(x, top, how)]), top


def _columns(
    x: Tensor, top: Tensor, how: Sampling, ends: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    at = torch.empty_like(targets)
    relative = None
    if how.proposal != 1:
        relative = torch.empty(targets.shape, device=x.device, dtype=torch.float64)
    for rows, below, masses in _masses(x, top, how):
        found = torch.searchsorted(masses.cumsum(1), targets[rows], right=True)
        at[rows] = found = found.clamp_max(x.shape[-1] - 1)  # all masses of a row can be 0
        if relative is not None:
            relative[rows] = below.gather(1, found)
    return at, relative


def _masses(x: Tensor, top: Tensor, how: Sampling) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (rows, y - top, masses) per chunk; if `how.invariant`, per row, from a copy of it."""
    flat = x.detach().reshape(-1, x.shape[-1])
    single = (slice(i, i + 1) for i in range(len(flat)))
    for rows in single if how.invariant else chunks(flat, None, 4):
        assert isinstance(rows, slice)
        y, _ = capped(flat[rows].clone() if how.invariant else flat[rows], how.softcap)
        below = y.double() - top[rows, None]
        yield rows, below, ((below * how.rate).exp_() * ONE).round_().nan_to_num_(0.0).long()
