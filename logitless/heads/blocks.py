"""A head cut along its vocabulary: statistics block by block, then gradients block by block.

`Blocks` of columns stand where a tensor of logits stands, and `ByBlock` where a backend does, so
that a loss of statistics that merge runs on them as it is. The logits of a block are made twice,
once for the statistics and once for the gradient, except for those that are kept. Statistics are
computed from the first block to the last, gradients from the last to the first. Until the first
blocks' rows of the weight's gradient are written, their memory is free, and holds the logits of
many of the later blocks (kept_blocks in heads/plan.py).
"""

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..contract import Coefficients, Partials, Reading, Statistics
from ..core.loss import RowLoss, Saved
from .chunks import Chunks, HeadGradients, Rows, Sum, SumInPlace, Visit, product, way_to_sum
from .plan import chunk_rows, kept_blocks

WAITING = 4  # statistics of blocks that are merged together


class ColumnChunks(Chunks):
    """Groups of rows, all if they fit, whose logits come in blocks of columns.

    None are queued before the number of rows is known.
    """

    def begin(self, dtype: torch.dtype) -> None:
        """Memory for the logits of a block, of this dtype, and for their gradient.

        From here on `run` reads Blocks.
        """
        self.run: Any = ByBlock(self.run)
        hidden, vocab, columns = self.hidden, len(self.weight), self.cut.columns
        assert columns is not None
        starts = range(0, max(vocab, 1), columns)  # of no columns, which a rank may have, one block
        self.blocks = tuple(slice(start, min(start + columns, vocab)) for start in starts)
        room = (chunk_rows(len(hidden), self.cut), columns)
        self.memory = torch.empty(room, device=hidden.device, dtype=dtype)
        self.gradient = self.memory
        if dtype != hidden.dtype:
            self.gradient = torch.empty_like(self.memory, dtype=hidden.dtype)

    def gradients(
        self, needs: Sequence[bool], accumulate: str, into: Tensor | None = None
    ) -> "ColumnGradients":
        return ColumnGradients(self, needs, accumulate, into)

    def walk(
        self,
        loss: RowLoss,
        visit: Visit,
        sums: "ColumnGradients | None" = None,
        known: Iterable[Saved] = (),
    ) -> None:
        known = iter(known)
        for rows in self.slices:
            some, blocks = loss.take(rows, self.lead), Blocks(self, rows, sums)
            visit(some, next(known, None), rows, blocks, None)


class Blocks:
    """The logits of some rows in blocks of columns, for their statistics and then gradients."""

    def __init__(self, chunks: ColumnChunks, rows: Rows, sums: "ColumnGradients | None"):
        self.chunks, self.rows, self.sums = chunks, rows, sums
        self.h = chunks.hidden[rows]  # (n, D)
        self.shape, self.device = (len(self.h), len(chunks.weight)), self.h.device
        self.kept: dict[int, int] = {}  # blocks whose logits wait for their gradient, and where
        self.kept_in: Tensor | None = None
        self.holds: dict[int | None, int] = {}  # which block each place holds; None: the workspace

    def keep(self) -> None:
        """From here on, logits wait in memory of the weight's gradient, where there is some."""
        chunks, (rows, vocab) = self.chunks, self.shape
        if self.sums is not None and chunks.cut.kept:
            self.kept_in = self.sums.free_memory()
        if self.kept_in is not None:
            self.kept = kept_blocks(rows, vocab, self.h.shape[1], chunks.cut.columns)

    def logits(self, index: int) -> Tensor:
        """(n, c) of a block; made, unless they wait. Not once its gradient is written over them."""
        chunks, part, place = self.chunks, self.chunks.blocks[index], self.kept.get(index)
        memory, rows = chunks.memory, len(self.h)
        if place is not None:
            size = rows * chunks.cut.columns
            memory = self.kept_in[place * size : (place + 1) * size].view(rows, -1)
        z = memory[:rows, : part.stop - part.start]
        if self.holds.get(place) != index:
            bias = None if chunks.bias is None else chunks.bias[part]
            product(self.h, chunks.weight[part], bias, z)
            self.holds[place] = index
        return z


class ByBlock:
    """A backend for Blocks, of losses that need statistics of a row alone."""

    one_pass = None  # the gradient waits for the other blocks

    def __init__(self, run: ModuleType):
        self.run = run

    def __getattr__(self, name: str):
        """What reads no logits is the backend's own."""
        return getattr(self.run, name)

    def read(self, x: Blocks, reading: Reading) -> Statistics:
        """The statistics of whole rows, merged as they come, so that few are in memory."""
        x.keep()
        waiting = []
        for index, part in enumerate(x.chunks.blocks):
            waiting.append(self.run.partial(x.logits(index), reading, part.start))
            if len(waiting) == WAITING:
                waiting = [self.run.merge(waiting, reading)]
        whole: Partials = waiting[0] if len(waiting) == 1 else self.run.merge(waiting, reading)
        return self.run.finish(whole, reading)

    def gradient(
        self,
        x: Blocks,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,
        factor: Tensor | None = None,
        into: None = None,
    ) -> None:
        """That of the logits goes to the sums of x, from the last block to the first."""
        sums, rows = x.sums, len(x.h)
        assert sums is not None
        sums.start(x.rows, x.h)
        for index in reversed(range(len(x.chunks.blocks))):
            z, part = x.logits(index), x.chunks.blocks[index]
            over = z if index in x.kept else x.chunks.gradient[:rows, : part.stop - part.start]
            how = (state, coefficients, upstream, factor, over, part.start)
            sums.add_block(index, part, x.h, self.run.gradient(z, reading, *how))
        sums.end(x.rows)


class ColumnGradients(HeadGradients):
    """Gradients of hidden, weight and bias, block by block.

    That of hidden is summed over blocks, and that of the weight over groups of rows if there are
    several.
    """

    def __init__(
        self, chunks: ColumnChunks, needs: Sequence[bool], accumulate: str, into: Tensor | None
    ):
        super().__init__(chunks, needs, accumulate, into)
        self.run, self.blocks = chunks.run, len(chunks.blocks)
        self.written_once = into is None and len(chunks.slices) == 1  # the weight's
        self.hidden_sum: Sum | SumInPlace | None = None

    def free_memory(self) -> Tensor | None:
        """Memory that may hold logits until the weight's gradient is written to it."""
        d = self.d_weight
        free = d is not None and self.written_once and d.dtype == self.weight.dtype
        return d.view(-1) if free else None

    def start(self, rows: Rows, h: Tensor) -> None:
        """Of a group of rows."""
        if self.d_hidden is None:
            return
        dtype, kind = way_to_sum(self.run, self.blocks, h, self.weight, "auto")
        if isinstance(rows, slice) and dtype == h.dtype:
            total = self.d_hidden[rows]
        else:
            total = torch.empty(h.shape, device=h.device, dtype=dtype)
        self.hidden_sum = kind(self.run, total, self.blocks)

    def add_block(self, index: int, part: slice, h: Tensor, dz: Tensor) -> None:
        if self.hidden_sum is not None:
            self.hidden_sum.add(dz.t(), self.weight[part])
        if self.d_bias is not None:
            self.d_bias[part] += dz.sum(0, dtype=self.d_bias.dtype)
        if self.weight_sums:
            self.weight_sums[index].add(dz, h)

    def end(self, rows: Rows) -> None:
        """Of a group of rows."""
        if self.hidden_sum is not None and self.d_hidden is not None:
            total, self.hidden_sum = self.hidden_sum.total, None
            self.put(rows, total.to(self.d_hidden.dtype))
