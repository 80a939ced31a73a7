"""Statistics of the rows and the columns of similarities, from one pass over the similarities.

Each program reads several rows of a strip of columns, tile by tile. A tile is (lanes, repeats,
columns), where a lane is a group of adjacent rows in one warp: both sums stay inside a warp. Lanes
come first, because Triton distributes the warps over the first dimension. Column states stay in
registers to the end of the strip; those of rows are written once per strip. A second launch merges
the strips in a fixed order.

Logits are multiplied by log2 e. A state is a reference m and Σ 2^(z - m). For 16-bit similarities
(see `one_exponential`), a strip first tries one reference for all its rows and columns, so that a
pair needs one exponential; if a sum leaves `_in_range`, it starts again with the max of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...eager.contrastive import Block
from .. import config
from ..launch import launch
from ..numerics import INF, LN2, LOG2E, finite, move
from ..profiling import nothing, profiled
from .tile import (
    Pairs,
    exponentials,
    is_full,
    load_similarities,
    logits_of,
    numbers_of,
    one_exponential,
    tensors_of,
)


@triton.jit
def _in_range(s):
    """Whether a sum of exponentials is exact although its reference is not the max; not for NaN.

    The terms lost below 2^-126 are negligible in a sum above 2^-60.
    """
    return (s > 8.7e-19) & (s < 1.2e18)  # 2^-60 and 2^60


@triton.jit(
    **profiled("contrastive_fwd", MASK=nothing),
    do_not_specialize_on_alignment=["POSITIVES", "MASK", "ROW_LABELS", "COLUMN_LABELS"],
)
def _contrastive_fwd_kernel(
    X, RATE, POSITIVES, MASK, ROW_LABELS, COLUMN_LABELS,  # inputs
    ROWS, COLUMNS,  # outputs (2, strips, n) and (2, spans, m)
    n, m, stride_x, diagonal, stride_mask,  # sizes
    LANES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr,
    FULL: tl.constexpr, ONE_EXPONENTIAL: tl.constexpr,
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
    first = span * SPAN
    end = tl.minimum(first + SPAN, n)
    if ROWS is not None:
        ROWS += strip.to(tl.int64) * n
    if COLUMNS is not None:
        COLUMNS += span.to(tl.int64) * m + offs_m

    if ONE_EXPONENTIAL:
        some = first + tl.arange(0, LANES)[:, None, None]  # the max of these rows is `ref`
        of_some = load_similarities(X, stride_x, some, cols, n, FULL)
        ref = finite(tl.max(logits_of(of_some, rate, pairs, some, cols, n, m, FULL)))
        good = tl.full((LANES, REPEATS), 1, tl.int1)
        s_c = tl.zeros((LANES, BLOCK_M), tl.float32)
        for start in range(first, end, BLOCK_N):
            offs_n = start + in_tile
            rows = offs_n[:, :, None]
            x = load_similarities(X, stride_x, rows, cols, n, FULL)
            e = exponentials(x, rate, ref, rows, cols, n, m, FULL)
            if ROWS is not None:
                s_r = tl.sum(e, 2)
                good = good & (_in_range(s_r) | (offs_n >= n))
                tl.store(
                    ROWS + offs_n, tl.full((LANES, REPEATS), 0.0, tl.float32) + ref, offs_n < n
                )
                tl.store(ROWS + strips.to(tl.int64) * n + offs_n, s_r, mask=offs_n < n)
            if COLUMNS is not None:
                s_c += tl.sum(e, 1)
        exact = tl.min(good.to(tl.int32)) != 0
        if COLUMNS is not None:
            s_all = tl.sum(s_c, 0)
            exact = exact & (tl.min((_in_range(s_all) | (offs_m >= m)).to(tl.int32)) != 0)
            tl.store(COLUMNS, tl.full((BLOCK_M,), 0.0, tl.float32) + ref, mask=offs_m < m)
            tl.store(COLUMNS + spans.to(tl.int64) * m, s_all, mask=offs_m < m)
        if exact:
            return
        tl.debug_barrier()  # the stores below overwrite the stores above

    m_c = tl.full((LANES, BLOCK_M), -INF, tl.float32)
    s_c = tl.zeros((LANES, BLOCK_M), tl.float32)
    for start in range(first, end, BLOCK_N):
        offs_n = start + in_tile
        rows = offs_n[:, :, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
        z = logits_of(x, rate, pairs, rows, cols, n, m, FULL)
        if ROWS is not None:
            m_r = tl.max(z, 2)
            s_r = tl.sum(tl.exp2(z - finite(m_r)[:, :, None]), 2)
            tl.store(ROWS + offs_n, m_r, mask=offs_n < n)
            tl.store(ROWS + strips.to(tl.int64) * n + offs_n, s_r, mask=offs_n < n)
        if COLUMNS is not None:
            m_new = tl.maximum(m_c, tl.max(z, 1))
            e = tl.sum(tl.exp2(z - finite(m_new)[:, None, :]), 1)
            s_c = s_c * tl.exp2(move(m_c, m_new, s_c)) + e
            m_c = m_new
    if COLUMNS is not None:
        m_all = tl.max(m_c, 0)
        s_all = tl.sum(s_c * tl.exp2(move(m_c, m_all[None, :], s_c)), 0)
        tl.store(COLUMNS, m_all, mask=offs_m < m)
        tl.store(COLUMNS + spans.to(tl.int64) * m, s_all, mask=offs_m < m)


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
    n, m = x.shape
    if n == 0 or m == 0 or (rows is None and columns is None):
        return
    cut = config.contrastive_fwd(n, m, x.element_size())
    strips, spans = config.ceil_div(m, cut.block_v), config.ceil_div(n, cut.span)
    row_parts = None if rows is None else rows.new_empty((2, strips, n))
    column_parts = None if columns is None else columns.new_empty((2, spans, m))
    launch(
        _contrastive_fwd_kernel, (strips, spans),
        (x, rate_of(block), *tensors_of(block), row_parts, column_parts), numbers_of(x, block),
        num_warps=cut.num_warps, LANES=min(cut.num_warps, cut.block_n), BLOCK_N=cut.block_n,
        BLOCK_M=cut.block_v, SPAN=cut.span, FULL=is_full(x, cut),
        ONE_EXPONENTIAL=one_exponential(x, block),
    )  # fmt: skip
    cut = config.contrastive_merge()
    for state, parts in ((rows, row_parts), (columns, column_parts)):
        if state is not None and parts is not None:
            launch(
                _contrastive_merge_kernel, (config.ceil_div(len(state), cut.block_v),),
                (state, parts), (len(state), parts.shape[1]),
                num_warps=cut.num_warps, BLOCK_P=cut.block_n, BLOCK=cut.block_v,
            )  # fmt: skip


def contrastive_finish(state: Tensor, picked: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Like `contrastive_finish` in eager/, with log2 s, and a loss clamped to at least 0."""
    m, log_s = state[:, 0], state[:, 1].log2()
    of_positives = picked.float() * (scale * LOG2E.value)
    loss = (log_s - (of_positives - m)).clamp_min(0) * LN2.value
    return loss, torch.stack((m, log_s), 1)


def rate_of(block: Block) -> Tensor:
    """What similarities are multiplied by: scale · log2 e."""
    return block.scale * LOG2E.value
