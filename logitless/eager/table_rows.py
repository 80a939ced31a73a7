"""Dot products of each hidden state with M rows of a table (V, D), in plain PyTorch.

Only a dense gradient of the table is as large as the table.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import NO_ID, PRECISION, has_values

CHUNK_BYTES = 16 << 20  # bytes of the table's rows that are gathered at once


def _chunks(ids: Tensor, width: int, itemsize: int) -> Iterator[slice]:
    """Yields slices of the rows of `ids` (N, M) that gather about CHUNK_BYTES of the table each."""
    step = max(1, CHUNK_BYTES // max(ids.shape[1] * width * itemsize, 1))
    for start in range(0, len(ids), step):
        yield slice(start, start + step)


def row_dots(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """hidden[i] · weight[ids[i, j]] (N, M), in fp32 or fp64; 0 for NO_ID, NaN out of range."""
    full = PRECISION[hidden.dtype]
    dots = torch.zeros(ids.shape, device=ids.device, dtype=full)
    inside = (ids >= 0) & (ids < len(weight))
    for rows in _chunks(ids, weight.shape[1], full.itemsize):
        table = weight[torch.where(inside[rows], ids[rows], 0)].to(full)
        found = (table @ hidden[rows].to(full).unsqueeze(-1)).squeeze(-1)
        dots[rows] = torch.where(inside[rows], found, torch.nan)
    return dots.masked_fill_(ids == NO_ID, 0.0)


def row_dots_gradients(
    hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor, needs: tuple[bool, bool], sparse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of `hidden` and `weight` that `needs` selects; g is that of `row_dots`.

    A sparse gradient of the weight is COO, with the rows of `ids` only. A pair (i, j) with g[i,
    j] = 0 adds 0, even if the hidden state or the row of the table is not finite.
    """
    full = PRECISION[hidden.dtype]
    if not has_values(ids):  # the number of distinct ids is unknown, and at most ids.numel()
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        which, rows = ids.reshape(-1), weight.new_empty((ids.numel(), weight.shape[1]))
        return d_hidden, table_gradient(which, rows, weight, sparse) if needs[1] else None
    g = g.to(full)
    used = (ids >= 0) & (ids < len(weight)) & (g != 0)
    d_hidden = torch.zeros_like(hidden, dtype=full) if needs[0] else None
    d_rows = None
    which, place = ids.new_zeros(0), ids
    if needs[1]:
        which, place = torch.unique(ids[used], return_inverse=True)
        d_rows = torch.zeros((len(which), weight.shape[1]), device=g.device, dtype=full)
    start = 0
    for rows in _chunks(ids, weight.shape[1], full.itemsize):
        row, column = used[rows].nonzero(as_tuple=True)
        gain = g[rows][row, column].unsqueeze(-1)
        if d_hidden is not None:
            table = weight[ids[rows][row, column]].to(full)
            _add_rows(d_hidden[rows], row, gain * table)
        if d_rows is not None:
            _add_rows(d_rows, place[start : start + len(row)], gain * hidden[rows][row].to(full))
        start += len(row)
    d_hidden = None if d_hidden is None else d_hidden.to(hidden.dtype)
    if d_rows is None:
        return d_hidden, None
    return d_hidden, table_gradient(which, d_rows.to(weight.dtype), weight, sparse)


def _add_rows(total: Tensor, at: Tensor, rows: Tensor) -> None:
    """Adds `rows` (n, D) to `total` at the indices `at` (n,), in the same order in every run.

    The order of `index_add_` on a GPU changes from run to run.
    """
    if total.is_cuda:
        total.index_put_((at,), rows, accumulate=True)
    else:
        total.index_add_(0, at, rows)


def table_gradient(ids: Tensor, rows: Tensor, weight: Tensor, sparse: bool) -> Tensor:
    """Returns the gradient of the weight: `rows` (n, D) at distinct, ascending `ids`, else 0."""
    if sparse:
        return torch.sparse_coo_tensor(
            ids.unsqueeze(0), rows, weight.shape, is_coalesced=True, check_invariants=False
        )
    return torch.zeros_like(weight).index_copy_(0, ids, rows)
