"""Checks of targets and ids: integers in [0, V), one or K per row. Only `in_range` reads values."""

from typing import Any

from torch import Tensor

from .tensor_checks import _integer, _rows, _same_device, _shape, _shaped


def classes(name: str, t: Any, x: Tensor) -> None:
    """Checks t, with one class per row. The errors name the differences to F.cross_entropy."""
    if isinstance(t, Tensor) and t.is_floating_point():
        raise TypeError(
            f"{name} must hold integers, got {t.dtype}; soft_cross_entropy takes probabilities."
        )
    _integer(name, t)
    lead = x.shape[:-1]
    if t.shape != lead and len(lead) > 1 and t.shape == (*lead[:1], *lead[2:], x.shape[-1]):
        raise ValueError(
            f"{name} must have shape {_shape(lead)} to match logits {_shape(x)}, got {_shape(t)}; "
            "the vocabulary must be the last dimension; for logits of shape (N, V, ...), pass "
            "logits.movedim(1, -1)."
        )
    _rows(name, t, x)


def ids(name: str, t: Any, x: Tensor) -> None:
    _integer(name, t)
    lead = x.shape[:-1]
    several = t.shape[len(lead) : len(lead) + 1]
    _shaped(name, t, (*lead, *several), x, legal="{rows} or {K}")


def has_first_id(t: Tensor | None, x: Tensor) -> None:
    if t is None:
        raise ValueError("ids must be given if rank=True, got None.")
    if t.dim() == len(x.shape) and t.shape[-1] == 0:
        raise ValueError(f"ids must hold at least one id per row if rank=True, got {_shape(t)}.")


def ids_of_rows(name: str, t: Any, x: Tensor) -> None:
    _integer(name, t)
    _k_per_row(name, t, x)


def negatives(name: str, t: Any, x: Tensor) -> None:
    """K ids that all rows share, or K ids per row."""
    _integer(name, t)
    if t.dim() != 1:
        _k_per_row(name, t, x, "hidden", "(K,) or {K}")
    if t.shape[-1] == 0:
        raise ValueError(f"{name} must hold at least one id, got shape {_shape(t)}.")
    _same_device(name, t, x, "hidden")


def _k_per_row(name: str, t: Tensor, x: Any, of: str = "logits", legal: str = "{K}") -> None:
    wanted = (*x.shape[:-1], t.shape[-1] if t.dim() else 0)
    _shaped(name, t, wanted, x, of, legal)


def in_range(
    ids: Tensor, V: int, counts: Tensor | None, name: str, ignore_index: int | None,
    place: str = "row",
) -> None:  # fmt: skip
    """Raises, with its position, if an id outside [0, V) is selected by the mask `counts`."""
    bad = (ids < 0) | (ids >= V)
    if counts is not None:
        bad &= counts
    if not bool(bad.any()):
        return
    rule = f"be in [0, {V})" + (
        "" if ignore_index is None else f" or ignore_index ({ignore_index})"
    )
    at = tuple(bad.nonzero()[0].tolist())
    where = at[0] if len(at) == 1 else at
    raise IndexError(f"{name} must {rule}, got {int(ids[at])} at {place} {where}.")


def no_labels(ce_weight: float) -> None:
    if ce_weight != 0:
        raise ValueError(f"ce_weight must be 0 without labels, got {ce_weight}.")
