"""Launches of sums over chunks of a head, and over rows of a table, for aot.py."""

import torch

from logitless import kernels


def launch_sums(dz: torch.Tensor) -> None:
    """Launches the sum of a weight's gradient over three chunks, for both layouts of dz."""
    h, total = torch.zeros(2, 512, dtype=dz.dtype), torch.zeros(dz.shape[1], 512, dtype=dz.dtype)
    exponents = kernels.exponents(total)
    for chunk in range(3):
        kernels.accumulate(dz, h, total, exponents, chunk == 0, chunk == 2)
        columns = dz.t().contiguous().t()
        kernels.accumulate(columns, h, total, exponents, chunk == 0, chunk == 2)


def launch_table(dtype: torch.dtype) -> None:
    """Launches the kernels for gathered rows of a table."""
    table, ids = torch.zeros(1000, 128, dtype=dtype), torch.zeros(2, 40, dtype=torch.int64)
    g = kernels.row_dots(table[:2], table, ids)
    kernels.row_dots_gradients(table[:2], table, ids, g, (True, True), False)
