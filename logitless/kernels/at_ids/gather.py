"""Gathers softcapped logits at K ids per row, and computes the gradient of the logits.

The caller applies the temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Reading
from .. import config
from ..launch import launch
from ..layout import is_live, load_label, numbers, row_offset, rows_of
from ..numerics import NO_ID, capped, load
from ..profiling import at_ids, profiled
from ..statistics.backward import MAX_PRELOADED, is_bad, sums_of_same
from ..statistics.gradient_tile import row_gain
from .duplicate_ids import are_repeated


@triton.jit(
    **profiled("gather_fwd", shows=("K",), X=at_ids),
    do_not_specialize=["N", "rows_t"],
    do_not_specialize_on_alignment=["LABEL", "IDS"],
)
def _gather_fwd_kernel(
    X, LABEL, IDS,  # inputs
    PICKED,  # output
    N, rows_t, stride_xb, stride_xt, V, K,  # sizes
    softcap, ignore_index,  # options
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program gathers the logits at BLOCK_K slots, which can belong to several rows."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = slot < N.to(tl.int64) * K
    row = slot // K
    live = mask
    if ignore_index is not None:
        live = mask & is_live(tl.load(LABEL + row, mask=mask, other=0), ignore_index)
    ids = tl.load(IDS + slot, mask=live, other=0)
    inside = live & (ids >= 0) & (ids < V)
    y, _ = capped(load(X, row_offset(row, rows_t, stride_xb, stride_xt) + ids, inside), softcap)
    tl.store(PICKED + slot, tl.where(inside, y, tl.where(live, float("nan"), 0.0)), mask=mask)


def gather(x: Tensor, reading: Reading) -> Tensor:  # x (..., V)
    """Returns the softcapped logits, NaN for ids outside [0, V), and 0 in ignored rows."""
    ids = reading.ids
    picked = torch.empty(ids.shape, device=x.device, dtype=torch.float32)
    if picked.numel() == 0:
        return picked
    x, rows = rows_of(x)
    launch(
        _gather_fwd_kernel, (config.ceil_div(ids.numel(), 1024),),
        (x, _label_of(reading), ids.contiguous(), picked),
        (
            rows.count, *rows.strides, rows.vocab, ids.shape[-1], reading.softcap,
            reading.ignore_index,
        ),
        num_warps=4, BLOCK_K=1024,
    )  # fmt: skip
    return picked


def _label_of(reading: Reading) -> Tensor | None:
    label = None if reading.ignore_index is None else reading.label
    return None if label is None else label.contiguous()


@triton.jit(
    **profiled("gather_bwd", shows=("K",), DX=at_ids),
    do_not_specialize=["rows_t", "step_u", "step_f"],
    do_not_specialize_on_alignment=["PICKED", "LABEL", "IDS", "G", "UPSTREAM", "FACTOR"],
)
def _gather_bwd_kernel(
    PICKED, LABEL, IDS, G, UPSTREAM, FACTOR,  # inputs
    DX,  # output, initially zero
    rows_t, stride_db, stride_dt, V, K, step_u, step_f,  # sizes
    softcap, ignore_index,  # options
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program writes the gradient at the ids of one row."""
    row = tl.program_id(0)
    if ignore_index is not None:
        if not is_live(load_label(LABEL, row), ignore_index):
            return
    at = row.to(tl.int64) * K
    DXrow = DX + row_offset(row, rows_t, stride_db, stride_dt)
    gain = row_gain(UPSTREAM, FACTOR, row, step_u, step_f)
    repeated = are_repeated(IDS + at, K, BLOCK_K)
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + at + offs_k, mask=offs_k < K, other=NO_ID)
        inside = (ids >= 0) & (ids < V)
        bad |= is_bad(ids, V)
        g = load(G + at, offs_k, inside).to(tl.float32)
        if repeated:
            g = sums_of_same(IDS + at, G + at, ids, K)
        g *= gain
        if softcap is not None:
            t = load(PICKED + at, offs_k, inside) / softcap
            g = tl.where(g == 0, 0.0, g * (1.0 - t * t))
        tl.store(DXrow + ids, g.to(DX.dtype.element_ty), mask=inside)
    if tl.max(bad, axis=0) > 0:
        tl.debug_barrier()  # NaN must be stored after the gradients at the ids
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)
            nan = tl.full((BLOCK_V,), float("nan"), tl.float32).to(DX.dtype.element_ty)
            tl.store(DXrow + cols, nan, mask=cols < V)


def gather_gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    picked: Tensor,  # (..., K), the result of gather
    g: Tensor,  # (..., K)
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,  # output, in the shape of x; can be x itself
) -> Tensor:
    if into is None:
        into = torch.zeros_like(x, memory_format=torch.contiguous_format)
    else:
        into.zero_()
    ids = reading.ids
    if into.numel() == 0 or ids.numel() == 0:
        return into
    target, rows = rows_of(into)
    upstream, step_u = numbers(upstream)
    factor, step_f = numbers(factor)
    K = ids.shape[-1]
    block = min(MAX_PRELOADED, max(config.ceil_pow2(K), 2))
    launch(
        _gather_bwd_kernel, (rows.count,),
        (picked, _label_of(reading), ids.contiguous(), g.contiguous(), upstream, factor, target),
        (*rows.strides, rows.vocab, K, step_u, step_f, reading.softcap, reading.ignore_index),
        num_warps=max(1, block // 128), BLOCK_K=block, BLOCK_V=256,
    )  # fmt: skip
    # `into` without a (B, T, V) view with contiguous rows was copied
    if target.data_ptr() != into.data_ptr():
        into.copy_(target)
    return into
