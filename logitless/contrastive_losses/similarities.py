"""Computes the similarities a @ b.T in chunks of rows, and the gradients of `a` and `b`.

One chunk of similarities is in memory at a time. A backend reads the chunk, or overwrites the chunk
with its gradient. All chunks use the same memory. Some losses read all chunks in a first pass, and
overwrite all chunks in a second pass. The second pass takes the chunks in reverse order, because
the last chunk of the first pass is still in memory. This chunk is not computed again.
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

# Rows of similarities are padded to a multiple of PACK columns. The kernels then read 16 bytes at a
# time, because Triton vectorises a load only if the stride is a multiple of 16.
PACK = 16
# In the eager backend, a chunk and up to four temporary tensors of the same size are in memory at
# once. So a chunk gets only a part of the workspace.
EAGER_PART = 8
# The largest number of rows of a chunk. CUDA allows 65,535 programs along the second dimension of a
# grid. Each program computes at least 64 rows.
MOST_ROWS = 1 << 21


class Chunk(NamedTuple):
    """The similarities between some rows of `a` and all rows of a block of `b`."""

    rows: slice
    x: Tensor  # (n, m)
    block: Block


class Similarities:
    """The similarities of `a` with one or several blocks of `b`."""

    def __init__(self, a: Tensor, most: int, workspace: int | None, backend: Any = None):
        """Allocates the memory of a chunk.

        `most` is the largest number of rows of `b` in a block. Backward passes the backend that
        forward used, because each backend stores normalisers in its own units.
        """
        self.backend: Any = backend_of(a) if backend is None else backend
        self.full = PRECISION[a.dtype]
        self.a = self.working(a.detach())
        width = _padded(most) * self.a.element_size()
        limit = workspace or default_workspace(max(width, 1), a.device.type)
        if self.backend is eager:
            limit //= EAGER_PART
        self.step = min(even_chunk(len(a), limit // max(width, 1)), MOST_ROWS)
        size = min(self.step, len(a)) * _padded(most)
        self.memory = torch.empty(size, device=a.device, dtype=self.a.dtype)
        # The owner and the rows of the chunk in `memory`, or None after the chunk was overwritten.
        self.in_memory: tuple[int, slice] | None = None

    def working(self, t: Tensor) -> Tensor:
        """Converts embeddings to the dtype of the GEMMs and to contiguous memory.

        On a CPU, GEMMs of 16-bit tensors are slow, so the eager backend computes in fp32.
        """
        if self.backend is eager and not t.is_cuda:
            t = t.to(self.full)
        return t.contiguous()

    def chunks(
        self, owner: int, b: Tensor, block: Block, overwritten: bool = False
    ) -> Iterator[Chunk]:
        """Computes the similarities with the block `b` of rank `owner`, one chunk at a time.

        `overwritten` is True if the caller overwrites the chunks. The chunks then come in reverse
        order.
        """
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
    """Sums the gradient of `a`, and the gradient of the current block of `b`, in fp32 or fp64.

    These gradients are not yet multiplied by `scale`.
    """

    def __init__(self, similarities: Similarities, for_a: bool):
        self.backend, self.a, self.full = (
            similarities.backend, similarities.a, similarities.full,
        )  # fmt: skip
        self.d_a = self.zeros_like(self.a) if for_a else None

    def zeros_like(self, t: Tensor) -> Tensor:
        return torch.zeros(t.shape, device=t.device, dtype=self.full)

    def add(self, chunk: Chunk, b: Tensor, d_b: Tensor | None) -> None:
        """Adds the contributions of a chunk to the gradient of `a`, and to `d_b`.

        `chunk.x` holds the gradient of the similarities.
        """
        dz, rows = chunk.x, chunk.rows
        if dz.device.type == "cpu":
            clear_padding(dz)
        if self.d_a is not None:
            Sum(self.backend, self.d_a[rows], 1, fresh=False).add(dz.t(), b)
        if d_b is not None:
            Sum(self.backend, d_b, 1, fresh=False).add(dz, self.a[rows])


def times(total: Tensor | None, factor: Tensor, like: Tensor) -> Tensor | None:
    """Returns `total` · `factor` in the dtype of `like`."""
    if total is None:
        return None
    out = total if total.dtype == like.dtype else torch.empty_like(total, dtype=like.dtype)
    return torch.mul(total, factor, out=out)


def cast_embeddings(a: Any, b: Any) -> tuple[Any, Any]:
    """Casts `a` and `b` to the dtype of autocast, if autocast is on and `a` and `b` are tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and autocasts(a.device):
        return cast_by_autocast(a), cast_by_autocast(b)
    return a, b


def picked(chunk: Chunk, valid: Tensor | None) -> Tensor | None:
    """Returns each row's similarity with its positive, or None if the block has no positives.

    `valid` is True for rows that have a positive. The result is arbitrary for all other rows.
    """
    x, block = chunk.x, chunk.block
    if block.positives is not None:
        columns = block.positives if valid is None else torch.where(valid, block.positives, 0)
        return x.gather(1, columns.unsqueeze(1)).squeeze(1)
    return None if block.diagonal is None else x.diagonal(block.diagonal)


def _padded(columns: int) -> int:
    return -(-columns // PACK) * PACK
