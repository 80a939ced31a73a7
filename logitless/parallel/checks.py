"""Checks the arguments of functions over a vocabulary that is sharded over ranks."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core import tensor_checks as _checks
from ..core.source import Source


def mean(loss_sum: Any, count: Any) -> None:
    # The value of a `count` on a GPU is not checked, because the host would wait.
    if not isinstance(loss_sum, Tensor) or not loss_sum.is_floating_point() or loss_sum.dim():
        got = type(loss_sum).__name__
        if isinstance(loss_sum, Tensor):
            got = f"{loss_sum.dtype} of shape {tuple(loss_sum.shape)}"
        raise TypeError(
            "loss_sum must be one floating-point number as a tensor, such as a loss with"
            f' reduction="sum", got {got}.'
        )
    is_number = isinstance(count, (int, float)) and not isinstance(count, bool)
    if not is_number and not (isinstance(count, Tensor) and not count.dim()):
        got = f"shape {tuple(count.shape)}" if isinstance(count, Tensor) else repr(count)[:50]
        raise TypeError(f"count must be one number, or a tensor of one number, got {got}.")
    on_host = not isinstance(count, Tensor) or count.device.type == "cpu"
    if on_host and not 0 <= float(count) < float("inf"):
        raise ValueError(f"count must be at least 0, got {float(count)}.")


def shard(source: Any, start: Any, vocab: Any, sequence_parallel: Any) -> None:
    _checks.some_logits(source, "source")
    if has_all_columns(source):
        raise TypeError(
            "source must be this rank's columns, got lazy logits of all ranks; pass the lazy"
            " logits to the loss without a VocabShard."
        )
    for name, value in (("start", start), ("vocab", vocab)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an int, got {value!r}.")
        if value is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}.")
    _checks.yes_or_no("sequence_parallel", sequence_parallel)
    if sequence_parallel and (
        not isinstance(source, Source) or source.hidden is None or source.hidden.dim() < 2
    ):
        raise TypeError(
            "source must be a LinearLogits over hidden states (tokens, ..., D) with "
            f"sequence_parallel=True, got {source!r:.60}."
        )


def has_all_columns(source: Any) -> bool:
    """Whether losses over `source` already use the columns of all ranks, as with a VocabShard."""
    return isinstance(source, Source) and source.ranks_of_call() is not None


def member(index: int) -> None:
    if index < 0:
        raise ValueError("group must contain this rank, got a group without this rank.")


def tiles(starts: Sequence[int], widths: Sequence[int], vocab: int | None) -> None:
    """Checks that the columns of all ranks cover the vocabulary without gaps or overlaps."""
    end = 0
    for start, width, rank in sorted(zip(starts, widths, range(len(starts)), strict=True)):
        if start != end:
            raise ValueError(
                f"start must be {end} on rank {rank}, because the preceding columns end at {end},"
                f" got {start}; the ranks have {list(widths)} columns."
            )
        end += width
    if vocab is not None and end != vocab:
        raise ValueError(
            f"vocab must be {end}, the sum of the ranks' columns {list(widths)}, got {vocab}."
        )
    if end == 0:
        raise ValueError("source must have at least one column on one of the ranks, got none.")


def inside(start: int, width: int, vocab: int) -> None:
    """Checks that this rank's columns are inside the vocabulary, without data of other ranks."""
    if start + width > vocab:
        raise ValueError(
            f"start must be at most {vocab - width}, so that {width} columns end within vocab"
            f" {vocab}, got {start}."
        )


def chunk(width: int, chunk: int) -> None:
    if width != chunk:
        raise ValueError(
            f"a sharded DTensor must have {chunk} columns on this rank, as after torch.chunk,"
            f" got {width}; for any other split, pass ll.VocabShard(logits, group)."
        )


def same_columns(teacher: Any, student: Any) -> None:
    if teacher != student:
        raise ValueError(
            f"teacher must have the same columns as the student, widths {student.widths} and starts"
            f" {student.starts}, got widths {teacher.widths} and starts {teacher.starts}."
        )


def replicated(t: Any) -> None:
    """`t` is a DTensor other than the logits, such as labels."""
    if not all(p.is_replicate() for p in t.placements):
        raise TypeError(
            "tensors other than the logits must be plain tensors or "
            f"replicated DTensors, got a DTensor of placements {t.placements}."
        )


def same_call(said: Sequence[str]) -> None:
    """`said` holds one text per rank."""
    for rank, words in enumerate(said):
        if words != said[0]:
            raise ValueError(
                "ranks must call the same loss with the same arguments, got on rank 0:\n"
                f"  {said[0]}\nand on rank {rank}:\n  {words}."
            )
