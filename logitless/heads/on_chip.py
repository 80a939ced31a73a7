"""Computes a loss over a narrow head (small hidden size D) without writing logits to memory.

The methods of a loss get an `OnChip` instead of a tensor of logits, and an `OnChipBackend` as the
backend, so a loss whose statistics can be merged needs no further code. Each kernel recomputes the
logits, which for a small D takes less time than writing them. Besides two GEMMs for the gradient of
the weight, a cross-entropy takes two for the statistics and the gradient of `hidden`; other losses
take one for the statistics and two for that gradient.
"""

from typing import Any

import torch
from torch import Tensor

from ..contract import Coefficients, Reading, Statistics
from ..core.loss import RowLoss
from .blocks import BlockChunks, ReadsNoLogits
from .choose_cut import Work
from .chunks import Chunks
from .gradient_sums import GradientSums, Needs
from .head import Head, Rows


def chunks_of(head: Head, loss: RowLoss, work: Work) -> Chunks:
    groups, live = loss.groups, head.rows_that_count(loss)
    cut = head.cut(work) if groups is None else head.cut_of_groups(work)
    kind = OnChipChunks if cut.on_chip else Chunks if cut.columns is None else BlockChunks
    return kind(head, cut, live, groups)


class OnChipChunks(BlockChunks):
    """Computes all rows in a single group, without those for which the mask `live` is False."""

    def begin(self, dtype: torch.dtype) -> Any:
        """Returns the OnChipBackend; no memory, because the kernels write no logits."""
        return OnChipBackend(self.head.backend())

    def gradients(self, needs: Needs, into: Tensor | None = None) -> "OnChipSums":
        all_rows = self.index is None
        return OnChipSums(
            self.head, self.hidden, needs, len(self.slices), all_rows, self.blocks, into
        )

    def logits_of(self, rows: Rows, h: Tensor, sums: Any) -> "OnChip":
        return OnChip(self, rows, h, sums)


class OnChip:
    """The logits of some rows, which are never written to memory."""

    def __init__(self, chunks: OnChipChunks, rows: Rows, h: Tensor, sums: "OnChipSums | None"):
        self.rows, self.sums = rows, sums
        self.expected: Any = None  # sums for the gradient of `hidden`, or None
        self.weight, self.bias = chunks.weight, chunks.bias
        self.h = h if h.stride(1) == 1 else h.contiguous()  # (n, D)
        self.shape, self.device = (len(self.h), len(self.weight)), self.h.device


class OnChipBackend(ReadsNoLogits):
    """A backend that computes logits from an `OnChip`, for losses that need only row statistics."""

    def read(self, x: OnChip, reading: Reading) -> Statistics:
        """The statistics of whole rows, merged from partial statistics of column ranges."""
        expects = x.sums is not None and x.sums.d_hidden is not None
        partials, x.expected = self.backend.narrow_partial(x.h, x.weight, x.bias, reading, expects)
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
        sums = x.sums
        assert sums is not None
        d_hidden = sums.hidden_memory(x.rows, x.h)
        d_weight = sums.weight_memory()
        self.backend.narrow_gradients(
            x.h, x.weight, x.bias, reading, state, coefficients, upstream, factor,
            d_hidden, d_weight, sums.d_bias, sums.adds, x.expected,
        )  # fmt: skip
        sums.end(x.rows, d_hidden, d_weight)


class OnChipSums(GradientSums):
    """The gradients of `hidden`, `weight` and `bias`, which the kernels write only once."""

    def __init__(self, head: Head, hidden, needs: Needs, chunks: int, all_rows, blocks, into):
        super().__init__(head, hidden, needs, chunks, all_rows, blocks, into)
        self.adds = into is not None  # whether the weight's gradient is added to `into`

    def hidden_memory(self, rows: Rows, h: Tensor) -> Tensor | None:
        """Memory for the gradient of `hidden` in these rows, or None if it is not needed."""
        if self.d_hidden is None:
            return None
        if isinstance(rows, slice):
            return self.d_hidden[rows]
        return torch.empty(h.shape, device=h.device, dtype=h.dtype)

    def weight_memory(self) -> Tensor | None:
        """Memory for the gradient of the weight, or None if it is not needed."""
        if not self.weight_sums or self.d_weight is None or self.d_weight.stride(1) == 1:
            return self.d_weight if self.weight_sums else None
        return self.d_weight.contiguous()

    def end(self, rows: Rows, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
        if d_hidden is not None:
            self.put(rows, d_hidden)
        if d_weight is not None and self.d_weight is not None and d_weight is not self.d_weight:
            self.d_weight.copy_(d_weight)
