"""Row statistics, forward: one pass over the row, online.

Each block folds into the running state of its row, (m, s, w, c, n, arg):

    m = max y    s = Σ e^d    w = Σ d e^d    c = Σ v (y - ref)    n = Σ v    arg = argmax y

with d = (y - m) / temperature, v the class weights (1 without) and ref near the row's mean, so that
c stays small and exact. Rows that are too few to fill the GPU are split over several programs, whose
states a second kernel merges by the same law that joins the blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .rows import (
    INF,
    LOG2E,
    capped,
    fringe_tile,
    inverse_temperature,
    row_offset,
    split_row,
)
from .view import Rows, on_device, rows_of

FIELDS = tl.constexpr(6)  # of the state
NOWHERE = tl.constexpr(2**31 - 1)  # argmax of no columns


@triton.jit
def _finite(m):
    """What to subtract: m, or 0 where m is ±inf and the bare exponential is right (0, inf or NaN)."""
    return tl.where(tl.abs(m) == INF, 0.0, m)


@triton.jit
def _exp(d):
    return tl.exp2(d * LOG2E)


@triton.jit
def _move(m, m_new, s, inv_t):
    """d of a state whose max moves from m to m_new; the empty state (-inf, 0) moves at no cost."""
    return tl.where((m == m_new) | (s == 0), 0.0, (m - m_new) * inv_t)


@triton.jit
def _fold(
    m, s, w, c, n, arg,
    X, W, at, mask, first, ref, inv_t, softcap,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """The state after one more block: elements `at` of X, which are columns first + at of the row."""
    y, _ = capped(tl.load(X + at, mask=mask, other=0.0), softcap)
    # Masked after the softcap: a padded column must not come back as -softcap.
    y = tl.where(mask, y, -INF)
    top = tl.max(y, axis=0)
    if ARGMAX:
        if top >= m:  # seldom true after the first few blocks
            leftmost = tl.min(tl.where(mask & (y == top), first + at, NOWHERE), axis=0)
            arg = tl.where(top > m, leftmost, tl.minimum(leftmost, arg))
    m_new = tl.maximum(m, top)
    moved = _move(m, m_new, s, inv_t)
    d = (y - _finite(m_new)) * inv_t
    e = _exp(d)
    if ENTROPY:
        w = (w + moved * s) * _exp(moved) + tl.sum(tl.where(e > 0, d * e, 0.0), axis=0)
    s = s * _exp(moved) + tl.sum(e, axis=0)
    if TOTAL:
        if W is not None:
            v = tl.load(W + first + at, mask=mask, other=0.0).to(tl.float32)
        else:
            v = tl.where(mask, 1.0, 0.0)
        c += tl.sum(tl.where(v != 0, v * (y - ref), 0.0), axis=0)
        n += tl.sum(v, axis=0)
    return m_new, s, w, c, n, arg


@triton.jit
def _reference(Xrow, V, softcap, BLOCK_V: tl.constexpr, TOTAL: tl.constexpr):
    """Mean of the row's first block: a number near which Σ (y - ref) does not cancel."""
    ref = 0.0
    if TOTAL:
        cols = tl.arange(0, BLOCK_V)
        mask = cols < V
        y, _ = capped(tl.load(Xrow + cols, mask=mask, other=0.0), softcap)
        mean = tl.sum(tl.where(mask, y, 0.0), axis=0) / tl.maximum(tl.minimum(BLOCK_V, V), 1)
        ref = tl.where(tl.abs(mean) < INF, mean, 0.0)
    return ref


@triton.jit
def _fold_span(
    Xrow, W, offset, V, lead, lo, hi, ref, inv_t, softcap,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, ARGMAX: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """State of the packs [lo, hi) of a row, and of its ragged ends where lo = 0."""
    m = tl.full((), -INF, tl.float32)
    zero = tl.full((), 0.0, tl.float32)
    s, w, c, n, arg = zero, zero, zero, zero, tl.full((), NOWHERE, tl.int32)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    if not ALIGNED:
        if lo == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            m, s, w, c, n, arg = _fold(
                m, s, w, c, n, arg, Xrow, W, ends, mask_ends, 0, ref, inv_t, softcap,
                ENTROPY, TOTAL, ARGMAX,
            )  # fmt: skip
    Xbody = tl.multiple_of(Xrow + head, 16)
    hi = tl.multiple_of(tl.minimum(hi, body), PACK)
    offs = tl.arange(0, BLOCK_V)
    for start in tl.range(lo, hi, BLOCK_V, num_stages=STAGES):
        m, s, w, c, n, arg = _fold(
            m, s, w, c, n, arg, Xbody, W, start + offs, start + offs < hi, head, ref, inv_t, softcap,
            ENTROPY, TOTAL, ARGMAX,
        )  # fmt: skip
    return m, s, w, c, n, arg


@triton.jit
def _finish(
    m, s, w, c, n, arg,
    Xrow, IDS, SHIFT, LOG_S, PICKED, ENTROPY, TOTAL, ARGMAX,
    row, rows, V, K, live, ref, softcap, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a row's statistics from its state, and the logits at its ids. An ignored row is zeros."""
    shift = _finite(m)
    log_s = tl.log(s)
    tl.store(SHIFT + row, tl.where(live, shift, 0.0))
    tl.store(LOG_S + row, tl.where(live, log_s, 0.0))
    if ENTROPY is not None:
        tl.store(ENTROPY + row, tl.where(live & (s != 0), log_s - w / s, 0.0))
    if TOTAL is not None:
        tl.store(TOTAL + row, tl.where(live, n * ref + c, 0.0))
        tl.store(TOTAL + rows + row, tl.where(live, n * (shift - ref) - c, 0.0))
    if ARGMAX is not None:
        arg = tl.where(arg < V, arg, 0)  # a row of NaNs has no largest
        tl.store(ARGMAX + row, tl.where(live, arg, -1).to(tl.int64))
    if IDS is not None:
        for start in range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            at = row.to(tl.int64) * K + offs_k
            ids = tl.load(IDS + at, mask=mask_k, other=0)
            inside = mask_k & (ids >= 0) & (ids < V) & live
            y, _ = capped(tl.load(Xrow + ids, mask=inside, other=0.0), softcap)
            y = tl.where(inside, y, tl.where(live, float("nan"), 0.0))
            tl.store(PICKED + at, y, mask=mask_k)


@triton.jit
def _is_live(IDS, row, ignore_index):
    """Whether a row counts. An ignored row is read by no one."""
    if ignore_index is not None:
        return tl.load(IDS + row) != ignore_index
    else:
        return True


@triton.jit(do_not_specialize=["rows", "rows_t", "lead"])
def _stats_fwd_kernel(
    X, IDS, W, TEMP,  # inputs
    SHIFT, LOG_S, PICKED, ENTROPY, TOTAL, ARGMAX,  # outputs
    rows, rows_t, stride_xb, stride_xt, lead, V, K,  # sizes
    temperature, softcap, ignore_index,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    live = _is_live(IDS, row, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, columns, softcap, BLOCK_V, TOTAL is not None)
    m, s, w, c, n, arg = _fold_span(
        X + offset, W, offset, columns, lead, 0, columns, ref, inv_t, softcap,
        ENTROPY is not None, TOTAL is not None, ARGMAX is not None,
        PACK, ALIGNED, BLOCK_V, STAGES,
    )  # fmt: skip
    _finish(
        m, s, w, c, n, arg,
        X + offset, IDS, SHIFT, LOG_S, PICKED, ENTROPY, TOTAL, ARGMAX,
        row, rows, V, K, live, ref, softcap, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_t", "lead", "span", "splits"])
def _split_kernel(
    X, IDS, W, TEMP,  # inputs
    PART,  # (rows, splits, FIELDS), output
    rows_t, stride_xb, stride_xt, lead, V, span, splits,  # sizes
    temperature, softcap, ignore_index,  # options
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, ARGMAX: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First level: one program a split of a row, to a partial state."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    columns = tl.where(_is_live(IDS, row, ignore_index), V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, columns, softcap, BLOCK_V, TOTAL)
    span = tl.multiple_of(span, BLOCK_V)
    m, s, w, c, n, arg = _fold_span(
        X + offset, W, offset, columns, lead, split * span, split * span + span,
        ref, inv_t, softcap, ENTROPY, TOTAL, ARGMAX, PACK, ALIGNED, BLOCK_V, STAGES,
    )  # fmt: skip
    at = PART + (row.to(tl.int64) * splits + split) * FIELDS
    tl.store(at, m)
    tl.store(at + 1, s)
    tl.store(at + 2, w)
    tl.store(at + 3, c)
    tl.store(at + 4, n)
    tl.store(at + 5, arg.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "rows_t", "splits"])
def _merge_kernel(
    PART, X, IDS, TEMP,  # inputs
    SHIFT, LOG_S, PICKED, ENTROPY, TOTAL, ARGMAX,  # outputs
    rows, rows_t, stride_xb, stride_xt, V, K, splits,  # sizes
    temperature, softcap, ignore_index,  # options
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Second level: one program a row merges its splits' states, all at once."""
    row = tl.program_id(0)
    live = _is_live(IDS, row, ignore_index)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    ref = _reference(X + offset, tl.where(live, V, 0), softcap, BLOCK_V, TOTAL is not None)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < splits
    at = PART + (row.to(tl.int64) * splits + offs_s) * FIELDS
    m_s = tl.load(at, mask=mask_s, other=-INF)
    s_s = tl.load(at + 1, mask=mask_s, other=0.0)
    m = tl.max(m_s, axis=0)
    moved = _move(m_s, m, s_s, inv_t)
    s = tl.sum(s_s * _exp(moved), axis=0)
    w, c, n, arg = m, m, m, NOWHERE  # stay unread unless asked for
    if ENTROPY is not None:
        w_s = tl.load(at + 2, mask=mask_s, other=0.0)
        w = tl.sum((w_s + moved * s_s) * _exp(moved), axis=0)
    if TOTAL is not None:
        c = tl.sum(tl.load(at + 3, mask=mask_s, other=0.0), axis=0)
        n = tl.sum(tl.load(at + 4, mask=mask_s, other=0.0), axis=0)
    if ARGMAX is not None:
        arg_s = tl.load(at + 5, mask=mask_s, other=0.0).to(tl.int32, bitcast=True)
        arg = tl.min(tl.where(mask_s & (m_s == m), arg_s, NOWHERE), axis=0)
    _finish(
        m, s, w, c, n, arg,
        X + offset, IDS, SHIFT, LOG_S, PICKED, ENTROPY, TOTAL, ARGMAX,
        row, rows, V, K, live, ref, softcap, BLOCK_K,
    )  # fmt: skip


def stats_fwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    want_entropy: bool,
    want_total: bool,
    want_argmax: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """shift, log_s (...); picked like ids; entropy (...); total (2, ...); argmax (...), or None."""
    lead_shape, V = x.shape[:-1], x.shape[-1]
    like = {"device": x.device, "dtype": torch.float32}
    shift, log_s = torch.empty(lead_shape, **like), torch.empty(lead_shape, **like)
    picked = None if ids is None else torch.empty(ids.shape, **like)
    entropy = torch.empty(lead_shape, **like) if want_entropy else None
    total = torch.empty((2, *lead_shape), **like) if want_total else None
    argmax = torch.empty(lead_shape, device=x.device, dtype=torch.int64) if want_argmax else None
    outputs = (shift, log_s, picked, entropy, total, argmax)
    if shift.numel() == 0:
        return outputs

    view = rows_of(x)
    ids = None if ids is None else ids.contiguous()
    K = 1 if ids is None else ids.numel() // view.count
    cut = config.forward(view.count, V, x.element_size(), config.processors(x.device))
    options = (temperature, softcap, ignore_index)
    row_temperature = None if row_temperature is None else row_temperature.contiguous()
    weight = None if weight is None else weight.contiguous()
    block_k = min(128, triton.next_power_of_2(K))
    layout = {"PACK": view.pack, "ALIGNED": view.aligned, "BLOCK_V": cut.block_v}
    with on_device(x):
        if cut.splits == 1:
            _stats_fwd_kernel[(view.count,)](
                view.x, ids, weight, row_temperature, *outputs,
                view.count, view.rows_t, view.stride_b, view.stride_t, view.lead, V, K,
                *options, **layout,
                BLOCK_K=block_k, STAGES=cut.num_stages, num_warps=cut.num_warps,
            )  # fmt: skip
            return outputs
        span = triton.cdiv(triton.cdiv(V, cut.splits), cut.block_v) * cut.block_v
        part = torch.empty((view.count, cut.splits, FIELDS.value), **like)
        _split_kernel[(view.count, cut.splits)](
            view.x, ids, weight, row_temperature, part,
            view.rows_t, view.stride_b, view.stride_t, view.lead, V, span, cut.splits,
            *options, want_entropy, want_total, want_argmax, **layout,
            STAGES=cut.num_stages, num_warps=cut.num_warps,
        )  # fmt: skip
        _merge_kernel[(view.count,)](
            part, view.x, ids, row_temperature, *outputs,
            view.count, view.rows_t, view.stride_b, view.stride_t, V, K, cut.splits,
            *options, BLOCK_V=cut.block_v, BLOCK_K=block_k, BLOCK_S=config.MAX_SPLITS,
            num_warps=cut.num_warps,
        )  # fmt: skip
    return outputs
