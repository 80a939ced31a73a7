"""The rules of SparseTargets, worded as those of core/checks.py."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import call as _call
from ..core import checks as _checks
from ..core.checks import _floating, _integer, _same_device, _shape


def tensors(ids: Any, logprobs: Any, tail: Any, mask: Any) -> None:
    """Shapes, dtypes and devices."""
    _integer("ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}.")
    if ids.dim() == 0 or ids.shape[-1] == 0:
        raise ValueError(
            f"ids must have at least one slot in its last dimension, got {_shape(ids)}."
        )
    _checks.slots("logprobs", logprobs, "ids", ids)
    _checks.slot_mask(mask, ids, "ids")
    if tail is not None:
        _floating("tail", tail)
        if tail.shape != ids.shape[:-1]:
            raise ValueError(
                f"tail must have shape {_shape(ids.shape[:-1])} to match ids {_shape(ids)}, "
                f"got {_shape(tail)}."
            )
        _same_device("tail", tail, ids, "ids")


def mass(ids: Tensor, logprobs: Tensor, tail: Tensor | None, mask: Tensor | None) -> None:
    """Raise where a row's probabilities come to more than 1, naming the row; where that is free.

    Rounding is allowed for. A log-probability l stored with a relative error u makes p wrong by
    u |l| p; over a row that is u times its entropy, at most u log(K + 1) for K slots and the tail,
    and u more for the sums. A tensor's dtype doesn't tell in which its numbers were rounded first,
    so that u is no less than bfloat16's, 2⁻⁸. A NaN passes: it shows in its own row's loss.
    """
    given = [t for t in (ids, logprobs, tail, mask) if t is not None]
    if (
        _call.under_transform()
        or any(type(t) is not Tensor for t in given)
        or not _call.reads_values(ids)
    ):
        return
    u = max(2**-8, *(torch.finfo(t.dtype).eps / 2 for t in (logprobs, tail) if t is not None))
    most = 1 + u * (1 + math.log(ids.shape[-1] + 1))
    p = logprobs.detach().float().exp()
    if mask is not None:
        p = torch.where(mask != 0, p, 0.0)
    rest = 0.0 if tail is None else tail.detach().float().exp()
    over = p.sum(-1) + rest > most
    if not bool(over.any()):
        return
    _at_most_0("logprobs", logprobs, p > most)
    if tail is not None:
        _at_most_0("tail", tail, rest > most)
    total = _once_each(ids, p).sum(-1) + rest  # only now: it sorts
    over = total > most
    if bool(over.any()):
        place = tuple(over.nonzero()[0].tolist())
        raise ValueError(
            f"{'logprobs' if tail is None else 'logprobs and tail'} must give a row a mass of at "
            f"most 1, got {float(total[place]):.4g} at row {_where(place)}."
        )


def _at_most_0(name: str, t: Tensor, bad: Tensor) -> None:
    if bool(bad.any()):
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be at most 0, the logarithms of probabilities, "
            f"got {float(t[place]):.4g} at {_where(place)}."
        )


def _where(place: tuple[int, ...]) -> int | tuple[int, ...]:
    return place[0] if len(place) == 1 else place


def _once_each(ids: Tensor, p: Tensor) -> Tensor:
    """p of each id of a row once, the largest; 0 where an id is repeated. In another order."""
    p, order = p.sort(dim=-1, descending=True)
    ids, order = ids.gather(-1, order).sort(dim=-1, stable=True)
    again = torch.zeros_like(ids, dtype=torch.bool)
    again[..., 1:] = ids[..., 1:] == ids[..., :-1]
    return p.gather(-1, order).masked_fill(again, 0.0)


_SIMPLE = (int, slice, Tensor, type(None), type(Ellipsis))  # parts of an index; others are arrays


def row_index(index: Any, ids: Tensor) -> tuple:
    """An index of rows, spelt out, that leaves the slots alone: they have no meaning apart."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = [p if isinstance(p, _SIMPLE) else _array(p) for p in parts]
    used = sum(map(_dimensions, parts))
    rows = ids.dim() - 1
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if used > rows or len(dots) > 1:
        raise IndexError(
            f"targets must be indexed by rows, of which it has {_shape(ids.shape[:-1])}, "
            f"got an index into the slots: {index!r}."
        )
    for i in dots:
        parts[i : i + 1] = [slice(None)] * (rows - used)
    return tuple(parts)


def _array(part: Any) -> Tensor:
    found = torch.as_tensor(part)
    return found if found.numel() else found.long()  # [] would be of floats


def _dimensions(part: Any) -> int:
    """How many dimensions a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1


def joined(targets: Sequence[Any], kind: type) -> None:
    """What is joined is of one kind: all with a tail or none, on one device."""
    if not targets:
        raise ValueError("targets must hold at least one SparseTargets, got none.")
    for i, t in enumerate(targets):
        if not isinstance(t, kind):
            raise TypeError(f"targets[{i}] must be SparseTargets, got {type(t).__name__}.")
        _same_device(f"targets[{i}]", t, targets[0], "targets[0]")
        if (t.tail is None) != (targets[0].tail is None):
            one, other = ("no tail", "one") if t.tail is not None else ("a tail", "none")
            raise ValueError(
                f"targets[{i}] must have {one} like targets[0], got {other}: give all of them "
                "their tail, or none."
            )


def same_rows(targets: Sequence[Any], but: int | None) -> None:
    """Rows of one shape, but for dimension `but`."""
    first = targets[0].shape
    for i, t in enumerate(targets):
        same = len(t.shape) == len(first) and all(
            m == n for d, (m, n) in enumerate(zip(t.shape, first, strict=True)) if d != but
        )
        if not same:
            aside = "" if but is None else f" but for dim {but}"
            raise ValueError(
                f"targets[{i}] must have rows {_shape(first)}{aside} like targets[0], "
                f"got {_shape(t)}."
            )


def row_dim(dim: Any, dims: int) -> int:
    """A dimension of `dims` of them, counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}.")
    if not -dims <= dim < dims:
        raise IndexError(f"dim must be one of the {dims} dimensions of rows, got {dim}.")
    return dim % dims


def float_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype!r}.")


def saved(path: Any, header: Any, form: str, version: str) -> None:
    """A file of targets: its metadata says so, and it holds what targets have."""
    found = header.metadata.get("format"), header.metadata.get("version")
    if found != (form, version):
        raise ValueError(
            f"{path} must be a file of format {form!r}, version {version!r}, "
            f"got {found[0]!r}, {found[1]!r}."
        )
    names = set(header.entries)
    if not {"ids", "logprobs"} <= names <= {"ids", "logprobs", "tail", "mask"}:
        raise ValueError(
            f"{path} must hold ids and logprobs, and tail and mask where known, "
            f"got {sorted(names)!r:.200}."
        )
