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
    **profiled("scale", X=in_place, Y=lambda args: 2 * elements(args["Y"])),
    do_not_specialize=["step_g", "rows_t", "tiles_x", "tiles", "blocks"],
    do_not_specialize_on_alignment=["G"],
)
def _scale_kernel(
    X, Y, G,  # inputs; X and Y, which can be None, are also the outputs
    step_g, rows_t, stride_xb, stride_xt, V, size_y, tiles_x, tiles, blocks,  # sizes
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program loops over tiles; the grid has as many as the GPU can run at once.

    The tiles of X, `blocks` per row, come before those of Y, which is contiguous.
    """
    if step_g == 0:
        if tl.load(G).to(tl.float32) == 1.0:
            return
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if tile < tiles_x:
            row = tile // blocks
            g = tl.load(G + row.to(tl.int64) * step_g).to(tl.float32)
            if g != 1.0:
                first = X + row_offset(row, rows_t, stride_xb, stride_xt)
                _scale_tile(first, tile % blocks, V, g, BLOCK_V)
        elif Y is not None:
            _scale_tile(Y, tile - tiles_x, size_y, tl.load(G).to(tl.float32), BLOCK_V)


@triton.jit
def _scale_tile(X, tile, size, g, BLOCK_V: tl.constexpr):
    at = tile.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(X + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(X + at, (x * g).to(X.dtype.element_ty), mask=at < size)


@functools.lru_cache(REMEMBERED)
def scale_launch(
    shape: tuple, strides: tuple, offset: int, itemsize: int, one_number: bool, size_y: int,
    offset_y: int, device: torch.device, revision: int,
) -> Launch | None:  # fmt: skip
    """Returns the Launch, or None if x has no (B, T, V) view with contiguous rows.

    The compiled kernel depends on the offsets, which are addresses modulo 16.
    """
    rows = describe(shape, strides, offset, itemsize)
    if rows is None:
        return None
    cut = config.scale(max(rows.vocab, size_y))
    blocks = config.ceil_div(rows.vocab, cut.block_v)
    tiles_x = rows.count * blocks
    tiles = tiles_x + config.ceil_div(size_y, cut.block_v)
    return Launch(
        _scale_kernel, (min(tiles, 8 * config.processors(device)),),
        (0 if one_number else 1, *rows.strides, rows.vocab, size_y, tiles_x, tiles, blocks),
        num_warps=cut.num_warps, BLOCK_V=cut.block_v,
    )  # fmt: skip


def scale_(x: Tensor, g: Tensor) -> None:
    """Multiplies x in place by g, one number or one per row, without waiting for its value."""
    if x.numel() == 0:
        return
    launch = scale_launch(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), g.dim() == 0, 0, 0, x.device,
        config.revision,
    )  # fmt: skip
    if launch is None:  # x has no (B, T, V) view with contiguous rows
        dense = x.contiguous()
        scale_(dense, g)
        x.copy_(dense)
    else:
        launch(x, None, g.contiguous())


def scale_two_(x: Tensor, y: Tensor, g: Tensor) -> None:
    """Multiplies two contiguous tensors of one dtype in place by the number g, in one launch."""
    assert x.is_contiguous()
    assert y.is_contiguous()
    size_x, size_y = x.numel(), y.numel()
    if size_x + size_y:
        launch = scale_launch(
            (size_x,), (1,), x.data_ptr() % 16, x.element_size(), True, size_y,
            y.data_ptr() % 16, x.device, config.revision,
        )  # fmt: skip
        assert launch is not None
        launch(x, y, g)
