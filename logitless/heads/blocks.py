"""Computes a loss over a head in blocks of columns: first all statistics, then all gradients.

The methods of a loss get a `Blocks` instead of a tensor of logits, and a `BlockBackend` as the
backend, so a loss whose statistics can be merged needs no code for blocks. Logits that are not kept
are computed twice, for the statistics from the first block to the last, and for the gradient from
the last to the first. So the first rows of the weight's gradient are written last, and until then
their memory can hold the logits of later blocks (`kept_blocks` in choose_cut.py).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION, Coefficients, Partials, Reading, Statistics
from ..core.loss import RowLoss, Saved
from .choose_cut import chunk_rows, kept_blocks
from .chunks import Chunks, Tile
from .gemms import product, two_parts
from .gradient_sums import GradientSums, Needs, Sum, SumInPlace, way_to_sum
from .head import Head, Rows
from .quantized import is_quantized

WAITING = 4  # the number of `Partials` that are merged at a time


class BlockChunks(Chunks):
    """Computes logits for one group of rows at a time, possibly all, in blocks of columns.

    Before the first GEMM is queued, the host waits for the number of rows that are not ignored.
    """

    def begin(self, dtype: torch.dtype) -> Any:
        """Allocates one block of logits and its gradient, and returns the BlockBackend."""
        hidden, vocab, columns = self.hidden, len(self.weight), self.cut.columns
        assert columns is not None
        starts = range(0, max(vocab, 1), columns)  # a rank without columns has one empty block
        self.blocks: tuple[slice, ...] = tuple(
            slice(start, min(start + columns, vocab)) for start in starts
        )
        room = (chunk_rows(len(hidden), self.cut), columns)
        self.memory = torch.empty(room, device=hidden.device, dtype=dtype)
        self.gradient = self.memory
        if dtype != hidden.dtype:
            self.gradient = torch.empty_like(self.memory, dtype=hidden.dtype)
        return BlockBackend(self.head.backend())

    def gradients(self, needs: Needs, into: Tensor | None = None) -> "BlockSums":
        all_rows = self.index is None
        return BlockSums(
            self.head, self.hidden, needs, len(self.slices), all_rows, self.blocks, into
        )

    def tiles(
        self,
        loss: RowLoss,
        sums: "BlockSums | None" = None,
        known: Iterable[Saved] = (),
    ) -> Iterator[Tile]:
        known = iter(known)
        for rows, results, piece in self.pieces(loss):
            logits = self.logits_of(rows, self.hidden_of(rows, piece, sums), sums)
            tile = Tile(piece, next(known, None), rows, results, logits, None)
            yield tile
            tile.release()

    def logits_of(self, rows: Rows, h: Tensor, sums: Any) -> Any:
        return Blocks(self, rows, h, sums)


class Blocks:
    def __init__(self, chunks: BlockChunks, rows: Rows, h: Tensor, sums: "BlockSums | None"):
        self.chunks, self.rows, self.sums = chunks, rows, sums
        self.h = h  # (n, D)
        self.shape, self.device = (len(self.h), len(chunks.weight)), self.h.device
        self.kept: dict[int, int] = {}  # maps a kept block to its slot (see choose_cut.kept_blocks)
        self.kept_in: Tensor | None = None
        # Slot -> block whose logits are in it. The key None stands for the workspace.
        self.holds: dict[int | None, int] = {}

    def keep(self) -> None:
        """Chooses the blocks whose logits are kept until their gradient is computed.

        They use the memory of the weight's gradient, which is written later.
        """
        chunks, (rows, vocab) = self.chunks, self.shape
        if self.sums is not None and chunks.cut.kept:
            self.kept_in = self.sums.free_memory()
        if self.kept_in is not None:
            width = chunks.weight.shape[1]
            self.kept = kept_blocks(rows, vocab, width, chunks.cut.columns)

    def logits(self, index: int) -> Tensor:
        """The logits of a block for all rows of the group, recomputed if no longer in memory.

        Not to be called once the block's gradient has overwritten them.
        """
        chunks, columns, place = self.chunks, self.chunks.blocks[index], self.kept.get(index)
        memory, rows = chunks.memory, len(self.h)
        if place is not None:
            size = rows * chunks.cut.columns
            memory = self.kept_in[place * size : (place + 1) * size].view(rows, -1)
        z = memory[:rows, : columns.stop - columns.start]
        if self.holds.get(place) != index:
            bias, low_rank = (
                None if t is None else t[columns] for t in (chunks.bias, chunks.low_rank)
            )
            product(self.h, chunks.weight[columns], bias, low_rank, z)
            self.holds[place] = index
        return z


class ReadsNoLogits:
    """Wraps a backend, without the functions that read logits."""

    one_pass = None  # one pass is not possible, because a gradient needs statistics of whole rows
    # All blocks of columns use the same coefficients, computed once.
    stats_gradient = None

    def __init__(self, backend: Any):
        self.backend = backend
        self.cross_entropy, self.label_mass = backend.cross_entropy, backend.label_mass
        self.label_coefficients = backend.label_coefficients
        self.coefficients = backend.coefficients
        self.weighted_nll, self.share = backend.weighted_nll, backend.share
        self.reduce, self.scale_, self.slots = backend.reduce, backend.scale_, backend.slots
        self.scale_two_, self.zero_ignored = backend.scale_two_, backend.zero_ignored
        self.can_accumulate, self.is_narrow = backend.can_accumulate, backend.is_narrow
        self.row_gemm = backend.row_gemm


class BlockBackend(ReadsNoLogits):
    """A backend that reads logits from a `Blocks`, for losses that need only row statistics."""

    def read(self, x: Blocks, reading: Reading) -> Statistics:
        """The statistics of whole rows, merged every few blocks (`WAITING`) to save memory."""
        x.keep()
        waiting = []
        for index, columns in enumerate(x.chunks.blocks):
            waiting.append(self.backend.partial(x.logits(index), reading, columns.start))
            if len(waiting) == WAITING:
                waiting = [self.backend.merge(waiting, reading)]
        whole: Partials = waiting[0] if len(waiting) == 1 else self.backend.merge(waiting, reading)
        return self.backend.finish(whole, reading)

    def gradient(
        self,
        x: Blocks,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,
        factor: Tensor | None = None,
        into: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        """Adds the gradients of `hidden`, `weight` and `bias` to x.sums, last block first."""
        sums, rows = x.sums, len(x.h)
        assert sums is not None
        sums.start(x.rows, x.h)
        for index in reversed(range(len(x.chunks.blocks))):
            z, columns = x.logits(index), x.chunks.blocks[index]
            width = columns.stop - columns.start
            over = z if index in x.kept else x.chunks.gradient[:rows, :width]
            dz = self.backend.gradient(
                z, reading, state, coefficients, upstream, factor, over, columns.start
            )
            sums.add_block(index, columns, x.h, dz)
        sums.end(x.rows)


class BlockSums(GradientSums):
    """Sums the gradient of `hidden` over blocks, and the others over groups of rows."""

    def __init__(self, head: Head, hidden, needs: Needs, chunks: int, all_rows, blocks, into):
        super().__init__(head, hidden, needs, chunks, all_rows, blocks, into)
        self.backend, self.blocks = head.backend(), len(blocks)
        # Whether each element of the weight's gradient is written only once.
        self.written_once = into is None and chunks == 1
        self.hidden_sum: Sum | SumInPlace | None = None
        self.low_rank_sum: Sum | None = None  # gradient of the R columns that multiply `low_rank`

    def free_memory(self) -> Tensor | None:
        """The memory of the weight's gradient, if logits can use it until that is written."""
        d = self.d_weight
        free = d is not None and self.written_once and d.dtype == self.weight.dtype
        return d.view(-1) if free else None

    def start(self, rows: Rows, h: Tensor) -> None:
        """Allocates the gradient of `hidden` for one group of rows, to which each block adds."""
        if self.d_hidden is None:
            return
        dtype, kind = way_to_sum(self.backend, self.blocks, h, self.weight, "auto")
        shape = (len(h), self.weight.shape[1])
        if isinstance(rows, slice) and dtype == h.dtype and self.low_rank is None:
            total = self.d_hidden[rows]
        else:
            total = torch.empty(shape, device=h.device, dtype=dtype)
        if not self.skips_first:
            self.hidden_sum = kind(self.backend, total, self.blocks)
        if self.low_rank is not None:
            shape = (len(h), self.low_rank.shape[1])
            total = torch.empty(shape, device=h.device, dtype=PRECISION[h.dtype])
            self.low_rank_sum = Sum(self.backend, total, self.blocks)

    def add_block(self, index: int, columns: slice, h: Tensor, dz: Tensor) -> None:
        if self.hidden_sum is not None:
            block = self.weight[columns]
            block = block.dequantize().to(h.dtype) if is_quantized(block) else block
            self.hidden_sum.add(dz.t(), block)
        if self.low_rank_sum is not None and self.low_rank is not None:
            self.low_rank_sum.add(dz.t(), self.low_rank[columns])
        if self.d_bias is not None:
            self.d_bias[columns] += dz.sum(0, dtype=self.d_bias.dtype)
        self.add_weights(index, dz, h)

    def end(self, rows: Rows) -> None:
        """Writes the gradient of `hidden` for a group of rows, after its last block."""
        if self.d_hidden is None:
            return
        sums, self.hidden_sum = self.hidden_sum, None
        if self.low_rank is None:
            assert sums is not None
            self.put(rows, sums.total.to(self.d_hidden.dtype))
            return
        low_rank_sum, self.low_rank_sum = self.low_rank_sum, None
        assert low_rank_sum is not None
        d = self.d_hidden.new_zeros((len(low_rank_sum.total), self.d_hidden.shape[1]))
        first, second = two_parts(d, self.weight, self.low_rank)
        if sums is not None:
            first.copy_(sums.total)
        second.copy_(low_rank_sum.total)
        self.put(rows, d)
