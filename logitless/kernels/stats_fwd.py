"""Row statistics, forward: one pass over the row, online.

Each block folds into the running state of its row, (m, s, w, c, n, block, s1):

    m = max y    s = Σ e^(d/T)    w = Σ d e^(d/T)    c = Σ v (y - ref)    n = Σ v        d = y - m

with v the class weights (1 without), ref near the row's mean so that c stays small and exact,
`block` the first block to reach m, and s1 = Σ e^d, a second normaliser at temperature 1. Rows that
are too few to fill the GPU are split over several programs, whose states a second kernel merges by
the same law that joins the blocks.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .rows import (
    INF,
    LOG2E,
    capped,
    finite,
    fringe_tile,
    inverse_temperature,
    load,
    move,
    row_offset,
    split_row,
)
from .tail import mass_outside
from .view import Rows, rows_of

FIELDS = tl.constexpr(7)  # of the state
NOWHERE = tl.constexpr(2**31 - 1)  # a column that is none


@triton.jit
def _fold(
    m, s, w, c, n, block, s1,
    X, W, start, offs, mask, first, ref, rate, softcap,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The state after one more block: elements start + offs of X, `first` columns into the row."""
    at = start + offs
    y, _ = capped(load(X, at, mask), softcap)
    if mask is not None:
        # After the softcap: a padded column must not come back as -softcap.
        y = tl.where(mask, y, -INF)
    top = tl.max(y, axis=0)
    block = tl.where(top > m, start, block)
    m_new = tl.maximum(m, top)
    moved = move(m, m_new, s)
    scale = tl.exp2(moved * rate)
    d = y - finite(m_new)
    e = tl.exp2(d * rate)
    if ENTROPY:
        # -inf · 0 is 0 here: any finite d will do where e is 0.
        w = w * scale + moved * (s * scale) + tl.sum(tl.maximum(d, -1e38) * e, axis=0)
    s = s * scale + tl.sum(e, axis=0)
    if PLAIN:
        s1 = s1 * tl.exp2(moved * LOG2E) + tl.sum(tl.exp2(d * LOG2E), axis=0)
    if TOTAL:
        u = y - ref
        if W is not None:
            v = load(W, first + at, mask).to(tl.float32)
            c += tl.sum(tl.where(v != 0, v * u, 0.0), axis=0)
            n += tl.sum(v, axis=0)
        elif mask is not None:
            c += tl.sum(tl.where(mask, u, 0.0), axis=0)
        else:
            c += tl.sum(u, axis=0)
    return m_new, s, w, c, n, block, s1


@triton.jit
def _reference(Xrow, V, softcap, TOTAL: tl.constexpr):
    """Mean of the row's first columns: a number near which Σ (y - ref) does not cancel."""
    ref = 0.0
    if TOTAL:
        cols = tl.arange(0, 512)
        mask = cols < V
        y, _ = capped(load(Xrow, cols, mask), softcap)
        mean = tl.sum(tl.where(mask, y, 0.0), axis=0) / tl.maximum(tl.minimum(512, V), 1)
        ref = tl.where(tl.abs(mean) < INF, mean, 0.0)
    return ref


@triton.jit
def fold_span(
    Xrow, W, offset, V, lead, lo, hi, ref, rate, softcap,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, PLAIN: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """State of the packs [lo, hi) of a row, and of its ragged ends where lo = 0."""
    m = tl.full((), -INF, tl.float32)
    zero = tl.full((), 0.0, tl.float32)
    s, w, c, n, s1, block = zero, zero, zero, zero, zero, tl.full((), 0, tl.int32) + lo
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xbody = tl.multiple_of(Xrow + head, 16)
    hi = tl.multiple_of(tl.minimum(hi, body), PACK)
    full = lo + tl.maximum(hi - lo, 0) // BLOCK_V * BLOCK_V
    offs = tl.arange(0, BLOCK_V)
    for start in range(lo, full, BLOCK_V):
        m, s, w, c, n, block, s1 = _fold(
            m, s, w, c, n, block, s1, Xbody, W, start, offs, None, head, ref, rate, softcap,
            ENTROPY, TOTAL, PLAIN,
        )  # fmt: skip
    if full < hi:
        m, s, w, c, n, block, s1 = _fold(
            m, s, w, c, n, block, s1, Xbody, W, full, offs, full + offs < hi,
            head, ref, rate, softcap, ENTROPY, TOTAL, PLAIN,
        )  # fmt: skip
    if not ALIGNED:
        if lo == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            m, s, w, c, n, _, s1 = _fold(
                m, s, w, c, n, block, s1, Xrow, W, 0, ends, mask_ends, 0, ref, rate, softcap,
                ENTROPY, TOTAL, PLAIN,
            )  # fmt: skip
    return m, s, w, c, n, block, s1


@triton.jit
def _leftmost(X, at, mask, first, m, softcap):
    """Lowest column whose y is m, or NOWHERE."""
    y, _ = capped(load(X, at, mask), softcap)
    return tl.min(tl.where(mask & (y == m), first + at, NOWHERE), axis=0)


@triton.jit
def _argmax(
    Xrow, m, block, offset, V, lead, softcap,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Column of the max: one more look at the first block that reached it, not at every block."""
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    at = block + tl.arange(0, BLOCK_V)
    arg = _leftmost(tl.multiple_of(Xrow + head, 16), at, at < body, head, m, softcap)
    if not ALIGNED:
        ends, mask_ends = fringe_tile(head, body, V, PACK)
        arg = tl.minimum(arg, _leftmost(Xrow, ends, mask_ends, 0, m, softcap))
    return arg


@triton.jit
def _finish_label(Xrow, ID, LABEL, LOG_S1, row, V, live, shift, s1, softcap):
    """log p of a row's first id at temperature 1."""
    id = tl.load(ID)
    inside = (id >= 0) & (id < V) & live
    y, _ = capped(tl.load(Xrow + id, mask=inside, other=0.0), softcap)
    log_s1 = tl.log(s1)
    log_p = tl.where(inside, (y - shift) - log_s1, tl.where(live, float("nan"), 0.0))
    tl.store(LABEL + row, log_p)
    tl.store(LOG_S1 + row, tl.where(live, log_s1, 0.0))


@triton.jit
def _finish(
    m, s, w, c, n, arg, s1,
    Xrow, IDS, SHIFT, LOG_S, LSE, PICKED, ENTROPY, TOTAL, ARGMAX, LABEL, LOG_S1,
    row, V, K, live, ref, inv_t, softcap, NORMALISED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a row's statistics from its state, and what is at its ids; zeros if ignored."""
    shift = finite(m)
    log_s = tl.log(s)
    tl.store(SHIFT + row, tl.where(live, shift, 0.0))
    tl.store(LOG_S + row, tl.where(live, log_s, 0.0))
    tl.store(LSE + row, tl.where(live, shift * inv_t + log_s, 0.0))
    if ENTROPY is not None:
        tl.store(ENTROPY + row, tl.where(live & (s != 0), log_s - w * inv_t / s, 0.0))
    if TOTAL is not None:
        if NORMALISED:
            total = (c - n * (shift - ref)) * inv_t - n * log_s
        else:
            total = (c + n * ref) * inv_t
        tl.store(TOTAL + row, tl.where(live, total, 0.0))
    if ARGMAX is not None:
        arg = tl.where(arg < V, arg, 0)  # a row of NaNs has no largest
        tl.store(ARGMAX + row, tl.where(live, arg, -1).to(tl.int64))
    if LABEL is not None:
        _finish_label(
            Xrow, IDS + row.to(tl.int64) * K, LABEL, LOG_S1, row, V, live, shift, s1, softcap
        )
    if IDS is not None:
        for start in range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            at = row.to(tl.int64) * K + offs_k
            ids = tl.load(IDS + at, mask=mask_k, other=0)
            inside = mask_k & (ids >= 0) & (ids < V) & live
            y, _ = capped(load(Xrow, ids, inside), softcap)
            if NORMALISED:  # as (t - m) - log s, never as t - lse
                z = (y - shift) * inv_t - log_s
            else:
                z = y * inv_t
            tl.store(PICKED + at, tl.where(inside, z, tl.where(live, float("nan"), 0.0)), mask_k)


@triton.jit
def is_live(IDS, row, K, ignore_index):
    """Whether a row counts, by its first id. An ignored row is read by no one."""
    if ignore_index is not None:
        return tl.load(IDS + row.to(tl.int64) * K) != ignore_index
    else:
        return True


@triton.jit(do_not_specialize=["rows_t", "lead"])
def _stats_fwd_kernel(
    X, IDS, W, TEMP,  # inputs
    SHIFT, LOG_S, LSE, PICKED, ENTROPY, TOTAL, ARGMAX, LABEL, LOG_S1,  # outputs
    rows_t, stride_xb, stride_xt, lead, V, K,  # sizes
    temperature, softcap, ignore_index,  # options
    NORMALISED: tl.constexpr, BLOCK_K: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    live = is_live(IDS, row, K, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, columns, softcap, TOTAL is not None)
    m, s, w, c, n, block, s1 = fold_span(
        X + offset, W, offset, columns, lead, 0, columns, ref, inv_t * LOG2E, softcap,
        ENTROPY is not None, TOTAL is not None, LABEL is not None, PACK, ALIGNED, BLOCK_V,
    )  # fmt: skip
    if W is None:
        n = columns.to(tl.float32)
    arg = 0
    if ARGMAX is not None:
        arg = _argmax(X + offset, m, block, offset, columns, lead, softcap, PACK, ALIGNED, BLOCK_V)
    _finish(
        m, s, w, c, n, arg, s1,
        X + offset, IDS, SHIFT, LOG_S, LSE, PICKED, ENTROPY, TOTAL, ARGMAX, LABEL, LOG_S1,
        row, V, K, live, ref, inv_t, softcap, NORMALISED, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_t", "lead", "span", "splits"])
def _split_kernel(
    X, IDS, W, TEMP,  # inputs
    PART,  # (rows, splits, FIELDS), output
    rows_t, stride_xb, stride_xt, lead, V, K, span, splits,  # sizes
    temperature, softcap, ignore_index,  # options
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, ARGMAX: tl.constexpr, PLAIN: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """First level: one program a split of a row, to a partial state."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    columns = tl.where(is_live(IDS, row, K, ignore_index), V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, columns, softcap, TOTAL)
    span = tl.multiple_of(span, BLOCK_V)
    m, s, w, c, n, block, s1 = fold_span(
        X + offset, W, offset, columns, lead, split * span, split * span + span,
        ref, inv_t * LOG2E, softcap, ENTROPY, TOTAL, PLAIN, PACK, ALIGNED, BLOCK_V,
    )  # fmt: skip
    arg = NOWHERE
    if ARGMAX:
        arg = _argmax(X + offset, m, block, offset, columns, lead, softcap, PACK, ALIGNED, BLOCK_V)
    at = PART + (row.to(tl.int64) * splits + split) * FIELDS
    tl.store(at, m)
    tl.store(at + 1, s)
    tl.store(at + 2, w)
    tl.store(at + 3, c)
    tl.store(at + 4, n)
    tl.store(at + 5, arg.to(tl.float32, bitcast=True))
    tl.store(at + 6, s1)


@triton.jit(do_not_specialize=["rows_t", "splits"])
def _merge_kernel(
    PART, X, IDS, W, TEMP,  # inputs
    SHIFT, LOG_S, LSE, PICKED, ENTROPY, TOTAL, ARGMAX, LABEL, LOG_S1,  # outputs
    rows_t, stride_xb, stride_xt, V, K, splits,  # sizes
    temperature, softcap, ignore_index,  # options
    NORMALISED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Second level: one program a row merges its splits' states, all at once."""
    row = tl.program_id(0)
    live = is_live(IDS, row, K, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, columns, softcap, TOTAL is not None)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < splits
    at = PART + (row.to(tl.int64) * splits + offs_s) * FIELDS
    m_s = tl.load(at, mask=mask_s, other=-INF)
    s_s = tl.load(at + 1, mask=mask_s, other=0.0)
    m = tl.max(m_s, axis=0)
    moved = move(m_s, m, s_s)
    scale = tl.exp2(moved * (inv_t * LOG2E))
    s = tl.sum(s_s * scale, axis=0)
    w, c, n, s1, arg = m, m, m, m, 0  # stay unread unless asked for
    if ENTROPY is not None:
        w_s = tl.load(at + 2, mask=mask_s, other=0.0)
        w = tl.sum(w_s * scale + moved * (s_s * scale), axis=0)
    if LABEL is not None:
        s1_s = tl.load(at + 6, mask=mask_s, other=0.0)
        s1 = tl.sum(s1_s * tl.exp2(move(m_s, m, s1_s) * LOG2E), axis=0)
    if TOTAL is not None:
        c = tl.sum(tl.load(at + 3, mask=mask_s, other=0.0), axis=0)
        n = columns.to(tl.float32)
        if W is not None:
            n = tl.sum(tl.load(at + 4, mask=mask_s, other=0.0), axis=0)
    if ARGMAX is not None:
        args = tl.load(at + 5, mask=mask_s, other=0.0).to(tl.int32, bitcast=True)
        arg = tl.min(tl.where(mask_s & (m_s == m), args, NOWHERE), axis=0)
    _finish(
        m, s, w, c, n, arg, s1,
        X + offset, IDS, SHIFT, LOG_S, LSE, PICKED, ENTROPY, TOTAL, ARGMAX, LABEL, LOG_S1,
        row, V, K, live, ref, inv_t, softcap, NORMALISED, BLOCK_K,
    )  # fmt: skip


def stats_fwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,
    outside: int | None,
    plain: bool,
    want_entropy: bool,
    want_total: bool,
    want_argmax: bool,
) -> tuple[Tensor | None, ...]:
    """shift, log_s, lse, picked, entropy, total, argmax, tail, label, log_s1, repeats.

    None if not wanted; repeats, which goes with tail, is whether one of ids[..., outside:] is in
    two slots.

    (...) each, picked like ids. picked and total are of z, or of log p = z - lse where
    `normalised`; tail is the log mass outside ids[..., outside:]; where `plain`, label is log p of
    the first id at temperature 1, and log_s1 its normaliser. A row whose first id is ignore_index
    is not read.
    """
    V = x.shape[-1]
    shift = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    outputs = (
        shift,
        torch.empty_like(shift),
        torch.empty_like(shift),
        None if ids is None else torch.empty(ids.shape, device=x.device, dtype=torch.float32),
        torch.empty_like(shift) if want_entropy else None,
        torch.empty_like(shift) if want_total else None,
        torch.empty_like(shift, dtype=torch.int64) if want_argmax else None,
    )
    label, log_s1 = (torch.empty_like(shift) if plain else None for _ in range(2))
    tail = repeats = None
    if outside is not None:
        tail, repeats = torch.empty_like(shift), torch.empty_like(shift, dtype=torch.int8)
    if shift.numel() == 0:
        return *outputs, tail, label, log_s1, repeats

    ids, weight, row_temperature = (
        None if t is None else t.contiguous() for t in (ids, weight, row_temperature)
    )
    x, rows = rows_of(x)
    heavy = want_entropy or want_total or want_argmax or softcap is not None
    cut = config.forward(rows.count, V, rows.itemsize, config.processors(x.device), heavy, plain)
    K = 1 if ids is None else ids.numel() // rows.count
    wants = (want_entropy, want_total, want_argmax, plain)
    first, second = _plan(rows, K, temperature, softcap, ignore_index, normalised, wants, cut)
    if second is None:
        first(x, ids, weight, row_temperature, *outputs, label, log_s1)
    else:
        size = (rows.count, cut.splits, FIELDS.value)
        part = torch.empty(size, device=x.device, dtype=torch.float32)
        first(x, ids, weight, row_temperature, part)
        second(part, x, ids, weight, row_temperature, *outputs, label, log_s1)
    if tail is not None:
        mass_outside(
            x, rows, ids, outputs[3], row_temperature, *outputs[:2], tail, repeats,
            K, outside, temperature, softcap, ignore_index,
        )  # fmt: skip
    return *outputs, tail, label, log_s1, repeats


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, K: int, temperature: float, softcap: float | None, ignore_index: int | None,
    normalised: bool, wants: tuple[bool, ...], cut: config.Config,
) -> tuple[Launch, Launch | None]:  # fmt: skip
    """One program a row; or one a split of a row, then one a row."""
    V, options = rows.vocab, (temperature, softcap, ignore_index)
    layout = {"PACK": rows.pack, "ALIGNED": rows.aligned, "BLOCK_V": cut.block_v}
    block_k = config.ceil_pow2(K)
    if cut.splits == 1:
        return Launch(
            _stats_fwd_kernel, (rows.count,), (*rows.where, rows.lead, V, K, *options),
            num_warps=cut.num_warps, NORMALISED=normalised,
            BLOCK_K=min(128 * cut.num_warps, block_k), **layout,
        ), None  # fmt: skip
    span = config.ceil_div(config.ceil_div(V, cut.splits), cut.block_v) * cut.block_v
    return Launch(
        _split_kernel, (rows.count, cut.splits),
        (*rows.where, rows.lead, V, K, span, cut.splits, *options),
        num_warps=cut.num_warps, **layout,
        **dict(zip(("ENTROPY", "TOTAL", "ARGMAX", "PLAIN"), wants, strict=True)),
    ), Launch(
        _merge_kernel, (rows.count,), (*rows.where, V, K, cut.splits, *options),
        num_warps=1, NORMALISED=normalised, BLOCK_K=min(128, block_k), BLOCK_S=config.MAX_SPLITS,
    )  # fmt: skip
