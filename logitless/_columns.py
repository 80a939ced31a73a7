"""A head cut along its vocabulary: statistics block by block, then gradients block by block.

The logits of a block are made twice, once for the statistics and once for the gradient, except for
those that are kept. Statistics are computed from the first block to the last, gradients from the
last to the first. Until the first blocks' rows of the weight's gradient are written, their memory
is free, and holds the logits of many of the later blocks (kept_blocks in _cut.py).
"""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ._chunks import Chunks, HiddenGradient, Rows, Sum, SumInPlace, product, sum_in, way_to_sum
from ._contract import PRECISION, Coefficients, Partials, Reading
from ._cut import kept_blocks

Parts = tuple[Tensor, Tensor, Tensor | None]  # hidden (N, D), weight (V, D), bias (V,)


def blocks_of(vocab: int, columns: int) -> list[slice]:
    starts = range(0, max(vocab, 1), columns)  # of no columns, which a rank may have, one block
    return [slice(start, min(start + columns, vocab)) for start in starts]


class BlockMemory(NamedTuple):
    """Memory for the logits of a block, and for their gradient."""

    logits: Tensor
    gradient: Tensor  # the same memory, if they are of one dtype

    @staticmethod
    def of(rows: int, columns: int, dtype: torch.dtype, like: Tensor) -> "BlockMemory":
        z = torch.empty((rows, columns), device=like.device, dtype=dtype)
        same = dtype == like.dtype
        return BlockMemory(z, z if same else torch.empty_like(z, dtype=like.dtype))


class Block(NamedTuple):
    """Some columns of some rows."""

    index: int  # counted from the first block
    part: slice  # of the vocabulary
    logits: Tensor  # (n, c)
    into: Tensor  # (n, c), for their gradient


class Blocks:
    """The logits of some rows in blocks of columns, for their statistics and then gradients."""

    def __init__(self, columns: int, memory: BlockMemory, parts: Parts, kept_in: Tensor | None):
        self.memory, (self.h, self.weight, self.bias) = memory, parts
        self.columns, vocab = columns, len(self.weight)
        self.parts = blocks_of(vocab, columns)
        self.kept_in, self.kept = kept_in, {}  # memory for logits; block to its place there
        if kept_in is not None:
            rows, width = self.h.shape
            self.kept = kept_blocks(rows, vocab, width, columns)
        self.in_memory: int | None = None  # the block whose logits are in the workspace

    def statistics(self, run: ModuleType, reading: Reading) -> Iterator[Partials]:
        """Of each block. The last one's logits stay."""
        for index in range(len(self.parts)):
            z = self._make(index)
            yield run.partial(z, reading, self.parts[index].start, len(self.weight))

    def for_gradients(self) -> Iterator[Block]:
        """From the last to the first; logits that were overwritten are made again."""
        for index in reversed(range(len(self.parts))):
            made = index in self.kept or index == self.in_memory
            z = self._memory_of(index) if made else self._make(index)
            into = z
            if index not in self.kept:
                into = self.memory.gradient[: z.shape[0], : z.shape[1]]
            yield Block(index, self.parts[index], z, into)

    def _make(self, index: int) -> Tensor:
        part = self.parts[index]
        if index not in self.kept:
            self.in_memory = index
        bias = None if self.bias is None else self.bias[part]
        return product(self.h, self.weight[part], bias, self._memory_of(index))

    def _memory_of(self, index: int) -> Tensor:
        rows, part = len(self.h), self.parts[index]
        if index not in self.kept:
            return self.memory.logits[:rows, : part.stop - part.start]
        size, at = rows * self.columns, self.kept[index]
        memory = self.kept_in[at * size : (at + 1) * size]
        return memory.view(rows, self.columns)[:, : part.stop - part.start]


class ColumnGradients:
    """Gradients of hidden, weight and bias, each only if it is needed, block by block.

    That of hidden is summed over blocks, and that of the weight over groups of rows if there are
    several: see Way in _chunks.py.
    """

    def __init__(
        self,
        run: ModuleType,
        chunks: Chunks,
        parts: Parts,
        needs: tuple[bool, bool, bool],
        accumulate: str,
        into: Tensor | None = None,  # what the weight's is added to
    ):
        self.run, (hidden, self.weight, bias) = run, parts
        self.groups, columns = len(chunks.slices()), chunks.cut.columns
        assert columns is not None
        self.parts = blocks_of(len(self.weight), columns)
        self.d_hidden = HiddenGradient(run, chunks, hidden) if needs[0] else None
        self.hidden_sum: Sum | SumInPlace | None = None
        self.total, self.sums = None, []
        if needs[1] and into is not None:
            self.sums = [Sum(into[part], fresh=False) for part in self.parts]
        elif needs[1]:
            way = way_to_sum(run, self.groups, hidden, self.weight, accumulate)
            make = torch.empty if self.groups else torch.zeros
            self.total = make(self.weight.shape, device=hidden.device, dtype=way.dtype)
            self.sums = [sum_in(run, self.total[part], self.groups, way) for part in self.parts]
        self.d_bias = None
        if needs[2] and bias is not None:
            self.d_bias = torch.zeros_like(bias, dtype=PRECISION[bias.dtype])

    def logits_memory(self) -> Tensor | None:
        """Memory that may hold logits until the weight's gradient is written to it."""
        whole = self.total is not None and self.groups == 1
        return self.total.view(-1) if whole and self.total.dtype == self.weight.dtype else None

    def start(self, rows: Rows, h: Tensor) -> None:
        """Of a group of rows."""
        if self.d_hidden is None:
            return
        way = way_to_sum(self.run, len(self.parts), h, self.weight, "auto")
        if isinstance(rows, slice) and way.dtype == h.dtype:
            total = self.d_hidden.total[rows]
        else:
            total = torch.empty(h.shape, device=h.device, dtype=way.dtype)
        self.hidden_sum = sum_in(self.run, total, len(self.parts), way)

    def add(self, block: Block, h: Tensor, dz: Tensor) -> None:
        if self.hidden_sum is not None:
            self.hidden_sum.add(dz.t(), self.weight[block.part])
        if self.d_bias is not None:
            self.d_bias[block.part] += dz.sum(0, dtype=self.d_bias.dtype)
        if self.sums:
            self.sums[block.index].add(dz, h)

    def end(self, rows: Rows) -> None:
        """Of a group of rows."""
        if self.hidden_sum is None or self.d_hidden is None:
            return
        total, self.hidden_sum = self.hidden_sum.total, None
        self.d_hidden.set(rows, total.to(self.d_hidden.total.dtype))

    def found(self) -> list[Tensor | None]:
        """All three; those of weight and bias may have more bits than they."""
        d_hidden = None if self.d_hidden is None else self.d_hidden.found()
        return [d_hidden, self.total, self.d_bias]


def add_gradients(
    run: ModuleType,
    blocks: Blocks,
    sums: ColumnGradients,
    rows: Rows,
    reading: Reading,  # of these rows
    state: Tensor,
    given: tuple[Coefficients, Tensor],
    factor: Tensor | None,
) -> None:
    """Adds the gradients of some rows, from their statistics, to the sums."""
    vocab = len(blocks.weight)
    sums.start(rows, blocks.h)
    for block in blocks.for_gradients():
        dz = run.gradient(
            block.logits, reading, state, *given, factor, block.into, (block.part.start, vocab)
        )
        sums.add(block, blocks.h, dz)
    sums.end(rows)
