"""The mean of -log p over the rows that count, and its gradient: one small launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import REMEMBERED, Launch
from .rows import load


@triton.jit(do_not_specialize=["N"])
def _mean_kernel(
    IDS, PICKED,  # inputs
    LOSS, D_PICKED,  # outputs, a number each
    N, ignore_index,  # sizes, options
    MEAN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program, so that the sum is the same from run to run."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    count = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        mask = rows < N
        if MEAN:
            ids = tl.load(IDS + rows, mask=mask, other=0)
            count += (mask & (ids != ignore_index)).to(tl.int32)
        if PICKED is not None:
            total += load(PICKED, rows, mask)
    share = 1.0
    if MEAN:
        share = 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    tl.store(D_PICKED, -share)
    if PICKED is not None:
        tl.store(LOSS, -share * tl.sum(total, axis=0))


def mean_nll(
    ids: Tensor,  # (...)
    picked: Tensor | None,  # (...), log p; None if not yet known
    ignore_index: int,
    mean: bool,
) -> tuple[Tensor | None, Tensor]:
    """-Σ picked, over the number of rows that count if `mean`; and its gradient, alike for all."""
    d_picked = torch.empty((), device=ids.device, dtype=torch.float32)
    loss = None if picked is None else torch.empty_like(d_picked)
    _plan(ids.numel(), ignore_index, mean)(ids.contiguous(), picked, loss, d_picked)
    return loss, d_picked


@functools.lru_cache(REMEMBERED)
def _plan(N: int, ignore_index: int, mean: bool) -> Launch:
    return Launch(_mean_kernel, (1,), (N, ignore_index), num_warps=16, MEAN=mean, BLOCK_N=8192)
