"""Copies hidden states, and writes 0 to the ignored rows of the copy, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from . import config
from .launch import launch
from .layout import is_live, load_label
from .profiling import profiled


@triton.jit(
    **profiled("zero_ignored"),
    do_not_specialize_on_alignment=["LABEL"],
)
def _zero_ignored_kernel(
    X, LABEL,  # inputs
    OUT,  # (N, D), contiguous
    stride, D, ignore_index,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program copies one block of columns of one row."""
    row = tl.program_id(0)
    live = is_live(load_label(LABEL, row), ignore_index)
    copy_block(X, OUT, row, tl.program_id(1) * BLOCK_D, live, stride, D, BLOCK_D)


@triton.jit
def copy_block(X, OUT, row, start, live, stride, D, BLOCK_D: tl.constexpr):
    """Copies the columns [start, start + BLOCK_D) of a row. If `live` is False, writes 0."""
    row = row.to(tl.int64)
    cols = start + tl.arange(0, BLOCK_D)
    x = tl.load(X + row * stride + cols, mask=cols < tl.where(live, D, 0), other=0.0)
    tl.store(OUT + row * D + cols, x, mask=cols < D)


def zero_ignored(x: Tensor, reading: Reading) -> Tensor:  # x (N, D)
    if reading.ignore_index is None or x.numel() == 0:
        return x
    x, out = with_memory_of_copy(x)
    (N, D), block = x.shape, columns_per_block(x.shape[1])
    launch(
        _zero_ignored_kernel, (N, config.ceil_div(D, block)), (x, reading.label.contiguous(), out),
        (x.stride(0), D, reading.ignore_index), num_warps=4, BLOCK_D=block,
    )  # fmt: skip
    return out


def with_memory_of_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x with contiguous rows, and contiguous memory for a copy of x."""
    if x.is_contiguous():
        return x, torch.empty_like(x)  # takes less time without `memory_format`
    x = x if x.stride(1) == 1 else x.contiguous()
    return x, torch.empty_like(x, memory_format=torch.contiguous_format)


def columns_per_block(D: int) -> int:
    return min(max(config.ceil_pow2(D), 16), 1024)
