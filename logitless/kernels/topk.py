"""The k largest of each row, and the mass of all the rest, in one pass.

A program streams over its row and keeps the best so far, sorted, and a threshold: the k-th of them.
A block's elements above the threshold are set aside in a short waiting list; all others can never
be among the k, so their exponentials go to the tail, which has a maximum of its own and is never
found by subtraction. When enough wait, they are sorted and merged into the best, those that fall
out go to the tail, and the threshold rises. In a row in no special order few blocks have anything
to set aside after the first ones; a row in ascending order costs a merge of every element.

A logit and its column are one integer, its `key`: ordered by logit, and among equals by column,
leftmost first, so every sort settles ties. Blocks come in the order of columns, so a later element
that only equals the threshold has lost already. A logit of -inf is never set aside. Rows with fewer
than k others look for their first ones at the end.

The order is that of the logits x, before the softcap: it is the same, but for ties by rounding.

Rows that are too few to fill the GPU are split over several programs; a second kernel merges what
they found, by the same steps, and writes the result.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..eager.topk import topk as topk_by_chunks
from . import config
from .launch import REMEMBERED, Launch
from .rows import INF, LOG2E, capped, finite, inverse_temperature, move, row_offset
from .view import Rows, rows_of

MAX_K = 256  # beyond, sorting in registers is no gain
MAX_SPLITS = 32
RESIDENT = 32  # programs that a multiprocessor holds at once

EMPTY = tl.constexpr(-(1 << 63))  # the key of no element, below every other
LOWEST = tl.constexpr(-2139095041)  # -inf, ordered
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _flip(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x, cols):
    """x in fp32 and its column as one number: a larger x is larger, then a lower column."""
    ordered = _flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))  # -0 is 0
    return (ordered.to(tl.int64) << 32) | (cols ^ LAST).to(tl.int64)


@triton.jit
def _logit(key):
    """x of a key; -inf of an empty one."""
    return _flip(tl.maximum((key >> 32).to(tl.int32), LOWEST)).to(tl.float32, bitcast=True)


@triton.jit
def _column(key):
    return key.to(tl.int32) ^ LAST


@triton.jit
def _places(LOG_K: tl.constexpr):
    """0, 1, 2, ... of the places of a list, as (2, ..., 2): an axis for each bit."""
    return tl.reshape(tl.arange(0, 1 << LOG_K), [2] * LOG_K)


@triton.jit
def _settle(h, places, runs: tl.constexpr, LOG_K: tl.constexpr):
    """Sort, downwards, runs of 2^runs places; each is bitonic: it rises and falls, and no more."""
    for i in tl.static_range(runs):
        # Of two keys whose places differ in one bit, the larger to the lower place.
        other = tl.sum(h, axis=LOG_K - runs + i, keep_dims=True) - h  # int64 wraps: exact
        second = ((places >> (runs - 1 - i)) & 1) != 0
        h = tl.where((h > other) != second, h, other)
    return h


@triton.jit
def _sort_bitonic(keys, LOG_K: tl.constexpr):
    """Sorted downwards: the larger of a falling and a rising list, place by place."""
    h = _settle(tl.reshape(keys, [2] * LOG_K), _places(LOG_K), LOG_K, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def _sort(keys, LOG_K: tl.constexpr):
    """Sorted downwards: every other run upwards, so that two make a bitonic one of twice the size.

    To go up is to go down with all bits turned, so which places are turned is all that changes
    from size to size: few masks, which the compiler keeps in few registers.
    """
    places = _places(LOG_K)
    h = tl.reshape(keys, [2] * LOG_K)
    for runs in tl.static_range(1, LOG_K + 1):
        # Turned until now: every other run of half the size. From now on: every other one.
        turned = places >> runs
        if runs > 1:
            turned ^= places >> (runs - 1)
        h = _settle(h ^ -(turned & 1).to(tl.int64), places, runs, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def _leave_out(m, s, y, top, rate):
    """The tail (m, s), m = max y and s = Σ e^((y - m)/T), with one more block: y, of max `top`."""
    m_new = tl.maximum(m, top)
    scale = tl.exp2(move(m, m_new, s) * rate)
    return m_new, s * scale + tl.sum(tl.exp2((y - finite(m_new)) * rate), axis=0)


@triton.jit
def _leave_out_keys(m, s, keys, rate, softcap, DTYPE: tl.constexpr):
    y, _ = capped(_logit(keys).to(DTYPE), softcap)
    y = tl.where(keys == EMPTY, -INF, y)
    return _leave_out(m, s, y, tl.max(y, axis=0), rate)


@triton.jit
def _merge(best, m, s, rising, rate, softcap, LOG_K: tl.constexpr, DTYPE: tl.constexpr):
    """The best of two sorted lists, one falling and one rising; the others go to the tail."""
    m, s = _leave_out_keys(m, s, tl.minimum(best, rising), rate, softcap, DTYPE)
    return _sort_bitonic(tl.maximum(best, rising), LOG_K), m, s


@triton.jit
def _read(Xrow, start, V, softcap, BLOCK_V: tl.constexpr):
    """A block from a 16-byte boundary: x, and y if it isn't x; -inf outside of the row."""
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
    """Add a block's keys above the threshold to those waiting; how many there are then.

    The block is read again, from the cache, in parts that need few registers.
    """
    for part in range(start, start + BLOCK_V, BLOCK_S):
        x, _ = _read(Xrow, part, V, None, BLOCK_S)
        chosen = x > threshold
        if tl.max(chosen.to(tl.int32), axis=0) != 0:
            place = waiting + tl.cumsum(chosen.to(tl.int32), axis=0)
            tl.store(Wait + place - 1, _key(x, part + tl.arange(0, BLOCK_S)), mask=chosen)
            waiting = tl.max(place, axis=0)
    return waiting


@triton.jit(do_not_specialize=["rows_t", "lead", "span", "splits", "pieces"])
def _stream_kernel(
    X,  # input
    BEST, TAIL,  # outputs: (rows, splits, 1 << LOG_K) keys, rising; (rows, splits, 2)
    WAITING,  # (programs, BLOCK_V + (1 << LOG_K)), for keys
    rows_t, stride_xb, stride_xt, lead, V, k, span, splits, pieces,  # sizes
    temperature, softcap,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    """Each program takes one piece, a split of a row, after another."""
    BLOCK_K: tl.constexpr = 1 << LOG_K
    offs_k = tl.arange(0, BLOCK_K)
    BLOCK_S: tl.constexpr = min(BLOCK_V, 128)
    rate = inverse_temperature(None, temperature, 0) * LOG2E
    Wait = WAITING + tl.program_id(0).to(tl.int64) * (BLOCK_V + BLOCK_K)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        offset = row_offset(piece // splits, rows_t, stride_xb, stride_xt)
        lo = piece % splits * span
        if not ALIGNED:
            lo -= ((lead + offset) % PACK).to(tl.int32)
        hi = tl.minimum(lo + span, V)
        best = tl.full((BLOCK_K,), EMPTY, tl.int64)
        threshold = tl.full((), -INF, tl.float32)
        m, s = tl.full((), -INF, tl.float32), tl.full((), 0.0, tl.float32)
        waiting = tl.full((), 0, tl.int32)
        for start in range(lo, hi, BLOCK_V):
            x, y = _read(X + offset, start, V, softcap, BLOCK_V)
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
                # What one thread wrote others read, and will write over.
                tl.debug_barrier()
                for at in range(0, waiting, BLOCK_K):
                    some = tl.load(Wait + at + offs_k, mask=at + offs_k < waiting, other=EMPTY)
                    best, m, s = _merge(
                        best, m, s, ~_sort(~some, LOG_K), rate, softcap,
                        LOG_K, X.dtype.element_ty,
                    )  # fmt: skip
                tl.debug_barrier()
                waiting = tl.full((), 0, tl.int32)
                kth = tl.max(tl.where(offs_k == k - 1, best, EMPTY), axis=0)
                threshold = _logit(kth)
        at = tl.full((), 0, tl.int64) + piece
        tl.store(BEST + at * BLOCK_K + (BLOCK_K - 1 - offs_k), best)
        tl.store(TAIL + at * 2, m)
        tl.store(TAIL + at * 2 + 1, s)


@triton.jit
def _fill(Xrow, Ids, found, V, k, BLOCK_V: tl.constexpr):
    """Columns of the first logits of -inf to the places from `found` to k."""
    offs_v = tl.arange(0, BLOCK_V)
    start = tl.full((), 0, tl.int32)
    while (found < k) & (start < V):
        cols = start + offs_v
        x = tl.load(Xrow + cols, mask=cols < V, other=0.0)
        lost = x == -INF
        place = found + tl.cumsum(lost.to(tl.int32), axis=0)
        tl.store(Ids + place - 1, cols.to(tl.int64), mask=lost & (place <= k))
        found = tl.max(place, axis=0)
        start += BLOCK_V
    return found


@triton.jit(do_not_specialize=["rows_t", "splits"])
def _finish_kernel(
    BEST, TAIL, X,  # inputs
    IDS, LOGPROBS, LOG_TAIL,  # outputs
    rows_t, stride_xb, stride_xt, V, k, splits,  # sizes
    temperature, softcap,  # options
    BLOCK_V: tl.constexpr, LOG_K: tl.constexpr,
):  # fmt: skip
    """One program a row merges what its splits found, and normalises."""
    BLOCK_K: tl.constexpr = 1 << LOG_K
    DTYPE: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < k
    inv_t = inverse_temperature(None, temperature, 0)
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
        best, m, s = _merge(best, m_new, s, rising, rate, softcap, LOG_K, DTYPE)
    m, s = _leave_out_keys(m, s, tl.where(mask_k, EMPTY, best), rate, softcap, DTYPE)

    # A place that is still empty belongs to a logit of -inf.
    y, _ = capped(tl.where(mask_k, _logit(best), -INF).to(DTYPE), softcap)
    found = tl.sum((mask_k & (best != EMPTY)).to(tl.int32), axis=0)
    if found < k:  # and all that is left out is -inf too
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

    tl.store(IDS + at, _column(best).to(tl.int64), mask=offs_k < found)
    if found < k:
        offset = row_offset(row, rows_t, stride_xb, stride_xt)
        found = _fill(X + offset, IDS + row.to(tl.int64) * k, found, V, k, BLOCK_V)
        # A row with NaN may have too few that are not: any ids will do.
        tl.store(IDS + at, offs_k.to(tl.int64), mask=mask_k & (offs_k >= found))


def topk(
    x: Tensor,  # (..., V)
    k: int,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and log-probabilities (..., k), largest first, and the log of the tail's mass (...).

    Equal logits come in the order of their ids. k > 256 takes the eager path, on this device:
    torch.topk on a few rows at a time, and more than one pass.
    """
    if k > MAX_K:
        return topk_by_chunks(x, k, temperature, softcap)
    shape = x.shape[:-1]
    ids = torch.empty((*shape, k), device=x.device, dtype=torch.int64)
    logprobs = torch.empty((*shape, k), device=x.device, dtype=torch.float32)
    log_tail = torch.empty(shape, device=x.device, dtype=torch.float32)
    if log_tail.numel() == 0:
        return ids, logprobs, log_tail

    x, rows = rows_of(x)
    processors = config.processors(x.device)
    narrow = softcap is not None or (rows.itemsize == 4 and k <= 64)
    cut = _cut(rows.count, rows.vocab, processors, narrow)
    pieces = rows.count * cut.splits
    programs = min(pieces, RESIDENT * processors)
    block_k = 1 << _log_k(k)
    best = torch.empty((pieces, block_k), device=x.device, dtype=torch.int64)
    tail = torch.empty((pieces, 2), device=x.device, dtype=torch.float32)
    waiting = torch.empty((programs, cut.block_v + block_k), device=x.device, dtype=torch.int64)
    stream, finish = _plan(rows, k, temperature, softcap, cut, programs)
    stream(x, best, tail, waiting)
    finish(best, tail, x, ids, logprobs, log_tail)
    return ids, logprobs, log_tail


def _log_k(k: int) -> int:
    return max(5, (k - 1).bit_length())


def _cut(rows: int, vocab: int, processors: int, narrow: bool) -> config.Config:
    """One warp a program, so that nothing waits for another; splits of four blocks or more.

    Chosen by registers, as compiled for sm_90: narrow blocks where there is more to hold.
    """
    block = min(512 if narrow else 1024, max(128, config.ceil_pow2(vocab)))
    splits = min(
        config.ceil_div(RESIDENT // 2 * processors, rows),
        config.ceil_div(vocab, 4 * block),
        MAX_SPLITS,
    )
    return config.overridden(config.Config(block, 1, splits))


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, k: int, temperature: float, softcap: float | None, cut: config.Config,
    programs: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    """All pieces of all rows, then one program a row."""
    V, layout = rows.vocab, {"BLOCK_V": cut.block_v, "LOG_K": _log_k(k)}
    # A row may start inside of its first pack.
    columns = config.ceil_div(V + rows.pack - 1, cut.splits)
    span = config.ceil_div(columns, cut.block_v) * cut.block_v
    return Launch(
        _stream_kernel, (programs,),
        (*rows.where, rows.lead, V, k, span, cut.splits, rows.count * cut.splits,
         temperature, softcap),
        num_warps=cut.num_warps, PACK=rows.pack, ALIGNED=rows.aligned, **layout,
    ), Launch(
        _finish_kernel, (rows.count,), (*rows.where, V, k, cut.splits, temperature, softcap),
        num_warps=1, **layout,
    )  # fmt: skip
