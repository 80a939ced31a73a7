"""A student row beside a teacher row: divergences and soft cross-entropy, forward and backward.

With d = y - max y of each row, e = 2^(d·rate) and s = Σ e, so that q = e_q / s_q and p = e_p / s_p:

    forward KL      Σ p log p/q    c = Σ e_p (d_p - d_q)    c/s_p /T + log s_q/s_p
    reverse KL      Σ q log q/p    c = Σ e_q (d_q - d_p)    c/s_q /T + log s_p/s_q
    cross-entropy  -Σ v log q      c = -Σ v d_q             c /T + Σv log s_q

are one sweep: where a max moves, d_p - d_q of all that came before moves alike, and c with it. Only
differences to a max are taken, so that no common offset costs a digit, and a student that is the
teacher gives 0 and no gradient, exactly. JSD, with M = βp + (1-β)q, needs both normalisers before
its first term: a second sweep adds up Σ q log q/M and Σ p log p/M. So that it finds the rows in the
cache, long rows are shared out as in visit.py: each program sweeps its part, waits for the others'
normalisers, sweeps its part again. Backward is one sweep of both rows, from five numbers a row:

    forward KL, cross-entropy   dz = (e_q ratio - v) gain              v = e_p, or the target's mass
    reverse KL                  dz = e_q (d_q - d_p - mean) gain
    JSD                         dz = q (log2 q/M - mean) gain
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_cuda

from . import config
from .launch import REMEMBERED, Launch
from .rows import (
    INF,
    LN2,
    LOG2E,
    capped,
    finite,
    fringe_tile,
    inverse_temperature,
    load,
    row_offset,
    split_row,
)
from .stats_bwd import zero_tile
from .view import Rows, rows_of
from .visit import MAX_PARTS, leave, meet

FIELDS = tl.constexpr(5)  # saved of a row: max and s of the student, of the teacher, and a mean
FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
JSD = tl.constexpr(2)
SOFT = tl.constexpr(3)
NORMS = tl.constexpr(4)  # the first sweep of JSD
KINDS = {"forward": 0, "reverse": 1, "jsd": 2, "soft": 3}


@triton.jit
def _student(X, at, mask, softcap):
    """y; -inf past the row."""
    y, _ = capped(load(X, at, mask), softcap)
    if mask is not None:
        # After the softcap: a padded column must not come back as -softcap.
        y = tl.where(mask, y, -INF)
    return y


@triton.jit
def _teacher(T, at, mask):
    """Logits of the teacher; -inf past the row."""
    t = load(T, at, mask).to(tl.float32)
    if mask is not None:
        t = tl.where(mask, t, -INF)
    return t


@triton.jit
def _target(T, W, at, mask, first, V, smoothing):
    """Mass of each class in soft cross-entropy: smoothed, times the class weight."""
    v = load(T, at, mask).to(tl.float32) * (1.0 - smoothing) + smoothing / V
    if W is not None:
        v *= load(W, first + at, mask).to(tl.float32)
    if mask is not None:
        v = tl.where(mask, v, 0.0)
    return v


@triton.jit
def _extend(m, y, rate):
    """The max after one more block, how far it moved (from -inf: 0), and d and e of the block."""
    m_new = tl.maximum(m, tl.max(y, axis=0))
    moved = tl.where((m == m_new) | (m == -INF), 0.0, tl.maximum(m - m_new, -1e38))
    d = y - finite(m_new)
    return m_new, moved, d, tl.exp2(d * rate)


@triton.jit
def _cross(c, s, moved, scale, e, h):
    """c after one more block; what scale or e makes nothing of is nothing, be it infinite."""
    before = tl.where(scale == 0, 0.0, c * scale + s * (moved * scale))
    return before + tl.where(e != 0, e * h, 0.0)


@triton.jit
def _log2(x, IN: tl.constexpr):
    """log2 of a normal number, as exactly as logits of dtype IN deserve; 0 of 1.

    Logits of 16 bits take NVIDIA's one instruction for it: right to 2^-22, as exp2 is. All else
    takes two dozen, right to a rounding or two.
    """
    if (IN == tl.bfloat16 or IN == tl.float16) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _mixture(log_q, log_p, beta, IN: tl.constexpr):
    """q, log q/M, p and log p/M of an element, M = βp + (1-β)q, in bits. Finite for any logits.

    By the larger of p and q, and the smaller as a share of it: μ = M / larger lies between the
    larger's weight and 1, and is 1 exactly where p = q. Of two -inf the fall from one to the other
    is NaN, and taken for a deep one; the larger is 0 there.
    """
    top = tl.maximum(log_q, log_p)
    fall = tl.minimum(log_q, log_p) - top
    fall = tl.where(fall > -1000.0, fall, -1000.0)
    more = log_q > log_p
    large, share = tl.exp2(top), tl.exp2(fall)
    small = large * share
    log_mu = _log2(share + tl.where(more, 1.0 - beta, beta) * (1.0 - share), IN)
    q, log_q_m = tl.where(more, large, small), tl.where(more, 0.0, fall) - log_mu
    p, log_p_m = tl.where(more, small, large), tl.where(more, fall, 0.0) - log_mu
    return q, log_q_m, p, log_p_m


@triton.jit
def _fold(
    m_q, s_q, m_p, s_p, c, log_q, log_p,
    X, T, W, at, mask, first, V, rate, softcap, blend, KIND: tl.constexpr,
):  # fmt: skip
    """The state after one more block: maxima are numbers, sums a number for each lane.

    Lanes are added up at the end of the row: only the maxima wait for one another in every block.
    """
    y = _student(X, at, mask, softcap)
    if KIND == JSD:
        t = _teacher(T, at, mask)
        q, log_q_m, p, log_p_m = _mixture(
            (y - m_q) * rate - log_q, (t - m_p) * rate - log_p, blend, X.dtype.element_ty
        )
        return m_q, s_q + q * log_q_m, m_p, s_p + p * log_p_m, c
    else:
        m_q, moved_q, d_q, e_q = _extend(m_q, y, rate)
        scale_q = tl.exp2(moved_q * rate)
        if KIND == SOFT:
            v = _target(T, W, at, mask, first, V, blend)
            c -= moved_q * s_p + tl.where(v != 0, v * d_q, 0.0)
            s_p += v
        else:
            m_p, moved_p, d_p, e_p = _extend(m_p, _teacher(T, at, mask), rate)
            scale_p = tl.exp2(moved_p * rate)
            if KIND == FORWARD:
                c = _cross(c, s_p, moved_p - moved_q, scale_p, e_p, d_p - d_q)
            if KIND == REVERSE:
                c = _cross(c, s_q, moved_q - moved_p, scale_q, e_q, d_q - d_p)
            s_p = s_p * scale_p + e_p
        return m_q, s_q * scale_q + e_q, m_p, s_p, c


@triton.jit
def _sweep(
    m_q, m_p, log_q, log_p, Xrow, Trow, W, offset, V, lead, lo, hi, rate, softcap, blend,
    KIND: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, T_STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Packs [lo, hi) of both rows, their ragged ends where lo = 0: m_q, s_q, m_p, s_p, c.

    For JSD the normalisers are given, in bits, and the sums are Σ q log q/M and Σ p log p/M.
    """
    zero = tl.zeros((BLOCK_V,), tl.float32)
    s_q, s_p, c = zero, zero, zero
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xbody = tl.multiple_of(Xrow + head, 16)
    Tbody = Trow + head
    if T_STEP:
        Tbody = tl.multiple_of(Tbody, 16)
    hi = tl.multiple_of(tl.minimum(hi, body), PACK)
    full = lo + tl.maximum(hi - lo, 0) // BLOCK_V * BLOCK_V
    offs = tl.arange(0, BLOCK_V)
    for start in range(lo, full, BLOCK_V):
        m_q, s_q, m_p, s_p, c = _fold(
            m_q, s_q, m_p, s_p, c, log_q, log_p,
            Xbody, Tbody, W, start + offs, None, head, V, rate, softcap, blend, KIND,
        )  # fmt: skip
    if full < hi:
        m_q, s_q, m_p, s_p, c = _fold(
            m_q, s_q, m_p, s_p, c, log_q, log_p,
            Xbody, Tbody, W, full + offs, full + offs < hi, head, V, rate, softcap, blend, KIND,
        )  # fmt: skip
    if not ALIGNED:
        if lo == 0:
            ends = tl.where(offs < PACK, offs, head + body + offs - PACK)
            mask_ends = tl.where(offs < PACK, offs < head, ends < V)
            m_q, s_q, m_p, s_p, c = _fold(
                m_q, s_q, m_p, s_p, c, log_q, log_p,
                Xrow, Trow, W, ends, mask_ends, 0, V, rate, softcap, blend, KIND,
            )  # fmt: skip
    return m_q, tl.sum(s_q, axis=0), m_p, tl.sum(s_p, axis=0), tl.sum(c, axis=0)


@triton.jit
def _bits(s):
    """log2 s of a normaliser, for log2 p = d·rate - log2 s. Of a row of -inf, p is 0."""
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _jensen_shannon(of_q, of_p, log_q, log_p, blend):
    """The loss of a row from Σ q log q/M and Σ p log p/M, in bits."""
    # A row without a distribution, or with a NaN, has no divergence: 0 · inf is NaN.
    return ((1.0 - blend) * of_q + blend * of_p) * LN2 + 0.0 * (log_q + log_p)


@triton.jit
def _save(STATS, row, shift_q, s_q, shift_p, s_p, mean):
    at = STATS + row.to(tl.int64) * FIELDS
    tl.store(at, shift_q)
    tl.store(at + 1, s_q)
    tl.store(at + 2, shift_p)
    tl.store(at + 3, s_p)
    tl.store(at + 4, mean)


@triton.jit(do_not_specialize=["rows_x", "rows_t", "lead"])
def _pair_fwd_kernel(
    X, T, W, TEMP, MASK,  # inputs
    LOSS, STATS,  # outputs
    rows_x, stride_xb, stride_xt, rows_t, stride_tb, stride_tt, lead, V,  # sizes
    temperature, softcap, blend,  # options
    KIND: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, T_STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    if MASK is not None:
        if tl.load(MASK + row) == 0:
            tl.store(LOSS + row, 0.0)
            _save(STATS, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    offset = row_offset(row, rows_x, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    rate = inv_t * LOG2E
    empty = tl.full((), -INF, tl.float32)
    m_q, s_q, m_p, s_p, c = _sweep(
        empty, empty, 0.0, 0.0, X + offset, Trow, W, offset, V, lead, 0, V, rate, softcap, blend,
        NORMS if KIND == JSD else KIND, PACK, ALIGNED, T_STEP, BLOCK_V,
    )  # fmt: skip
    shift_q, shift_p = finite(m_q), finite(m_p)
    mean = 0.0
    if KIND == SOFT:
        loss = c * inv_t + s_p * tl.log(s_q)
    else:
        if KIND == FORWARD:
            loss = c / s_p * inv_t + tl.log(s_q / s_p)
        elif KIND == REVERSE:
            mean = c / s_q
            loss = mean * inv_t + tl.log(s_p / s_q)
        else:
            log_q, log_p = _bits(s_q), _bits(s_p)
            _, mean, _, of_p, _ = _sweep(
                shift_q, shift_p, log_q, log_p, X + offset, Trow, W, offset, V, lead, 0, V,
                rate, softcap, blend, JSD, PACK, ALIGNED, T_STEP, BLOCK_V,
            )  # fmt: skip
            loss = _jensen_shannon(mean, of_p, log_q, log_p, blend)
        loss = tl.where(loss < 0, 0.0, loss)  # by rounding; a NaN stays
    tl.store(LOSS + row, loss)
    _save(STATS, row, shift_q, s_q, shift_p, s_p, mean)


@triton.jit(do_not_specialize=["rows_x", "rows_t", "lead", "parts"])
def _jsd_part_kernel(
    X, T, TEMP, MASK,  # inputs
    STATS, SUMS, MEETING,  # outputs; MEETING (rows, 2, parts) starts as zeros
    rows_x, stride_xb, stride_xt, rows_t, stride_tb, stride_tt, lead, V, parts,  # sizes
    temperature, softcap, blend,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, T_STEP: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program a part of a row: SPAN columns of its body; the fringe goes with the first."""
    pid = tl.program_id(0)
    row = pid // parts
    part = pid % parts
    if MASK is not None:
        if tl.load(MASK + row) == 0:
            return

    lo = part * SPAN
    offset = row_offset(row, rows_x, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    rate = inverse_temperature(TEMP, temperature, row) * LOG2E
    empty = tl.full((), -INF, tl.float32)
    m_q, s_q, m_p, s_p, _ = _sweep(
        empty, empty, 0.0, 0.0, X + offset, Trow, None, offset, V, lead, lo, lo + SPAN,
        rate, softcap, blend, NORMS, PACK, ALIGNED, T_STEP, BLOCK_V,
    )  # fmt: skip
    at = MEETING + row.to(tl.int64) * 2 * parts
    leave(at + part, m_q, s_q)
    leave(at + parts + part, m_p, s_p)
    m_q, s_q = meet(at, parts, rate, BLOCK_P)
    m_p, s_p = meet(at + parts, parts, rate, BLOCK_P)
    shift_q, shift_p = finite(m_q), finite(m_p)
    _, of_q, _, of_p, _ = _sweep(
        shift_q, shift_p, _bits(s_q), _bits(s_p), X + offset, Trow, None, offset, V, lead,
        lo, lo + SPAN, rate, softcap, blend, JSD, PACK, ALIGNED, T_STEP, BLOCK_V,
    )  # fmt: skip
    at_sums = SUMS + (row.to(tl.int64) * parts + part) * 2
    tl.store(at_sums, of_q)
    tl.store(at_sums + 1, of_p)
    if part == 0:
        _save(STATS, row, shift_q, s_q, shift_p, s_p, 0.0)


@triton.jit(do_not_specialize=["parts"])
def _jsd_sum_kernel(
    SUMS, MASK,  # inputs
    LOSS, STATS,  # outputs; of STATS, the mean
    parts, blend, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program a row: the sums of its parts, and the loss."""
    row = tl.program_id(0)
    if MASK is not None:
        if tl.load(MASK + row) == 0:
            tl.store(LOSS + row, 0.0)
            _save(STATS, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    offs_p = tl.arange(0, BLOCK_P)
    at_sums = SUMS + (row.to(tl.int64) * parts + offs_p) * 2
    mean = tl.sum(load(at_sums, 0, offs_p < parts), axis=0)
    of_p = tl.sum(load(at_sums, 1, offs_p < parts), axis=0)
    at = STATS + row.to(tl.int64) * FIELDS
    log_q, log_p = _bits(tl.load(at + 1)), _bits(tl.load(at + 3))
    loss = _jensen_shannon(mean, of_p, log_q, log_p, blend)
    tl.store(LOSS + row, tl.where(loss < 0, 0.0, loss))  # by rounding; a NaN stays
    tl.store(at + 4, mean)


@triton.jit
def _row_terms(STATS, row, g, inv_t, blend, KIND: tl.constexpr):
    """What the columns of a row share: shifts, normalisers in bits, ratio or mean, and gain."""
    at = STATS + row.to(tl.int64) * FIELDS
    shift_q, s_q = tl.load(at), tl.load(at + 1)
    shift_p, s_p = tl.load(at + 2), tl.load(at + 3)
    mean = tl.load(at + 4)
    log_q, log_p = 0.0, 0.0
    alive = tl.where(s_q == 0, INF, s_q)
    gain = g * inv_t
    if KIND == REVERSE:
        gain = gain * inv_t / alive
    elif KIND == JSD:
        log_q, log_p = _bits(s_q), _bits(s_p)
        gain = gain * (1.0 - blend) * LN2 + 0.0 * (log_q + log_p)
    else:
        mean = s_p / alive
        if KIND == FORWARD:
            gain = gain / s_p
    # A student of -inf has no distribution, and nothing flows to it.
    return shift_q, shift_p, log_q, log_p, mean, tl.where(s_q == 0, 0.0, gain)


@triton.jit
def _dx_tile(
    X, T, W, DX, cols, mask, first, V,
    shift_q, shift_p, log_q, log_p, mean, gain, rate, softcap, blend, KIND: tl.constexpr,
):  # fmt: skip
    """Read a tile of both rows, write the student's gradient."""
    y, slope = capped(load(X, cols, mask), softcap)
    d_q = y - shift_q
    if KIND == SOFT:
        v = _target(T, W, cols, mask, first, V, blend)
        dz = tl.exp2(d_q * rate) * mean - v
    else:
        d_p = load(T, cols, mask).to(tl.float32) - shift_p
        if KIND == FORWARD:
            dz = tl.exp2(d_q * rate) * mean - tl.exp2(d_p * rate)
        elif KIND == REVERSE:
            e_q = tl.exp2(d_q * rate)
            dz = tl.where(e_q != 0, e_q * (d_q - d_p - mean), 0.0)
        else:
            q, log_q_m, _, _ = _mixture(
                d_q * rate - log_q, d_p * rate - log_p, blend, X.dtype.element_ty
            )
            dz = q * (log_q_m - mean)
    # Streamed: nobody reads it back soon, and the cache is better used for logits.
    dx = (dz * gain * slope).to(DX.dtype.element_ty)
    tl.store(DX + cols, dx, mask=mask, cache_modifier=".cs")


@triton.jit(do_not_specialize=["rows_x", "rows_t", "lead", "blocks"])
def _pair_bwd_kernel(
    X, T, W, TEMP, MASK, STATS, G,  # inputs
    DX,  # output
    rows_x, stride_xb, stride_xt, rows_t, stride_tb, stride_tt, stride_db, stride_dt,  # sizes
    lead, V, blocks, step_g,
    temperature, softcap, blend,  # options
    KIND: tl.constexpr, PACK: tl.constexpr, ALIGNED: tl.constexpr,
    X_STEP: tl.constexpr, T_STEP: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a (row, block). The fringe of a row goes with its first block."""
    pid = tl.program_id(0)
    row = pid // blocks
    block = pid % blocks
    offset = row_offset(row, rows_x, stride_db, stride_dt)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    DXrow = DX + offset
    DXbody = tl.multiple_of(DXrow + head, 16)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    if MASK is not None:
        if tl.load(MASK + row) == 0:
            zero_tile(DXbody, cols, cols < body)
            if block == 0:
                ends, mask_ends = fringe_tile(head, body, V, PACK)
                zero_tile(DXrow, ends, mask_ends)
            return

    Xrow = X + row_offset(row, rows_x, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    Xbody, Tbody = Xrow + head, Trow + head
    if X_STEP:
        Xbody = tl.multiple_of(Xbody, 16)
    if T_STEP:
        Tbody = tl.multiple_of(Tbody, 16)
    inv_t = inverse_temperature(TEMP, temperature, row)
    rate = inv_t * LOG2E
    g = tl.load(G + row * step_g).to(tl.float32)
    shift_q, shift_p, log_q, log_p, mean, gain = _row_terms(STATS, row, g, inv_t, blend, KIND)
    _dx_tile(
        Xbody, Tbody, W, DXbody, cols, cols < body, head, V,
        shift_q, shift_p, log_q, log_p, mean, gain, rate, softcap, blend, KIND,
    )  # fmt: skip
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            _dx_tile(
                Xrow, Trow, W, DXrow, ends, mask_ends, 0, V,
                shift_q, shift_p, log_q, log_p, mean, gain, rate, softcap, blend, KIND,
            )  # fmt: skip


def pair_fwd(
    x: Tensor,  # (..., V), the student
    teacher: Tensor,  # (..., V), logits; probabilities for "soft"
    weight: Tensor | None,  # (V,), of "soft"
    row_temperature: Tensor | None,  # (...)
    mask: Tensor | None,  # (...), bool: rows that count
    temperature: float,
    softcap: float | None,
    blend: float,  # β of "jsd", the label smoothing of "soft"
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, (...), and what its backward needs, (..., 5)."""
    loss = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    stats = torch.empty((*loss.shape, FIELDS.value), device=x.device, dtype=torch.float32)
    if loss.numel() == 0:
        return loss, stats
    weight, row_temperature, mask = _dense(weight, row_temperature, mask)
    x, rows = rows_of(x)
    teacher, t_rows = rows_of(teacher)
    blend = _safe(blend, kind)
    parts = _parts(x) if kind == "jsd" else 1
    if parts > 1:
        cut = config.pair_shared(rows.vocab, rows.itemsize)
        meeting = torch.zeros((rows.count, 2, parts), device=x.device, dtype=torch.int64)
        sums = torch.empty((rows.count, parts, 2), device=x.device, dtype=torch.float32)
        first, second = _shared_plan(rows, t_rows, parts, temperature, softcap, blend, cut)
        first(x, teacher, row_temperature, mask, stats, sums, meeting)
        second(sums, mask, loss, stats)
    else:
        cut = config.pair_forward(rows.vocab)
        run = _fwd_plan(rows, t_rows, temperature, softcap, blend, kind, cut)
        run(x, teacher, weight, row_temperature, mask, loss, stats)
    return loss, stats


def pair_bwd(
    x: Tensor,  # (..., V)
    teacher: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    mask: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    blend: float,
    kind: str,
    stats: Tensor,  # (..., 5)
    g: Tensor,  # (...), the gradient of each row's loss
    inplace: bool = False,
) -> Tensor:
    """The gradient of the student's logits, (..., V) in their dtype; in place, it replaces x."""
    dx = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    weight, row_temperature, mask = _dense(weight, row_temperature, mask)
    alike = not any(g.stride())  # one number for all, as the gradient of a sum is
    g = g if alike else g.contiguous()
    x, rows = rows_of(x)
    teacher, t_rows = rows_of(teacher)
    into, d_rows = (x, rows) if inplace else (dx, rows.packed(dx))
    run = _bwd_plan(
        rows, t_rows, d_rows, alike, temperature, softcap, _safe(blend, kind), kind,
        config.pair_backward(rows.vocab, rows.itemsize),
    )  # fmt: skip
    run(x, teacher, weight, row_temperature, mask, stats.contiguous(), g, into)
    if into.data_ptr() != dx.data_ptr():  # a copy, for want of strides
        dx.copy_(into)
    return dx


def _dense(weight: Tensor | None, row_temperature: Tensor | None, mask: Tensor | None):
    """Contiguous, and a mask of bytes."""
    weight, row_temperature, mask = (
        None if t is None else t.contiguous() for t in (weight, row_temperature, mask)
    )
    return weight, row_temperature, None if mask is None else mask.view(torch.int8)


def _parts(x: Tensor) -> int:
    """Programs that share a row of JSD: one, where several could not wait for each other.

    The interpreter's could not: it runs one after another.
    """
    parts = config.ceil_div(x.shape[-1], config.pair_shared(x.shape[-1], x.element_size()).span)
    return parts if parts <= MAX_PARTS and x.device.type != "cpu" else 1


def _safe(blend: float, kind: str) -> float:
    """β of JSD, such that neither it nor 1 - β is 0 in fp32."""
    return min(max(blend, 1e-30), 1 - 2**-24) if kind == "jsd" else blend


def _in_step(rows: Rows, other: Rows) -> bool:
    """Whether a row lies on a 16-byte boundary where its counterpart's body does."""
    if rows.aligned and other.aligned:
        return True
    alike = rows.pack == other.pack and rows.rows_t == other.rows_t
    return alike and rows.in_step_with(other)


@functools.lru_cache(REMEMBERED)
def _fwd_plan(
    rows: Rows, t_rows: Rows, temperature: float, softcap: float | None, blend: float, kind: str,
    cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _pair_fwd_kernel, (rows.count,),
        (*rows.where, *t_rows.where, rows.lead, rows.vocab, temperature, softcap, blend),
        num_warps=cut.num_warps, KIND=KINDS[kind],
        PACK=rows.pack, ALIGNED=rows.aligned, T_STEP=_in_step(t_rows, rows), BLOCK_V=cut.block_v,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _shared_plan(
    rows: Rows, t_rows: Rows, parts: int, temperature: float, softcap: float | None, blend: float,
    cut: config.Config,
) -> tuple[Launch, Launch]:  # fmt: skip
    """JSD: one program a part of a row, then one a row."""
    block_p = 32 if parts <= 32 else MAX_PARTS
    return Launch(
        _jsd_part_kernel, (rows.count * parts,),
        (*rows.where, *t_rows.where, rows.lead, rows.vocab, parts, temperature, softcap, blend),
        num_warps=cut.num_warps,
        PACK=rows.pack, ALIGNED=rows.aligned, T_STEP=_in_step(t_rows, rows),
        SPAN=cut.span, BLOCK_V=cut.block_v, BLOCK_P=block_p,
    ), Launch(
        _jsd_sum_kernel, (rows.count,), (parts, blend), num_warps=1, BLOCK_P=block_p
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _bwd_plan(
    rows: Rows, t_rows: Rows, d_rows: Rows, alike: bool, temperature: float,
    softcap: float | None, blend: float, kind: str, cut: config.Config,
) -> Launch:  # fmt: skip
    blocks = config.ceil_div(rows.vocab, cut.block_v)
    return Launch(
        _pair_bwd_kernel, (rows.count * blocks,),
        (
            *rows.where, *t_rows.where, d_rows.stride_b, d_rows.stride_t,
            d_rows.lead, rows.vocab, blocks, 0 if alike else 1, temperature, softcap, blend,
        ),
        num_warps=cut.num_warps, KIND=KINDS[kind],
        PACK=rows.pack, ALIGNED=d_rows.aligned,
        X_STEP=_in_step(rows, d_rows), T_STEP=_in_step(t_rows, d_rows), BLOCK_V=cut.block_v,
    )  # fmt: skip
