"""Tiles of a narrow head, whose logits stay on the chip.

A head is narrow if the whole width D of its hidden states fits into one tile, so that one product
of (rows, D) by (columns, D) gives finished logits. For a small D, computing them again can take
less time than writing them to memory. `tl.dot` requires a width of at least 16.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.target_info import is_cuda

from .. import config
from ..launch import field
from ..numerics import load

UPCAST = tl.constexpr(knobs.runtime.interpret)  # the interpreter cannot multiply bf16
# bytes per element -> largest D; wider tiles do not fit into the registers
MAX_WIDTH = {2: 128, 4: 64}  # by bytes per element; wider heads take less time in chunks


@triton.constexpr_function
def precision_of(dtype, on_cuda):
    """The input precision for tl.dot. With plain tf32, fp32 inputs would be rounded to 11 bits."""
    return "tf32x3" if dtype == tl.float32 and on_cuda else "ieee"


@triton.jit
def dot(a, b, acc):
    """Returns acc + a @ b with fp32 sums. If acc is None, the result is a @ b."""
    PRECISION: tl.constexpr = precision_of(a.dtype, is_cuda())
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_rows(
    P, start, count,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL_ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Returns the rows [start, start + BLOCK) of a matrix (count, D), with 0 outside of it.

    ALL_ROWS: the tile ends inside the matrix. ALIGNED: its rows start on 16-byte boundaries. STRIDE
    and D are constants, so that the compiler can load 16 bytes at a time for every D.
    """
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    first = P + tl.cast(start, tl.int64) * STRIDE
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    at = first + offs[:, None] * STRIDE + offs_d[None, :]
    if ALL_ROWS and D == BLOCK_D:
        return tl.load(at)
    elif ALL_ROWS:
        return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        return tl.load(at, mask=(start + offs < count)[:, None], other=0.0)
    else:
        mask = (start + offs < count)[:, None] & (offs_d < D)[None, :]
        return tl.load(at, mask=mask, other=0.0)


@triton.constexpr_function
def layout(constants, name):
    """Returns a field of the HeadLayout in a kernel's CONSTANTS (see launch.py)."""
    return getattr(constants.layout, name)


@triton.jit
def load_hidden(P, start, count, ALL_ROWS: tl.constexpr, CONSTANTS: tl.constexpr):
    return load_rows(
        P, start, count, layout(CONSTANTS, "stride_h"), layout(CONSTANTS, "width"),
        field(CONSTANTS, "block_n"), layout(CONSTANTS, "block_d"), ALL_ROWS,
        layout(CONSTANTS, "h_aligned"),
    )  # fmt: skip


@triton.jit
def load_weight(
    P, start, count, BLOCK: tl.constexpr, ALL_ROWS: tl.constexpr, CONSTANTS: tl.constexpr
):  # fmt: skip
    return load_rows(
        P, start, count, layout(CONSTANTS, "stride_w"), layout(CONSTANTS, "width"),
        BLOCK, layout(CONSTANTS, "block_d"), ALL_ROWS, layout(CONSTANTS, "w_aligned"),
    )  # fmt: skip


@triton.jit
def with_bias(x, BIAS, cols, mask):
    if BIAS is not None:
        return x + load(BIAS, cols, mask).to(tl.float32)
    else:
        return x


def is_narrow(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the kernels for narrow heads support a head with these tensors on this device.

    The shared memory of AMD GPUs is too small for the tiles.
    """
    device, width = hidden.device, MAX_WIDTH.get(hidden.element_size(), 0)
    if hidden.dtype != weight.dtype or weight.stride(1) != 1 or len(weight) == 0:
        return False
    if device.type == "cuda" and (torch.version.hip or not config.has_async_copies(device)):
        return False
    return device.type in ("cuda", "cpu") and 0 < weight.shape[1] <= width


@dataclass(frozen=True)
class HeadLayout:
    """The memory layout of hidden states (N, D) and weight (V, D), a constant of kernels."""

    width: int  # D
    stride_h: int
    stride_w: int
    h_aligned: bool  # every row of the hidden states starts on a 16-byte boundary
    w_aligned: bool

    @property
    def block_d(self) -> int:
        """The width of a tile: D padded to a power of two, and at least 16."""
        return max(config.ceil_pow2(self.width), 16)

    @property
    def aligned(self) -> bool:
        return self.h_aligned and self.w_aligned


def layout_of(hidden: Tensor, weight: Tensor) -> HeadLayout:
    strides = (hidden.stride(0), weight.stride(0))
    return HeadLayout(hidden.shape[1], *strides, _is_aligned(hidden), _is_aligned(weight))


def _is_aligned(t: Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
