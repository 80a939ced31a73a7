"""Computes a loss over a narrow head, whose D is small, without writing logits to memory.

`OnChip` replaces a tensor of logits, and `OnChipBackend` replaces a backend. So any loss whose
statistics can be merged works without changes. Each kernel computes the logits again. plan.py
chooses these kernels if D, the size of the hidden states, is small. Computing the logits again then
takes less time than writing the logits to memory. The statistics take one GEMM, and the gradients
of hidden states and weight take two GEMMs each.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..contract import Coefficients, Reading, Statistics
from ..core.loss import RowLoss, Saved
from .blocks import BlockChunks, ReadsNoLogits
from .chunks import Chunks, Tile
from .gradient_sums import GradientSums, Needs
from .head import Head, Rows
from .plan import Cut, Work


def chunks_of(head: Head, loss: RowLoss, work: Work) -> Chunks:
    """Returns Chunks, BlockChunks or OnChipChunks of a head, as plan.py chooses."""
    cut, live = head.cut(work), head.rows_that_count(loss)
    kind = OnChipChunks if cut.on_chip else Chunks if cut.columns is None else BlockChunks
    return kind(head, cut, live)


class OnChipChunks(Chunks):
    """Computes all rows in a single group. Rows for which the mask `live` is False are left out."""

    def __init__(self, head: Head, cut: Cut, live: Tensor | None):
        self.drops = live is not None
        super().__init__(head, cut, live)

    def begin(self, dtype: torch.dtype) -> Any:
        """Returns the OnChipBackend.

        No memory is allocated, because the kernels write no logits.
        """
        return OnChipBackend(self.head.backend())

    def gradients(self, needs: Needs, into: Tensor | None = None) -> "OnChipSums":
        all_rows = self.index is None
        return OnChipSums(
            self.head, self.hidden, needs, len(self.slices), all_rows, self.blocks, into
        )

    def tiles(
        self,
        loss: RowLoss,
        sums: "OnChipSums | None" = None,  # pyright: ignore[reportIncompatibleMethodOverride]
        known: Iterable[Saved] = (),
    ) -> Iterator[Tile]:
        known = iter(known)
        for rows in self.slices:
            of_rows = loss.rows(rows, self.lead)
            reading = None if self.drops else of_rows.reading
            tile = Tile(of_rows, next(known, None), rows, OnChip(self, rows, reading, sums), None)
            yield tile
            tile.release()


class OnChip:
    """Represents the logits of some rows. The logits are never written to memory."""

    def __init__(
        self, chunks: OnChipChunks, rows: Rows, reading: Reading | None, sums: "OnChipSums | None"
    ):
        self.rows, self.sums = rows, sums
        self.weight, self.bias = chunks.weight, chunks.bias
        self.h = chunks.hidden[rows]  # (n, D)
        if reading is not None:
            # The hidden states of ignored rows are set to 0, because the kernels multiply them by
            # 0, and 0 · NaN would be NaN.
            self.h = chunks.head.backend().zero_ignored(self.h, reading)
        if self.h.stride(1) != 1:
            self.h = self.h.contiguous()
        self.shape, self.device = (len(self.h), len(self.weight)), self.h.device


class OnChipBackend(ReadsNoLogits):
    """A backend that computes logits from an `OnChip`, for losses that need only row statistics."""

    def read(self, x: OnChip, reading: Reading) -> Statistics:
        """Returns the statistics of whole rows, merged from partial statistics of column ranges."""
        partials = self.backend.narrow_partial(x.h, x.weight, x.bias, reading)
        return self.backend.finish(partials, reading)

    def gradient(
        self,
        x: OnChip,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,
        factor: Tensor | None = None,
        into: Tensor | None = None,
        start: int | None = None,
    ) -> None:
        """Writes the gradients of hidden, weight and bias to x.sums."""
        sums = x.sums
        assert sums is not None
        d_hidden = sums.hidden_memory(x.rows, x.h)
        d_weight = sums.weight_memory()
        self.backend.narrow_gradients(
            x.h, x.weight, x.bias, reading, state, coefficients, upstream, factor,
            d_hidden, d_weight, sums.d_bias, sums.adds,
        )  # fmt: skip
        sums.end(x.rows, d_hidden, d_weight)


class OnChipSums(GradientSums):
    """The gradients of hidden, weight and bias, which the kernels write once."""

    def __init__(self, head: Head, hidden, needs: Needs, chunks: int, all_rows, blocks, into):
        super().__init__(head, hidden, needs, chunks, all_rows, blocks, into)
        self.adds = into is not None  # whether the weight's gradient is added to `into`

    def hidden_memory(self, rows: Rows, h: Tensor) -> Tensor | None:
        """Returns memory for the gradient of hidden in these rows; None if it is not needed."""
        if self.d_hidden is None:
            return None
        if isinstance(rows, slice):
            return self.d_hidden[rows]
        return torch.empty(h.shape, device=h.device, dtype=h.dtype)

    def weight_memory(self) -> Tensor | None:
        """Returns memory for the gradient of the weight; None if the gradient is not needed."""
        if not self.weight_sums or self.d_weight is None or self.d_weight.stride(1) == 1:
            return self.d_weight if self.weight_sums else None
        return self.d_weight.contiguous()

    def end(self, rows: Rows, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
        """Copies gradients from temporary memory to the final gradient tensors."""
        if d_hidden is not None:
            self.put(rows, d_hidden)
        if d_weight is not None and self.d_weight is not None and d_weight is not self.d_weight:
            self.d_weight.copy_(d_weight)
