"""Computes the similarities a @ b.T in chunks of rows, and the gradients of `a` and `b`.

All chunks use the same memory: a backend reads a chunk, or overwrites it with its gradient. A
second pass that overwrites takes the chunks in reverse order, because the last one of the first
pass is still in memory, and is not computed again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import eager
from ..contract import PRECISION
from ..core.choose_backend import backend_of
from ..eager.contrastive import Block
from ..heads.choose_cut import default_workspace, even_chunk
from ..heads.gemms import add_product, autocasts, cast_by_autocast
from ..heads.gradient_sums import Sum, clear_padding

# Columns are padded to a multiple: Triton loads 16 bytes at a time only if the stride is one of 16.
PACK = 16
# A chunk gets this part of the workspace: `eager` has up to four temporary tensors of its size.
EAGER_PART = 8
# CUDA allows 65,535 programs along a grid's second dimension, each of at least 64 rows.
MOST_ROWS = 1 << 21


class Chunk(NamedTuple):
    """The similarities between some rows of `a` and all rows of a block of `b`."""

    rows: slice
    x: Tensor  # (n, m)
    block: Block


class Similarities:
    """The similarities of `a` with blocks of `b`."""

    def __init__(self, a: Tensor, most: int, workspace: int | None, backend: Any = None):
        """`most` is the largest number of rows of a block.

        Backward passes the backend of forward, because each has its own units of normalisers.
        """
        self.backend: Any = backend_of(a) if backend is None else backend
        self.eager = self.backend.contrastive_read is eager.contrastive_read
        self.full = PRECISION[a.dtype]
        self.a = self.working(a.detach())
        width = _padded(most) * self.a.element_size()
        limit = workspace or default_workspace(max(width, 1), a.device.type)
        if self.eager:
            limit //= EAGER_PART
        self.step = min(even_chunk(len(a), limit // max(width, 1)), MOST_ROWS)
        size = min(self.step, len(a)) * _padded(most)
        self.memory = torch.empty(size, device=a.device, dtype=self.a.dtype)
        # the owner and the rows of the chunk in memory; None once it is overwritten
        self.in_memory: tuple[int, slice] | None = None

    def working(self, t: Tensor) -> Tensor:
        # 16-bit GEMMs are slow on a CPU, so the eager backend computes in fp32
        if self.eager and not t.is_cuda:
            t = t.to(self.full)
        return t.contiguous()

    def chunks(
        self, owner: int, b: Tensor, block: Block, overwritten: bool = False
    ) -> Iterator[Chunk]:
        """The similarities with the block `b` of rank `owner`, in reverse if to be overwritten."""
        m, width = len(b), _padded(len(b))
        starts = range(0, len(self.a), self.step)
        for start in reversed(starts) if overwritten else starts:
            rows = slice(start, min(start + self.step, len(self.a)))
            n = rows.stop - start
            x = self.memory[: n * width].view(n, width)[:, :m]
            if self.in_memory != (owner, rows):
                add_product(self.a[rows], b, None, x)
            self.in_memory = None if overwritten else (owner, rows)
            yield Chunk(rows, x, block.rows(rows))


class Gradients:
    """The gradients of `a` and of the current block of `b`, in fp32 or fp64, without `scale`."""

    def __init__(self, similarities: Similarities, for_a: bool):
        self.backend, self.a, self.full = (
            similarities.backend, similarities.a, similarities.full,
        )  # fmt: skip
        self.d_a = self.zeros_like(self.a) if for_a else None

    def zeros_like(self, t: Tensor) -> Tensor:
        return torch.zeros(t.shape, device=t.device, dtype=self.full)

    def add(self, chunk: Chunk, b: Tensor, d_b: Tensor | None) -> None:
        """`chunk.x` holds the gradient of the similarities."""
        dz, rows = chunk.x, chunk.rows
        if dz.device.type == "cpu":
            clear_padding(dz)
        if self.d_a is not None:
            Sum(self.backend, self.d_a[rows], 1, fresh=False).add(dz.t(), b)
        if d_b is not None:
            Sum(self.backend, d_b, 1, fresh=False).add(dz, self.a[rows])


def times(total: Tensor | None, factor: Tensor, like: Tensor) -> Tensor | None:
    """`total` · `factor` in the dtype of `like`."""
    if total is None:
        return None
    out = total if total.dtype == like.dtype else torch.empty_like(total, dtype=like.dtype)
    return torch.mul(total, factor, out=out)


def cast_embeddings(a: Any, b: Any) -> tuple[Any, Any]:
    """Casts to the dtype of autocast, if it is on and both are tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and autocasts(a.device):
        return cast_by_autocast(a), cast_by_autocast(b)
    return a, b


def picked(chunk: Chunk, valid: Tensor | None) -> Tensor | None:
    """The similarity of each row with its positive (arbitrary unless `valid`), or None."""
    x, block = chunk.x, chunk.block
    if block.positives is not None:
        columns = block.positives if valid is None else torch.where(valid, block.positives, 0)
        return x.gather(1, columns.unsqueeze(1)).squeeze(1)
    return None if block.diagonal is None else x.diagonal(block.diagonal)


def _padded(columns: int) -> int:
    return -(-columns // PACK) * PACK
