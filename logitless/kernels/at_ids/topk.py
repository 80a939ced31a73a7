"""Computes the k largest logits of each row, and the mass of the other columns, in one pass.

A program reads a row, or a split of one if rows are too few to fill the GPU, block by block, and
keeps a sorted list of the largest keys so far (topk_keys.py). Logits above the threshold, that of
the k-th key, go to a waiting list, which is sorted and merged when it is long enough; the threshold
rises. All others, and keys that drop out of the list, are added to the tail, relative to its own
max; nothing is ever subtracted from it, so there is no cancellation. In random order, few later
blocks have logits above the threshold; in ascending order, every logit is merged.

Blocks are read in the order of columns, so a later logit equal to the threshold has a smaller key
and is not among the k largest. -inf never waits.

A second kernel merges the lists of a row. If fewer than k logits are above -inf, it adds the row's
first columns of logit -inf. Logits are sorted before the softcap, which can round two of them to
one number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...eager.topk import topk as topk_by_chunks
from .. import config
from ..launch import launch
from ..layout import row_offset, rows_of
from ..numerics import INF, LOG2E, capped, finite, inverse_temperature, move
from ..profiling import nothing, profiled
from .topk_keys import EMPTY, column_of, key_of, logit_of, sort, sort_bitonic

MAX_K = 256  # for a larger k, sorting in registers is not faster than torch.topk
MAX_SPLITS = 32
RESIDENT = 32  # number of programs that a multiprocessor runs at once


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


@triton.jit
def _fill(Xrow, Ids, count, V, k, BLOCK_V: tl.constexpr):
    """Fills Ids[count:k] with the first columns whose logit is -inf. Returns the new count."""
    offs_v = tl.arange(0, BLOCK_V)
    start = tl.full((), 0, tl.int32)
    while (count < k) & (start < V):
        cols = start + offs_v
        x = tl.load(Xrow + cols, mask=cols < V, other=0.0)
        lost = x == -INF
        place = count + tl.cumsum(lost.to(tl.int32), axis=0)
        tl.store(Ids + place - 1, cols.to(tl.int64), mask=lost & (place <= k))
        count = tl.max(place, axis=0)
        start += BLOCK_V
    return count


@triton.jit(
    **profiled("topk_merge", shows=("k",), X=nothing),
    do_not_specialize=["rows_t", "splits"],
)
def _topk_merge_kernel(
    BEST, TAIL, X,  # inputs
    IDS, LOGPROBS, LOG_TAIL,  # outputs
    rows_t, stride_xb, stride_xt, V, k, splits,  # sizes
    temperature, softcap,  # options
    BLOCK_V: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    """Each program merges the lists of all splits of one row, and computes log-probabilities."""
    BLOCK_K: tl.constexpr = 1 << LOG_K
    DTYPE: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < k
    inv_t = inverse_temperature(temperature, 0)
    rate = inv_t * LOG2E
    best = tl.full((BLOCK_K,), EMPTY, tl.int64)
    m, s = tl.full((), -INF, tl.float32), tl.full((), 0.0, tl.float32)
    for split in range(splits):
        at = row.to(tl.int64) * splits + split
        m_split, s_split = tl.load(TAIL + at * 2), tl.load(TAIL + at * 2 + 1)
        m_new = tl.maximum(m, m_split)
        s = s * tl.exp2(move(m, m_new, s) * rate)
        s += s_split * tl.exp2(move(m_split, m_new, s_split) * rate)
        rising = tl.load(BEST + at * BLOCK_K + offs_k)
        best, m, s = merge(best, m_new, s, rising, rate, softcap, LOG_K, DTYPE)
    m, s = leave_out_keys(m, s, tl.where(mask_k, EMPTY, best), rate, softcap, DTYPE)

    # empty entries have the logit -inf
    y, _ = capped(tl.where(mask_k, logit_of(best), -INF).to(DTYPE), softcap)
    count = tl.sum((mask_k & (best != EMPTY)).to(tl.int32), axis=0)
    # then all logits of the tail are -inf
    if count < k:
        m = tl.min(y, axis=0)
        s = tl.where(s == s, 1.0 * (V - k), s)
    shift = finite(tl.max(y, axis=0))
    total = tl.sum(tl.where(mask_k, tl.exp2((y - shift) * rate), 0.0), axis=0)
    total += tl.where(s == 0, 0.0, s * tl.exp2((m - shift) * rate))
    log_s = tl.log(total)
    at = row.to(tl.int64) * k + offs_k
    tl.store(LOGPROBS + at, (y - shift) * inv_t - log_s, mask=mask_k)
    log_tail = tl.where(s == 0, -INF, (m - shift) * inv_t + tl.log(s))
    tl.store(LOG_TAIL + row, log_tail - log_s)

    tl.store(IDS + at, column_of(best).to(tl.int64), mask=offs_k < count)
    if count < k:
        offset = row_offset(row, rows_t, stride_xb, stride_xt)
        count = _fill(X + offset, IDS + row.to(tl.int64) * k, count, V, k, BLOCK_V)
        # arbitrary ids, if NaNs leave fewer than k logits
        tl.store(IDS + at, offs_k.to(tl.int64), mask=mask_k & (offs_k >= count))


def topk(
    x: Tensor,  # (..., V)
    k: int,
    temperature: float,
    softcap: float | None,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `topk` in eager/, which computes k > MAX_K and reads the logits more than once.

    `invariant` requires that the rows of x start on 16-byte boundaries.
    """
    if k > MAX_K:
        return topk_by_chunks(x, k, temperature, softcap, invariant)
    shape = x.shape[:-1]
    ids = torch.empty((*shape, k), device=x.device, dtype=torch.int64)
    logprobs = torch.empty((*shape, k), device=x.device, dtype=torch.float32)
    log_tail = torch.empty(shape, device=x.device, dtype=torch.float32)
    if log_tail.numel() == 0:
        return ids, logprobs, log_tail

    x, rows = rows_of(x)
    processors = config.processors(x.device)
    narrow = softcap is not None or (rows.itemsize == 4 and k <= 64)
    count = RESIDENT * processors if invariant else rows.count  # many rows, so one split per row
    cut = _cut(count, rows.vocab, processors, narrow)
    splits_in_all = rows.count * cut.splits
    programs = min(splits_in_all, RESIDENT * processors)
    block_k = 1 << _log_k(k)
    best = torch.empty((splits_in_all, block_k), device=x.device, dtype=torch.int64)
    tail = torch.empty((splits_in_all, 2), device=x.device, dtype=torch.float32)
    waiting = torch.empty((programs, cut.block_v + block_k), device=x.device, dtype=torch.int64)
    V, layout = rows.vocab, {"BLOCK_V": cut.block_v, "LOG_K": _log_k(k)}
    # blocks start on 16-byte boundaries: the first one up to `rows.pack - 1` columns early
    columns = config.ceil_div(V + rows.pack - 1, cut.splits)
    span = config.ceil_div(columns, cut.block_v) * cut.block_v
    launch(
        topk_stream_kernel, (programs,), (x, best, tail, waiting),
        (
            *rows.strides, rows.lead, V, k, span, cut.splits, splits_in_all, temperature, softcap
        ),
        num_warps=cut.num_warps, PACK=rows.pack, ALIGNED=rows.aligned, **layout,
    )  # fmt: skip
    launch(
        _topk_merge_kernel, (rows.count,), (best, tail, x, ids, logprobs, log_tail),
        (*rows.strides, V, k, cut.splits, temperature, softcap), num_warps=1, **layout,
    )  # fmt: skip
    return ids, logprobs, log_tail


def _log_k(k: int) -> int:
    return max(5, (k - 1).bit_length())


def _cut(rows: int, vocab: int, processors: int, narrow: bool) -> config.Config:
    """Returns the Config of both kernels. A program has one warp, so reductions need no barrier.

    A row of B blocks has at most ceil(B / 4) splits. The registers of sm_90 suffice; `narrow` is
    for programs that need more of them.
    """
    block = min(512 if narrow else 1024, max(128, config.ceil_pow2(vocab)))
    splits = min(
        config.ceil_div(RESIDENT // 2 * processors, rows),
        config.ceil_div(vocab, 4 * block),
        MAX_SPLITS,
    )
    return config.overridden(config.Config(block, 1, splits))
