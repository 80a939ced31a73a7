"""Overwrites similarities with the gradient of a loss over all pairs, in one pass.

Softmax: with p the probability of a pair in its row, and q in its column, the gradient of its logit
is

    g_row (p - y) + g_column (q - y)      where y is 1 for positives and 0 for other pairs

Only the sum is rounded, from fp32: of a rounded p, p - 1 would have few exact digits.

The normaliser of a row is m and log2 s, with p = 2^((z - m) - log2 s) for a logit z times log2 e.
For any h, p is also 2^(z - h) · 2^((h - m) - log2 s), and likewise q, so one exponential serves
both. A program uses this if the similarities are 16-bit (`one_exponential`), and if its normalisers
are so close together that the factors neither overflow nor underflow.

Sigmoid: let t be z = scale · x + bias for negatives, and -z for positives. The loss of a pair is
softplus(t) = max(t, 0) + log1p(e) with e = exp(-|t|), and its derivative is sigmoid(t). It needs no
normaliser, so the same pass computes the loss.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...eager.contrastive import Block
from .. import config
from ..launch import launch
from ..numerics import INF, LOG2E, reciprocal
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


@triton.jit
def _log1p(e):
    """Returns log(1 + e) for e in [0, 1], to a relative error of 2e-7.

    Most pairs are negatives with a tiny e whose losses are summed, so the relative error matters,
    and that of log(1 + e) is large in fp32.
    """
    p = 0.00523262402 * e - 0.0295049573
    p = (p * e + 0.0782254934) * e - 0.136632069
    p = (p * e + 0.191059885) * e - 0.248429775
    p = (p * e + 0.333190962) * e - 0.499994931
    return (p * e + 0.99999997) * e


@triton.jit
def _flipped(t, pairs, rows, cols, n):
    return tl.where(positives_of(pairs, rows, cols, n), -t, t)


@triton.jit(
    **profiled("contrastive_bwd", shows=("LOSS",), X=in_place, MASK=nothing),
    do_not_specialize_on_alignment=[
        "SCALE", "POSITIVES", "MASK", "ROW_LABELS", "COLUMN_LABELS", "ROW_LSE", "COLUMN_LSE",
        "BIAS", "ROW_UPSTREAM", "COLUMN_UPSTREAM",
    ],
)  # fmt: skip
def _contrastive_bwd_kernel(
    X,  # input, and output if GRADIENT
    SCALE, POSITIVES, MASK, ROW_LABELS, COLUMN_LABELS,  # inputs; for "softmax", SCALE has log2 e
    ROW_LSE, COLUMN_LSE,  # inputs for "softmax"
    BIAS,  # input for "sigmoid"
    ROW_UPSTREAM, COLUMN_UPSTREAM,  # inputs
    LOSSES,  # output for "sigmoid" (strips, n)
    SUMS,  # output, Σ gradient · x and for "sigmoid" Σ gradient (1 or 2, spans, strips)
    n, m, stride_x, diagonal, stride_mask,  # sizes
    LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr, SPAN_POW2: tl.constexpr,
    FULL: tl.constexpr, ONE_EXPONENTIAL: tl.constexpr,
):  # fmt: skip
    """Each program computes SPAN rows of a strip of BLOCK_M columns."""
    strip, span = tl.program_id(0), tl.program_id(1)
    offs_m = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = offs_m[None, :]
    scale = tl.load(SCALE)
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
    if LOSS == "sigmoid":
        bias = tl.load(BIAS)
    sum_x = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sum_1 = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        rows = offs_n[:, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
        g_rows = 1.0
        if ROW_UPSTREAM is not None:
            g_rows = tl.load(ROW_UPSTREAM + offs_n, mask=offs_n < n, other=0.0)[:, None]
        if LOSS == "sigmoid":
            if not FULL:
                x = tl.where((rows < n) & (cols < m), x, 0.0)
            t = x * scale + bias
            if HAS_POSITIVES:
                some = may_hold_positives(pairs, start, strip * BLOCK_M, BLOCK_N, BLOCK_M)
                if some:
                    t = _flipped(t, pairs, rows, cols, n)
            e = tl.exp2(tl.abs(t) * -LOG2E)
            loss = tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL) + _log1p(e)
            if not FULL:
                loss = tl.where(cols < m, loss, 0.0)
            tl.store(LOSSES + strip.to(tl.int64) * n + offs_n, tl.sum(loss, 1), mask=offs_n < n)
            dz = tl.where(t > 0, 1.0, e) * reciprocal(1.0 + e)
            if HAS_POSITIVES:
                if some:
                    dz = _flipped(dz, pairs, rows, cols, n)
            if ROW_UPSTREAM is not None:
                dz *= g_rows
            if not FULL:
                dz = tl.where((rows < n) & (cols < m), dz, 0.0)
        else:
            m_r, log_r = _load_normalisers(ROW_LSE, rows, rows < n, middle)
            if near:
                factors = tl.exp2(middle - m_r - log_r) * g_rows + column_factors
                dz = exponentials(x, scale, middle, rows, cols, n, m, FULL) * factors
                if HAS_POSITIVES:
                    if may_hold_positives(pairs, start, strip * BLOCK_M, BLOCK_N, BLOCK_M):
                        y = positives_of(pairs, rows, cols, n)
                        dz -= tl.where(y, g_rows + g_columns, 0.0)
            else:
                z = logits_of(x, scale, pairs, rows, cols, n, m, FULL)
                y = 0.0
                if HAS_POSITIVES:
                    y = tl.where(positives_of(pairs, rows, cols, n), 1.0, 0.0)
                dz = (tl.exp2(z - m_r - log_r) - y) * g_rows
                if COLUMN_LSE is not None:
                    dz += (tl.exp2(z - m_c - log_c) - y) * g_columns
        if SUMS is not None:
            if (LOSS == "sigmoid") | (FULL & ONE_EXPONENTIAL):
                sum_x += dz * x
            else:
                sum_x += dz * tl.where(dz == 0, 0.0, x)  # x can be NaN if the pair is left out
            if LOSS == "sigmoid":
                sum_1 += dz
        if GRADIENT:
            at = rows.to(tl.int64) * stride_x + cols
            if FULL:
                tl.store(X + at, dz.to(X.dtype.element_ty))
            else:
                tl.store(X + at, dz.to(X.dtype.element_ty), mask=(rows < n) & (cols < stride_x))
    if SUMS is not None:
        Part = SUMS + span * tl.num_programs(0) + strip
        tl.store(Part, tl.sum(sum_x))
        if LOSS == "sigmoid":
            tl.store(Part + tl.num_programs(1) * tl.num_programs(0), tl.sum(sum_1))


def contrastive_gradient(
    x: Tensor,  # (n, m), with padded rows
    block: Block,
    rows: Tensor,  # (n, 2), the normalisers of the rows
    columns: Tensor | None,  # (m, 2), the normalisers of the columns
    row_upstream: Tensor | None = None,  # (n,); None means 1 for every row
    column_upstream: Tensor | None = None,  # (m,); None means 1 for every column
    d_scale: bool = False,
) -> Tensor | None:
    if x.numel() == 0:
        return rows.new_zeros(()) if d_scale else None
    cut = config.contrastive_bwd(*x.shape, x.element_size())
    sums = rows.new_empty((1, *_programs(x, cut)[::-1])) if d_scale else None
    lse, upstream = (rows, columns), (row_upstream, column_upstream)
    _overwrite("softmax", x, block, cut, rate_of(block), *lse, None, *upstream, None, sums)
    return None if sums is None else sums.sum()


def sigmoid_contrastive(
    x: Tensor,  # (n, m), with padded rows
    block: Block,
    bias: Tensor,  # ()
    gradient: bool,
    upstream: Tensor | None = None,  # (n,); None means 1 for every row
) -> tuple[Tensor, Tensor | None]:
    if x.numel() == 0:
        return bias.new_zeros(len(x)), bias.new_zeros(2) if gradient else None
    cut = config.contrastive_bwd(*x.shape, x.element_size(), 2)
    strips, spans = _programs(x, cut)
    losses = bias.new_empty((strips, len(x)))
    sums = bias.new_empty((2, spans, strips)) if gradient else None
    tensors = None, None, bias, upstream, None, losses, sums
    _overwrite("sigmoid", x, block, cut, block.scale, *tensors, gradient=gradient)
    return losses.sum(0), None if sums is None else sums.sum((1, 2))


def _programs(x: Tensor, cut: config.Config) -> tuple[int, int]:
    """The numbers of strips and of spans."""
    return config.ceil_div(x.shape[1], cut.block_v), config.ceil_div(x.shape[0], cut.span)


def _overwrite(
    loss: str, x: Tensor, block: Block, cut: config.Config, scale: Tensor,
    *tensors: Tensor | None,  # from ROW_LSE to SUMS
    gradient: bool = True,
) -> None:  # fmt: skip
    launch(
        _contrastive_bwd_kernel, _programs(x, cut), (x, scale, *tensors_of(block), *tensors),
        numbers_of(x, block),
        num_warps=cut.num_warps, LOSS=loss, GRADIENT=gradient,
        BLOCK_N=cut.block_n, BLOCK_M=cut.block_v, SPAN=cut.span,
        SPAN_POW2=config.ceil_pow2(cut.span), FULL=is_full(x, cut),
        ONE_EXPONENTIAL=loss == "softmax" and one_exponential(x, block),
    )  # fmt: skip
