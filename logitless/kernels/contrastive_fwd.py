"""Statistics of the rows and the columns of similarities, from one pass over the similarities.

Each program reads a strip of columns of several rows, one tile at a time. A tile has three
dimensions: lanes, repeats and columns. Each warp holds one lane. So the max over the repeats of a
column needs no exchange between threads, and the max over the columns of a row is inside one warp.
Triton gives the warps to the first dimension, so the lanes come first.
The state of the columns stays in registers until the end of the strip. The states of the rows are
written for every strip. A second launch merges the states of strips in a fixed order.

All logits are multiplied by log2 e, and the kernels compute exponentials of base 2. The state of a
row is the max m of its logits, and the sum s of 2^(z - m).
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..eager.contrastive import Block
from . import config
from .contrastive_tile import Pairs, load_similarities, logits_of, numbers_of, tensors_of
from .launch import REMEMBERED, Launch
from .numerics import INF, LN2, LOG2E, finite, move
from .profiling import nothing, profiled


@triton.jit(
    **profiled("contrastive_fwd", MASK=nothing),
    do_not_specialize_on_alignment=["POSITIVES", "MASK", "ROW_LABELS", "COLUMN_LABELS"],
)
def _contrastive_fwd_kernel(
    X, RATE, POSITIVES, MASK, ROW_LABELS, COLUMN_LABELS,  # inputs
    ROWS, COLUMNS,  # outputs (2, strips, n) and (2, spans, m)
    n, m, stride_x, diagonal, stride_mask,  # sizes
    LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Each program reads SPAN rows of a strip of BLOCK_M columns."""
    strip, span = tl.program_id(0), tl.program_id(1)
    strips, spans = tl.num_programs(0), tl.num_programs(1)
    REPEATS: tl.constexpr = BLOCK_N // LANES
    offs_m = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = offs_m[None, None, :]
    in_tile = (tl.arange(0, LANES) * REPEATS)[:, None] + tl.arange(0, REPEATS)[None, :]
    rate = tl.load(RATE)
    pairs = Pairs(POSITIVES, diagonal, MASK, stride_mask, ROW_LABELS, COLUMN_LABELS)
    m_c = tl.full((LANES, BLOCK_M), -INF, tl.float32)
    s_c = tl.zeros((LANES, BLOCK_M), tl.float32)
    first = span * SPAN
    for start in range(first, tl.minimum(first + SPAN, n), BLOCK_N):
        offs_n = start + in_tile
        rows = offs_n[:, :, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
        z = logits_of(x, rate, pairs, rows, cols, n, m, FULL)
        if ROWS is not None:
            m_r = tl.max(z, 2)
            s_r = tl.sum(tl.exp2(z - finite(m_r)[:, :, None]), 2)
            Row = ROWS + strip.to(tl.int64) * n + offs_n
            tl.store(Row, m_r, mask=offs_n < n)
            tl.store(Row + strips.to(tl.int64) * n, s_r, mask=offs_n < n)
        if COLUMNS is not None:
            m_new = tl.maximum(m_c, tl.max(z, 1))
            e = tl.sum(tl.exp2(z - finite(m_new)[:, None, :]), 1)
            s_c = s_c * tl.exp2(move(m_c, m_new, s_c)) + e
            m_c = m_new
    if COLUMNS is not None:
        m_all = tl.max(m_c, 0)
        s_all = tl.sum(s_c * tl.exp2(move(m_c, m_all[None, :], s_c)), 0)
        Column = COLUMNS + span.to(tl.int64) * m + offs_m
        tl.store(Column, m_all, mask=offs_m < m)
        tl.store(Column + spans.to(tl.int64) * m, s_all, mask=offs_m < m)


@triton.jit(**profiled("contrastive_merge"))
def _contrastive_merge_kernel(
    STATE,  # (count, 2), input and output
    PARTS,  # (2, parts, count), input
    count, parts,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program merges the states of BLOCK rows or columns into STATE, BLOCK_P at a time."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    m = tl.load(STATE + 2 * offs, mask=mask, other=-INF)
    s = tl.load(STATE + 2 * offs + 1, mask=mask, other=0.0)
    for start in range(0, parts, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        inside = (offs_p[:, None] < parts) & mask[None, :]
        Part = PARTS + offs_p[:, None].to(tl.int64) * count + offs[None, :]
        m_p = tl.load(Part, mask=inside, other=-INF)
        s_p = tl.load(Part + tl.cast(parts, tl.int64) * count, mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(m_p, 0))
        e = tl.sum(s_p * tl.exp2(move(m_p, m_new[None, :], s_p)), 0)
        s = s * tl.exp2(move(m, m_new, s)) + e
        m = m_new
    tl.store(STATE + 2 * offs, m, mask=mask)
    tl.store(STATE + 2 * offs + 1, s, mask=mask)


def contrastive_read(
    x: Tensor,  # (n, m), with padded rows
    block: Block,
    rows: Tensor | None,  # (n, 2)
    columns: Tensor | None,  # (m, 2)
) -> None:
    """Merges the logits of a block into the states of its rows and of its columns."""
    n, m = x.shape
    if n == 0 or m == 0 or (rows is None and columns is None):
        return
    cut = config.contrastive_fwd(n, m, x.element_size())
    strips, spans = config.ceil_div(m, cut.block_v), config.ceil_div(n, cut.span)
    row_parts = None if rows is None else rows.new_empty((2, strips, n))
    column_parts = None if columns is None else columns.new_empty((2, spans, m))
    _plan(numbers_of(x, block), cut, (strips, spans))(
        x, rate_of(block), *tensors_of(block), row_parts, column_parts
    )
    for state, parts in ((rows, row_parts), (columns, column_parts)):
        if state is not None and parts is not None:
            _merge_plan(len(state), parts.shape[1], config.contrastive_merge())(state, parts)


def contrastive_finish(state: Tensor, picked: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns -log p of the positives, and the normalisers that `contrastive_gradient` takes.

    `picked` holds the similarities of the positives. The normalisers are logarithms of base 2.
    """
    m, log_s = state[:, 0], state[:, 1].log2()
    of_positives = picked.float() * (scale * LOG2E.value)
    return (log_s - (of_positives - m)) * LN2.value, m + log_s


def rate_of(block: Block) -> Tensor:
    """Returns scale · log2 e, the factor from similarities to logits of base 2."""
    return block.scale * LOG2E.value


@functools.lru_cache(REMEMBERED)
def _plan(numbers: tuple, cut: config.Config, programs: tuple[int, int]) -> Launch:
    n, m = numbers[:2]
    return Launch(
        _contrastive_fwd_kernel, programs, numbers, num_warps=cut.num_warps,
        LANES=min(cut.num_warps, cut.block_n), BLOCK_N=cut.block_n, BLOCK_M=cut.block_v,
        SPAN=cut.span, FULL=n % cut.block_n == 0 and m % cut.block_v == 0,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _merge_plan(count: int, parts: int, cut: config.Config) -> Launch:
    return Launch(
        _contrastive_merge_kernel, (config.ceil_div(count, cut.block_v),), (count, parts),
        num_warps=cut.num_warps, BLOCK_P=cut.block_n, BLOCK=cut.block_v,
    )  # fmt: skip
