"""A head in chunks of rows: their logits one after another, and the gradients they add up to.

Every chunk reads the weight and, but for the first, the sum of the weight's gradient so far, so
chunks are as large as memory allows. The sum is the delicate part. bf16 keeps 8 bits: rounded after
every one of many chunks it drifts away from what one large product would give. Kept in fp32 it
takes twice the memory of the gradient itself. Stored as block floating point (int16 with one
exponent per 128 values, kernels/accumulate.py) it needs no extra memory.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ._contract import PRECISION

Rows = slice | Tensor

WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes of logits alive at once, by default
TILE = 128  # rows that a GEMM works on together
PACK = 8  # columns: rows of 16-bit logits start on 16-byte boundaries
SLAB = 64 << 20  # bytes of a sum in fp32 that a CPU has in work at once


class Chunks:
    """Which rows are computed, and how many at once: all, or those that count.

    How many count, the GPU knows first, and the host has to wait for it once. The logits of the
    first chunk are queued before that, so that the GPU has work while the host waits.
    """

    def __init__(self, weight: Tensor, rows: int, live: Tensor | None, workspace: int | None):
        self.width = -(-weight.shape[0] // PACK) * PACK
        limit = workspace or WORKSPACE.get(weight.device.type, WORKSPACE["cuda"])
        self.most = limit // (self.width * weight.element_size())
        self.first = even_chunk(rows, self.most)  # rows of the first chunk, unless fewer count
        self.rows, self.index = rows, None
        if live is not None:
            self.index = torch.argsort(live, descending=True, stable=True)
            self.rows = _Number(live.sum())  # on its way from the GPU

    def wait(self, rows: int) -> None:
        """Wait for the number of rows that count, of so many."""
        if isinstance(self.rows, _Number):
            self.rows = self.rows.wait()
            if self.rows == rows:
                self.index = None

    def slices(self) -> list[Rows]:
        """The rows of each chunk, once their number is known."""
        first = min(self.first, self.rows)
        step = even_chunk(self.rows - first, self.most)
        starts = [*([0] if first else []), *range(first, self.rows, step), self.rows]
        return [self._some(start, end) for start, end in itertools.pairwise(starts)]

    def _some(self, start: int, end: int) -> Rows:
        return slice(start, end) if self.index is None else self.index[start:end]

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """(rows, their hidden states, their logits), one chunk after another in one workspace.

        On return the first chunk is queued, and the number of rows known.
        """
        size = (self.first, self.width)
        space = torch.empty(size, device=hidden.device, dtype=hidden.dtype)[:, : weight.shape[0]]

        def multiply(h: Tensor) -> Tensor:
            z = space[: len(h)]
            if bias is None:
                return torch.mm(h, weight.t(), out=z)
            return torch.addmm(bias, h, weight.t(), out=z)

        if len(hidden):
            multiply(hidden[self._some(0, min(self.first, len(hidden)))])
        self.wait(len(hidden))

        def each():
            for i, rows in enumerate(self.slices()):
                h = hidden[rows]
                yield rows, h, multiply(h) if i else space[: len(h)]  # the first is queued already

        return each()


@functools.lru_cache(1024)
def even_chunk(rows: int, room: int) -> int:
    """How many of so many rows make a chunk, in a workspace with room for `room` of them.

    Whole tiles of a GEMM if it holds one, a power of two if it holds several, as batches are: then
    nothing is left over. Chunks are even, for the smallest costs a reading of the weight too.
    """
    most = max(room, 1)
    if most >= 8 * TILE:
        most = 1 << (most.bit_length() - 1)
    elif most >= TILE:
        most -= most % TILE
    even = -(-rows // max(-(-rows // most), 1))
    return max(min(most, -(-even // TILE) * TILE, rows), 1)


class _Number:
    """A number on its way from the GPU."""

    def __init__(self, number: Tensor):
        self.there = None
        if number.is_cuda:
            self.there = torch.cuda.Event()
            here = torch.empty((), dtype=number.dtype, pin_memory=True)
            number = here.copy_(number, non_blocking=True)
            self.there.record()
        self.number = number

    def wait(self) -> int:
        if self.there is not None:
            self.there.synchronize()
        return int(self.number)


class HeadGradients:
    """Gradients of hidden, weight and bias, each only if it is needed, chunk by chunk."""

    def __init__(
        self,
        run: ModuleType,
        chunks: Chunks,
        parts: tuple[Tensor, Tensor, Tensor | None],  # hidden (N, D), weight (V, D), bias (V,)
        needs: tuple[bool, bool, bool],
        accumulate: str,
        into: Tensor | None = None,  # what the weight's is added to
    ):
        hidden, self.weight, bias = parts
        # Rows that no chunk computes have no gradient.
        blank = torch.empty_like if chunks.index is None else torch.zeros_like
        self.d_hidden = blank(hidden) if needs[0] else None
        self.weight_sum = None
        if needs[1]:
            count = len(chunks.slices())
            self.weight_sum = _sum_for(run, count, hidden, self.weight, accumulate, into)
        self.d_bias = None
        if needs[2] and bias is not None:
            self.d_bias = torch.zeros_like(bias, dtype=PRECISION[bias.dtype])

    def add(self, rows: Rows, h: Tensor, dz: Tensor) -> None:
        if self.d_hidden is not None:
            if isinstance(rows, slice):
                torch.mm(dz, self.weight, out=self.d_hidden[rows])
            else:
                self.d_hidden[rows] = torch.mm(dz, self.weight)
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.d_bias.dtype)
        if self.weight_sum is not None:
            self.weight_sum.add(dz, h)

    def found(self) -> list[Tensor | None]:
        """All three; those of weight and bias may have more bits than they."""
        total = None if self.weight_sum is None else self.weight_sum.total
        return [self.d_hidden, total, self.d_bias]


class RowGradients:
    """Gradients of the tensors beside the rows of a loss, chunk by chunk; None if not needed."""

    def __init__(self, loss, needs: Sequence[bool]):
        pairs = zip(loss.others, needs, strict=True)
        self.found = [
            torch.zeros(t.shape, device=t.device, dtype=t.dtype) if need else None
            for t, need in pairs
        ]

    def add(self, rows: Rows, some, saved: tuple, scale: Tensor) -> None:
        """Of some rows' loss, for what multiplies each row's value."""
        for total, d in zip(self.found, some.d_others(saved, scale), strict=True):
            if total is not None and d is not None:
                flat = total.view(-1, *d.shape[1:])
                flat[rows] = d


def _sum_for(
    run: ModuleType, chunks: int, hidden: Tensor, weight: Tensor, accumulate: str,
    into: Tensor | None,
) -> "_Sum | _SumInPlace":  # fmt: skip
    """Where Σ dz.T @ h goes. fp16, of little range, is always summed in fp32."""
    if into is not None:
        return _Sum(into, fresh=False)
    dtype = weight.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate == "fp32"):
        dtype = torch.float32
    elif dtype == torch.bfloat16 and accumulate == "auto" and chunks > 2:
        if run.can_accumulate(hidden, weight):
            return _SumInPlace(run, weight, chunks)
        dtype = torch.float32
    make = torch.empty if chunks else torch.zeros
    return _Sum(make(weight.shape, device=weight.device, dtype=dtype), fresh=True)


class _Sum:
    """Σ dz.T @ h over chunks, in the dtype of the total."""

    def __init__(self, total: Tensor, fresh: bool):
        self.total, self.fresh = total, fresh

    def add(self, dz: Tensor, h: Tensor) -> None:
        total, beta = self.total, 0 if self.fresh else 1
        if dz.dtype == total.dtype:
            torch.addmm(total, dz.t(), h, beta=beta, out=total)
        elif dz.is_cuda:
            torch.addmm(total, dz.t(), h, out_dtype=total.dtype, beta=beta, out=total)
        else:
            h = h.to(total.dtype)
            step = max(SLAB // (total.element_size() * h.shape[1]), 1)
            for start in range(0, len(total), step):
                part = slice(start, start + step)
                wide = dz[:, part].t().to(total.dtype)
                torch.addmm(total[part], wide, h, beta=beta, out=total[part])
        self.fresh = False


class _SumInPlace:
    """The same in 16 bits a number: right to 14 between chunks, rounded as bf16 at the end."""

    def __init__(self, run: ModuleType, weight: Tensor, chunks: int):
        self.run = run
        self.total = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
        self.exponents = run.exponents(self.total)
        self.chunks, self.done = chunks, 0

    def add(self, dz: Tensor, h: Tensor) -> None:
        first, last = self.done == 0, self.done == self.chunks - 1
        self.run.accumulate(dz, h, self.total, self.exponents, first, last)
        self.done += 1
