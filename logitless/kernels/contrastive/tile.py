"""Loads tiles of similarities x = a @ b.T, and finds the positives and the pairs that are left out.

A tile is (rows, columns), or (lanes, repeats, columns) in forward.py; `rows` and `cols`,
its row and column numbers, have as many dimensions. Rows of similarities are padded in memory, and
kernels read and overwrite the padding: every load and store moves 16 bytes per thread.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...eager.contrastive import Block
from .. import config
from ..numerics import INF, rounded_product


class Pairs(NamedTuple):
    """Pointers to the positives, and to the pairs that are left out. Each can be None."""

    POSITIVES: tl.tensor  # (n,), the column of each row's positive
    diagonal: tl.tensor  # without POSITIVES, the positive of row i is the column i + diagonal
    MASK: tl.tensor  # (n, m), 1 for pairs that are left out
    stride_mask: tl.tensor
    ROW_LABELS: tl.tensor  # (n,)
    COLUMN_LABELS: tl.tensor  # (m,)


@triton.jit
def load_similarities(X, stride_x, rows, cols, n, FULL: tl.constexpr):
    """Loads a tile in fp32. If FULL is True, the whole tile is inside the similarities."""
    at = rows.to(tl.int64) * stride_x + cols
    if FULL:
        return tl.load(X + at).to(tl.float32)
    else:
        return tl.load(X + at, mask=(rows < n) & (cols < stride_x), other=0.0).to(tl.float32)


@triton.jit
def positives_of(pairs, rows, cols, n):
    if pairs.POSITIVES is not None:
        return tl.load(pairs.POSITIVES + rows, mask=rows < n, other=-1) == cols
    else:
        return rows + pairs.diagonal == cols


@triton.jit
def exponentials(x, rate, ref, rows, cols, n, m, FULL: tl.constexpr):
    """Returns 2^(z - ref), or 0 outside the similarities, if no pair is left out."""
    e = tl.exp2(x * rate - ref)
    if not FULL:
        e = tl.where((rows < n) & (cols < m), e, 0.0)
    return e


@triton.jit
def may_hold_positives(pairs, row, column, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether the tile that begins at (row, column) can contain positives."""
    if pairs.POSITIVES is not None:
        return row >= 0
    else:
        first = row + pairs.diagonal
        return (first < column + BLOCK_M) & (first + BLOCK_N > column)


@triton.jit
def logits_of(x, rate, pairs, rows, cols, n, m, FULL: tl.constexpr):
    """Returns the logits of a tile times log2 e, -inf for pairs that are left out."""
    z = rounded_product(x, rate)
    HAS_POSITIVES: tl.constexpr = (pairs.POSITIVES is not None) | (pairs.diagonal is not None)
    if pairs.MASK is not None:
        at = rows.to(tl.int64) * pairs.stride_mask + cols
        out = tl.load(pairs.MASK + at, mask=(rows < n) & (cols < m), other=0) != 0
        if pairs.ROW_LABELS is not None:
            out = out | _same_label(pairs, rows, cols, n, m)
        if HAS_POSITIVES:
            out = out & (positives_of(pairs, rows, cols, n) == 0)
        z = tl.where(out, -INF, z)
    elif pairs.ROW_LABELS is not None:
        out = _same_label(pairs, rows, cols, n, m)
        if HAS_POSITIVES:
            out = out & (positives_of(pairs, rows, cols, n) == 0)
        z = tl.where(out, -INF, z)
    if not FULL:
        z = tl.where((rows < n) & (cols < m), z, -INF)
    return z


@triton.jit
def _same_label(pairs, rows, cols, n, m):
    of_rows = tl.load(pairs.ROW_LABELS + rows, mask=rows < n, other=0)
    return of_rows == tl.load(pairs.COLUMN_LABELS + cols, mask=cols < m, other=0)


def tensors_of(block: Block) -> tuple[Tensor | None, ...]:
    """Returns the tensors POSITIVES, MASK, ROW_LABELS and COLUMN_LABELS of a launch."""
    positives, mask = block.positives, block.mask
    if positives is not None:
        positives = positives.contiguous()
    if mask is not None:
        mask = (mask if mask.stride(1) == 1 else mask.contiguous()).view(torch.uint8)
    labels: Any = (None, None)
    if block.labels is not None:
        labels = (t.contiguous() for t in block.labels)
    return positives, mask, *labels


def numbers_of(x: Tensor, block: Block) -> tuple[int | None, ...]:
    """Returns n, m, stride_x, diagonal and stride_mask of a launch."""
    assert x.stride(1) == 1 or x.shape[1] == 1
    diagonal = block.diagonal if block.positives is None else None
    mask = block.mask
    stride = None
    if mask is not None:
        stride = mask.stride(0) if mask.stride(1) == 1 else mask.shape[1]
    return *x.shape, x.stride(0), diagonal, stride


def is_full(x: Tensor, cut: config.Config) -> bool:
    """Whether every tile is inside the similarities (the constant FULL)."""
    return x.shape[0] % cut.block_n == 0 and x.shape[1] % cut.block_v == 0


def one_exponential(x: Tensor, block: Block) -> bool:
    """Whether kernels may compute one exponential per pair instead of two.

    Its rounding error is slightly larger, but far below that of 16-bit similarities. If pairs are
    left out, though, the positive can be the only pair of a row, whose loss and gradient must be
    exactly 0.
    """
    several = min(x.shape) > 1
    return x.element_size() == 2 and several and block.mask is None and block.labels is None
