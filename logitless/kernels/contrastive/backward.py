"""Overwrites similarities with the gradient of a contrastive loss.

With p the probability of a pair in its row, and q in its column, the gradient of its logit is

    g_row (p - y) + g_column (q - y)      where y is 1 for positives and 0 for other pairs

Only the sum is rounded, from fp32: of a rounded p, p - 1 would have few exact digits.

The normaliser of a row is m and log2 s, with p = 2^((z - m) - log2 s) for a logit z times log2 e.
For any h, p is also 2^(z - h) · 2^((h - m) - log2 s), and likewise q, so one exponential serves
both. A program uses this if the similarities are 16-bit (`one_exponential`), and if its normalisers
are so close together that the factors neither overflow nor underflow.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...eager.contrastive import Block
from .. import config
from ..launch import launch
from ..numerics import INF
from ..profiling import in_place, nothing, profiled
from .forward import rate_of
from .tile import (
    Pairs,
    exponentials,
    is_full,
    load_similarities,
    logits_of,
    may_hold_positives,
    numbers_of,
    one_exponential,
    positives_of,
    tensors_of,
)


@triton.jit
def _load_normalisers(P, offs, mask, other):
    """Returns m and log2 s of rows or columns; m is `other` and log2 s is 0 where masked."""
    m = tl.load(P + 2 * offs, mask=mask, other=other)
    return m, tl.load(P + 2 * offs + 1, mask=mask, other=0.0)


@triton.jit
def _all_near(m, log_s, middle):
    """Whether 2^(z - middle) and 2^(middle - lse) stay in fp32's range for logits z <= lse.

    False for infinite numbers and for NaN.
    """
    return tl.min((tl.abs(m - middle + log_s) < 60.0).to(tl.int32)) != 0


@triton.jit(
    **profiled("contrastive_bwd", X=in_place, MASK=nothing),
    do_not_specialize_on_alignment=[
        "POSITIVES", "MASK", "ROW_LABELS", "COLUMN_LABELS", "ROW_LSE", "COLUMN_LSE",
        "ROW_UPSTREAM", "COLUMN_UPSTREAM",
    ],
)  # fmt: skip
def _contrastive_bwd_kernel(
    X,  # input and output
    RATE, POSITIVES, MASK, ROW_LABELS, COLUMN_LABELS,  # inputs
    ROW_LSE, COLUMN_LSE, ROW_UPSTREAM, COLUMN_UPSTREAM,  # inputs
    D_SCALE,  # output (spans, strips)
    n, m, stride_x, diagonal, stride_mask,  # sizes
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr, SPAN_POW2: tl.constexpr,
    FULL: tl.constexpr, ONE_EXPONENTIAL: tl.constexpr,
):  # fmt: skip
    """Each program computes SPAN rows of a strip of BLOCK_M columns."""
    strip, span = tl.program_id(0), tl.program_id(1)
    offs_m = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = offs_m[None, :]
    rate = tl.load(RATE)
    pairs = Pairs(POSITIVES, diagonal, MASK, stride_mask, ROW_LABELS, COLUMN_LABELS)
    HAS_POSITIVES: tl.constexpr = (POSITIVES is not None) | (diagonal is not None)
    first = span * SPAN
    end = tl.minimum(first + SPAN, n)
    near, middle = False, 0.0
    if ONE_EXPONENTIAL:
        middle = tl.load(ROW_LSE + 2 * first)
        middle = tl.where(tl.abs(middle) < INF, middle, 0.0)
        offs_s = first + tl.arange(0, SPAN_POW2)
        m_s, log_s = _load_normalisers(ROW_LSE, offs_s, offs_s < end, middle)
        near = _all_near(m_s, log_s, middle)
    g_columns, column_factors = 0.0, 0.0
    if COLUMN_LSE is not None:
        m_c, log_c = _load_normalisers(COLUMN_LSE, cols, cols < m, middle)
        g_columns = 1.0
        if COLUMN_UPSTREAM is not None:
            g_columns = tl.load(COLUMN_UPSTREAM + offs_m, mask=offs_m < m, other=0.0)[None, :]
        if ONE_EXPONENTIAL:
            near = near & _all_near(m_c, log_c, middle)
            column_factors = tl.exp2(middle - m_c - log_c) * g_columns
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        rows = offs_n[:, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
        m_r, log_r = _load_normalisers(ROW_LSE, rows, rows < n, middle)
        g_rows = 1.0
        if ROW_UPSTREAM is not None:
            g_rows = tl.load(ROW_UPSTREAM + offs_n, mask=offs_n < n, other=0.0)[:, None]
        if near:
            factors = tl.exp2(middle - m_r - log_r) * g_rows + column_factors
            dz = exponentials(x, rate, middle, rows, cols, n, m, FULL) * factors
            if HAS_POSITIVES:
                if may_hold_positives(pairs, start, strip * BLOCK_M, BLOCK_N, BLOCK_M):
                    dz -= tl.where(positives_of(pairs, rows, cols, n), g_rows + g_columns, 0.0)
        else:
            z = logits_of(x, rate, pairs, rows, cols, n, m, FULL)
            y = 0.0
            if HAS_POSITIVES:
                y = tl.where(positives_of(pairs, rows, cols, n), 1.0, 0.0)
            dz = (tl.exp2(z - m_r - log_r) - y) * g_rows
            if COLUMN_LSE is not None:
                dz += (tl.exp2(z - m_c - log_c) - y) * g_columns
        if D_SCALE is not None:
            if FULL & ONE_EXPONENTIAL:
                total += dz * x
            else:
                total += dz * tl.where(dz == 0, 0.0, x)  # x can be NaN if the pair is left out
        at = rows.to(tl.int64) * stride_x + cols
        if FULL:
            tl.store(X + at, dz.to(X.dtype.element_ty))
        else:
            tl.store(X + at, dz.to(X.dtype.element_ty), mask=(rows < n) & (cols < stride_x))
    if D_SCALE is not None:
        tl.store(D_SCALE + span * tl.num_programs(0) + strip, tl.sum(total))


def contrastive_gradient(
    x: Tensor,  # (n, m), with padded rows
    block: Block,
    rows: Tensor,  # (n, 2), the normalisers of the rows
    columns: Tensor | None,  # (m, 2), the normalisers of the columns
    row_upstream: Tensor | None = None,  # (n,); None means 1 for every row
    column_upstream: Tensor | None = None,  # (m,); None means 1 for every column
    d_scale: bool = False,
) -> Tensor | None:
    n, m = x.shape
    if n == 0 or m == 0:
        return rows.new_zeros(()) if d_scale else None
    cut = config.contrastive_bwd(n, m, x.element_size())
    programs = config.ceil_div(m, cut.block_v), config.ceil_div(n, cut.span)
    parts = rows.new_empty(programs) if d_scale else None
    launch(
        _contrastive_bwd_kernel, programs,
        (
            x, rate_of(block), *tensors_of(block), rows, columns, row_upstream, column_upstream,
            parts,
        ),
        numbers_of(x, block),
        num_warps=cut.num_warps, BLOCK_N=cut.block_n, BLOCK_M=cut.block_v, SPAN=cut.span,
        SPAN_POW2=config.ceil_pow2(cut.span), FULL=is_full(x, cut),
        ONE_EXPONENTIAL=one_exponential(x, block),
    )  # fmt: skip
    return None if parts is None else parts.sum()
