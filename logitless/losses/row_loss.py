"""`row_loss` computes a user-defined loss over row statistics, as fast as the built-in losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..contract import PRECISION, Coefficients, RowStats
from ..core import call, operators, tensor_checks
from ..core.evaluate import evaluate
from ..core.loss import RowLoss, flat_rows, ignored_value, rows_in
from ..eager.stats_coefficients import fields_of
from .statistics import Read, stats_reading

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])


@call.named()
def row_loss(
    formula: Callable[..., Result],
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
    rank: bool = False,
    ignore_index: int | None = -100,
    mask: Tensor | None = None,
) -> Result:
    """Computes a user-defined loss over row statistics, as fast as the built-in losses.

    The result is a scalar, or one number per row for reduction="none". `formula(stats, *rows)` gets
    n rows at a time: their statistics as a RowStats, each of shape (n,), or (n, K) for K ids per
    row, and the same n rows of each tensor in `rows`, which has one or several numbers per row, and
    can require gradients. It returns a tensor (n,), one number per row. Other tensors that it uses,
    for example from its closure, get no gradient.

    The formula can also return a tuple (loss, *more) of tensors (n,), for example to compute
    metrics. Then row_loss returns a tuple too, whose tensors of `more` have one number per row, are
    detached, and keep their dtypes; `row_weight` and the reduction do not apply to them. In ignored
    rows, they are -1 if their dtype is a signed integer, and 0 otherwise.

    The formula can be called several times, each time for some of the rows, so it must not mix
    rows, for example by a mean over rows or a sort. With LOGITLESS_CHECK=1, row_loss calls it for
    two rows together and for each alone, and raises a ValueError if the results differ.

    `ids`, `entropy`, `total`, `argmax`, `rank`, `ignore_index` and `mask` are those of `row_stats`.
    `row_weight` (...) multiplies the loss of each row. "mean" divides by the number of rows that
    are not ignored, even with a row_weight. Over a LinearLogits, a mean or sum takes three GEMMs
    (four in fp16).

    >>> def grpo(stats, old, advantage):
    ...     ratio = (stats.logprob - old).exp()
    ...     return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    >>> loss = row_loss(grpo, logits, tokens, rows=(old_logprobs, advantages))
    """
    check_formula(formula, rows)
    call.checked(
        row_loss, logits=logits, ids=ids, reduction=reduction, row_weight=row_weight,
        temperature=temperature, softcap=softcap, rank=rank, ignore_index=ignore_index, mask=mask,
    )  # fmt: skip
    call.check_once(tensor_checks.beside_rows, logits, *rows)
    reading = stats_reading(
        logits, ids, temperature, softcap, ignore_index, mask, entropy, total, argmax, rank
    )
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (logits, *rows))
    return evaluate(logits, Formula(reading, formula, tuple(rows), wanted), reduction, row_weight)


@dataclass(eq=False)
class Formula(RowLoss):
    """A loss that a user's function computes from row statistics and the user's row_inputs."""

    names: ClassVar[tuple[str, str]] = ("ids", "ids")
    # the public function, and what has one result, in error messages
    caller: ClassVar[str] = "row_loss"
    unit: ClassVar[str] = "row"
    reads: ClassVar[type[Read]] = Read  # the statistics under a compiler  # type: ignore

    has_gain: ClassVar[bool] = False  # the function can multiply by any number
    extras: ClassVar[None] = None  # the number of extras is known only after a call of `function`

    function: Callable[..., Any]  # RowStats, *row_inputs -> (n,), or a tuple of tensors (n,)
    row_inputs: tuple[Tensor, ...]
    differentiable: bool = True  # whether the loss from `function` must require grad

    def first_argument(self, statistics: dict[str, Tensor], row_inputs) -> tuple[Any, Sequence]:
        """Returns the first argument of the function, and the row_inputs."""
        return RowStats(**statistics), row_inputs

    def hints(self, argument: Any) -> list[str]:
        """Names each field of `argument` that is None, with the option that requests it."""
        by = {"picked": "ids", "logprob": "ids"}
        names = [name for name, t in argument._asdict().items() if t is None]
        to = self.caller
        return [f"stats.{name} (pass {by.get(name, f'{name}=True')} to {to})" for name in names]

    def call(self, statistics: dict[str, Tensor], row_inputs, count: int) -> tuple[Tensor, ...]:
        """Calls the function, checks its `count` results, and returns them as a tuple."""
        argument, row_inputs = self.first_argument(statistics, row_inputs)
        hints = self.hints(argument)
        hint = f" These statistics were not requested: {', '.join(hints)}." if hints else ""
        try:
            results = self.function(argument, *row_inputs)
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error):
                raise TypeError(f"formula raised an error: {error}.{hint}") from error
            raise
        return _checked(results, self.unit, count, hint)

    def apply(
        self, statistics: dict[str, Tensor], row_inputs, lead: torch.Size, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Returns the loss and the extras of each row. In ignored rows, the loss is 0."""
        ignored = self.reading.ignored_rows()
        ignored = None if ignored is None else ignored.reshape(-1)
        flat = {name: flat_rows(t, lead) for name, t in statistics.items()}
        inputs = [constant_where(ignored, flat_rows(t, lead)) for t in row_inputs]
        value, *more = self.call(flat, inputs, rows_in(lead))

        def results_of(at: slice) -> tuple[Tensor, ...]:
            some = {name: t[at] for name, t in flat.items()}
            return self.call(some, [t[at] for t in inputs], at.stop - at.start)

        self.check_alone(results_of, rows_in(lead))
        if ignored is not None:
            value = torch.where(ignored, 0.0, value)
            more = [t.masked_fill(ignored, ignored_value(t.dtype)) for t in more]
        return value.view(lead).to(dtype), *(t.view(lead) for t in more)

    def check_alone(self, results_of: Callable[[slice], tuple[Tensor, ...]], count: int) -> None:
        """With LOGITLESS_CHECK=1, checks that two results together are those of each alone."""
        if count < 2 or call.under_transform() or not call.thorough():
            return
        with torch.no_grad():
            both, first, second = (
                torch.cat([t.double().reshape(len(t), -1) for t in results_of(at)], -1)
                for at in (slice(0, 2), slice(0, 1), slice(1, 2))
            )
        apart, unit = torch.cat([first, second]), self.unit
        if not torch.allclose(both, apart, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"formula must not mix {unit}s, so that its results do not depend on how {unit}s"
                f" are grouped, got {both.squeeze(-1).tolist()} for two {unit}s together and"
                f" {apart.squeeze(-1).tolist()} for each {unit} alone."
            )

    def whole(self, t: Tensor) -> Tensor:
        """A statistic of the present rows, as the function gets it."""
        return t

    def parts(self, t: Tensor | None) -> Tensor | None:
        """The inverse of `whole`, for gradients."""
        return t

    def value(self, backend, statistics):
        wants = self.reading.wants
        lse = statistics.lse  # lse is always computed
        with torch.enable_grad():
            leaves = [self.whole(getattr(statistics, name)) for name in wants]
            leaves = [t.requires_grad_(t.is_floating_point()) for t in leaves]
            inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.row_inputs]
            by_name = dict(zip(wants, leaves, strict=True))
            value, *more = self.apply(by_name, inputs, lse.shape, lse.dtype)
            wanted = [t for t in (*leaves, *inputs) if t.requires_grad]
            gradients = (None,) * len(wanted)
            if self.differentiable and not value.requires_grad:
                raise RuntimeError(
                    "formula must return numbers that have a gradient, got a tensor that does not "
                    "require grad. To compute metrics beside a loss, return (loss, *metrics). To "
                    f"compute only a metric, call {self.caller} under torch.no_grad()."
                )
            if value.requires_grad:
                # No value depends on another row or group: one backward of the sum gives all.
                gradients = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
        gradients = iter(gradients)
        d_leaves = [next(gradients) if t.requires_grad else None for t in leaves]
        d_inputs = [next(gradients) if t.requires_grad else None for t in inputs]
        d_statistics = {name: self.parts(d) for name, d in zip(wants, d_leaves, strict=True)}
        rows, _, ids = backend.coefficients(self.reading, statistics.state, d_statistics)
        # Outputs are cloned, because the formula can return one of the user's own tensors.
        outputs = tuple(t.detach().clone() for t in (value, *more))
        return outputs, (statistics.state, rows, ids, *d_inputs)

    def coefficients(self, saved, upstream):
        _, rows, ids, *_ = saved
        has = fields_of(self.reading.wants, self.reading.ids is not None)
        return Coefficients(rows, has, ids), self.of_rows(upstream[0])

    def traced(self, x, call=operators.call):
        statistics = self.reads(self.reading).traced(x, call)
        by_name = dict(zip(self.reading.wants, statistics, strict=True))
        return self.apply(by_name, self.row_inputs, x.shape[:-1], PRECISION[x.dtype])

    def d_row_inputs(self, saved, scale):
        _, _, _, *d_inputs = saved
        return tuple(
            None if d is None else self.times_input(i, d, scale).to(t.dtype)
            for i, (d, t) in enumerate(zip(d_inputs, self.row_inputs, strict=True))
        )

    def times_input(self, i, d, scale):
        ignored = self.reading.ignored_rows()
        return _times_rows(d, scale, None if ignored is None else ignored.reshape(-1))


def check_formula(formula: Any, rows: Any) -> None:
    if not callable(formula):
        raise TypeError(f"formula must be a function, got {type(formula).__name__}.")
    if isinstance(rows, Tensor):
        raise TypeError("rows must be a sequence of Tensors, got a Tensor. Pass rows=(t,).")


def constant_where(ignored: Tensor | None, t: Tensor) -> Tensor:
    """Detaches the ignored rows of `t`, because their gradient could be 0 · inf = NaN."""
    if ignored is None or not t.requires_grad:
        return t
    ignored = ignored if t.dim() == ignored.dim() else ignored.unsqueeze(-1)
    return torch.where(ignored, t.detach(), t)


def _times_rows(d: Tensor, scale: Tensor, ignored: Tensor | None) -> Tensor:
    """d · scale (one number, or one per row), and 0 in ignored rows."""
    rows = scale.numel() if scale.dim() else None
    rows = rows if ignored is None else ignored.numel()
    if rows is None:
        return d * scale
    flat = d.reshape(rows, -1 if rows else 1) * (scale.reshape(-1, 1) if scale.dim() else scale)
    if ignored is not None:
        flat = torch.where(ignored.unsqueeze(-1), 0.0, flat)
    return flat.view(d.shape)


def _checked(results: Any, unit: str, count: int, hint: str) -> tuple[Tensor, ...]:
    """Checks the results of a formula: (loss, *extras). Extras of groups can be (count, ...)."""
    several = isinstance(results, tuple)
    if several and len(results) < 2:
        raise ValueError(
            "formula must return a Tensor, or a tuple (loss, *more) of at least two Tensors, got a "
            f"tuple of {len(results)}."
        )
    for i, t in enumerate(results if several else (results,)):
        where = f" as result {i} of the tuple" if several else ""
        if not isinstance(t, Tensor):
            after = hint if t is None else ""
            raise TypeError(f"formula must return a Tensor{where}, got {type(t).__name__}.{after}")
        if t.is_complex():
            raise TypeError(f"formula must return real numbers{where}, got {t.dtype}.")
        more = i > 0 and unit == "group"
        if (t.shape[:1] if more else t.shape) != (count,):
            shape = f"({count}, ...)" if more else f"({count},)"
            raise ValueError(
                f"formula must return one number per {unit}{where}, shape {shape}, "
                f"got {tuple(t.shape)}."
            )
    return results if several else (results,)
