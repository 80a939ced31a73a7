"""The gradient of a contrastive loss, which overwrites the similarities.

With the probability p of a pair in its row, and the probability q of the same pair in its column,
the gradient of a logit is

    g_row (p - y) + g_column (q - y)      where y is 1 for positives and 0 for other pairs

The kernel computes both terms in fp32 and rounds only the sum, because p - 1 has few exact digits
after p was rounded.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..eager.contrastive import Block
from . import config
from .contrastive_fwd import rate_of
from .contrastive_tile import (
    Pairs,
    load_similarities,
    logits_of,
    numbers_of,
    positives_of,
    tensors_of,
)
from .launch import REMEMBERED, Launch
from .profiling import in_place, nothing, profiled


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
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Each program computes SPAN rows of a strip of BLOCK_M columns."""
    strip, span = tl.program_id(0), tl.program_id(1)
    offs_m = strip * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = offs_m[None, :]
    rate = tl.load(RATE)
    pairs = Pairs(POSITIVES, diagonal, MASK, stride_mask, ROW_LABELS, COLUMN_LABELS)
    HAS_POSITIVES: tl.constexpr = (POSITIVES is not None) | (diagonal is not None)
    if COLUMN_LSE is not None:
        of_columns = tl.load(COLUMN_LSE + offs_m, mask=offs_m < m, other=0.0)[None, :]
        if COLUMN_UPSTREAM is not None:
            g_column = tl.load(COLUMN_UPSTREAM + offs_m, mask=offs_m < m, other=0.0)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = span * SPAN
    for start in range(first, tl.minimum(first + SPAN, n), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        rows = offs_n[:, None]
        x = load_similarities(X, stride_x, rows, cols, n, FULL)
        z = logits_of(x, rate, pairs, rows, cols, n, m, FULL)
        dz = tl.exp2(z - tl.load(ROW_LSE + offs_n, mask=offs_n < n, other=0.0)[:, None])
        if HAS_POSITIVES:
            y = tl.where(positives_of(pairs, rows, cols, n), 1.0, 0.0)
            dz -= y
        if ROW_UPSTREAM is not None:
            dz *= tl.load(ROW_UPSTREAM + offs_n, mask=offs_n < n, other=0.0)[:, None]
        if COLUMN_LSE is not None:
            q = tl.exp2(z - of_columns)
            if HAS_POSITIVES:
                q -= y
            if COLUMN_UPSTREAM is not None:
                q *= g_column
            dz += q
        if D_SCALE is not None:
            total += dz * tl.where(dz == 0, 0.0, x)  # the padding of x can be NaN
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
    rows: Tensor,  # (n,), the normalisers of the rows
    columns: Tensor | None,  # (m,), the normalisers of the columns
    row_upstream: Tensor | None = None,  # (n,), or None for ones
    column_upstream: Tensor | None = None,  # (m,), or None for ones
    d_scale: bool = False,
) -> Tensor | None:
    """Overwrites x by the gradient of the logits. If `d_scale`, returns Σ gradient · x."""
    n, m = x.shape
    if n == 0 or m == 0:
        return rows.new_zeros(()) if d_scale else None
    cut = config.contrastive_bwd(n, m, x.element_size())
    programs = config.ceil_div(m, cut.block_v), config.ceil_div(n, cut.span)
    parts = rows.new_empty(programs) if d_scale else None
    _plan(numbers_of(x, block), cut, programs)(
        x, rate_of(block), *tensors_of(block), rows, columns, row_upstream, column_upstream, parts
    )
    return None if parts is None else parts.sum()


@functools.lru_cache(REMEMBERED)
def _plan(numbers: tuple, cut: config.Config, programs: tuple[int, int]) -> Launch:
    n, m = numbers[:2]
    return Launch(
        _contrastive_bwd_kernel, programs, numbers, num_warps=cut.num_warps, BLOCK_N=cut.block_n,
        BLOCK_M=cut.block_v, SPAN=cut.span, FULL=n % cut.block_n == 0 and m % cut.block_v == 0,
    )  # fmt: skip
