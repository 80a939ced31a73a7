"""Multiplies rows in place, each by its number, or two tensors by one number, in one launch.

Nothing is read where the number is 1.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .layout import describe, row_offset
from .profiling import elements, in_place, profiled


@triton.jit(
    **profiled("scale", X=in_place),
    do_not_specialize=["step_g", "rows_t", "tiles", "blocks"],
    do_not_specialize_on_alignment=["G"],
)
def _scale_kernel(
    X, G,  # inputs; X is also the output
    step_g, rows_t, stride_xb, stride_xt, V, tiles, blocks,  # sizes
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles; the grid has as many as the GPU can run at once."""
    if step_g == 0:
        if tl.load(G).to(tl.float32) == 1.0:
            return
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // blocks
        g = tl.load(G + row.to(tl.int64) * step_g).to(tl.float32)
        if g != 1.0:
            cols = tile % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
            at = X + row_offset(row, rows_t, stride_xb, stride_xt) + cols
            x = tl.load(at, mask=cols < V, other=0.0).to(tl.float32)
            tl.store(at, (x * g).to(X.dtype.element_ty), mask=cols < V)


@functools.lru_cache(REMEMBERED)
def scale_launch(
    shape: tuple, strides: tuple, offset: int, itemsize: int, one_number: bool,
    device: torch.device, revision: int,
) -> Launch | None:  # fmt: skip
    """Returns the Launch, or None if x has no (B, T, V) view with contiguous rows."""
    rows = describe(shape, strides, offset, itemsize)
    if rows is None:
        return None
    cut = config.scale(rows.vocab)
    blocks = config.ceil_div(rows.vocab, cut.block_v)
    tiles = rows.count * blocks
    return Launch(
        _scale_kernel, (min(tiles, 8 * config.processors(device)),),
        (0 if one_number else 1, *rows.strides, rows.vocab, tiles, blocks),
        num_warps=cut.num_warps, BLOCK_V=cut.block_v,
    )  # fmt: skip


@triton.jit(
    **profiled("scale_two", X=in_place, Y=lambda args: 2 * elements(args["Y"])),
    do_not_specialize=["tiles_x", "tiles"],
    do_not_specialize_on_alignment=["G"],
)
def _scale_two_kernel(
    X, Y, G,  # inputs; X and Y are also the outputs
    size_x, size_y, tiles_x, tiles,  # elements of X, elements of Y, tiles of X, all tiles
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles, those of X before those of Y."""
    g = tl.load(G).to(tl.float32)
    if g == 1.0:
        return
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < tiles_x:
            _scale_tile(X, tile, size_x, g, BLOCK_V)
        else:
            _scale_tile(Y, tile - tiles_x, size_y, g, BLOCK_V)


@triton.jit
def _scale_tile(X, tile, size, g, BLOCK_V: tl.constexpr):
    at = (tl.zeros((BLOCK_V,), tl.int64) + tile) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(X + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(X + at, (x * g).to(X.dtype.element_ty), mask=at < size)


@functools.lru_cache(REMEMBERED)
def scale_two_launch(
    size_x: int, size_y: int, offsets: tuple[int, int], device: torch.device
) -> Launch:
    """Returns the Launch for two contiguous tensors at `offsets`, their addresses modulo 16.

    The compiled kernel depends on these.
    """
    block = 4096
    tiles_x, tiles_y = config.ceil_div(size_x, block), config.ceil_div(size_y, block)
    tiles = tiles_x + tiles_y
    return Launch(
        _scale_two_kernel, (min(tiles, 8 * config.processors(device)),),
        (size_x, size_y, tiles_x, tiles), num_warps=8, BLOCK_V=block,
    )  # fmt: skip


def scale_(x: Tensor, g: Tensor) -> None:
    """Multiplies x in place by g, one number or one per row, without waiting for its value."""
    if x.numel() == 0:
        return
    launch = scale_launch(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), g.dim() == 0, x.device,
        config.revision,
    )  # fmt: skip
    if launch is None:  # x has no (B, T, V) view with contiguous rows
        dense = x.contiguous()
        scale_(dense, g)
        x.copy_(dense)
    else:
        launch(x, g.contiguous())


def scale_two_(x: Tensor, y: Tensor, g: Tensor) -> None:
    """Multiplies two contiguous tensors of one dtype in place by the number g, in one launch."""
    assert x.is_contiguous()
    assert y.is_contiguous()
    size_x, size_y = x.numel(), y.numel()
    if size_x + size_y:
        offsets = x.data_ptr() % 16, y.data_ptr() % 16
        scale_two_launch(size_x, size_y, offsets, x.device)(x, y, g)
