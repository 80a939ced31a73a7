"""Checks of SparseTargets."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import call as _call
from ..core import tensor_checks as _checks
from ..core.tensor_checks import _floating, _integer, _same_device, _shape


def tensors(ids: Any, logprobs: Any, tail: Any, mask: Any) -> None:
    _integer("ids", ids)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be int32 or int64, got {ids.dtype}.")
    if ids.dim() == 0 or ids.shape[-1] == 0:
        raise ValueError(
            f"ids must have at least one slot in its last dimension, got {_shape(ids)}."
        )
    _checks.slots("logprobs", logprobs, ids, "ids")
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
    """Raises if the probabilities of a row add up to more than 1, and names the row.

    Values on a GPU are read only with LOGITLESS_CHECK=1. Rounding is allowed for: a relative error
    u of log p = l is an error u · |l| · p of p, so a row has u times its entropy, which is at most
    log(K + 1), plus u for the sum. fp32 values may come from bfloat16, so u is at least 2⁻⁸. A row
    with a NaN passes, because its loss will be NaN anyway.
    """
    tensors = [t for t in (ids, logprobs, tail, mask) if t is not None]
    if (
        _call.under_transform()
        or any(type(t) is not Tensor for t in tensors)
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
    # `_once_each` sorts, which is slow, so it waits until the sum with repeated ids is too large.
    total = _once_each(ids, p).sum(-1) + rest
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
            f"{name} must be at most 0, as logarithms of probabilities are, "
            f"got {float(t[place]):.4g} at {_where(place)}."
        )


def _where(place: tuple[int, ...]) -> int | tuple[int, ...]:
    return place[0] if len(place) == 1 else place


def _once_each(ids: Tensor, p: Tensor) -> Tensor:
    """Returns `p` sorted by id, with 0 in all slots of an id but that of its largest `p`."""
    p, order = p.sort(dim=-1, descending=True)
    ids, order = ids.gather(-1, order).sort(dim=-1, stable=True)
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[..., 1:] = ids[..., 1:] == ids[..., :-1]
    return p.gather(-1, order).masked_fill(repeated, 0.0)


# Entries of an index that stay as they are; others, such as lists, become tensors.
_SIMPLE = (int, slice, Tensor, type(None), type(Ellipsis))


def row_index(index: Any, ids: Tensor) -> tuple:
    """Returns the index as a tuple, without an Ellipsis. An entry for the K ids raises."""
    entries = index if isinstance(index, tuple) else (index,)
    entries = [entry if isinstance(entry, _SIMPLE) else _array(entry) for entry in entries]
    used = sum(map(_dimensions, entries))
    rows = ids.dim() - 1
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if used > rows or len(dots) > 1:
        raise IndexError(
            f"targets must be indexed by rows, which have shape {_shape(ids.shape[:-1])}, "
            f"got an index into the slots: {index!r}."
        )
    for i in dots:
        entries[i : i + 1] = [slice(None)] * (rows - used)
    return tuple(entries)


def _array(entry: Any) -> Tensor:
    array = torch.as_tensor(entry)
    return array if array.numel() else array.long()  # as_tensor([]) is fp32, not an integer index


def _dimensions(entry: Any) -> int:
    """How many dimensions of a tensor one entry of an index applies to."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def joined(targets: Sequence[Any], kind: type) -> None:
    if not targets:
        raise ValueError("targets must hold at least one SparseTargets, got none.")
    for i, t in enumerate(targets):
        if not isinstance(t, kind):
            raise TypeError(f"targets[{i}] must be SparseTargets, got {type(t).__name__}.")
        _same_device(f"targets[{i}]", t, targets[0], "targets[0]")
        if (t.tail is None) != (targets[0].tail is None):
            rule, got = ("no tail", "one") if t.tail is not None else ("a tail", "none")
            raise ValueError(
                f"targets[{i}] must have {rule}, like targets[0], got {got}. Either all targets "
                "have a tail, or none."
            )


def same_rows(targets: Sequence[Any], except_dim: int | None) -> None:
    """Checks that all rows have the same shape, except in the dimension `except_dim`."""
    first = targets[0].shape
    for i, t in enumerate(targets):
        same = len(t.shape) == len(first) and all(
            m == n for d, (m, n) in enumerate(zip(t.shape, first, strict=True)) if d != except_dim
        )
        if not same:
            exception = "" if except_dim is None else f" except in dim {except_dim}"
            raise ValueError(
                f"targets[{i}] must have rows {_shape(first)}{exception} like targets[0], "
                f"got {_shape(t)}."
            )


def row_dim(dim: Any, dims: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}.")
    if not -dims <= dim < dims:
        raise IndexError(f"dim must be one of the {dims} dimensions of rows, got {dim}.")
    return dim % dims


def float_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point dtype, got {dtype!r}.")


def saved(path: Any, header: Any, form: str, version: str) -> None:
    stored = header.metadata.get("format"), header.metadata.get("version")
    if stored != (form, version):
        raise ValueError(
            f"{path} must be a file of format {form!r}, version {version!r}, "
            f"got {stored[0]!r}, {stored[1]!r}."
        )
    names = set(header.entries)
    if not {"ids", "logprobs"} <= names <= {"ids", "logprobs", "tail", "mask"}:
        raise ValueError(
            f"{path} must hold ids and logprobs, and may hold tail and mask, "
            f"got {sorted(names)!r:.200}."
        )
