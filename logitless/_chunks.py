"""A head in chunks of rows: their logits one after another, and the gradients they add up to.

_cut.py says how many rows make a chunk. Every chunk reads the weight and, but for the first, the
sum of its gradient so far, so chunks are as large as memory allows. How that sum is stored matters:
in bf16, which keeps 8 bits, it is rounded after every one of many chunks and drifts away from what
one large product would give; in fp32 it takes twice the memory of the gradient itself. Stored as
block floating point (int16 with one exponent per 128 values, kernels/accumulate.py) it is as good
as one product, and needs no extra memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ._contract import PRECISION
from ._cut import Cut, Space, even_chunk

Rows = slice | Tensor

SLAB = 64 << 20  # bytes in fp32 that a CPU has in work at once


def product(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """h @ weight.T + bias, into `out`: of their dtype, or in fp32 as a GEMM sums it."""
    if out.dtype == h.dtype:
        if bias is None:
            return torch.mm(h, weight.t(), out=out)
        return torch.addmm(bias, h, weight.t(), out=out)
    if h.is_cuda and bias is None:
        return torch.mm(h, weight.t(), out_dtype=out.dtype, out=out)
    if h.is_cuda:
        out.copy_(bias)
        return torch.addmm(out, h, weight.t(), out_dtype=out.dtype, out=out)
    h = h.to(out.dtype)
    step = max(SLAB // (out.element_size() * max(h.shape[1], 1)), 1)
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        wide = weight[part].to(out.dtype).t()
        if bias is None:
            out[:, part] = h @ wide
        else:
            out[:, part] = torch.addmm(bias[part].to(out.dtype), h, wide)
    return out


class Step(NamedTuple):
    """Rows whose gradient may be written at once."""

    at: slice  # of the part
    rows: Rows
    logits: Tensor  # (n, V)
    into: Tensor  # (n, V), for their gradient


class Part(NamedTuple):
    """Rows whose logits are in memory together."""

    rows: Rows
    logits: Tensor  # (n, V)
    steps: list[Step]


class Chunk(NamedTuple):
    """Rows whose gradient is in memory at once. Most often it is one part, and one step."""

    rows: Rows
    hidden: Tensor  # (n, D)
    parts: Iterator[Part]  # each made when it is asked for, where those before it were
    gradient: Tensor  # (n, V), of all steps


class Chunks:
    """Which rows are computed, and how many at once: all, or those that count.

    How many count, the GPU knows first, and the host has to wait for it once. The logits of the
    first chunk are queued before that, so that the GPU has work while the host waits.
    """

    def __init__(self, cut: Cut, rows: int, live: Tensor | None):
        self.cut = cut
        self.first = self._even(rows)  # rows of the first chunk, unless fewer count
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
        step = self._even(self.rows - first)
        starts = [*([0] if first else []), *range(first, self.rows, step), self.rows]
        return [self._some(start, end) for start, end in itertools.pairwise(starts)]

    def _even(self, rows: int) -> int:
        if self.cut.columns is not None:
            return max(min(self.cut.rows, rows), 1)
        return even_chunk(rows, self.cut.rows)

    def _some(self, start: int, end: int) -> Rows:
        return slice(start, end) if self.index is None else self.index[start:end]

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Iterator[Chunk]:
        """The logits in this dtype, one chunk after another in one workspace.

        On return the first chunk is queued, and the number of rows known.
        """
        vocab = len(weight)
        space = Space(self.first, self.cut.rows, vocab, dtype, hidden)
        queued = None
        if len(hidden):
            queued = space.parts[0]
            h = hidden[self._some(0, min(queued.stop, len(hidden)))]
            product(h, weight, bias, space.logits(queued, len(h), vocab))
        self.wait(len(hidden))

        def parts(rows: Rows, hidden: Tensor, into: Tensor) -> Iterator[Part]:
            nonlocal queued
            for part in space.parts:
                h, own = hidden[part], into[part]
                if not len(h):
                    return
                z = space.logits(part, len(h), vocab)
                if queued is None:
                    product(h, weight, bias, z)
                queued, mine = None, some_of(rows, part)
                steps = [
                    Step(at, some_of(mine, at), z[at], own[at])
                    for at in space.steps(part, len(h))
                ]  # fmt: skip
                yield Part(mine, z, steps)

        def each() -> Iterator[Chunk]:
            for rows in self.slices():
                h = hidden[rows]
                into = space.gradient(len(h), vocab)
                yield Chunk(rows, h, parts(rows, h, into), into)

        return each()


def some_of(rows: Rows, at: slice) -> Rows:
    if isinstance(rows, slice):
        return slice(rows.start + at.start, min(rows.start + at.stop, rows.stop))
    return rows[at]


class _Number:
    """A number on its way from the GPU."""

    def __init__(self, number: Tensor):
        self.copied: torch.cuda.Event | None = None
        if number.is_cuda:
            self.copied = torch.cuda.Event()
            pinned = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            number = pinned.copy_(number, non_blocking=True)
            self.copied.record()
        self.number = number

    def wait(self) -> int:
        if self.copied is not None:
            self.copied.synchronize()
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
        self.d_hidden = HiddenGradient(run, chunks, hidden) if needs[0] else None
        self.weight_sum = None
        if needs[1] and into is not None:
            self.weight_sum = Sum(into, fresh=False)
        elif needs[1]:
            count = len(chunks.slices())
            way = way_to_sum(run, count, hidden, self.weight, accumulate)
            make = torch.empty if count else torch.zeros
            total = make(self.weight.shape, device=hidden.device, dtype=way.dtype)
            self.weight_sum = sum_in(run, total, count, way)
        self.d_bias = None
        if needs[2] and bias is not None:
            self.d_bias = torch.zeros_like(bias, dtype=PRECISION[bias.dtype])

    def add(self, rows: Rows, h: Tensor, dz: Tensor) -> None:
        clear_padding(dz)
        if self.d_hidden is not None:
            out = self.d_hidden.total[rows] if isinstance(rows, slice) else None
            self.d_hidden.set(rows, torch.mm(dz, self.weight, out=out))
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.d_bias.dtype)
        if self.weight_sum is not None:
            self.weight_sum.add(dz, h)

    def found(self) -> list[Tensor | None]:
        """All three; those of weight and bias may have more bits than they."""
        d_hidden = None if self.d_hidden is None else self.d_hidden.found()
        total = None if self.weight_sum is None else self.weight_sum.total
        return [d_hidden, total, self.d_bias]


class HiddenGradient:
    """The gradient of hidden (N, D), chunk by chunk.

    Ranks that have other columns add their shares to it while this one goes on to the weight's
    gradient: to each chunk where every rank wants all rows, else, once all chunks are there, to the
    slice of rows that is this rank's.
    """

    def __init__(self, run: ModuleType, chunks: Chunks, hidden: Tensor):
        # Rows that no chunk computes have no gradient.
        blank = torch.empty_like if chunks.index is None else torch.zeros_like
        self.total = blank(hidden, memory_format=torch.contiguous_format)  # whatever hidden's is
        self.add_up, self.adding = getattr(run, "add_up", None), []
        self.add_up_slices, self.own = getattr(run, "add_up_slices", None), None
        self.missing = len(chunks.slices())

    def set(self, rows: Rows, part: Tensor) -> None:
        """Of some rows; `part` is already there if it is what `total[rows]` shows."""
        if self.add_up is not None:
            self.adding.append((self.add_up(part), rows, part))
        else:
            self._put(rows, part)
        self.missing -= 1
        if self.add_up_slices is not None and not self.missing:
            self.own = self.add_up_slices(self.total)

    def _put(self, rows: Rows, part: Tensor) -> None:
        if not isinstance(rows, slice) or part.data_ptr() != self.total[rows].data_ptr():
            self.total[rows] = part

    def found(self) -> Tensor:
        """Of all rows, or of this rank's."""
        for work, rows, part in self.adding:
            work.wait()
            self._put(rows, part)
        if self.add_up_slices is None:
            return self.total
        own = self.add_up_slices(self.total) if self.own is None else self.own  # of no rows at all
        return own.wait()


def clear_padding(dz: Tensor) -> None:
    """Zeros the memory between the rows of a gradient in a workspace, on a CPU.

    There a bf16 GEMM (oneDNN with AVX-512) reads a few numbers beyond each row and multiplies them
    by 0: what is not a number stays so.
    """
    width, step = dz.shape[1], dz.stride(0)
    if dz.device.type == "cpu" and step > width > 0 and dz.stride(1) == 1:
        dz.as_strided((len(dz), step), (step, 1))[:, width:] = 0


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


class Way(NamedTuple):
    """How products are summed over chunks."""

    dtype: torch.dtype  # of the total
    in_place: bool  # in 16 bits that keep 14 between chunks


def way_to_sum(run: ModuleType, count: int, hidden: Tensor, weight: Tensor, accumulate: str) -> Way:
    """For so many products. fp16, of little range, is always summed in fp32."""
    dtype = weight.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate == "fp32"):
        return Way(torch.float32, False)
    if dtype == torch.bfloat16 and accumulate == "auto" and count > 2:
        in_place = weight.numel() > 0 and run.can_accumulate(hidden, weight)
        return Way(dtype if in_place else torch.float32, in_place)
    return Way(dtype, False)


def sum_in(run: ModuleType, total: Tensor, count: int, way: Way) -> "Sum | SumInPlace":
    return SumInPlace(run, total, count) if way.in_place else Sum(total, fresh=True)


class Sum:
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


class SumInPlace:
    """The same in 16 bits a number: right to 14 between chunks, rounded as bf16 at the end."""

    def __init__(self, run: ModuleType, total: Tensor, chunks: int):
        self.run, self.total = run, total
        self.exponents = run.exponents(self.total)
        self.chunks, self.done = chunks, 0

    def add(self, dz: Tensor, h: Tensor) -> None:
        first, last = self.done == 0, self.done == self.chunks - 1
        self.run.accumulate(dz, h, self.total, self.exponents, first, last)
        self.done += 1
