"""Launches that aot.py records: sums of a gradient, rows of a table, contrastive losses."""

import torch

from logitless import kernels
from logitless.eager.contrastive import Block


def launch_sums(dz: torch.Tensor) -> None:
    """Launches the sum of a weight's gradient over three chunks, for both layouts of dz."""
    h, total = torch.zeros(2, 512, dtype=dz.dtype), torch.zeros(dz.shape[1], 512, dtype=dz.dtype)
    exponents = kernels.exponents(total)
    for chunk in range(3):
        kernels.accumulate(dz, h, total, exponents, chunk == 0, chunk == 2)
        columns = dz.t().contiguous().t()
        kernels.accumulate(columns, h, total, exponents, chunk == 0, chunk == 2)


def launch_contrastive(dtype: torch.dtype, size: int, everything: bool = False) -> None:
    """Launches the kernels of contrastive losses, with padded rows if `size` is no multiple of 16.

    With `everything`, positives, a mask, labels and upstream gradients are given.
    """
    x = torch.zeros(size, -(-size // 16) * 16, dtype=dtype)[:, :size]
    row, ids, one = torch.zeros(size), torch.zeros(size, dtype=torch.int64), torch.ones(())
    block, upstream, state = Block(one, diagonal=0), None, torch.zeros(size, 2)
    if everything:
        mask = torch.zeros(size, size, dtype=torch.bool)
        block, upstream = Block(one, ids, None, mask, (ids, ids)), row
        some = block._replace(mask=None, labels=None)
        kernels.contrastive_read(x, some, state, state.clone())
        kernels.contrastive_gradient(x, some, row, row, upstream, upstream, True)
    kernels.contrastive_read(x, block, state, state.clone())
    kernels.contrastive_read(x, block, state, None)
    kernels.contrastive_gradient(x, block, row, row, upstream, upstream, True)
    kernels.contrastive_gradient(x, block._replace(diagonal=None), row, None)
    kernels.sigmoid_contrastive(x, block, one, True, upstream)
    kernels.sigmoid_contrastive(x, block._replace(diagonal=None), one, False)


def launch_table(dtype: torch.dtype) -> None:
    """Launches the kernels for gathered rows of a table."""
    table, ids = torch.zeros(1000, 128, dtype=dtype), torch.zeros(2, 40, dtype=torch.int64)
    g = kernels.row_dots(table[:2], table, ids)
    kernels.row_dots_gradients(table[:2], table, ids, g, (True, True), False)
