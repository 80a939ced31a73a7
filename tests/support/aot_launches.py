"""Launches that aot.py records: sums of a gradient, rows of a table, contrastive losses, GEMMs."""

from typing import Any
from unittest import mock

import torch
import triton

from logitless import kernels
from logitless.eager.contrastive import Block
from logitless.kernels import config


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
    # The gradient of a bias, from upstream gradients in fp32.
    bias, upstream = torch.zeros(1000, 1, dtype=dtype), torch.zeros(2, 1)
    kernels.row_dots_gradients(upstream, bias, ids[:, :1], g[:, :1], (False, True), False)


def launch_row_gemm(dz: torch.Tensor, wide: bool) -> None:
    """Launches the GEMMs of `ll.invariant()`: the logits, and the gradient of the hidden states.

    The tile sizes are those of the GPU for which the kernels are compiled.
    """
    rows, vocab = dz.shape
    h, weight = torch.zeros(rows, 512, dtype=dz.dtype), torch.zeros(vocab, 512, dtype=dz.dtype)
    out = torch.zeros(rows, -(-vocab // 8) * 8, dtype=torch.float32 if wide else dz.dtype)[
        :, :vocab
    ]
    target: Any = triton.runtime.driver.active.get_current_target()
    hopper = target.backend == "cuda" and target.arch in (90, 100)
    with mock.patch.object(config, "memory", return_value=config.HOPPER_MEMORY if hopper else 0):
        kernels.row_gemm(h, weight, out, weight[:, 0] if wide else None, True)
        kernels.row_gemm(dz, weight, h)
