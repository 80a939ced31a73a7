"""The rules of a vocabulary spread over ranks, worded as those of core/checks.py."""

from collections.abc import Sequence
from typing import Any

from ..core import checks as _checks


def shard(source: Any, start: Any, vocab: Any, sequence_parallel: Any) -> None:
    """One rank's columns, and the first of them."""
    _checks.some_logits(source, "source")
    if getattr(getattr(source, "recipe", None), "shard", None) is not None:
        raise TypeError(
            "source must be this rank's columns, got lazy logits of all ranks: give them to the"
            " loss as they are."
        )
    for name, value in (("start", start), ("vocab", vocab)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} must be an int, got {value!r}.")
        if value is not None and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}.")
    _checks.yes_or_no("sequence_parallel", sequence_parallel)
    if sequence_parallel and (not hasattr(source, "hidden") or source.hidden.dim() < 2):
        raise TypeError(
            "source must be a LinearLogits over hidden states (tokens, ..., D) with "
            f"sequence_parallel=True, got {source!r:.60}."
        )


def member(index: int) -> None:
    if index < 0:
        raise ValueError("group must have this rank in it, got one without it.")


def tiles(starts: Sequence[int], widths: Sequence[int], vocab: int | None) -> None:
    """The ranks' columns side by side are a vocabulary."""
    end = 0
    for start, width, rank in sorted(zip(starts, widths, range(len(starts)), strict=True)):
        if start != end:
            raise ValueError(
                f"start must be {end} on rank {rank}, where the columns before it end, got {start};"
                f" the ranks have {list(widths)} columns."
            )
        end += width
    if vocab is not None and end != vocab:
        raise ValueError(
            f"vocab must be the columns of all ranks, {end} of {list(widths)}, got {vocab}."
        )
    if end == 0:
        raise ValueError("source must have at least one column on one of the ranks, got none.")


def same_columns(teacher: Any, student: Any) -> None:
    if teacher != student:
        raise ValueError(
            f"teacher must have the columns of the student, {student.widths} from {student.starts},"
            f" got {teacher.widths} from {teacher.starts}."
        )


def head_placements(hidden: Any, weight: Any, bias: Any) -> None:
    """A head whose weight is sharded over the vocabulary, beside hidden states of all ranks."""
    _checks.placed("weight", weight, 0)
    if all(placement.is_replicate() for placement in weight.placements):
        raise TypeError(
            f"weight must be sharded on dimension 0, got a DTensor of placements "
            f"{weight.placements}: a head that every rank has whole takes weight.to_local()."
        )
    for name, t in (("hidden", hidden), ("bias", bias)):
        if t is None:
            continue
        if not hasattr(t, "placements") or t.device_mesh != weight.device_mesh:
            raise TypeError(
                f"{name} must be a DTensor on the mesh of weight, got a {type(t).__name__}:"
                " DTensor.from_local says how it is spread over ranks. (Of a weight that FSDP"
                " shards, compute the loss inside the forward of that module, or fuse the model.)"
            )
    if bias is not None and bias.placements != weight.placements:
        raise TypeError(
            f"bias must have the placements of weight, {weight.placements}, got {bias.placements}."
        )
    for own, other in zip(weight.placements, hidden.placements, strict=True):
        tokens = not own.is_replicate() and other.is_shard() and other.dim < hidden.dim() - 1
        if not (other.is_replicate() or tokens):
            raise TypeError(
                "hidden must be replicated, or sharded by tokens over the ranks that share weight,"
                f" got a DTensor of placements {hidden.placements}."
            )


def replicated(t: Any) -> None:
    """A DTensor beside the logits: labels, weights, and the like."""
    if not all(p.is_replicate() for p in t.placements):
        raise TypeError(
            "what is given beside logits must be plain tensors, or replicated, got a DTensor of "
            f"placements {t.placements}."
        )


def same_call(said: Sequence[str]) -> None:
    """All ranks call the same loss."""
    for rank, words in enumerate(said):
        if words != said[0]:
            raise ValueError(
                f"ranks must call one loss with the same arguments, got on rank 0:\n  {said[0]}\n"
                f"and on rank {rank}:\n  {words}."
            )
