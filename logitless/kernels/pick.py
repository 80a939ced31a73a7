"""y at K ids a row, and the gradient of that: zeros, but at the ids."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .rows import capped, load, row_offset
from .stats_bwd import ids_bwd
from .view import Rows, rows_of


@triton.jit(do_not_specialize=["N", "rows_t"])
def _pick_kernel(
    X, IDS,  # inputs
    PICKED,  # output
    N, rows_t, stride_xb, stride_xt, V, K, softcap,  # sizes, options
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a BLOCK_K of slots, of whatever rows."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = slot < N.to(tl.int64) * K
    ids = tl.load(IDS + slot, mask=mask, other=0)
    inside = mask & (ids >= 0) & (ids < V)
    y, _ = capped(
        load(X, row_offset(slot // K, rows_t, stride_xb, stride_xt) + ids, inside), softcap
    )
    tl.store(PICKED + slot, tl.where(inside, y, float("nan")), mask=mask)


def pick(
    x: Tensor,  # (..., V)
    ids: Tensor,  # (..., K)
    softcap: float | None,
) -> Tensor:
    """softcap · tanh(x / softcap) at ids, (..., K) in fp32; NaN for an id outside [0, V)."""
    picked = torch.empty(ids.shape, device=x.device, dtype=torch.float32)
    if picked.numel() == 0:
        return picked
    x, rows = rows_of(x)
    _plan(rows, ids.shape[-1], softcap)(x, ids.contiguous(), picked)
    return picked


@functools.lru_cache(REMEMBERED)
def _plan(rows: Rows, K: int, softcap: float | None) -> Launch:
    block = 1024
    return Launch(
        _pick_kernel, (config.ceil_div(rows.count * K, block),),
        (rows.count, *rows.where, rows.vocab, K, softcap),
        num_warps=4, BLOCK_K=block,
    )  # fmt: skip


def pick_bwd(
    x: Tensor,  # (..., V)
    ids: Tensor,  # (..., K)
    y: Tensor,  # (..., K), what was picked
    softcap: float | None,
    d_y: Tensor,  # (..., K)
    inplace: bool = False,
) -> Tensor:
    """The gradient of y, rounded when all that repeated ids bring is added; in place, over x."""
    if inplace:
        dx = x.zero_()
    else:
        dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if dx.numel() == 0 or ids.numel() == 0:
        return dx
    ids_bwd(dx, ids.contiguous(), y, softcap, d_y.contiguous())
    return dx
