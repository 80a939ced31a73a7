"""Copies hidden states, and writes 0 to the ignored rows of the copy, in one launch."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from . import config
from .launch import REMEMBERED, Launch
from .profiling import profiled
from .state import is_live, load_label


@triton.jit(
    **profiled("zero_ignored"),
    do_not_specialize_on_alignment=["LABEL", "SCALE"],
)
def _zero_ignored_kernel(
    X, LABEL, SCALE,  # inputs
    OUT,  # (N, D), contiguous
    stride, D, ignore_index,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program copies one block of columns of one row. An ignored row is not read."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = is_live(load_label(LABEL, row), ignore_index)
    x = tl.load(X + row * stride + cols, mask=(cols < D) & live, other=0.0)
    if SCALE is not None:
        x = tl.where(live, x.to(tl.float32) * tl.load(SCALE).to(tl.float32), 0.0)
    tl.store(OUT + row * D + cols, x.to(OUT.dtype.element_ty), mask=cols < D)


def zero_ignored(
    x: Tensor,  # (N, D)
    reading: Reading,
    scale: Tensor | None = None,  # (), a factor for the rows that count
) -> Tensor:
    """Returns x · scale, with 0 in the rows that the reading ignores.

    The result is x itself if there is neither a scale nor an ignore_index.
    """
    if x.numel() == 0 or (scale is None and reading.ignore_index is None):
        return x
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    label = None if reading.ignore_index is None else reading.label.contiguous()
    launch = _launch(*x.shape, x.stride(0), x.data_ptr() % 16, reading.ignore_index)
    launch(x, label, scale, out)
    return out


@functools.lru_cache(REMEMBERED)
def _launch(N: int, D: int, stride: int, offset: int, ignore_index: int | None) -> Launch:
    """Returns a Launch for inputs whose address modulo 16 is `offset`.

    Each offset needs its own Launch, because Triton compiles the kernel for the alignment of X.
    """
    block = min(max(config.ceil_pow2(D), 16), 1024)
    return Launch(
        _zero_ignored_kernel, (N, config.ceil_div(D, block)), (stride, D, ignore_index),
        num_warps=4, BLOCK_D=block,
    )  # fmt: skip
