"""`row_loss`: a user's own loss of a row's statistics, at the speed of ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import PRECISION, Coefficients, RowStats
from ..core import call as _call
from ..core.call import under_transform
from ..core.loss import RowLoss, evaluate, flat_rows, rows_in
from .statistics import Read, coefficients_of, fields_of, stats_reading


@_call.named()
def row_loss(
    formula: Callable[..., Tensor],
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    rows: Sequence[Tensor] = (),
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """Your own loss at the speed of ours: a scalar, or (...) for reduction="none".

    `formula(stats, *rows)` gets the RowStats of some n rows, (n,) each or (n, K) for K ids a row,
    and their own slices of `rows`, tensors (...) or (..., k) that may require gradients. It returns
    one number a row, (n,). A tensor that it captures is a constant.

    It is called on several rows at once, how many may change: it must not look from one row to
    another (no means, sums or sorting over rows). LOGITLESS_CHECK=1 compares two rows at once with
    one at a time, and raises where they differ.

    ids, the statistics and ignore_index are those of `row_stats`; "mean" divides the sum of the
    rows' numbers, each times its row_weight (...), by the number of rows that are not ignored.
    Over a LinearLogits a mean or a sum takes three GEMMs.

    >>> def grpo(stats, old, advantage):
    ...     ratio = (stats.logprob - old).exp()
    ...     return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    >>> loss = row_loss(grpo, logits, tokens, rows=(old_logprobs, advantages))
    """
    _call.once(_call.stats, logits, ids, temperature, softcap, ignore_index)
    _call.once(_call.row_loss, logits, row_weight, reduction, *rows)
    reading = stats_reading(logits, ids, temperature, softcap, ignore_index, entropy, total, argmax)
    return evaluate(logits, Formula(reading, formula, tuple(rows)), reduction, row_weight)


@dataclass(eq=False)
class Formula(RowLoss):
    """Any function of a row's statistics and of numbers beside it, (...) or (..., k) each.

    It sees rows as (n,), whatever their shape and however many at a time.
    """

    reads: ClassVar[int | None] = None

    function: Callable[..., Tensor]  # RowStats, rows -> (...)
    others: tuple[Tensor, ...]  # the numbers beside the rows

    @property
    def names(self):
        return "ids", "ids"

    def value(
        self, statistics: dict[str, Tensor], rows, lead: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """One number a row that counts, (...), 0 for the others."""
        ignored = None
        if self.reading.ignore_index is not None:
            ignored = (self.reading.label == self.reading.ignore_index).reshape(-1)
        flat = {name: flat_rows(t, lead) for name, t in statistics.items()}
        beside = [_constant_where(ignored, flat_rows(t, lead)) for t in rows]
        value = self.function(RowStats(**flat), *beside)
        _check_value(value, rows_in(lead))
        if not under_transform() and _call.asked() and rows_in(lead) > 1:
            _check_row_by_row(self.function, flat, beside)
        if ignored is not None:
            value = torch.where(ignored, 0.0, value)
        return value.view(lead).to(dtype)

    def settle(self, run, found):
        wants = self.reading.wants
        lse = found.lse  # which is always read
        with torch.enable_grad():
            leaves = [getattr(found, name) for name in wants]
            leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
            rows = [t.detach().requires_grad_(t.requires_grad) for t in self.others]
            given = dict(zip(wants, leaves, strict=True))
            value = self.value(given, rows, lse.shape, lse.dtype)
            wanted = [t for t in (*leaves, *rows) if t.requires_grad]
            # A row's value depends on that row alone, so the sum's gradient is each row's own.
            got = (None,) * len(wanted)
            if value.requires_grad:
                got = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
        each = iter(got)
        d = [next(each) if t.requires_grad else None for t in (*leaves, *rows)]
        upstream = dict(zip(wants, d, strict=False))
        coefficients = coefficients_of(self.reading, found.state, upstream)
        saved = (found.state, coefficients.rows, coefficients.ids, *d[len(leaves) :])
        # Cloned, for it may be one of the user's own tensors.
        return (value.detach().clone(),), saved

    def coefficients(self, saved, upstream):
        return Coefficients(saved[1], fields_of(self.reading), saved[2]), upstream[0]

    @property
    def tensors(self):
        return *super().tensors, *self.others

    def with_tensors(self, tensors, **changed):
        return super().with_tensors(tensors, others=tuple(tensors[4:]), **changed)

    def traced(self, x):
        found = Read(self.reading).traced(x)
        given = dict(zip(self.reading.wants, found, strict=True))
        lead, dtype = x.shape[:-1], PRECISION[x.dtype]
        return (self.value(given, self.others, lead, dtype),)

    def d_others(self, saved, scale):
        reading, ignored = self.reading, None
        if reading.ignore_index is not None:
            ignored = (reading.label == reading.ignore_index).reshape(-1)
        return tuple(
            None if d is None else _times_rows(d, scale, ignored).to(t.dtype)
            for d, t in zip(saved[3:], self.others, strict=True)
        )


def _constant_where(ignored: Tensor | None, t: Tensor) -> Tensor:
    """t (n,) or (n, k), through which nothing flows to ignored rows: 0 · inf is not 0."""
    if ignored is None or not t.requires_grad:
        return t
    return torch.where(ignored if t.dim() == 1 else ignored.unsqueeze(-1), t.detach(), t)


def _times_rows(d: Tensor, scale: Tensor, ignored: Tensor | None) -> Tensor:
    """d (...) or (..., k) times a number, or one a row; 0 in ignored rows."""
    rows = scale.numel() if scale.dim() else None
    rows = rows if ignored is None else ignored.numel()
    if rows is None:
        return d * scale
    found = d.reshape(rows, -1 if rows else 1) * (scale.reshape(-1, 1) if scale.dim() else scale)
    if ignored is not None:
        found = torch.where(ignored.unsqueeze(-1), 0.0, found)
    return found.view(d.shape)


def _check_value(value, rows: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"formula must return a Tensor, got {type(value).__name__}.")
    if value.shape != (rows,):
        raise ValueError(
            f"formula must return one number a row, shape ({rows},), got {tuple(value.shape)}."
        )


def _check_row_by_row(function: Callable, statistics: dict[str, Tensor], rows: list) -> None:
    """Raise where two rows at once give other numbers than one at a time."""
    with torch.no_grad():
        first, second, both = (
            function(RowStats(**{name: t[at] for name, t in statistics.items()}),
                     *(t[at] for t in rows))
            for at in (slice(0, 1), slice(1, 2), slice(0, 2))
        )  # fmt: skip
    apart = torch.cat([first, second])
    if not torch.allclose(both, apart, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            "formula must not look from one row to another: two rows at once must give what each "
            f"gives alone, got {both.tolist()} and {apart.tolist()}."
        )
