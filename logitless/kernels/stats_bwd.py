"""Row statistics, backward: one formula for every loss, written once into the gradient.

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c v_i        p_i = e^(z_i - lse)

a, b, g_c are per row and g_k per id; log p_i is taken as ((y_i - shift) / temperature) - log_s,
which no common offset can hurt, and dx_i = dz_i dz/dx_i. A label at temperature 1 adds its own
d_label ([i = label] - p1_i) to dy_i, and ids whose complement has a mass of its own have an `a` of
their own. One id a row is compared in place; several
ids are put right by a second, small kernel, so that a gradient is rounded once, after everything is
added.
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
    LN2,
    LOG2E,
    capped,
    fringe_tile,
    inverse_temperature,
    load,
    row_offset,
    split_row,
)
from .view import Rows, rows_of


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
def _label_terms(LOG_S1, D_LABEL, row):
    """d_label, and what e^(y - shift) is multiplied with on its behalf; 0 for a row of -inf."""
    if D_LABEL is not None:
        log_s1 = tl.load(LOG_S1 + row)
        d_label = tl.where(log_s1 == -INF, 0.0, tl.load(D_LABEL + row).to(tl.float32))
        return d_label, tl.where(log_s1 == -INF, 0.0, -d_label * tl.exp2(-log_s1 * LOG2E))
    else:
        return 0.0, 0.0


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
    X, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C, GAIN, LOG_S1, D_LABEL,  # inputs
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
    _, c_label = _label_terms(LOG_S1, D_LABEL, row)

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
        shift, c0, c1, c_label, g_c, rate, softcap,
        B is not None, G_C is not None, D_LABEL is not None,
    )  # fmt: skip
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            dx_tile(
                Xrow, W, DXrow, ends, mask_ends,
                shift, c0, c1, c_label, g_c, rate, softcap,
                B is not None, G_C is not None, D_LABEL is not None,
            )  # fmt: skip
    if mine:
        dx_id(x_id, W, DXrow, id, shift, c0, c1, g_id, g_c, rate, softcap, B is not None)


@triton.jit
def _sums_of_same(IDS, G_ID, ids, K, first):
    """For each of `ids`, Σ g over the slots that hold it, and whether one is from `first` on."""
    g = tl.zeros(ids.shape, tl.float32)
    member = tl.zeros(ids.shape, tl.int32)
    ids = ids.to(tl.int32)  # a row with larger ones is NaN in the end
    for j in range(K):
        same = ids == tl.load(IDS + j).to(tl.int32)
        g += tl.where(same, tl.load(G_ID + j).to(tl.float32), 0.0)
        member = tl.where(same & (j >= first), 1, member)
    return g, member


@triton.jit(do_not_specialize=["rows_t"])
def _ids_bwd_kernel(
    PICKED, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C, A_IDS, LOG_S1, D_LABEL,  # inputs
    DX,  # output
    rows_t, stride_db, stride_dt, V, K, first,  # sizes
    temperature, softcap, ignore_index,  # options
    NORMALISED: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Several ids a row: rewrite the gradient at each from what was picked; repeated ids add up."""
    row = tl.program_id(0)
    IDS += row.to(tl.int64) * K
    G_ID += row.to(tl.int64) * K
    PICKED += row.to(tl.int64) * K
    label = tl.load(IDS, mask=K > 0, other=-1)
    if ignore_index is not None:
        if label == ignore_index:
            return
    DXrow = DX + row_offset(row, rows_t, stride_db, stride_dt)
    inv_t = inverse_temperature(TEMP, temperature, row)
    log_s, y_max, shift, c0, c1, c0_ids, g_c, one = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, inv_t
    if SHIFT is not None:
        log_s = tl.load(LOG_S + row)
        y_max = tl.load(SHIFT + row)
        b = _load_or(B, row, 0.0)
        shift, c0, c1, one, g_c, _ = row_terms(
            y_max, log_s, _load_or(A, row, 0.0), b, 1.0, _load_or(G_C, row, 0.0),
            inv_t, 0, V, False, NORMALISED,
        )  # fmt: skip
        c0_ids = c0
        if A_IDS is not None:  # of the ids from `first` on
            _, c0_ids, _, _, _, _ = row_terms(
                y_max, log_s, tl.load(A_IDS + row), b, 0.0, 0.0, inv_t, 0, V, False, NORMALISED
            )
    d_label, c_label = _label_terms(LOG_S1, D_LABEL, row)

    bad = 0
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        ids = tl.load(IDS + offs_k, mask=mask_k, other=0)
        inside = (ids >= 0) & (ids < V)
        bad += tl.sum((mask_k & ~inside).to(tl.int32), axis=0)
        g, member = _sums_of_same(IDS, G_ID, ids, K, first)
        z = load(PICKED, offs_k, mask_k)
        if NORMALISED:
            y = (z + log_s) / inv_t + y_max
        else:
            y = z / inv_t
        dz = g * one
        if SHIFT is not None:
            y = tl.where(log_s == -INF, -INF, y)  # of a row without a distribution, z - lse is NaN
            c = tl.where(member > 0, c0_ids, c0)
            dz += _dz((y - shift) * (inv_t * LOG2E), c, c1, B is not None)
        if D_LABEL is not None:
            dz += tl.where(ids == label, d_label, 0.0) + tl.exp2((y - shift) * LOG2E) * c_label
        if G_C is not None:
            if W is not None:
                dz += g_c * load(W, ids, mask_k & inside).to(tl.float32)
            else:
                dz += g_c
        if softcap is not None:
            dz = tl.where(dz == 0, 0.0, dz * (1.0 - (y / softcap) * (y / softcap)))
        tl.store(DXrow + ids, dz.to(DX.dtype.element_ty), mask=mask_k & inside)
    if bad > 0:
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
    picked: Tensor | None,  # like ids
    log_s1: Tensor | None,  # (...)
    a: Tensor | None,  # (...)
    b: Tensor | None,  # (...)
    g_id: Tensor | None,  # like ids, or one number for all
    g_c: Tensor | None,  # (...)
    a_ids: Tensor | None,  # (...), for ids[..., outside:]
    d_label: Tensor | None,  # (...), of the first id at temperature 1
    gain: Tensor | None = None,  # a number
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits, (..., V) in their dtype; in place, it replaces x.

    Of one id a row that is `normalised`, a need not tell: -g_id is added to it. Such a g_id may
    have a gain, by which it is multiplied.
    """
    dx = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    ids, weight, row_temperature, picked, a, b, g_id, g_c, a_ids, d_label = (
        None if t is None else t.contiguous()
        for t in (ids, weight, row_temperature, picked, a, b, g_id, g_c, a_ids, d_label)
    )
    source, rows = rows_of(x)
    into, d_rows = (source, rows) if inplace else (dx, rows.packed(dx))
    K = 1 if ids is None else ids.numel() // rows.count
    alike = g_id is not None and g_id.dim() == 0
    one_id = ids is not None and K == 1 and outside is None and not plain
    every, several = _plan(
        rows, d_rows, K, one_id, alike, outside or 0, temperature, softcap, ignore_index,
        normalised, config.backward(rows.vocab),
    )  # fmt: skip
    per_row = (weight, row_temperature, shift, log_s, a, b)
    label = (log_s1, d_label) if d_label is not None else (None, None)
    if one_id:
        every(source, ids, *per_row, g_id, g_c, gain, *label, into)
    else:
        every(source, ids, *per_row, None, g_c, None, *label, into)
        if g_id is not None or a_ids is not None or d_label is not None:
            g_id = torch.zeros_like(picked) if g_id is None else g_id
            several(picked, ids, *per_row, g_id, g_c, a_ids, *label, into)
    if into.data_ptr() != dx.data_ptr():  # a copy, for want of strides
        dx.copy_(into)
    return dx


def several_ids(
    dx: Tensor,  # (..., V), zeros; written to
    ids: Tensor,  # (..., K)
    y: Tensor,  # (..., K)
    softcap: float | None,
    g_id: Tensor,  # (..., K)
) -> None:
    """Only what the ids' own gradients add."""
    _, rows = rows_of(dx)
    _, several = _plan(
        rows, rows, ids.shape[-1], False, False, 0, 1.0, softcap, None, False,
        config.backward(rows.vocab),
    )  # fmt: skip
    several(y, ids, *(None,) * 6, g_id, *(None,) * 4, dx)


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, d_rows: Rows, K: int, one_id: bool, alike: bool, first: int, temperature: float,
    softcap: float | None, ignore_index: int | None, normalised: bool, cut: config.Config,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Every element; then, where a row has several ids, theirs."""
    V, into = rows.vocab, (d_rows.stride_b, d_rows.stride_t)
    blocks = config.ceil_div(V, cut.block_v)
    return Launch(
        _stats_bwd_kernel, (rows.count * blocks,),
        (
            *rows.where, *into, d_rows.lead, V, K, blocks, 0 if alike else 1,
            temperature, softcap, ignore_index,
        ),
        num_warps=cut.num_warps, ONE_ID=one_id, NORMALISED=normalised,
        PACK=rows.pack, ALIGNED=d_rows.aligned, SAME=rows.in_step_with(d_rows),
        BLOCK_V=cut.block_v,
    ), Launch(
        _ids_bwd_kernel, (rows.count,),
        (rows.rows_t, *into, V, K, first, temperature, softcap, ignore_index),
        num_warps=1, NORMALISED=normalised,
        BLOCK_K=min(512, max(config.ceil_pow2(K), 2)), BLOCK_V=256,
    )  # fmt: skip
