"""The sigmoid loss of all pairs, and its gradient, from one pass over the similarities.

Let t be z = scale · x + bias for negatives, and -z for positives. The loss of a pair is
softplus(t) = max(t, 0) + log1p(e) with e = exp(-|t|), and its derivative is sigmoid(t).

Most pairs are negatives with a tiny e whose losses are summed, so the relative error matters, and
that of log(1 + e) is large in fp32. The kernel computes log1p(e) = e · p(e) with a polynomial p, to
a relative error of 2e-7.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...eager.contrastive import Block
from .. import config
from ..launch import launch
from ..numerics import LOG2E, reciprocal
from ..profiling import in_place, profiled
from .tile import (
    Pairs,
    is_full,
    load_similarities,
    may_hold_positives,
    numbers_of,
    positives_of,
)


@triton.jit
def _log1p(e):
    """Returns log(1 + e) for e in [0, 1]."""
    p = 0.00523262402 * e - 0.0295049573
    p = (p * e + 0.0782254934) * e - 0.136632069
    p = (p * e + 0.191059885) * e - 0.248429775
    p = (p * e + 0.333190962) * e - 0.499994931
    return (p * e + 0.99999997) * e


@triton.jit
def _flipped(t, pairs, rows, cols, n):
    return tl.where(positives_of(pairs, rows, cols, n), -t, t)


@triton.jit(
    **profiled("sigmoid_contrastive", X=in_place),
    do_not_specialize_on_alignment=["SCALE", "BIAS", "POSITIVES", "UPSTREAM"],
)
def _sigmoid_contrastive_kernel(
    X,  # input, and output if SUMS is not None
    SCALE, BIAS, POSITIVES, UPSTREAM,  # inputs
    LOSSES, SUMS,  # outputs (strips, n) and (2, spans, strips)
    n, m, stride_x, diagonal,  # sizes
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    strip, span = tl.program_id(0), tl.program_id(1)
    strips, spans = tl.num_programs(0), tl.num_programs(1)
    offs_m = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = offs_m[None, :]
    scale, bias = tl.load(SCALE), tl.load(BIAS)
    pairs = Pairs(POSITIVES, diagonal, None, None, None, None)
    HAS_POSITIVES: tl.constexpr = (POSITIVES is not None) | (diagonal is not None)
    sum_x = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    sum_1 = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = span * SPAN
    for start in range(first, tl.minimum(first + SPAN, n), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        rows = offs_n[:, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
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
        if SUMS is not None:
            dz = tl.where(t > 0, 1.0, e) * reciprocal(1.0 + e)
            if HAS_POSITIVES:
                if some:
                    dz = _flipped(dz, pairs, rows, cols, n)
            if UPSTREAM is not None:
                dz *= tl.load(UPSTREAM + offs_n, mask=offs_n < n, other=0.0)[:, None]
            if not FULL:
                dz = tl.where((rows < n) & (cols < m), dz, 0.0)
            sum_x += dz * x
            sum_1 += dz
            at = rows.to(tl.int64) * stride_x + cols
            if FULL:
                tl.store(X + at, dz.to(X.dtype.element_ty))
            else:
                tl.store(X + at, dz.to(X.dtype.element_ty), mask=(rows < n) & (cols < stride_x))
    if SUMS is not None:
        Part = SUMS + span * strips + strip
        tl.store(Part, tl.sum(sum_x))
        tl.store(Part + spans * strips, tl.sum(sum_1))


def sigmoid_contrastive(
    x: Tensor,  # (n, m), with padded rows
    block: Block,
    bias: Tensor,  # ()
    gradient: bool,
    upstream: Tensor | None = None,  # (n,); None means 1 for every row
) -> tuple[Tensor, Tensor | None]:
    n, m = x.shape
    if n == 0 or m == 0:
        return bias.new_zeros(n), bias.new_zeros(2) if gradient else None
    cut = config.contrastive_bwd(n, m, x.element_size(), 2)
    strips, spans = config.ceil_div(m, cut.block_v), config.ceil_div(n, cut.span)
    losses = bias.new_empty((strips, n))
    sums = bias.new_empty((2, spans, strips)) if gradient else None
    positives = None if block.positives is None else block.positives.contiguous()
    *numbers, _ = numbers_of(x, block)  # the stride of a mask is not needed
    launch(
        _sigmoid_contrastive_kernel, (strips, spans),
        (x, block.scale, bias, positives, upstream, losses, sums), tuple(numbers),
        num_warps=cut.num_warps, BLOCK_N=cut.block_n, BLOCK_M=cut.block_v, SPAN=cut.span,
        FULL=is_full(x, cut),
    )  # fmt: skip
    return losses.sum(0), None if sums is None else sums.sum((1, 2))
