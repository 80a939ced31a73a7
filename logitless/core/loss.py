"""A loss as data: which numbers it reads from each row, and how they become values and gradients.

evaluate.py evaluates a `RowLoss` over a tensor. A source (source.py) evaluates it over anything
else that stands for logits. Two methods of the loss do the work, and neither uses autograd:

    forward(backend, x)                       outputs (...), and the tensors that backward needs
    backward(backend, x, saved, upstream)     the gradient of the logits

Most losses need only statistics of each row. They implement `value` (statistics to outputs) and
`coefficients` (the factors of the one backward formula), from which both methods follow. A loss
that needs the logits of whole rows overrides `forward` and `backward`.

`backend` is `kernels` or `eager`, or a backend built on them that reads only some columns at a time
and merges their statistics with those of the other columns. The other columns are on other ranks
(parallel/columns.py) or in other blocks of a head (heads/blocks.py). See Backend in backend.py.

A loss is also a tree: `flatten` separates the tensors that backward reads from the rest, and
`rebuild` puts them back. `map_tensors` applies a function per kind of tensor; contract.py declares
for each tensor whether it is per row, per class or a teacher.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import eager
from ..contract import PER_ROW, TEACHER, Coefficients, Reading, Statistics, made_once
from . import operators
from .backend import Backend
from .source import teacher_rows

Saved = tuple[Tensor | None, ...]
Upstream = tuple[Tensor | None, ...]  # the gradient of each output, () or (...)


@dataclass(eq=False)
class RowLoss:
    """A loss with one value per row, which depends on this row alone."""

    reading: Reading

    multiple_outputs: ClassVar[bool] = False  # a tuple of outputs, instead of one number per row
    # Whether forward saves the gradient itself, for an upstream gradient of 1.
    saves_gradient: ClassVar[bool] = False
    # The fields that are structs of contract.py, each with its TENSORS.
    structs: ClassVar[tuple[str, ...]] = ("reading",)
    row_inputs = ()  # tensors per row, besides the logits, that may require a gradient

    @property
    def names(self) -> tuple[str, str]:
        """The names of the label and of the ids in error messages."""
        return "target", "ids"

    @property
    def teachers(self) -> tuple:
        """Dense teachers: tensors, or heads that compute some rows at a time."""
        return ()

    # --- statistics to values and gradients: what a loss implements

    def value(self, backend: Backend, statistics: Statistics) -> tuple[tuple[Tensor, ...], Saved]:
        """Outputs (...) from the statistics of whole rows, and the tensors `coefficients` needs."""
        raise NotImplementedError

    def coefficients(self, saved: Saved, upstream: Upstream) -> tuple[Coefficients, Tensor]:
        """The factors of the one backward formula, and a gain for all of them, () or (...)."""
        raise NotImplementedError

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """The shapes of the outputs, then of the saved tensors."""
        raise NotImplementedError

    def mass(self, backend: Backend, dtype: torch.dtype) -> Tensor | None:
        """The weight of each row in a mean, (N,); None if every row that counts weighs 1."""
        return None

    def d_row_inputs(self, saved: Saved, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of row_inputs, if the gradient of each row's value is `scale`, () or (...)."""
        return ()

    # --- methods that follow from the ones above

    def forward(self, backend: Backend, x: Tensor) -> tuple[tuple[Tensor, ...], Saved]:
        return self.value(backend, backend.read(x, self.reading))

    def backward(
        self,
        backend: Backend,
        x: Tensor,
        saved: Saved,
        upstream: Upstream,
        factor: Tensor | None = None,  # () or one per row: a further factor
        into: Tensor | None = None,  # where the gradient is written; x itself is allowed
    ) -> Tensor:
        coefficients, gain = self.coefficients(saved, upstream)
        return backend.gradient(x, self.reading, saved[0], coefficients, gain, factor, into)

    def value_and_gradient(
        self, backend: Backend, x: Tensor, factor: Tensor | None, into: Tensor
    ) -> tuple[Tensor, Tensor, Saved]:
        """Value, gradient for an upstream gradient of 1, and the tensors backward would need."""
        (value,), saved = self.forward(backend, x)
        gradient = self.backward(backend, x, saved, (one[x.device, value.dtype],), factor, into)
        return value, gradient, saved

    def mean_and_gradient(self, backend: Backend, x: Tensor, into: Tensor) -> Tensor | None:
        """The mean over rows and its gradient in the same launch; None where that is impossible.

        It is meant for logits so small that a launch takes longer than reading them.
        """
        return None

    def traced(self, x, call: Callable = operators.call) -> tuple[Tensor, ...]:
        """The outputs through an operator, for a compiler, a dispatch mode or torch.func.

        call(loss, x) runs the operator over x: logits, or a head (heads/operators.py).
        """
        return call(self, x)

    @property
    def merges(self) -> bool:
        """Whether the loss can be computed from merged partial statistics.

        Every statistic can be merged, except the tail.
        """
        return type(self).forward is RowLoss.forward and "tail" not in self.reading.wants

    def fold_scale(self, scale: float, softcap: float | None) -> "RowLoss | None":
        """The same loss for logits that are not yet multiplied by `scale`, with this softcap.

        The temperature and the softcap are divided by `scale`. None if that is impossible.
        """
        if scale != 1 and "logprob_t1" in self.reading.wants:  # always read at temperature 1
            return None
        return self.replace(reading=self.reading.fold_scale(scale, softcap))

    def reduce(self, values: Tensor, reduction: str, row_weight: Tensor | None) -> Tensor:
        """One value per row (...) to the result of the loss: weighted and reduced, differentiable.

        Sources reduce with this method. "mean" divides by the number of rows that count, or by the
        sum of their `mass`.
        """
        if reduction != "none":
            mass = self.mass(eager, values.dtype) if reduction == "mean" else None
            return eager.reduce(values, self.reading, row_weight, mass, reduction == "mean")[0]
        if row_weight is None:
            return values
        values, ignored = values * row_weight.to(values.dtype), self.reading.ignored_rows()
        return values if ignored is None else torch.where(ignored, 0.0, values)  # 0 · inf is not 0

    # --- a loss as a tree

    def flatten(self, recompute: bool = False) -> tuple[tuple[Tensor | None, ...], "RowLoss"]:
        """The tensors that backward reads, and the same loss without any tensor.

        With recompute=True also those that only forward reads, for a backward that calls it again.
        """
        r = self.reading
        return (r.label, r.ids, r.class_weight, r.row_temperature), self.replace(
            reading=r._replace(label=None, ids=None, class_weight=None, row_temperature=None)
        )

    def rebuild(self, tensors: Sequence[Tensor | None]) -> "RowLoss":
        """The inverse of `flatten`, except that tensors that backward does not read stay None."""
        label, ids, class_weight, row_temperature = tensors
        return self.replace(
            reading=self.reading._replace(
                label=label, ids=ids, class_weight=class_weight, row_temperature=row_temperature
            )
        )

    def replace(self, **changed) -> "RowLoss":
        """A copy with other fields."""
        copy = object.__new__(type(self))  # a quarter of the time of dataclasses.replace
        copy.__dict__ = {**self.__dict__, **changed}
        return copy

    def map_tensors(self, functions: dict[str, Callable[[Any], Any]]) -> "RowLoss":
        """The same loss, with a function applied to every tensor of each kind.

        Kinds are PER_ROW, PER_CLASS and TEACHER. Tensors that are None stay None.
        """
        changed = {}
        for name in self.structs:
            struct = getattr(self, name)
            new = {
                field: functions[kind](getattr(struct, field))
                for field, kind in struct.TENSORS
                if kind in functions and getattr(struct, field) is not None
            }
            changed[name] = struct._replace(**new)
        if self.row_inputs and PER_ROW in functions:
            changed["row_inputs"] = tuple(map(functions[PER_ROW], self.row_inputs))
        return self.replace(**changed)

    def rows(self, rows: slice | Tensor, lead: torch.Size) -> "RowLoss":
        """The same loss for some of its rows; `lead` is the shape (...) of all rows."""

        def chunk(t: Tensor) -> Tensor:
            some = t.reshape(lead.numel(), *t.shape[len(lead) :])[rows]
            return some.detach().requires_grad_() if t.requires_grad else some

        return self.map_tensors({PER_ROW: chunk, TEACHER: lambda t: teacher_rows(t, rows)})


@made_once
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones((), device=device, dtype=dtype)


def rows_in(lead: torch.Size) -> int:
    """The number of rows. Size.numel() would turn a symbolic size into a constant."""
    return math.prod(lead)


def flat_rows(t: Tensor, lead: torch.Size) -> Tensor:
    """(...) to (N,), or (..., k) to (N, k)."""
    return t.reshape(rows_in(lead), *t.shape[len(lead) :])
