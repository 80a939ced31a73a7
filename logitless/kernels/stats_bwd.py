"""Row statistics, backward: one formula for every loss, written once into the gradient.

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c v_i        p_i = e^(z_i - lse)

a, b, g_c are per row and g_k per id; log p_i is taken as ((y_i - shift) / temperature) - log_s,
which no common offset can hurt, and dx_i = dz_i dz/dx_i. A label at temperature 1 adds its own
d_label ([i = label] - p1_i) to dy_i, and ids whose complement has a mass of its own have an `a` of
their own. One id a row is compared in place. Where a row has several, a program writes a span of
it and then rewrites the ids that are there, so that a gradient is rounded once, after everything is
added.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .repeats import are_repeated, repeats_of
from .rows import (
    INF,
    LN2,
    LOG2E,
    NO_ID,
    capped,
    fringe_tile,
    inverse_temperature,
    load,
    row_offset,
    split_row,
)
from .view import Rows, rows_of

MAX_HELD = 512  # ids of a row that one program has in registers


@triton.jit
def _load_or(P, at, default):
    """A per-row number, or its default where the loss has none."""
    if P is not None:
        return tl.load(P + at).to(tl.float32)
    else:
        return default


@triton.jit
def row_terms(
    shift, log_s, a, b, g_id, g_c, inv_t, id, V, HAS_ID: tl.constexpr, NORMALISED: tl.constexpr
):  # fmt: skip
    """What the columns of a row share, so that each costs one exponential and one product.

    With d = (y - shift) rate and e = 2^d, p = e / s and log p = d ln 2 - log s:

        dz_i / T = e_i (c0 + c1 d_i) + g_id [i = id] + g_c v_i

    Where the id is of log p = z - lse, it takes its own g_id from a. Rows that have no gradient, or
    no right one, are settled here.
    """
    if HAS_ID:
        inside = (id >= 0) & (id < V)
        if NORMALISED:
            a -= g_id
        # A bad target has no gradient to give: the whole row says so.
        a = tl.where(inside, a, float("nan"))
        id = tl.where(inside, id, -1).to(tl.int32)
    # A row of -inf has no distribution: p = 0, and nothing flows.
    dead = log_s == -INF
    scale = tl.where(dead, 0.0, inv_t * tl.exp2(-log_s * LOG2E))
    c0 = tl.where(dead, 0.0, (a - b * log_s) * scale)
    g_id = tl.where(dead, 0.0, g_id * inv_t)
    g_c = tl.where(dead, 0.0, g_c * inv_t)
    return tl.where(dead, INF, shift), c0, b * LN2 * scale, g_id, g_c, id


@triton.jit
def _label_terms(LOG_S1, D_LABEL, at, row, log_s):
    """d_label, and what e^(y - shift) is multiplied with on its behalf; 0 for a row of -inf."""
    d_label = tl.where(log_s == -INF, 0.0, _load_or(D_LABEL, at, 0.0))
    if LOG_S1 is not None:
        factor = -d_label * tl.exp2(-tl.load(LOG_S1 + row) * LOG2E)
        return d_label, tl.where(log_s == -INF, 0.0, factor)
    else:
        return d_label, 0.0


@triton.jit
def _dz(d, c0, c1, HAS_B: tl.constexpr):
    """e (c0 + c1 d), with e = 2^d."""
    if HAS_B:
        # 0 · -inf is 0 here: any finite d will do where e is 0.
        return tl.exp2(d) * (c0 + c1 * tl.maximum(d, -1e38))
    else:
        return tl.exp2(d) * c0


@triton.jit
def zero_tile(DXrow, cols, mask):
    """The gradient of an ignored row, whose logits nobody reads."""
    tl.store(DXrow + cols, tl.zeros(cols.shape, DXrow.dtype.element_ty), mask=mask)


@triton.jit
def dx_tile(
    Xrow, W, DXrow, cols, mask, shift, c0, c1, c_label, g_c, rate, softcap,
    HAS_B: tl.constexpr, HAS_C: tl.constexpr, HAS_LABEL: tl.constexpr,
):  # fmt: skip
    """Read a tile of logits, write its gradient, but for what an id adds."""
    y, slope = capped(load(Xrow, cols, mask), softcap)
    dz = _dz((y - shift) * rate, c0, c1, HAS_B)
    if HAS_LABEL:
        dz += tl.exp2((y - shift) * LOG2E) * c_label
    if HAS_C:
        if W is not None:
            dz += g_c * load(W, cols, mask).to(tl.float32)
        else:
            dz += g_c
    # Streamed: nobody reads it back soon, and the cache is better used for logits.
    dx = (dz * slope).to(DXrow.dtype.element_ty)
    tl.store(DXrow + cols, dx, mask=mask, cache_modifier=".cs")


@triton.jit
def dx_id(x, W, DXrow, id, shift, c0, c1, g_id, g_c, rate, softcap, HAS_B: tl.constexpr):
    """Rewrite the gradient at a row's id, once the tile around it is written."""
    y, slope = capped(x, softcap)
    dz = _dz((y - shift) * rate, c0, c1, HAS_B) + g_id
    if W is not None:
        dz += g_c * tl.load(W + id).to(tl.float32)
    else:
        dz += g_c
    tl.debug_barrier()
    tl.store(DXrow + id, (dz * slope).to(DXrow.dtype.element_ty))


@triton.jit(do_not_specialize=["rows_t", "lead", "blocks"])
def _stats_bwd_kernel(
    X, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C, GAIN,  # inputs
    DX,  # output
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, K, blocks, step_g,  # sizes
    temperature, softcap, ignore_index,  # options
    ONE_ID: tl.constexpr, NORMALISED: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a (row, block). The fringe of a row goes with its first block."""
    pid = tl.program_id(0)
    row = pid // blocks
    block = pid % blocks
    offset = row_offset(row, rows_t, stride_db, stride_dt)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    DXrow = DX + offset
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < body

    id = -1
    if ONE_ID or ignore_index is not None:
        id = tl.load(IDS + row.to(tl.int64) * K)
    if ignore_index is not None:
        if id == ignore_index:
            zero_tile(tl.multiple_of(DXrow + head, 16), cols, mask)
            if block == 0:
                ends, mask_ends = fringe_tile(head, body, V, PACK)
                zero_tile(DXrow, ends, mask_ends)
            return

    if not ONE_ID:
        id = -1
    inv_t = inverse_temperature(TEMP, temperature, row)
    rate = inv_t * LOG2E
    shift, c0, c1, g_id, g_c, id = row_terms(
        tl.load(SHIFT + row), tl.load(LOG_S + row),
        _load_or(A, row, 0.0), _load_or(B, row, 0.0),
        _load_or(G_ID, row * step_g, 0.0) * _load_or(GAIN, 0, 1.0), _load_or(G_C, row, 0.0),
        inv_t, id, V, ONE_ID, NORMALISED,
    )  # fmt: skip

    column = id - head
    mine = (column >= block * BLOCK_V) & (column < tl.minimum(block * BLOCK_V + BLOCK_V, body))
    if not ALIGNED:
        mine = mine | ((block == 0) & (id >= 0) & ((column < 0) | (column >= body)))
    x_id = tl.load(Xrow + id, mask=mine, other=0.0)
    if mine:
        tl.debug_barrier()  # in place, the tile overwrites what was just read

    Xbody = Xrow + head
    if SAME:
        Xbody = tl.multiple_of(Xbody, 16)
    if W is not None:
        Wbody = W + head
    else:
        Wbody = W
    dx_tile(
        Xbody, Wbody, tl.multiple_of(DXrow + head, 16), cols, mask,
        shift, c0, c1, 0.0, g_c, rate, softcap,
        B is not None, G_C is not None, False,
    )  # fmt: skip
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            dx_tile(
                Xrow, W, DXrow, ends, mask_ends,
                shift, c0, c1, 0.0, g_c, rate, softcap,
                B is not None, G_C is not None, False,
            )  # fmt: skip
    if mine:
        dx_id(x_id, W, DXrow, id, shift, c0, c1, g_id, g_c, rate, softcap, B is not None)


@triton.jit
def _at_stake(ids, head, body, lo, hi, V, ALIGNED: tl.constexpr):
    """Which ids are in the columns [lo, hi) of a row's body, or in the fringe where lo = 0."""
    mine = (ids >= head + lo) & (ids < head + hi)
    if not ALIGNED:
        fringe = ((ids >= 0) & (ids < head)) | ((ids >= head + body) & (ids < V))
        mine = mine | (fringe & (lo == 0))
    return mine


@triton.jit
def _is_bad(ids, V):
    """Which of these are no ids, but claim to be."""
    return (((ids < 0) | (ids >= V)) & (ids != NO_ID)).to(tl.int32)


@triton.jit
def _own_g(G_ID, offs_k, mine, skip):
    """The slots' own gradients; G_ID is of the slots from `skip` on."""
    if G_ID is not None:
        return load(G_ID, offs_k - skip, mine & (offs_k >= skip)).to(tl.float32)
    else:
        return tl.zeros(offs_k.shape, tl.float32)


@triton.jit
def _sums_of_same(IDS, G_ID, ids, K, skip, first):
    """For each of `ids`, Σ g over the slots that hold it, and whether one is from `first` on."""
    g = tl.zeros(ids.shape, tl.float32)
    member = tl.zeros(ids.shape, tl.int32)
    ids = ids.to(tl.int32)  # a row with larger ones is NaN in the end
    for j in range(K):
        same = ids == tl.load(IDS + j).to(tl.int32)
        if G_ID is not None:
            g_j = tl.load(G_ID + j - skip, mask=j >= skip, other=0.0).to(tl.float32)
            g += tl.where(same, g_j, 0.0)
        member = tl.where(same & (j >= first), 1, member)
    return g, member


@triton.jit
def _fill(
    DXrow, value, head, body, lo, hi, V,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One number for the columns [lo, hi) of a row's body, and for the fringe where lo = 0."""
    for start in range(lo, hi, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        tile = tl.full((BLOCK_V,), value, tl.float32).to(DXrow.dtype.element_ty)
        tl.store(tl.multiple_of(DXrow + head, 16) + cols, tile, mask=cols < hi)
    if not ALIGNED:
        if lo == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            tile = tl.full((2 * PACK,), value, tl.float32).to(DXrow.dtype.element_ty)
            tl.store(DXrow + ends, tile, mask=mask_ends)


@triton.jit
def _times(P, at, gain):
    """A per-row number times gain; nothing where the loss has none."""
    if P is not None:
        return tl.load(P + at).to(tl.float32) * gain
    else:
        return 0.0


@triton.jit(do_not_specialize=["rows_t", "lead", "spans"])
def _spans_bwd_kernel(
    X, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C, GAIN, A_IDS, LOG_S1, D_LABEL, REPEATS,  # inputs
    DX,  # output
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, K, spans, span,  # sizes
    skip, first, step_gain, step_label,
    temperature, softcap, ignore_index,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, SAME: tl.constexpr, HELD: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Several ids a row. One program a (row, span): its columns, then the ids that are there.

    Written twice, but while the cache still holds them; the ids' logits are in it as well, or, in
    place, HELD from the start.
    """
    pid = tl.program_id(0)
    row = pid // spans
    offset = row_offset(row, rows_t, stride_db, stride_dt)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    DXrow = DX + offset
    IDS += row.to(tl.int64) * K
    span = tl.multiple_of(span, BLOCK_V)
    lo = pid % spans * span
    hi = tl.multiple_of(tl.minimum(lo + span, body), PACK)

    if ignore_index is not None:
        if tl.load(IDS) == ignore_index:
            _fill(DXrow, 0.0, head, body, lo, hi, V, PACK, ALIGNED, BLOCK_V)
            return

    inv_t = inverse_temperature(TEMP, temperature, row)
    rate = inv_t * LOG2E
    log_s = tl.load(LOG_S + row)
    gain = _load_or(GAIN, row * step_gain, 1.0)
    d_label, c_label = _label_terms(LOG_S1, D_LABEL, row * step_label, row, log_s)
    taken = 0.0  # by a label at the temperature of the ids, from a
    if LOG_S1 is None:
        taken = d_label
    shift, c0, c1, one, g_c, _ = row_terms(
        tl.load(SHIFT + row), log_s, _times(A, row, gain) - taken, _load_or(B, row, 0.0),
        gain, _load_or(G_C, row, 0.0), inv_t, 0, V, False, False,
    )  # fmt: skip

    x_held = tl.zeros((BLOCK_K,), X.dtype.element_ty)
    if HELD:
        offs_k = tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + offs_k, mask=offs_k < K, other=NO_ID)
        x_held = load(Xrow, ids, _at_stake(ids, head, body, lo, hi, V, ALIGNED))
        tl.debug_barrier()

    Xbody = Xrow + head
    if SAME:
        Xbody = tl.multiple_of(Xbody, 16)
    if W is not None:
        Wbody = W + head
    else:
        Wbody = W
    for start in range(lo, hi, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        dx_tile(
            Xbody, Wbody, tl.multiple_of(DXrow + head, 16), cols, cols < hi,
            shift, c0, c1, c_label, g_c, rate, softcap,
            B is not None, G_C is not None, LOG_S1 is not None,
        )  # fmt: skip
    if not ALIGNED:
        if lo == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            dx_tile(
                Xrow, W, DXrow, ends, mask_ends,
                shift, c0, c1, c_label, g_c, rate, softcap,
                B is not None, G_C is not None, LOG_S1 is not None,
            )  # fmt: skip
    tl.debug_barrier()  # from here on, what others of this program wrote is overwritten

    c0_ids = c0
    if A_IDS is not None:  # of the ids from `first` on
        _, c0_ids, _, _, _, _ = row_terms(
            0.0, log_s, _times(A_IDS, row, gain) - taken, _load_or(B, row, 0.0),
            0.0, 0.0, inv_t, 0, V, False, False,
        )  # fmt: skip
    if G_ID is not None:
        G_ID += row.to(tl.int64) * (K - skip)
    label = tl.load(IDS)
    repeated = tl.load(REPEATS + row) != 0
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + offs_k, mask=offs_k < K, other=NO_ID)
        mine = _at_stake(ids, head, body, lo, hi, V, ALIGNED)
        bad |= _is_bad(ids, V)
        g, member = _own_g(G_ID, offs_k, mine, skip), (offs_k >= first).to(tl.int32)
        if repeated:
            g, member = _sums_of_same(IDS, G_ID, ids, K, skip, first)
        if HELD:
            x = x_held
        else:
            x = load(Xrow, ids, mine)
        y, slope = capped(x, softcap)
        dz = _dz((y - shift) * rate, tl.where(member > 0, c0_ids, c0), c1, B is not None)
        dz += tl.where(log_s == -INF, 0.0, g * one)
        if D_LABEL is not None:
            dz += tl.where(ids == label, d_label, 0.0)
        if LOG_S1 is not None:
            dz += tl.exp2((y - shift) * LOG2E) * c_label
        if G_C is not None:
            if W is not None:
                dz += g_c * load(W, ids, mine).to(tl.float32)
            else:
                dz += g_c
        dx = (dz * slope).to(DX.dtype.element_ty)
        if D_LABEL is not None:  # first, for a slot with the same id knows more
            tl.store(DXrow + ids, dx, mask=mine & (offs_k < skip))
            tl.debug_barrier()
            mine = mine & (offs_k >= skip)
        tl.store(DXrow + ids, dx, mask=mine)
    if tl.max(bad, axis=0) > 0:
        tl.debug_barrier()  # after what was just stored
        _fill(DXrow, float("nan"), head, body, lo, hi, V, PACK, ALIGNED, BLOCK_V)


@triton.jit(do_not_specialize=["rows_t"])
def _ids_bwd_kernel(
    Y, IDS, G_ID,  # inputs
    DX,  # output, zeros so far
    rows_t, stride_db, stride_dt, V, K, softcap,  # sizes, options
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradient at the ids and nowhere else; repeated ids add up. One program a row."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * K
    DXrow = DX + row_offset(row, rows_t, stride_db, stride_dt)
    repeated = are_repeated(IDS + at, K, BLOCK_K)
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + at + offs_k, mask=offs_k < K, other=NO_ID)
        mine = _at_stake(ids, 0, V, 0, V, V, True)
        bad |= _is_bad(ids, V)
        g = _own_g(G_ID + at, offs_k, mine, 0)
        if repeated:
            g, _ = _sums_of_same(IDS + at, G_ID + at, ids, K, 0, 0)
        if softcap is not None:
            t = load(Y + at, offs_k, mine) * (1.0 / softcap)
            g = tl.where(g == 0, 0.0, g * (1.0 - t * t))
        tl.store(DXrow + ids, g.to(DX.dtype.element_ty), mask=mine)
    if tl.max(bad, axis=0) > 0:
        tl.debug_barrier()  # after what was just stored
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)
            nan = tl.full((BLOCK_V,), float("nan"), tl.float32).to(DX.dtype.element_ty)
            tl.store(DXrow + cols, nan, mask=cols < V)


def stats_bwd(
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
    shift: Tensor,  # (...)
    log_s: Tensor,  # (...)
    log_s1: Tensor | None,  # (...)
    a: Tensor | None,  # (...)
    b: Tensor | None,  # (...)
    g_id: Tensor | None,  # like ids, or the last of them; or one number for all
    g_c: Tensor | None,  # (...)
    a_ids: Tensor | None,  # (...), for ids[..., outside:]
    d_label: Tensor | None,  # (...) or a number, of the first id at temperature 1
    gain: Tensor | None = None,  # (...) or a number
    repeats: Tensor | None = None,  # (...), whether one of the ids of g_id is in two slots
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits, (..., V) in their dtype; in place, it replaces x.

    Of more than MAX_HELD ids a row it is a new tensor in any case: their logits are read again.

    Of one id a row that is `normalised`, a need not tell: -g_id is added to it; nor of a label
    without a log_s1, which is at the temperature of the ids. A gain multiplies g_id, and of several
    ids a and a_ids too.
    """
    K = 1 if ids is None else ids.numel() // max(shift.numel(), 1)
    inplace = inplace and K <= MAX_HELD
    dx = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    ids, weight, row_temperature, a, b, g_id, g_c, a_ids, d_label, gain = (
        None if t is None else t.contiguous()
        for t in (ids, weight, row_temperature, a, b, g_id, g_c, a_ids, d_label, gain)
    )
    source, rows = rows_of(x)
    into, d_rows = (source, rows) if inplace else (dx, rows.packed(dx))
    one_id = ids is not None and K == 1 and outside is None and not plain
    options = (temperature, softcap, ignore_index)
    per_row = (weight, row_temperature, shift, log_s, a, b)
    if one_id or K == 0 or (g_id is None and a_ids is None and d_label is None):
        g_id = g_id if one_id else None
        if g_id is not None and gain is not None and gain.dim() != 0:
            g_id, gain = g_id * gain.view(g_id.shape), None
        alike = g_id is not None and g_id.dim() == 0
        plan = _plan(
            rows, d_rows, K, one_id, alike, options, normalised, config.backward(rows.vocab)
        )
        plan(source, ids, *per_row, g_id, g_c, gain, into)
    else:
        skip = 0 if g_id is None else K - g_id.numel() // rows.count
        alike = tuple(t is not None and t.dim() == 0 for t in (gain, d_label))
        cut = config.spans(rows.vocab, rows.itemsize)
        plan = _spans_plan(rows, d_rows, K, skip, outside or 0, alike, options, inplace, cut)
        log_s1 = None if d_label is None else log_s1
        repeats = repeats_of(ids, rows.count, skip) if repeats is None else repeats
        plan(source, ids, *per_row, g_id, g_c, gain, a_ids, log_s1, d_label, repeats, into)
    if into.data_ptr() != dx.data_ptr():  # a copy, for want of strides
        dx.copy_(into)
    return dx


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, d_rows: Rows, K: int, one_id: bool, alike: bool, options: tuple,
    normalised: bool, cut: config.Config,
) -> Launch:  # fmt: skip
    blocks = config.ceil_div(rows.vocab, cut.block_v)
    return Launch(
        _stats_bwd_kernel, (rows.count * blocks,),
        (
            *rows.where, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab, K, blocks,
            0 if alike else 1, *options,
        ),
        num_warps=cut.num_warps, ONE_ID=one_id, NORMALISED=normalised,
        PACK=rows.pack, ALIGNED=d_rows.aligned, SAME=rows.in_step_with(d_rows),
        BLOCK_V=cut.block_v,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _spans_plan(
    rows: Rows, d_rows: Rows, K: int, skip: int, first: int, alike: tuple[bool, bool],
    options: tuple, held: bool, cut: config.Config,
) -> Launch:  # fmt: skip
    span = config.ceil_div(cut.span, cut.block_v) * cut.block_v
    spans = config.ceil_div(rows.vocab, span)
    return Launch(
        _spans_bwd_kernel, (rows.count * spans,),
        (
            *rows.where, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab, K, spans, span,
            skip, first, *(0 if one else 1 for one in alike), *options,
        ),
        num_warps=cut.num_warps, PACK=rows.pack, ALIGNED=d_rows.aligned,
        SAME=rows.in_step_with(d_rows), HELD=held, BLOCK_V=cut.block_v, BLOCK_K=_block_k(K),
    )  # fmt: skip


def _block_k(K: int) -> int:
    return min(MAX_HELD, max(config.ceil_pow2(K), 2))


def ids_bwd(
    dx: Tensor,  # (..., V), zeros; written to
    ids: Tensor,  # (..., K)
    y: Tensor,  # (..., K)
    softcap: float | None,
    g_id: Tensor,  # (..., K)
) -> None:
    """Only what the ids' own gradients add."""
    _, rows = rows_of(dx)
    _ids_plan(rows, ids.shape[-1], softcap)(y, ids, g_id, dx)


@functools.lru_cache(REMEMBERED)
def _ids_plan(rows: Rows, K: int, softcap: float | None) -> Launch:
    block = _block_k(K)
    return Launch(
        _ids_bwd_kernel, (rows.count,),
        (rows.rows_t, rows.stride_b, rows.stride_t, rows.vocab, K, softcap),
        num_warps=max(1, block // 128), BLOCK_K=block, BLOCK_V=256,
    )  # fmt: skip
