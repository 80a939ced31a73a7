"""Reduces the losses of all rows to one number, and computes the factor for each row's gradient."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from .launch import REMEMBERED, Launch
from .layout import is_live
from .profiling import profiled


@triton.jit
def row_block(LABEL, start, N, ignore_index, BLOCK_N: tl.constexpr):
    """Returns the rows of one block, a mask of those below N, and one of those also not ignored."""
    rows = start + tl.arange(0, BLOCK_N)
    mask = rows < N
    if LABEL is not None:
        label = tl.load(LABEL + rows, mask=mask, other=0)
        return rows, mask, mask & is_live(label, ignore_index)
    else:
        return rows, mask, mask


@triton.jit(
    **profiled("reduce"),
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=["VALUE", "LABEL", "WEIGHT", "MASS"],
)
def _reduce_kernel(
    LOSS,  # output, one number
    VALUE, LABEL, WEIGHT, MASS,  # inputs
    FACTOR,  # output, one number, or one number per row
    N, ignore_index,  # sizes, options
    MEAN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program, so that the result is bitwise reproducible."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    count = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, N, BLOCK_N):
        rows, _, live = row_block(LABEL, start, N, ignore_index, BLOCK_N)
        if MEAN:
            if MASS is not None:
                mass += tl.load(MASS + rows, mask=live, other=0.0)
            else:
                count += live.to(tl.int32)
        if VALUE is not None:
            value = tl.load(VALUE + rows, mask=live, other=0.0)
            if WEIGHT is not None:
                value *= tl.load(WEIGHT + rows, mask=live, other=0.0).to(tl.float32)
            total += value
    share = 1.0
    if MEAN:
        if MASS is not None:
            total_mass = tl.sum(mass, axis=0)
            share = 1.0 / tl.where(total_mass == 0, 1.0, total_mass)
        else:
            share = 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)
    if VALUE is not None:
        tl.store(LOSS, share * tl.sum(total, axis=0))
    if FACTOR is not None:
        if WEIGHT is not None:
            for start in range(0, N, BLOCK_N):
                rows, mask, live = row_block(LABEL, start, N, ignore_index, BLOCK_N)
                weight = tl.load(WEIGHT + rows, mask=live, other=0.0).to(tl.float32)
                tl.store(FACTOR + rows, share * weight, mask=mask)
        else:
            tl.store(FACTOR, share)


@functools.lru_cache(REMEMBERED)
def reduce_launch(N: int, ignore_index: int | None, mean: bool) -> Launch:
    return Launch(_reduce_kernel, (1,), (N, ignore_index), num_warps=16, MEAN=mean, BLOCK_N=8192)


def reduce(
    value: Tensor,  # (...)
    reading: Reading,
    row_weight: Tensor | None = None,  # (...), of any real dtype
    mass: Tensor | None = None,  # (N,), 0 for ignored rows
    mean: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the weighted sum or mean over the rows, and the factor of each row's gradient.

    The factor is one per row with a `row_weight`, else one for all, or None for 1.
    """
    if row_weight is None and not mean:  # the values of ignored rows are already 0
        return value.sum(), None
    label = None if reading.ignore_index is None else reading.label
    N, device = value.numel(), value.device
    loss = torch.empty((), device=device, dtype=torch.float32)
    if row_weight is not None:
        factor = torch.empty(N, device=device, dtype=torch.float32)
        row_weight = row_weight.contiguous()
        if row_weight.dtype == torch.bool:
            row_weight = row_weight.view(torch.uint8)
    else:
        factor = torch.empty_like(loss)
    reduce_launch(N, reading.ignore_index, mean)(
        loss, value.contiguous(), None if label is None else label.contiguous(), row_weight, mass,
        factor,
    )  # fmt: skip
    return loss, factor


def share(reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
    if mass is None and reading.ignore_index is None:
        return torch.full((), 1.0 / max(rows, 1), device=like.device, dtype=torch.float32)
    factor = torch.empty((), device=like.device, dtype=torch.float32)
    label = None if reading.ignore_index is None else reading.label.contiguous()
    # without VALUE, only the last argument is written; the first one selects the GPU
    reduce_launch(rows, reading.ignore_index, True)(factor, None, label, None, mass, factor)
    return factor
