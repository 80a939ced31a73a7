"""`Source`, the base of all sources of logits, and `source_of`, which finds the source of logits.

A plain tensor is evaluated by evaluate.py. Anything else that stands for logits (..., V) is a
`Source`: a head that is never materialised (heads/linear.py), lazy logits (lazy/logits.py), one
rank's columns of a vocabulary (parallel/shard.py), or a source of your own. The public functions
check their arguments by shape, dtype and device, build a RowLoss, and pass it to `evaluate` of the
source. Nothing else in the library depends on the kind of source.

A source calls `forward` and `backward` of the loss on the logits that it computes, for as many rows
at a time as it likes (`loss.rows(rows, lead)` is the same loss for some rows), and reduces the
values per row by `loss.reduce`. A source that has only some columns of each row computes their
`Partials` with the backend's `partial`, merges them with those of the other columns, and calls
`finish`.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .loss import RowLoss

TopK = tuple[Tensor, Tensor, Tensor]  # ids and log-probabilities (..., k), log tail mass (...)


class Source:
    """The base of everything that stands for logits (..., V) and is not a plain tensor."""

    shape: torch.Size  # (..., V)
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    hidden: Tensor | None = None  # the hidden states (..., D), if it is a head
    over_ranks = False  # whether it is one rank's columns of the logits
    exists = False  # whether the logits are in memory as a whole
    spread = False  # whether it is built from DTensors; source_of then returns another source

    def dim(self) -> int:
        return len(self.shape)

    def evaluate(self, loss: "RowLoss", reduction: str, row_weight: Tensor | None) -> Any:
        """The loss of the rows, weighted and reduced: "none" (...), "sum" or "mean" ().

        For a RowLoss with multiple outputs, their tuple. Differentiable.
        """
        raise NotImplementedError

    def evaluate_in_place(self, loss: "RowLoss", reduction: str, row_weight: Tensor | None) -> Any:
        """The same, where the gradient may overwrite logits that exist in memory."""
        return self.evaluate(loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        raise NotImplementedError

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """The logits, (..., V), differentiable; or those of some rows, (n, V), as constants."""
        raise NotImplementedError

    def as_teacher(self) -> Any:
        """The same logits as constants: a Tensor, or an object with `materialize(rows)`."""
        return self.materialize(slice(None)).view(self.shape)

    def in_columns(self, shard: Any) -> "Source":
        """The logits of all ranks, if this source holds the columns of `shard`, a VocabShard."""
        raise TypeError(f"source must be logits or a LinearLogits, got {type(self).__name__}.")

    def ranks_of_call(self) -> Any:
        """The ranks that must make the same call, or None."""
        return None

    def describe(self) -> str:
        """The source in one line, the same on all ranks: see parallel/same_call.py."""
        return f"a {type(self).__name__}"


def is_dtensor(t: Any) -> bool:
    return t.__class__ is not Tensor and hasattr(t, "placements")


def source_of(logits: Any) -> "Source | None":
    """The Source that evaluates a loss over these logits; None for a plain tensor."""
    if logits.__class__ is Tensor:
        return None
    if isinstance(logits, Source) and not logits.spread:
        return logits
    if isinstance(logits, Source) or is_dtensor(logits):
        # Imported here, because parallel/ is built on core/.
        from ..parallel.dtensor import source_of_dtensor

        return source_of_dtensor(logits)
    return None


def is_source(logits: Any) -> bool:
    """Whether these can be logits: a Tensor (also a DTensor) or a Source."""
    return isinstance(logits, (Tensor, Source))


def ranks_of_call(logits: Any) -> Any:
    """The ranks that must make the same call over these logits, or None."""
    return logits.ranks_of_call() if isinstance(logits, Source) else None


def is_over_ranks(logits: Any) -> bool:
    """Whether a rank has only some columns of the logits: a VocabShard or a DTensor."""
    over_ranks = isinstance(logits, Source) and logits.over_ranks
    return over_ranks or is_dtensor(logits)


# --- dense teachers: a Tensor, or an object that computes some rows at a time (ScaledHead)


def is_dense(t: Any) -> bool:
    """Whether t is a tensor whose values are in memory."""
    return isinstance(t, Tensor) and not isinstance(t, Source)


def teacher_of(teacher: Any, student: Any) -> Any:
    """A dense teacher as constants: a Tensor, or an object that computes some rows at a time."""
    if not isinstance(teacher, Source):
        return teacher.detach()
    source: Any = source_of(teacher)
    if isinstance(student, Source):
        return source.as_teacher()
    # The student's logits exist as a whole, so the teacher's may too.
    return source.materialize(slice(None)).view(student.shape)


def teacher_rows(teacher: Any, rows: slice | Tensor) -> Tensor:
    """Some rows of a dense teacher, (n, V)."""
    if is_dense(teacher):
        return teacher.reshape(math.prod(teacher.shape[:-1]), teacher.shape[-1])[rows]
    return teacher.materialize(rows)


def teacher_columns(teacher: Any, start: int, width: int) -> Any:
    """The columns [start, start + width) of a dense teacher of whole rows."""
    return teacher.narrow(-1, start, width)


def flat_teacher(teacher: Any) -> tuple[tuple[Tensor | None, ...], Any]:
    """The tensors of a dense teacher, and the teacher without them: None for a Tensor."""
    return ((teacher,), None) if is_dense(teacher) else teacher.flatten()


def scaled_teacher(teacher: Any, factor: float) -> Any:
    """A dense teacher times a factor; None for a Tensor, because that would copy it."""
    return None if is_dense(teacher) else teacher.times(factor)
