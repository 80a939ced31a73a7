"""Computes the k largest logits of one split of a row, and the mass of the rest, in one pass.

A program reads its split block by block, and keeps a sorted list of the largest keys so far
(topk_keys.py). Logits above the threshold, that of the k-th key, go to a waiting list, which is
sorted and merged when it is long enough; the threshold rises. All others, and keys that drop out of
the list, are added to the tail, relative to its own max; nothing is ever subtracted from it, so
there is no cancellation. In random order, few later blocks have logits above the threshold; in
ascending order, every logit is merged.

Blocks are read in the order of columns, so a later logit equal to the threshold has a smaller key
and is not among the k largest. -inf never waits.
"""

import triton
import triton.language as tl

from .layout import row_offset
from .numerics import INF, LOG2E, capped, finite, inverse_temperature, move
from .profiling import nothing, profiled
from .topk_keys import EMPTY, key_of, logit_of, sort, sort_bitonic


@triton.jit
def _leave_out(m, s, y, top, rate):
    """Adds the logits y of a block with max `top` to the tail's max m and s = Σ e^((y - m) / T)."""
    m_new = tl.maximum(m, top)
    scale = tl.exp2(move(m, m_new, s) * rate)
    return m_new, s * scale + tl.sum(tl.exp2((y - finite(m_new)) * rate), axis=0)


@triton.jit
def leave_out_keys(m, s, keys, rate, softcap, DTYPE: tl.constexpr):
    y, _ = capped(logit_of(keys).to(DTYPE), softcap)
    y = tl.where(keys == EMPTY, -INF, y)
    return _leave_out(m, s, y, tl.max(y, axis=0), rate)


@triton.jit
def merge(best, m, s, rising, rate, softcap, LOG_K: tl.constexpr, DTYPE: tl.constexpr):
    """Merges a descending and an ascending list of keys into a descending list of the largest keys.

    The others are added to the tail.
    """
    m, s = leave_out_keys(m, s, tl.minimum(best, rising), rate, softcap, DTYPE)
    return sort_bitonic(tl.maximum(best, rising), LOG_K), m, s


@triton.jit
def read_block(Xrow, start, V, softcap, BLOCK_V: tl.constexpr):
    """Returns the logits x of a block, and y after the softcap; -inf outside the row.

    The block starts on a 16-byte boundary.
    """
    offs = tl.arange(0, BLOCK_V)
    Xblock = tl.multiple_of(Xrow + start, 16)
    if (start >= 0) & (start + BLOCK_V <= V):
        raw = tl.load(Xblock + offs)
        x = raw.to(tl.float32)
        y, _ = capped(raw, softcap)
    else:
        cols = start + offs
        inside = (cols >= 0) & (cols < V)
        raw = tl.load(Xblock + offs, mask=inside, other=0.0)
        y, _ = capped(raw, softcap)
        x = tl.where(inside, raw.to(tl.float32), -INF)
        y = tl.where(inside, y, -INF)
    return x, y


@triton.jit
def _set_aside(
    Xrow, Wait, waiting, start, V, threshold, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Appends the keys of a block's logits above the threshold to the waiting list.

    The block is read again from the cache, BLOCK_S columns at a time to save registers. Returns the
    new length of the list.
    """
    for first in range(start, start + BLOCK_V, BLOCK_S):
        x, _ = read_block(Xrow, first, V, None, BLOCK_S)
        chosen = x > threshold
        if tl.max(chosen.to(tl.int32), axis=0) != 0:
            place = waiting + tl.cumsum(chosen.to(tl.int32), axis=0)
            tl.store(Wait + place - 1, key_of(x, first + tl.arange(0, BLOCK_S)), mask=chosen)
            waiting = tl.max(place, axis=0)
    return waiting


@triton.jit(
    **profiled("topk_stream", shows=("k",), WAITING=nothing),
    do_not_specialize=["rows_t", "lead", "span", "splits", "splits_in_all"],
)
def topk_stream_kernel(
    X,  # input
    # outputs: keys of each split, ascending (rows, splits, 1 << LOG_K), and tails (rows, splits,
    # 2), max m and sum s
    BEST, TAIL,
    WAITING,  # the waiting lists of keys, (programs, BLOCK_V + (1 << LOG_K))
    rows_t, stride_xb, stride_xt, lead, V, k, span, splits, splits_in_all,  # sizes
    temperature, softcap,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    """Each program loops over splits. `splits` is the number of splits per row."""
    BLOCK_K: tl.constexpr = 1 << LOG_K
    offs_k = tl.arange(0, BLOCK_K)
    # in Triton 3.5, min() of constants is not a constant
    BLOCK_S: tl.constexpr = BLOCK_V if BLOCK_V < 128 else 128
    rate = inverse_temperature(temperature, 0) * LOG2E
    Wait = WAITING + tl.program_id(0).to(tl.int64) * (BLOCK_V + BLOCK_K)
    for split in range(tl.program_id(0), splits_in_all, tl.num_programs(0)):
        offset = row_offset(split // splits, rows_t, stride_xb, stride_xt)
        lo = split % splits * span
        if not ALIGNED:
            lo -= ((lead + offset) % PACK).to(tl.int32)
        hi = tl.minimum(lo + span, V)
        best = tl.full((BLOCK_K,), EMPTY, tl.int64)
        threshold = tl.full((), -INF, tl.float32)
        m, s = tl.full((), -INF, tl.float32), tl.full((), 0.0, tl.float32)
        waiting = tl.full((), 0, tl.int32)
        for start in range(lo, hi, BLOCK_V):
            x, y = read_block(X + offset, start, V, softcap, BLOCK_V)
            top = tl.max(x, axis=0)
            if top > threshold:
                waiting = _set_aside(
                    X + offset, Wait, waiting, start, V, threshold, BLOCK_V, BLOCK_S
                )
                y = tl.where(x > threshold, -INF, y)
                top = tl.max(y, axis=0)
            if softcap is not None:
                top = tl.max(y, axis=0)
            m, s = _leave_out(m, s, y, top, rate)
            if (waiting >= BLOCK_K) | (start + BLOCK_V >= hi):
                # threads read keys of others here, and the next block overwrites them below
                tl.debug_barrier()
                for at in range(0, waiting, BLOCK_K):
                    keys = tl.load(Wait + at + offs_k, mask=at + offs_k < waiting, other=EMPTY)
                    best, m, s = merge(
                        best, m, s, ~sort(~keys, LOG_K), rate, softcap,
                        LOG_K, X.dtype.element_ty,
                    )  # fmt: skip
                tl.debug_barrier()
                waiting = tl.full((), 0, tl.int32)
                kth = tl.max(tl.where(offs_k == k - 1, best, EMPTY), axis=0)
                threshold = logit_of(kth)
        at = tl.full((), 0, tl.int64) + split
        tl.store(BEST + at * BLOCK_K + (BLOCK_K - 1 - offs_k), best)
        tl.store(TAIL + at * 2, m)
        tl.store(TAIL + at * 2 + 1, s)
