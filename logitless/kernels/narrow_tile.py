"""Tiles of a narrow head: the logits of some rows and columns, which stay on the chip.

A head is narrow if the whole width D of its hidden states fits into one tile. Then one product of a
tile of hidden states (rows, D) and a tile of the weight (columns, D) is a finished tile of logits.
For a narrow head, computing logits again costs less time than writing logits to memory. The width
is padded to a power of two of at least 16 (`tl.dot` requires 16).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.target_info import is_cuda

from . import config
from .numerics import load

UPCAST = tl.constexpr(knobs.runtime.interpret)  # the interpreter cannot multiply bf16
# Bytes of one row of a tile. Wider heads do not fit into registers and shared memory.
MAX_BYTES = 1024


@triton.constexpr_function
def precision_of(dtype, on_cuda):
    """The precision of tl.dot. Plain tf32 would round fp32 inputs to 11 bits."""
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
    P, start, stride, count, D,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    ALL_ROWS: tl.constexpr, EVEN_D: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The rows [start, start + BLOCK) of a matrix (count, D), as a tile (BLOCK, BLOCK_D).

    The tile is 0 beyond the matrix. If ALL_ROWS, all rows of the tile are rows of the matrix. If
    EVEN_D, D is BLOCK_D. If ALIGNED, every row of the matrix starts on a 16-byte boundary.
    """
    offs = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    first = P + tl.cast(start, tl.int64) * stride
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    at = first + offs[:, None] * stride + offs_d[None, :]
    if ALL_ROWS and EVEN_D:
        return tl.load(at)
    elif ALL_ROWS:
        return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)
    elif EVEN_D:
        return tl.load(at, mask=(start + offs < count)[:, None], other=0.0)
    else:
        mask = (start + offs < count)[:, None] & (offs_d < D)[None, :]
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def with_bias(x, BIAS, cols, mask):
    """Adds the bias of the columns to a tile of logits. `cols` broadcasts with x."""
    if BIAS is not None:
        return x + load(BIAS, cols, mask).to(tl.float32)
    else:
        return x


def is_narrow(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the kernels of this room can compute a head with these tensors on this device.

    AMD GPUs are left out, because their shared memory is too small for these tiles.
    """
    device, size = hidden.device, hidden.element_size()
    if hidden.dtype != weight.dtype or weight.stride(1) != 1 or weight.shape[0] == 0:
        return False
    if device.type == "cuda" and (torch.version.hip or not config.has_async_copies(device)):
        return False
    return (
        device.type in ("cuda", "cpu")
        and 0 < weight.shape[1]
        and size * padded(weight) <= (MAX_BYTES)
    )


def padded(t: Tensor) -> int:
    """The width of the tiles of a matrix (rows, D)."""
    return max(config.ceil_pow2(t.shape[1]), 16)


def is_aligned(t: Tensor) -> bool:
    """Whether every row of a matrix starts on a 16-byte boundary."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0
