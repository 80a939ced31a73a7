"""A GEMM whose rows have the same bits for every number of rows, in plain PyTorch."""

import torch
from torch import Tensor

SLAB = 64 << 20  # the largest size in bytes of a temporary copy of b in a wider dtype


def row_gemm(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N), or (N, K) if `transposed`
    out: Tensor,  # (M, N)
    bias: Tensor | None = None,  # (N,)
    transposed: bool = False,
) -> Tensor:
    """Writes a @ b + bias to `out`. A row has the same bits for every number of rows M.

    If `transposed`, the product is a @ b.T. Each row of a is multiplied on its own, because the
    GEMM of a CPU library can add terms in another order if the number of rows is different, or if
    the row is at another position in a. The rows of a are copied, so that all rows have the same
    alignment in memory.
    """
    b, dtype = b.t() if transposed else b, out.dtype
    step = b.shape[1]
    if b.dtype != dtype:
        step = max(SLAB // (dtype.itemsize * max(b.shape[0], 1)), 1)
    rows = [row.to(dtype, copy=True) for row in a.split(1) if len(row)]
    for start in range(0, b.shape[1], max(step, 1)):
        columns = slice(start, start + step)
        wide = b[:, columns].to(dtype)
        add = None if bias is None else bias[columns].to(dtype)
        for i, row in enumerate(rows):
            z = torch.mm(row, wide) if add is None else torch.addmm(add, row, wide)
            out[i, columns] = z[0]
    return out
