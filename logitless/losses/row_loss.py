"""`row_loss`: a user's own loss of the statistics of each row, at the speed of ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import PRECISION, Coefficients, RowStats
from ..core import call, operators
from ..core.evaluate import evaluate
from ..core.loss import RowLoss, flat_rows, rows_in
from . import checks
from .statistics import Read, coefficients_of, fields_of, stats_reading


@call.named()
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

    `formula(stats, *rows)` gets the RowStats of some n rows, (n,) each or (n, K) for K ids per row,
    and the same rows of the tensors in `rows`, (...) or (..., k), which may require gradients. The
    formula returns one number per row, (n,). A tensor that it captures is a constant.

    The formula is called on any number of rows at once, so it must not mix rows (no means, sums or
    sorting over rows). LOGITLESS_CHECK=1 compares two rows at once with one at a time, and raises
    where they differ.

    ids, the statistics and ignore_index are those of `row_stats`; "mean" divides the sum of the
    rows' numbers, each times its row_weight (...), by the number of rows that are not ignored.
    Over a LinearLogits a mean or a sum takes three GEMMs.

    >>> def grpo(stats, old, advantage):
    ...     ratio = (stats.logprob - old).exp()
    ...     return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    >>> loss = row_loss(grpo, logits, tokens, rows=(old_logprobs, advantages))
    """
    call.check_once(checks.statistics, logits, ids, temperature, softcap, ignore_index)
    call.check_once(checks.row_loss, logits, row_weight, reduction, *rows)
    reading = stats_reading(logits, ids, temperature, softcap, ignore_index, entropy, total, argmax)
    return evaluate(logits, Formula(reading, formula, tuple(rows)), reduction, row_weight)


@dataclass(eq=False)
class Formula(RowLoss):
    """Any function of the statistics of each row and of row_inputs, (...) or (..., k) each.

    The function gets n rows at a time as (n,), for any n and whatever the shape (...) of all rows.
    """

    function: Callable[..., Tensor]  # RowStats, *row_inputs -> (n,)
    row_inputs: tuple[Tensor, ...]

    @property
    def names(self):
        return "ids", "ids"

    def apply(
        self, statistics: dict[str, Tensor], row_inputs, lead: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """One number per row that counts, (...); 0 for ignored rows."""
        ignored = self.reading.ignored_rows()
        ignored = None if ignored is None else ignored.reshape(-1)
        flat = {name: flat_rows(t, lead) for name, t in statistics.items()}
        inputs = [_constant_where(ignored, flat_rows(t, lead)) for t in row_inputs]
        value = self.function(RowStats(**flat), *inputs)
        _check_value(value, rows_in(lead))
        if not call.under_transform() and call.thorough() and rows_in(lead) > 1:
            _check_row_by_row(self.function, flat, inputs)
        if ignored is not None:
            value = torch.where(ignored, 0.0, value)
        return value.view(lead).to(dtype)

    def value(self, backend, statistics):
        wants = self.reading.wants
        lse = statistics.lse  # which is always read
        with torch.enable_grad():
            leaves = [getattr(statistics, name) for name in wants]
            leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.row_inputs]
            by_name = dict(zip(wants, leaves, strict=True))
            value = self.apply(by_name, inputs, lse.shape, lse.dtype)
            wanted = [t for t in (*leaves, *inputs) if t.requires_grad]
            gradients = (None,) * len(wanted)
            if value.requires_grad:
                # The value of a row depends on that row alone, so the gradient of the sum holds the
                # gradient of each row.
                gradients = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
        gradients = iter(gradients)
        d_leaves = [next(gradients) if t.requires_grad else None for t in leaves]
        d_inputs = [next(gradients) if t.requires_grad else None for t in inputs]
        d_statistics = dict(zip(wants, d_leaves, strict=True))
        rows, _, ids = coefficients_of(self.reading, statistics.state, d_statistics)
        # Cloned, because the formula may return one of the user's own tensors.
        return (value.detach().clone(),), (statistics.state, rows, ids, *d_inputs)

    def coefficients(self, saved, upstream):
        _, rows, ids, *_ = saved
        return Coefficients(rows, fields_of(self.reading), ids), upstream[0]

    def flatten(self, recompute=False):
        tensors, loss = super().flatten()
        blank = (None,) * len(self.row_inputs)
        return (*tensors, *self.row_inputs), loss.replace(row_inputs=blank)

    def rebuild(self, tensors):
        count = len(tensors) - len(self.row_inputs)
        return super().rebuild(tensors[:count]).replace(row_inputs=tuple(tensors[count:]))

    def traced(self, x, call=operators.call):
        statistics = Read(self.reading).traced(x, call)
        by_name = dict(zip(self.reading.wants, statistics, strict=True))
        return (self.apply(by_name, self.row_inputs, x.shape[:-1], PRECISION[x.dtype]),)

    def d_row_inputs(self, saved, scale):
        _, _, _, *d_inputs = saved
        ignored = self.reading.ignored_rows()
        ignored = None if ignored is None else ignored.reshape(-1)
        return tuple(
            None if d is None else _times_rows(d, scale, ignored).to(t.dtype)
            for d, t in zip(d_inputs, self.row_inputs, strict=True)
        )


def _constant_where(ignored: Tensor | None, t: Tensor) -> Tensor:
    """t (n,) or (n, k), without gradient in ignored rows, because 0 · inf is not 0."""
    if ignored is None or not t.requires_grad:
        return t
    return torch.where(ignored if t.dim() == 1 else ignored.unsqueeze(-1), t.detach(), t)


def _times_rows(d: Tensor, scale: Tensor, ignored: Tensor | None) -> Tensor:
    """d (...) or (..., k) times one number, or one per row; 0 in ignored rows."""
    rows = scale.numel() if scale.dim() else None
    rows = rows if ignored is None else ignored.numel()
    if rows is None:
        return d * scale
    flat = d.reshape(rows, -1 if rows else 1) * (scale.reshape(-1, 1) if scale.dim() else scale)
    if ignored is not None:
        flat = torch.where(ignored.unsqueeze(-1), 0.0, flat)
    return flat.view(d.shape)


def _check_value(value, rows: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"formula must return a Tensor, got {type(value).__name__}.")
    if value.shape != (rows,):
        raise ValueError(
            f"formula must return one number per row, shape ({rows},), got {tuple(value.shape)}."
        )


def _check_row_by_row(function: Callable, statistics: dict[str, Tensor], rows: list) -> None:
    """Raises where two rows at once give other numbers than one at a time."""
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
