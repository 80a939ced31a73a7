"""A GEMM in plain PyTorch, in which the bits of a result row do not depend on other rows."""

import torch
from torch import Tensor

SLAB = 64 << 20  # the largest temporary copy of b in a wider dtype, in bytes


def row_gemm(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N), or (N, K) if `transposed` is True
    out: Tensor,  # (M, N)
    bias: Tensor | None = None,  # (N,)
    transposed: bool = False,
) -> Tensor:
    """Writes a @ b + bias to `out`, with the same bits in a row for every M.

    The order in which a CPU library adds products can depend on the number of rows, and on a row's
    position and alignment. So each row of `a` is multiplied on its own, from a copy.
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
