"""`RowLoss`: the statistics that a loss needs, and the methods that compute it, without autograd:

    forward(backend, x) returns the outputs of each row, and the tensors that backward needs.
    backward(backend, x, saved, upstream) returns the gradient of the logits.

The first output is the value, which is weighted and reduced. The others, `extras`, are results per
row without a gradient. Most losses need only statistics of rows: they implement `value` (outputs
from statistics) and `coefficients` (of the backward formula in contract.py), and so work with every
backend, also with those that read some columns at a time (backend.py). A loss that needs the logits
of whole rows overrides `forward` and `backward`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import eager
from ..contract import PER_ROW, TEACHER, Coefficients, Reading, Statistics, Total, made_once
from . import operators
from .backend import Backend
from .invariant import aligned
from .source import teacher_rows

Saved = tuple[Tensor | None, ...]
Upstream = tuple[Tensor | None, ...]  # the gradients of the outputs: scalars, or one number per row


@dataclass(eq=False)
class RowLoss:
    """A loss with one value per row, which depends only on this row, or one per group of rows."""

    reading: Reading

    # Whether all outputs are results per row, which are never reduced.
    multiple_outputs: ClassVar[bool] = False
    # The names of the extras ("argmax" and "rank" are int64); None if known only after forward.
    extras: ClassVar[tuple[str, ...] | None] = ()
    # Whether the labels are always class ids, and never a mask of rows (`reads_label` in call.py).
    labels_are_ids: ClassVar[bool] = False
    # Whether forward computes and saves the gradient, for an upstream gradient of 1.
    saves_gradient: ClassVar[bool] = False
    # Whether `gain` is known. If not, the gradient of fp16 logits must wait for the upstream one.
    has_gain: ClassVar[bool] = True
    # The fields that hold structs of contract.py.
    structs: ClassVar[tuple[str, ...]] = ("reading",)
    # The label and the ids in error messages. A subclass can have a property, here and below.
    names: ClassVar[Any] = ("target", "ids")
    row_inputs = ()  # tensors with one or k numbers per row; they can require grad
    signature = None  # the Signature of the call, for `Source.again`
    # The dense teachers, each a Tensor or a ScaledHead.
    teachers: ClassVar[Any] = ()
    groups = None  # the Groups (groups.py) of rows that have one result together

    # --- methods that a subclass implements

    def value(self, backend: Backend, statistics: Statistics) -> tuple[tuple[Tensor, ...], Saved]:
        """Computes each row's outputs from its statistics, and the tensors for `coefficients`."""
        raise NotImplementedError

    def coefficients(self, saved: Saved, upstream: Upstream) -> tuple[Coefficients, Tensor]:
        """Returns the coefficients, and a factor of them: () or (N,), usually `upstream`."""
        raise NotImplementedError

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """The shapes of the outputs, followed by the shapes of the saved tensors."""
        raise NotImplementedError

    def mass(self, backend: Backend, dtype: torch.dtype) -> Tensor | None:
        """A tensor (N,) whose sum divides a mean; None to count the rows that are not ignored."""
        return None

    def d_row_inputs(self, saved: Saved, scale: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `row_inputs`. `scale` is the upstream gradient of each row's value."""
        return ()

    # --- methods that most subclasses inherit

    def forward(self, backend: Backend, x: Tensor) -> tuple[tuple[Tensor, ...], Saved]:
        return self.value(backend, backend.read(x, self.reading))

    def backward(
        self,
        backend: Backend,
        x: Tensor,
        saved: Saved,
        upstream: Upstream,
        factor: Tensor | None = None,  # () or (N,), multiplies `upstream`
        into: Tensor | None = None,  # output (..., V) or (N, V), can be x; None means a new tensor
    ) -> Tensor:
        coefficients, gain = self.coefficients(saved, upstream)
        return backend.gradient(x, self.reading, saved[0], coefficients, gain, factor, into)

    def value_and_gradient(
        self, backend: Backend, x: Tensor, factor: Tensor | None, into: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor, Saved]:
        """Returns outputs, `factor` times the gradient for an upstream gradient of 1, and saved."""
        outputs, saved = self.forward(backend, x)
        upstream = self.upstream_of_one(outputs)
        return outputs, self.backward(backend, x, saved, upstream, factor, into), saved

    def in_one_launch(self, backend: Backend, reduction: str) -> Total | None:
        """The mean or sum that one kernel launch can compute with its gradient, or None.

        It saves time for small tensors and heads, whose logits are read faster than a kernel
        starts. If None, the next two methods are not called.
        """
        return None

    def launch_total(
        self, total: Total, backend: Backend, x: Tensor, into: Tensor
    ) -> Tensor | None:
        """Returns the mean or sum, and writes its gradient to `into`; None if not possible."""
        raise NotImplementedError

    def plan_total(
        self, total: Total, backend: Backend, rows: int, stride: int, hidden: Tensor, copies: bool
    ) -> Any:
        """Returns a launch over a small head (kernels/cross_entropy/one_pass.py), or None."""
        raise NotImplementedError

    def traced(self, x, call: Callable = operators.call) -> tuple[Tensor, ...]:
        """Computes outputs by an operator. x is a tensor, or a head (heads/operators.py)."""
        return call(self, x)

    def gain(self, inverse_t: Any) -> Any:
        """The largest number that multiplies a row's gradient, besides weights of rows and classes.

        `inverse_t` is 1 / temperature: one number, or one number per row.
        """
        return inverse_t

    def upstream_of_one(self, outputs: Sequence[Tensor]) -> Upstream:
        return (one.beside(outputs[0], outputs[0].device, outputs[0].dtype),)

    @property
    def only_scales(self) -> bool:
        """Whether a row's gradient is linear in one number, the upstream gradient of its result."""
        return not self.multiple_outputs

    # A loss over groups of rows (losses/group_loss.py) overrides the next five. Its results, and
    # the first dimension of its row_inputs, belong to groups instead of rows.

    @property
    def counted(self) -> Reading:
        """The Reading whose rows that are not ignored are the divisor of a mean."""
        return self.reading

    def results(self, lead: torch.Size) -> torch.Size:
        """The shape of the value for logits (*lead, V)."""
        return lead

    def of_rows(self, g: Tensor) -> Tensor:
        """Converts a number per result to a number per row."""
        return g

    def place(self, i: int, results: Any) -> Any:
        """Where in row_inputs[i] the numbers of some results are."""
        return results

    def times_input(self, i: int, d: Tensor, scale: Tensor) -> Tensor:
        """Multiplies d, the gradient of row_inputs[i], by one number, or by one per result."""
        raise NotImplementedError

    @property
    def real_ids(self) -> Tensor | None:
        """A mask (..., K) of the ids that the user passed, or None for all ids.

        All other ids are NO_ID. The user can pass this number too, and it is then out of range.
        """
        return None

    @property
    def merges(self) -> bool:
        """Whether merged partial statistics are enough: all statistics but `tail` and `rank`."""
        whole_rows = {"tail", "rank"} & {*self.reading.wants}
        return type(self).forward is RowLoss.forward and not whole_rows

    def fold_scale(self, scale: float, softcap: float | None) -> "RowLoss | None":
        """Returns the loss f with f(x) = this loss of scale · x, and this softcap of scale · x.

        None if a term of the loss always uses temperature 1.
        """
        if scale != 1 and "logprob_t1" in self.reading.wants:
            return None
        return self.replace(reading=self.reading.fold_scale(scale, softcap))

    def without_gradient(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.multiple_outputs:
            return [t for t in outputs if not t.is_floating_point()]
        return outputs[1:]

    def reduce(self, values: Any, reduction: str, row_weight: Tensor | None) -> Any:
        """Multiplies each row's value by row_weight and applies `reduction`, differentiably.

        Of a tuple of outputs, only the first is reduced: the result is (value, *extras), or the
        value if there are no extras.
        """
        if isinstance(values, tuple):
            value, *extras = values
            value = self.reduce(value, reduction, row_weight)
            return (value, *(t.detach() for t in extras)) if extras else value
        if reduction != "none":
            mass = self.mass(eager, values.dtype) if reduction == "mean" else None
            return eager.reduce(values, self.counted, row_weight, mass, reduction == "mean")[0]
        if row_weight is None:
            return values
        values, ignored = values * row_weight.to(values.dtype), self.reading.ignored_rows()
        # 0 times an infinite row_weight would be NaN in ignored rows
        return values if ignored is None else torch.where(ignored, 0.0, values)

    # --- access to the tensors of a loss

    def flatten(self, recompute: bool = False) -> tuple[tuple[Tensor | None, ...], "RowLoss"]:
        """Returns the tensors that backward reads, and the same loss without any tensor.

        With recompute=True, also those that only forward reads, because backward calls it again.
        """
        vocab, label, ids, class_weight, row_temperature, *options = self.reading
        loss = self.replace(reading=Reading(vocab, None, None, None, None, *options))
        if self.row_inputs:
            loss = loss.replace(row_inputs=(None,) * len(self.row_inputs))
        return (label, ids, class_weight, row_temperature, *self.row_inputs), loss

    def rebuild(self, tensors: Sequence[Tensor | None]) -> "RowLoss":
        """Puts the tensors from `flatten` back. All other tensors stay None."""
        label, ids, class_weight, row_temperature, *row_inputs = tensors
        vocab, _, _, _, _, *options = self.reading
        loss = self.replace(
            reading=Reading(vocab, label, ids, class_weight, row_temperature, *options)
        )
        return loss.replace(row_inputs=tuple(row_inputs)) if row_inputs else loss

    def replace(self, **changed) -> "RowLoss":
        copy = object.__new__(type(self))  # four times as fast as dataclasses.replace
        copy.__dict__ = {**self.__dict__, **changed}
        return copy

    def map_tensors(self, functions: dict[str, Callable[[Any], Any]]) -> "RowLoss":
        """Applies functions[kind] to all tensors of a kind: PER_ROW, PER_CLASS or TEACHER."""
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
        """The loss of these rows of logits (*lead, V) only."""

        def chunk(t: Tensor) -> Tensor:
            some = t.reshape(lead.numel(), *t.shape[len(lead) :])[rows]
            return some.detach().requires_grad_() if t.requires_grad else some

        def teacher(t: Any) -> Tensor:
            some = teacher_rows(t, rows)
            return aligned(some) if self.reading.invariant else some

        return self.map_tensors({PER_ROW: chunk, TEACHER: teacher})


@made_once
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones((), device=device, dtype=dtype)


def rows_in(lead: torch.Size) -> int:
    """The number of rows. Size.numel() would make a symbolic size of torch.compile a constant."""
    return math.prod(lead)


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def ignored_value(dtype: torch.dtype) -> int:
    """-1 for signed integers like argmax, otherwise 0."""
    return -1 if dtype in _SIGNED else 0


def flat_rows(t: Tensor, lead: torch.Size) -> Tensor:
    return t.reshape(rows_in(lead), *t.shape[len(lead) :])
