"""A head in chunks of rows: their logits one after another, and the gradients they add up to.

Every chunk reads the weight and, but for the first, the sum of the weight's gradient so far, so
chunks are as large as memory allows. The sum is the delicate part. bf16 keeps 8 bits: rounded after
every one of many chunks it drifts away from what one large product would give. Kept in fp32 it
takes twice the memory of the gradient itself. Where the GPU can, it waits between chunks in the
gradient's own memory as whole numbers with a common exponent (kernels/accumulate.py).
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ._dispatch import backend

Rows = slice | Tensor

ACCUMULATE = ("auto", "fp32", "weight")
WORKSPACE = {"cuda": 1 << 30, "cpu": 64 << 20}  # bytes of logits alive at once, by default
TILE = 128  # rows that a GEMM works on together
PACK = 8  # columns: rows of 16-bit logits start on 16-byte boundaries
SLAB = 64 << 20  # bytes of a sum in fp32 that a CPU has in work at once


class Chunks:
    """Which rows are visited, and how many at once: all, or those that count.

    How many count, the GPU knows first, and the host has to wait for it once. The logits of the
    first chunk are ordered before: the GPU has work while the host waits, and looks at the answer.
    """

    def __init__(self, weight: Tensor, rows: int, counts: Tensor | None, workspace: int | None):
        self.most = _most_rows(weight, workspace)
        self.ahead = self._even(rows)  # rows of the first chunk, unless fewer count
        self.rows = rows
        self.index, self.answer = None, None
        if counts is not None:
            self.index = torch.argsort(counts, descending=True, stable=True)
            self.answer = _Answer(counts.sum())

    def _even(self, rows: int) -> int:
        """How many of so many rows make a chunk: the smallest costs a reading of the weight too."""
        even = _ceil_div(rows, max(_ceil_div(rows, self.most), 1))
        return max(min(self.most, _ceil_div(even, TILE) * TILE, rows), 1)

    def settle(self) -> None:
        """Wait for the number of rows, where it is not known yet."""
        if self.answer is not None:
            counting, self.answer = self.answer.wait(), None
            if counting == self.rows:
                self.index = None
            self.rows = counting

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Rows]:
        self.settle()
        first = min(self.ahead, self.rows)
        starts = [0] if first else []
        starts += range(first, self.rows, self._even(self.rows - first))
        for start, end in itertools.pairwise([*starts, self.rows]):
            yield self._rows(start, end)

    def _rows(self, start: int, end: int) -> Rows:
        return slice(start, end) if self.index is None else self.index[start:end]

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """(rows, their hidden states, their logits), one chunk after another in one workspace.

        On return the first chunk is ordered, and the number of rows known.
        """
        V = weight.shape[0]
        space = torch.empty((self.ahead, _padded(V)), device=hidden.device, dtype=hidden.dtype)
        space = space[:, :V]
        ordered = min(self.ahead, self.rows)
        if ordered:
            _product(hidden[self._rows(0, ordered)], weight, bias, space[:ordered])
        self.settle()

        def visit():
            for i, rows in enumerate(self):
                h = hidden[rows]
                z = space[: len(h)]
                if i:
                    _product(h, weight, bias, z)
                yield rows, h, z

        return visit()


def _most_rows(weight: Tensor, workspace: int | None) -> int:
    """Rows of logits that a workspace holds: in whole tiles of a GEMM, if it holds one."""
    limit = workspace or WORKSPACE.get(weight.device.type, WORKSPACE["cuda"])
    most = max(limit // (_padded(weight.shape[0]) * weight.element_size()), 1)
    if most >= 8 * TILE:
        return 1 << (most.bit_length() - 1)  # as batches are: nothing is left over
    return most - most % TILE if most >= TILE else most


def _product(h: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor) -> None:
    if bias is None:
        torch.mm(h, weight.t(), out=z)
    else:
        torch.addmm(bias, h, weight.t(), out=z)


class _Answer:
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
        chunks: Chunks,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
        accumulate: str,
        into: Tensor | None = None,  # what the weight's is added to
    ):
        self.weight = weight
        # Rows that no chunk visits have none.
        blank = torch.empty_like if chunks.index is None else torch.zeros_like
        self.d_hidden = blank(hidden) if needs[0] else None
        self.weight_sum = _sum_for(chunks, hidden, weight, accumulate, into) if needs[1] else None
        self.d_bias = None
        if needs[2] and bias is not None:
            self.d_bias = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float))

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


def _sum_for(
    chunks: Chunks, hidden: Tensor, weight: Tensor, accumulate: str, into: Tensor | None
) -> "_Sum | _SumInPlace":
    """Where Σ dz.T @ h goes. fp16, of little range, is always summed in fp32."""
    if into is not None:
        return _Sum(into, fresh=False)
    dtype, few = weight.dtype, len(chunks) <= 2
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate == "fp32"):
        dtype = torch.float32
    elif dtype == torch.bfloat16 and accumulate == "auto" and not few:
        if backend(hidden).can_accumulate(hidden, weight):
            return _SumInPlace(weight, len(chunks))
        dtype = torch.float32
    make = torch.empty if len(chunks) else torch.zeros
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

    def __init__(self, weight: Tensor, chunks: int):
        self.total = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
        self.exponents = backend(weight).exponents(self.total)
        self.chunks, self.done = chunks, 0

    def add(self, dz: Tensor, h: Tensor) -> None:
        first, last = self.done == 0, self.done == self.chunks - 1
        backend(dz).accumulate(dz, h, self.total, self.exponents, first, last)
        self.done += 1


def _padded(columns: int) -> int:
    return _ceil_div(columns, PACK) * PACK


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
