"""`Source`, the base class of everything that represents logits (..., V) and is no plain tensor.

A head whose logits are not materialised (heads/linear.py), lazy logits (lazy/logits.py), one rank's
shard of the vocabulary (parallel/shard.py), and a user's own subclass are sources. A public
function builds a RowLoss and passes it to `source.evaluate`; the rest of the library treats all
sources alike. LinearLogits and VocabShard are thin public wrappers (`Logits`) around a Source.

A source computes logits for some rows at a time (`loss.rows`), calls the loss's `forward` and
`backward`, and reduces all values with `loss.reduce`. One with only some columns of each row
instead merges the `Partials` of all columns, and calls the backend's `finish`.
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

    # Every loss reads these several times. Slots are faster than properties, and in help().
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
        """Evaluates a RowLoss, with the result of `evaluate` in evaluate.py."""
        raise NotImplementedError

    def again(self, signature: Any, label: Tensor) -> Tensor | None:
        """The loss as in an earlier call with equal arguments, if the source can repeat it.

        `signature` stands for all arguments of the loss but the source and the label.
        """
        return None

    def evaluate_in_place(self, loss: Any, reduction: str, row_weight: Tensor | None) -> Any:
        """Like `evaluate`, but the gradient is allowed to overwrite logits that are in memory."""
        return self.evaluate(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        """Returns the results of a capture (capture.py) for all rows."""
        raise NotImplementedError

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """Returns the differentiable logits (..., V), or those of `rows` without a gradient."""
        raise NotImplementedError

    def as_teacher(self) -> Any:
        """These logits without a gradient: a Tensor, or an object with `materialize(rows)`."""
        return self.materialize(slice(None)).view(self.shape)

    def in_columns(self, shard: Any) -> "Source":
        """Returns a source of all columns that computes only this rank's, given its `Shard`."""
        raise TypeError(f"source must be logits or a LinearLogits, got {type(self).__name__}.")

    def ranks_of_call(self) -> Any:
        """Returns the ranks that share these logits, and so must make the same calls, or None."""
        return None

    def describe(self) -> str:
        """A one-line description that is equal on all ranks (see parallel/same_call.py)."""
        return f"a {type(self).__name__}"


def is_dtensor(t: Any) -> bool:
    # the class first: hasattr takes longer
    return t.__class__ not in (Tensor, Parameter) and hasattr(t, "placements")


def needs_grad(*tensors: Tensor | None) -> bool:
    # a loop, because any() is slower
    for t in tensors:  # noqa: SIM110
        if t is not None and t.requires_grad:
            return True
    return False


def without_wrapper(logits: Any) -> Any:
    return logits._source if isinstance(logits, Logits) else logits


def repeated(logits: Any, signature: Any, label: Tensor) -> Tensor | None:
    """See `Source.again`."""
    if signature is None or logits.__class__ is Tensor:
        return None
    source = logits._source if isinstance(logits, Logits) else logits
    return source.again(signature, label) if isinstance(source, Source) else None


_CONVERTERS: list[Callable[[Any], "Source | None"]] = []


def converts(function: F) -> F:
    """Registers a function that converts logits to a Source, or returns None for others.

    It sees a Source that is `spread`, and logits that are neither a Source nor a plain tensor.
    """
    _CONVERTERS.append(function)
    return function


def source_of(logits: Any) -> "Source | None":
    """Returns the Source of these logits, or None for a plain tensor."""
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
    return isinstance(logits, (Tensor, Logits, Source))


def ranks_of_call(logits: Any) -> Any:
    logits = without_wrapper(logits)
    return logits.ranks_of_call() if isinstance(logits, Source) else None


def is_over_ranks(logits: Any) -> bool:
    logits = without_wrapper(logits)
    over_ranks = isinstance(logits, Source) and logits.over_ranks
    return over_ranks or is_dtensor(logits)


# --- dense teachers; a teacher is a Tensor, or a ScaledHead that computes some rows at a time


def is_dense(t: Any) -> bool:
    """Whether t is a tensor whose values are in memory, and no source."""
    return isinstance(t, Tensor) and not isinstance(t, Source)


def teacher_of(teacher: Any, student: Any) -> Any:
    """Returns the teacher without gradients, as in `as_teacher`."""
    if not isinstance(teacher, (Logits, Source)):
        return teacher.detach()
    source: Any = source_of(teacher)
    if isinstance(student, (Logits, Source)):
        return source.as_teacher()
    # The student's logits exist in memory, so the teacher's may too.
    return source.materialize(slice(None)).view(student.shape)


def teacher_rows(teacher: Any, rows: slice | Tensor) -> Tensor:
    """Returns these rows of a dense teacher, as a tensor (n, V)."""
    if is_dense(teacher):
        return teacher.reshape(math.prod(teacher.shape[:-1]), teacher.shape[-1])[rows]
    return teacher.materialize(rows)


def teacher_columns(teacher: Any, start: int, width: int) -> Any:
    return teacher.narrow(-1, start, width)


def flat_teacher(teacher: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    """Returns the teacher's tensors, and the teacher without them (None if it is a Tensor)."""
    return ((teacher,), None) if is_dense(teacher) else teacher.flatten()


def scaled_teacher(teacher: Any, factor: float) -> Any:
    """Returns a dense teacher with `factor` times the logits; None for a Tensor, to save a copy."""
    return None if is_dense(teacher) else teacher.times(factor)
