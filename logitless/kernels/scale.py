"""Rows times a number each, in place, and no memory touched where that number is 1."""

import triton
import triton.language as tl
from torch import Tensor

from . import config
from .rows import row_offset
from .view import on_device, rows_of


@triton.jit(do_not_specialize=["rows_t", "blocks"])
def _scale_kernel(
    X, G,  # inputs; X is the output too
    stride_g, rows_t, stride_xb, stride_xt, V, blocks,  # sizes
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a (row, block)."""
    pid = tl.program_id(0)
    row = pid // blocks
    g = tl.load(G + row.to(tl.int64) * stride_g).to(tl.float32)
    if g != 1.0:
        cols = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
        at = X + row_offset(row, rows_t, stride_xb, stride_xt) + cols
        x = tl.load(at, mask=cols < V, other=0.0).to(tl.float32)
        tl.store(at, (x * g).to(X.dtype.element_ty), mask=cols < V)


def scale_rows_(x: Tensor, g: Tensor) -> None:
    """x (..., V) times g, a scalar or (...), without asking the host what g is."""
    if x.numel() == 0:
        return
    rows = rows_of(x)
    g = g.reshape(-1)
    cut = config.backward(x.shape[-1])
    blocks = config.ceil_div(x.shape[-1], cut.block_v)
    with on_device(x):
        _scale_kernel[(rows.count * blocks,)](
            rows.x, g, 0 if g.numel() == 1 else g.stride(0),
            rows.rows_t, rows.stride_b, rows.stride_t, x.shape[-1], blocks,
            BLOCK_V=cut.block_v, num_warps=cut.num_warps,
        )  # fmt: skip
    if rows.x.data_ptr() != x.data_ptr():  # strides that no view describes: a copy
        x.copy_(rows.x.view(x.shape))
