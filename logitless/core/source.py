"""Defines `Source`, the base class of all sources of logits.

`source_of` converts logits to a Source. evaluate.py evaluates a loss over a plain tensor. Any other
object that represents logits (..., V) is a `Source`. Examples are a head whose logits are not
materialised (heads/linear.py), lazy logits (lazy/logits.py), one rank's shard of the vocabulary
(parallel/shard.py), and a user's own subclass. The public functions check the shapes, dtypes and
devices of their arguments. Then they build a RowLoss, and pass the loss to the method `evaluate` of
the source. The rest of the library treats all sources alike.

Users construct LinearLogits and VocabShard, which are subclasses of `Logits`. The class `Logits`
has only the members that users need. The attribute `_source` of a `Logits` is the Source that
evaluates losses.

A source computes logits for some rows at a time, and calls `forward` and `backward` of the loss for
these rows. `loss.rows(rows, lead)` returns the loss of only these rows. The source reduces the
values of all rows with `loss.reduce`. A source that has only some columns of each row calls the
backend's `partial`, which returns the `Partials` of these columns. The source then merges the
`Partials` of all columns, and calls the backend's `finish`.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .capture import Capture, Captured

F = TypeVar("F", bound=Callable)


class Logits:
    """Base class of the public classes that represent logits (..., V)."""

    # Every loss reads these attributes several times. Reading a slot takes less time than reading a
    # property, and help() lists slots too.
    __slots__ = ("_source", "device", "dtype", "requires_grad", "shape")
    shape: torch.Size
    """The shape (..., V) of the logits."""
    dtype: torch.dtype
    """The dtype of the logits."""
    device: torch.device
    """The device on which the logits are computed."""
    requires_grad: bool
    """Whether a loss over these logits has a gradient."""
    _source: Any  # the Source that evaluates losses over these logits

    def __init__(self, source: "Source"):
        self._source, self.shape, self.dtype = source, source.shape, source.dtype
        self.device, self.requires_grad = source.device, source.requires_grad

    def dim(self) -> int:
        """The number of dimensions of the logits."""
        return len(self.shape)

    def __repr__(self) -> str:
        return repr(self._source)


class Source:
    """Base class of objects that represent logits (..., V) and are not plain tensors."""

    shape: torch.Size  # (..., V)
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    hidden: Tensor | None = None  # the hidden states (..., D), if the source is a head
    over_ranks = False  # whether the source is one rank's shard of the logits
    exists = False  # whether the logits are in memory as a whole
    spread = False  # whether the source holds DTensors; if so, `source_of` returns a `Shard`

    def dim(self) -> int:
        return len(self.shape)

    def evaluate(self, loss: Any, reduction: str, row_weight: Tensor | None) -> Any:
        """Evaluates a RowLoss. The result is weighted, reduced and differentiable.

        The result is one number per row for reduction "none", and a scalar for "sum" and "mean".
        For a RowLoss with multiple outputs, the result is a tuple. For a RowLoss with extras, the
        result is (value, *extras), where each of the extras has one number per row.
        """
        raise NotImplementedError

    def evaluate_in_place(self, loss: Any, reduction: str, row_weight: Tensor | None) -> Any:
        """Like `evaluate`, but the gradient is allowed to overwrite logits that are in memory."""
        return self.evaluate(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        """Returns the results of a capture for all rows. capture.py defines the captures."""
        raise NotImplementedError

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """Returns the differentiable logits, as a tensor of shape (..., V).

        With `rows`, the result holds only the logits of these rows, without a gradient.
        """
        raise NotImplementedError

    def as_teacher(self) -> Any:
        """Returns these logits without a gradient.

        The result is a Tensor, or an object with the method `materialize(rows)`.
        """
        return self.materialize(slice(None)).view(self.shape)

    def in_columns(self, shard: Any) -> "Source":
        """Returns a source that represents all columns, but computes only the columns of this rank.

        `shard` is the `Shard` (parallel/shard.py) that wraps this source.
        """
        raise TypeError(f"source must be logits or a LinearLogits, got {type(self).__name__}.")

    def ranks_of_call(self) -> Any:
        """Returns the ranks that share these logits; None if the logits are not sharded.

        All ranks that hold shards of the same logits must make the same calls.
        """
        return None

    def describe(self) -> str:
        """A one-line description that is equal on all ranks (see parallel/same_call.py)."""
        return f"a {type(self).__name__}"


def is_dtensor(t: Any) -> bool:
    # The class is compared first, because hasattr takes longer.
    return t.__class__ not in (Tensor, Parameter) and hasattr(t, "placements")


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors requires a gradient. The loop is faster than any()."""
    for t in tensors:  # noqa: SIM110
        if t is not None and t.requires_grad:
            return True
    return False


def without_wrapper(logits: Any) -> Any:
    """Returns the Source of a LinearLogits or VocabShard. Other logits are returned unchanged."""
    return logits._source if isinstance(logits, Logits) else logits


# The functions that are decorated with `converts`, for example in parallel/.
_CONVERTERS: list[Callable[[Any], "Source | None"]] = []


def converts(function: F) -> F:
    """Registers a function that converts logits to a Source.

    The function is called in two cases: for a Source whose attribute `spread` is True, and for
    logits that are neither a Source nor a plain tensor. The function must return None for logits
    that it cannot convert.
    """
    _CONVERTERS.append(function)
    return function


def source_of(logits: Any) -> "Source | None":
    """Returns the Source that evaluates a loss over these logits, or None for a plain tensor."""
    if logits.__class__ is Tensor:
        return None
    if isinstance(logits, Logits):
        logits = logits._source
    if isinstance(logits, Source) and not logits.spread:
        return logits
    for convert in _CONVERTERS:
        source = convert(logits)
        if source is not None:
            return source
    return None


def is_source(logits: Any) -> bool:
    """Whether `logits` is a Tensor, a DTensor, a Logits or a Source."""
    return isinstance(logits, (Tensor, Logits, Source))


def ranks_of_call(logits: Any) -> Any:
    """Returns the ranks that share these logits; None if the logits are not sharded."""
    logits = without_wrapper(logits)
    return logits.ranks_of_call() if isinstance(logits, Source) else None


def is_over_ranks(logits: Any) -> bool:
    """Whether the logits are sharded over ranks, as in a VocabShard or a DTensor."""
    logits = without_wrapper(logits)
    over_ranks = isinstance(logits, Source) and logits.over_ranks
    return over_ranks or is_dtensor(logits)


# --- dense teachers; a teacher is a Tensor, or a ScaledHead that computes some rows at a time


def is_dense(t: Any) -> bool:
    """Whether t is a tensor whose values are in memory."""
    return isinstance(t, Tensor) and not isinstance(t, Source)


def teacher_of(teacher: Any, student: Any) -> Any:
    """Returns the teacher without gradients, as a Tensor or an object with `materialize(rows)`."""
    if not isinstance(teacher, (Logits, Source)):
        return teacher.detach()
    source: Any = source_of(teacher)
    if isinstance(student, (Logits, Source)):
        return source.as_teacher()
    # The student's logits are all in memory, so the teacher's logits are also computed at once.
    return source.materialize(slice(None)).view(student.shape)


def teacher_rows(teacher: Any, rows: slice | Tensor) -> Tensor:
    """Returns these rows of a dense teacher's logits or probabilities, as a tensor (n, V)."""
    if is_dense(teacher):
        return teacher.reshape(math.prod(teacher.shape[:-1]), teacher.shape[-1])[rows]
    return teacher.materialize(rows)


def teacher_columns(teacher: Any, start: int, width: int) -> Any:
    """Returns the columns [start, start + width) of a dense teacher that has all columns."""
    return teacher.narrow(-1, start, width)


def flat_teacher(teacher: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    """Returns the tensors of a dense teacher, and the teacher without tensors.

    If the teacher is a plain Tensor, the second result is None.
    """
    return ((teacher,), None) if is_dense(teacher) else teacher.flatten()


def scaled_teacher(teacher: Any, factor: float) -> Any:
    """Returns a dense teacher with the logits of `teacher` times `factor`.

    The result is None if the teacher is a Tensor, because the product would need a copy of the
    tensor.
    """
    return None if is_dense(teacher) else teacher.times(factor)
