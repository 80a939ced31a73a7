"""Copies hidden states, and writes 0 to the ignored rows of the copy.

The same launch can multiply the gradient of the logits by the upstream gradient. For a small head,
every launch costs time.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from . import config
from .host import scale_
from .launch import REMEMBERED, Launch
from .profiling import nothing, profiled
from .state import is_live, load_label

STEPS = 8  # a program multiplies up to STEPS · BLOCK columns of DZ


@triton.jit(
    **profiled("zero_ignored", DZ=nothing),
    do_not_specialize_on_alignment=["LABEL", "G"],
)
def _zero_ignored_kernel(
    X, LABEL, G,  # inputs
    DZ,  # (N, V), multiplied by G in place; None if G is None
    OUT,  # (N, D), contiguous
    stride_x, stride_z, D, V, ignore_index,  # sizes
    BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Each program copies one block of a row of X. An ignored row of X is not read.

    Each program also multiplies STEPS blocks of a row of DZ.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = is_live(load_label(LABEL, row), ignore_index)
    x = tl.load(X + row * stride_x + cols, mask=(cols < D) & live, other=0.0)
    tl.store(OUT + row * D + cols, x, mask=cols < D)
    if DZ is not None:
        g = tl.load(G).to(tl.float32)
        if g != 1.0:
            for step in range(STEPS):
                cols = (tl.program_id(1) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
                at = DZ + row * stride_z + cols
                dz = tl.load(at, mask=cols < V, other=0.0).to(tl.float32)
                tl.store(at, (dz * g).to(DZ.dtype.element_ty), mask=cols < V)


def zero_ignored(
    x: Tensor,  # (N, D)
    reading: Reading,
    dz: Tensor | None = None,  # (N, V), the gradient of the logits
    upstream: Tensor | None = None,  # ()
) -> Tensor:
    """Returns x with 0 in the rows that the reading ignores. Without an ignore_index, returns x.

    If dz is given, dz is multiplied in place by `upstream`.
    """
    if reading.ignore_index is None or x.numel() == 0:
        if dz is not None:
            scale_(dz, upstream)
        return x
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    place = (0, 0, 0) if dz is None else (dz.data_ptr() % 16, dz.stride(0), dz.shape[1])
    launch = _launch(*x.shape, x.stride(0), x.data_ptr() % 16, place, reading.ignore_index)
    launch(x, reading.label.contiguous(), upstream, dz, out)
    return out


@functools.lru_cache(REMEMBERED)
def _launch(
    N: int, D: int, stride_x: int, offset: int, place: tuple[int, int, int], ignore_index: int
) -> Launch:
    """Returns a Launch for inputs whose address modulo 16 is `offset`.

    Each offset needs its own Launch, because Triton compiles the kernel for the alignment of X and
    DZ. `place` is the offset, the stride and the vocabulary size of DZ.
    """
    _, stride_z, V = place
    block = min(max(config.ceil_pow2(D), 64), 1024)
    blocks = max(config.ceil_div(D, block), config.ceil_div(V, STEPS * block))
    return Launch(
        _zero_ignored_kernel, (N, blocks), (stride_x, stride_z, D, V, ignore_index),
        num_warps=4, BLOCK=block, STEPS=STEPS,
    )  # fmt: skip
