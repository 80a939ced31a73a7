"""Row statistics, backward: one formula for every loss, written once into the gradient.

    dy_i = p_i (a + b log p_i) / temperature + Σ_k g_k [i = id_k] + g_c v_i        p_i = e^(z_i - lse)

a, b, g_c are per row and g_k per id; log p_i is taken as ((y_i - shift) / temperature) - log_s, which
no common offset can hurt. One id a row is compared in place; several ids are put right by a second,
small kernel, so that a gradient is rounded once, after everything is added.
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
from .view import on_device, rows_like, rows_of


@triton.jit
def _load_or(P, at, default):
    """A per-row number, or its default where the loss has none."""
    if P is not None:
        return tl.load(P + at).to(tl.float32)
    else:
        return default


@triton.jit
def _softmax_part(y, shift, log_s, a, b, inv_t, HAS_B: tl.constexpr):
    """p (a + b log p) / temperature."""
    log_p = (y - shift) * inv_t - log_s
    p = tl.exp2(log_p * LOG2E)
    if HAS_B:
        # 0 · -inf is 0 here: x log x.
        return (p * a + tl.where(p > 0, p * b * log_p, 0.0)) * inv_t
    else:
        return p * (a * inv_t)


@triton.jit
def _dx_tile(
    Xrow, W, DXrow, cols, mask, id, shift, log_s, a, b, g_id, g_c, inv_t, softcap,
    HAS_B: tl.constexpr, HAS_ID: tl.constexpr, HAS_C: tl.constexpr,
):  # fmt: skip
    """Read a tile of logits, write its gradient."""
    y, slope = capped(tl.load(Xrow + cols, mask=mask, other=0.0), softcap)
    dy = _softmax_part(y, shift, log_s, a, b, inv_t, HAS_B)
    if HAS_C:
        if W is not None:
            dy += g_c * tl.load(W + cols, mask=mask, other=0.0).to(tl.float32)
        else:
            dy += g_c
    if HAS_ID:
        dy += tl.where(cols == id, g_id, 0.0)
    tl.store(DXrow + cols, (dy * slope).to(DXrow.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows_t", "lead", "blocks"])
def _stats_bwd_kernel(
    X, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C,  # inputs
    DX,  # output
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, blocks,  # sizes
    temperature, softcap, ignore_index,  # options
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
    if IDS is not None:
        id = tl.load(IDS + row)
    if ignore_index is not None:
        if id == ignore_index:
            zero = tl.zeros((BLOCK_V,), DX.dtype.element_ty)
            tl.store(tl.multiple_of(DXrow + head, 16) + cols, zero, mask=mask)
            if not ALIGNED:
                if block == 0:
                    ends, mask_ends = fringe_tile(head, body, V, PACK)
                    tl.store(DXrow + ends, tl.zeros((2 * PACK,), DX.dtype.element_ty), mask_ends)
            return

    shift = tl.load(SHIFT + row)
    log_s = tl.load(LOG_S + row)
    inv_t = inverse_temperature(TEMP, temperature, row)
    a = _load_or(A, row, 0.0)
    b = _load_or(B, row, 0.0)
    g_id = _load_or(G_ID, row, 0.0)
    g_c = _load_or(G_C, row, 0.0)
    if IDS is not None:
        # A bad target has no gradient to give: the whole row says so.
        a = tl.where((id >= 0) & (id < V), a, float("nan"))
    # A row of -inf has no distribution: p = 0, and nothing flows.
    dead = log_s == -INF
    shift = tl.where(dead, INF, shift)
    log_s = tl.where(dead, 0.0, log_s)
    a = tl.where(dead, 0.0, a)
    g_id = tl.where(dead, 0.0, g_id)
    g_c = tl.where(dead, 0.0, g_c)

    Xbody = Xrow + head
    if SAME:
        Xbody = tl.multiple_of(Xbody, 16)
    if W is not None:
        Wbody = W + head
    else:
        Wbody = W
    _dx_tile(
        Xbody, Wbody, tl.multiple_of(DXrow + head, 16), cols, mask, id - head,
        shift, log_s, a, b, g_id, g_c, inv_t, softcap,
        B is not None, IDS is not None, G_C is not None,
    )  # fmt: skip
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            _dx_tile(
                Xrow, W, DXrow, ends, mask_ends, id,
                shift, log_s, a, b, g_id, g_c, inv_t, softcap,
                B is not None, IDS is not None, G_C is not None,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows_t"])
def _ids_bwd_kernel(
    PICKED, IDS, W, TEMP, SHIFT, LOG_S, A, B, G_ID, G_C,  # inputs
    DX,  # output
    rows_t, stride_db, stride_dt, V, K,  # sizes
    temperature, softcap,  # options
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Several ids a row: rewrite the gradient at each from its saved logit; repeated ids add up."""
    row = tl.program_id(0)
    at = row.to(tl.int64) * K
    DXrow = DX + row_offset(row, rows_t, stride_db, stride_dt)
    shift = tl.load(SHIFT + row)
    log_s = tl.load(LOG_S + row)
    inv_t = inverse_temperature(TEMP, temperature, row)
    a = _load_or(A, row, 0.0)
    b = _load_or(B, row, 0.0)
    g_c = _load_or(G_C, row, 0.0)
    live = log_s != -INF
    bad = 0
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        ids = tl.load(IDS + at + offs_k, mask=mask_k, other=0)
        inside = (ids >= 0) & (ids < V)
        bad += tl.sum((mask_k & ~inside).to(tl.int32), axis=0)
        g = tl.zeros((BLOCK_K,), tl.float32)
        for other in range(0, K, BLOCK_K):
            offs_j = other + tl.arange(0, BLOCK_K)
            mask_j = offs_j < K
            ids_j = tl.load(IDS + at + offs_j, mask=mask_j, other=-1)
            g_j = tl.load(G_ID + at + offs_j, mask=mask_j, other=0.0).to(tl.float32)
            same = (ids[:, None] == ids_j[None, :]) & mask_j[None, :]
            g += tl.sum(tl.where(same, g_j[None, :], 0.0), axis=1)
        y = tl.load(PICKED + at + offs_k, mask=mask_k, other=0.0)
        dy = _softmax_part(y, shift, log_s, a, b, inv_t, B is not None) + g
        if G_C is not None:
            if W is not None:
                dy += g_c * tl.load(W + ids, mask=mask_k & inside, other=0.0).to(tl.float32)
            else:
                dy += g_c
        if softcap is not None:
            dy *= 1.0 - (y / softcap) * (y / softcap)
        dx = tl.where(live, dy, 0.0).to(DX.dtype.element_ty)
        tl.store(DXrow + ids, dx, mask=mask_k & inside)
    if bad > 0:
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
    shift: Tensor,  # (...)
    log_s: Tensor,  # (...)
    picked: Tensor | None,  # like ids
    a: Tensor | None,  # (...)
    b: Tensor | None,  # (...)
    g_id: Tensor | None,  # like ids
    g_c: Tensor | None,  # (...)
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits, (..., V) in their dtype; in place, written over x and returned."""
    dx = x if inplace else torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if dx.numel() == 0:
        return dx
    V = x.shape[-1]
    rows = rows_of(x)
    d_rows = rows if inplace else rows_like(dx, rows)
    K = 1 if ids is None else ids.numel() // rows.count
    ids, weight, row_temperature, picked, a, b, g_id, g_c = (
        None if t is None else t.contiguous()
        for t in (ids, weight, row_temperature, picked, a, b, g_id, g_c)
    )
    per_row = (weight, row_temperature, shift, log_s, a, b)
    sizes = (d_rows.stride_b, d_rows.stride_t)
    one_id = K == 1
    cut = config.backward(V, x.element_size())
    blocks = triton.cdiv(V, cut.block_v)
    with on_device(x):
        _stats_bwd_kernel[(rows.count * blocks,)](
            rows.x, ids if one_id else None, *per_row, g_id if one_id else None, g_c,
            d_rows.x,
            rows.rows_t, rows.stride_b, rows.stride_t, *sizes, d_rows.lead, V, blocks,
            temperature, softcap, ignore_index,
            PACK=d_rows.pack, ALIGNED=d_rows.aligned, SAME=rows.in_step_with(d_rows),
            BLOCK_V=cut.block_v, num_warps=cut.num_warps,
        )  # fmt: skip
        if not one_id and g_id is not None:
            _ids_bwd_kernel[(rows.count,)](
                picked, ids, *per_row, g_id, g_c,
                d_rows.x,
                rows.rows_t, *sizes, V, K,
                temperature, softcap,
                BLOCK_K=min(64, triton.next_power_of_2(K)), BLOCK_V=cut.block_v,
            )  # fmt: skip
    if inplace and rows.x.data_ptr() != x.data_ptr():  # strides that no view describes: a copy
        x.copy_(rows.x.view(x.shape))
    return dx
