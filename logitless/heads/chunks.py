"""A head in chunks of rows: their logits one after another, and the gradients they add up to.

heads/plan.py says how many rows make a chunk. Every chunk reads the weight and, but for the first,
the sum of its gradient so far, so chunks are as large as memory allows. How that sum is stored
matters: in bf16, which keeps 8 bits, it is rounded after every one of many chunks and drifts away
from what one large product would give; in fp32 it takes twice the memory of the gradient itself.
Stored as block floating point (int16 with one exponent per 128 values, kernels/blockfp_gemm.py) it
is as good as one product, and needs no extra memory.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core.loss import RowLoss, Saved
from .plan import PACK, Cut, bounds, chunk_rows, layout

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


# What is done with some rows, visit(loss, saved, rows, logits, into): it gets their loss, what an
# earlier forward saved of them, which rows they are, their logits, and where a gradient goes if one
# is wanted. It returns that gradient: a new tensor where it cannot go there.
Visit = Callable[[RowLoss, Saved | None, Rows, Any, Tensor | None], Any]


class Chunks:
    """The rows of a head that are computed, all or those that count, some at a time.

    How many count, the GPU knows first, and the host has to wait for it once. The logits of the
    first chunk are queued before that, so that the GPU has work while the host waits.
    """

    blocks = (slice(None),)  # of columns, whose gradients are summed each by itself

    def __init__(self, source, cut: Cut, live: Tensor | None):
        hidden, self.weight, self.bias = (None if t is None else t.detach() for t in source.parts)
        self.hidden = hidden.reshape(-1, hidden.shape[-1])  # (N, D)
        self.lead, self.run, self.cut = source.shape[:-1], source.backend(), cut
        rows = len(self.hidden)
        self.index, count, copied = None, rows, None
        if live is not None:
            self.index = torch.argsort(live, descending=True, stable=True)
            count, copied = to_host(live.sum())
        self.begin(source.dtype)
        if copied is not None:
            copied.synchronize()
        count = int(count)
        if count == rows:
            self.index = None
        self.slices: list[Rows] = [
            slice(start, end) if self.index is None else self.index[start:end]
            for start, end in bounds(rows, count, cut)
        ]

    def begin(self, dtype: torch.dtype) -> None:
        """Memory for the logits of a chunk, of this dtype; those of the first are queued."""
        hidden, vocab, padded = self.hidden, len(self.weight), -(-len(self.weight) // PACK) * PACK
        first = chunk_rows(len(hidden), self.cut)
        size, parts = layout(first, self.cut.rows, dtype != hidden.dtype)
        self.memory = torch.empty((size, padded), device=hidden.device, dtype=hidden.dtype)
        self.parts = []
        for part in parts:
            room = (part.rows.stop - part.rows.start, padded)
            logits = self.memory[part.at :].view(dtype).view(room)[:, :vocab]
            self.parts.append((part, logits))
        part, logits = self.parts[0]
        h = hidden[part.rows if self.index is None else self.index[part.rows]]
        if len(h):
            product(h, self.weight, self.bias, logits[: len(h)])

    def gradients(
        self, needs: Sequence[bool], accumulate: str, into: Tensor | None = None
    ) -> "HeadGradients":
        """Sums for `walk`."""
        return HeadGradients(self, needs, accumulate, into)

    def walk(
        self,
        loss: RowLoss,
        visit: Visit,
        sums: "HeadGradients | None" = None,  # without, no gradient is wanted
        known: Iterable[Saved] = (),  # what forward saved, part by part
    ) -> None:
        """Visits all rows, once, and adds the gradient of each chunk to `sums`."""
        known = iter(known)
        queued = True  # the logits of the first part, by `begin`
        for rows in self.slices:
            h = self.hidden[rows]
            dz = self.memory[: len(h), : len(self.weight)]
            for part, logits in self.parts:
                h_part, here = h[part.rows], some_of(rows, part.rows)
                count = len(h_part)
                if not count:
                    break
                z, into = logits[:count], dz[part.rows]
                if not queued:
                    product(h_part, self.weight, self.bias, z)
                queued = False
                some, saved = loss.take(here, self.lead), next(known, None)
                steps = [at for at in part.steps if at.start < count]
                if sums is None:
                    visit(some, saved, here, z, None)
                elif len(steps) == 1:
                    into = visit(some, saved, here, z, into)
                    dz = into if count == len(h) else dz  # of a part, it is always in dz
                else:
                    for at in steps:
                        few = some.take(at, torch.Size((count,)))
                        visit(few, saved_of(saved, at, count), some_of(here, at), z[at], into[at])
                        del few
                del some, saved  # a teacher's logits, before the next chunk's are made
            if sums is not None:
                sums.add(rows, h, dz)


def some_of(rows: Rows, at: slice) -> Rows:
    if isinstance(rows, slice):
        return slice(rows.start + at.start, min(rows.start + at.stop, rows.stop))
    return rows[at]


def saved_of(saved: Saved | None, at: slice, count: int) -> Saved | None:
    """What was saved of so many rows, for some of them; what is one for all stays."""
    if saved is None:
        return None
    return tuple(t if t is None or len(t) != count else t[at] for t in saved)


def to_host(number: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
    """A number on its way from the GPU, and what to wait for."""
    if not number.is_cuda:
        return number, None
    copied = torch.cuda.Event()
    pinned = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
    pinned.copy_(number, non_blocking=True)
    copied.record()
    return pinned, copied


class HeadGradients:
    """Gradients of hidden, weight and bias, each only if it is needed, chunk by chunk."""

    def __init__(
        self,
        chunks: Chunks,
        needs: Sequence[bool],  # of hidden, weight and bias
        accumulate: str,
        into: Tensor | None,  # what the weight's is added to
    ):
        run, hidden, self.weight = chunks.run, chunks.hidden, chunks.weight
        count = len(chunks.slices)
        self.d_hidden = self.over_ranks = self.d_bias = None
        if needs[0]:
            # Rows that no chunk computes have no gradient.
            blank = torch.empty_like if chunks.index is None else torch.zeros_like
            # Contiguous, whatever hidden is.
            self.d_hidden = blank(hidden, memory_format=torch.contiguous_format)
            self.put = partial(put, self.d_hidden)
            if hasattr(run, "hidden_sum"):  # where ranks have other columns
                self.over_ranks = run.hidden_sum(self.d_hidden, count)
            if self.over_ranks is not None:
                self.put = self.over_ranks.put
        self.d_weight, self.weight_sums = into, []
        if needs[1]:
            kind = Sum
            if into is None:
                dtype, kind = way_to_sum(run, count, hidden, self.weight, accumulate)
                make = torch.empty if count else torch.zeros
                self.d_weight = make(self.weight.shape, device=hidden.device, dtype=dtype)
            for block in chunks.blocks:
                self.weight_sums.append(kind(run, self.d_weight[block], count, into is None))
        if needs[2] and chunks.bias is not None:
            self.d_bias = torch.zeros_like(chunks.bias, dtype=PRECISION[chunks.bias.dtype])

    def add(self, rows: Rows, h: Tensor, dz: Tensor) -> None:
        if dz.device.type == "cpu":
            clear_padding(dz)
        if self.d_hidden is not None:
            out = self.d_hidden[rows] if isinstance(rows, slice) else None
            self.put(rows, torch.mm(dz, self.weight, out=out))
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.d_bias.dtype)
        if self.weight_sums:
            self.weight_sums[0].add(dz, h)

    def found(self) -> list[Tensor | None]:
        """All three; those of weight and bias may have more bits than they."""
        d_hidden = self.d_hidden if self.over_ranks is None else self.over_ranks.found()
        return [d_hidden, self.d_weight, self.d_bias]


def as_parts(gradients: list, parts: tuple) -> list:
    """Each in the shape and dtype of what it is the gradient of."""
    pairs = zip(gradients, parts, strict=True)
    return [None if t is None else t.view(part.shape).to(part.dtype) for t, part in pairs]


def put(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Some rows into their place, unless `part` is that place."""
    if not isinstance(rows, slice) or part.data_ptr() != total[rows].data_ptr():
        total[rows] = part


def clear_padding(dz: Tensor) -> None:
    """Zeros the memory between the rows of a gradient in a workspace, on a CPU.

    There a bf16 GEMM (oneDNN with AVX-512) reads a few numbers beyond each row and multiplies them
    by 0: what is not a number stays so.
    """
    width, step = dz.shape[1], dz.stride(0)
    if step > width > 0 and dz.stride(1) == 1:
        dz.as_strided((len(dz), step), (step, 1))[:, width:] = 0


class RowGradients:
    """Gradients of the tensors beside the rows of a loss, chunk by chunk; None if not needed."""

    def __init__(self, loss: RowLoss, needs: Sequence[bool]):
        self.found = [
            torch.zeros(t.shape, device=t.device, dtype=t.dtype) if need else None
            for t, need in zip(loss.others, needs, strict=True)
        ]

    def add(self, rows: Rows, some: RowLoss, saved: Saved, scale: Tensor) -> None:
        """Of some rows' loss, for what multiplies each row's value."""
        for total, d in zip(self.found, some.d_others(saved, scale), strict=True):
            if total is not None and d is not None:
                total.view(-1, *d.shape[1:])[rows] = d


# Both are made by the same arguments: the backend, the total, how many products come, and whether
# the total is fresh memory, or is added to.


class Sum:
    """Σ dz.T @ h over chunks, in the dtype of the total."""

    def __init__(self, run: ModuleType, total: Tensor, count: int, fresh: bool = True):
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

    def __init__(self, run: ModuleType, total: Tensor, count: int, fresh: bool = True):
        self.run, self.total = run, total
        self.exponents = run.exponents(total)
        self.count, self.done = count, 0

    def add(self, dz: Tensor, h: Tensor) -> None:
        first, last = self.done == 0, self.done == self.count - 1
        self.run.accumulate(dz, h, self.total, self.exponents, first, last)
        self.done += 1


def way_to_sum(
    run: ModuleType, count: int, hidden: Tensor, weight: Tensor, accumulate: str
) -> tuple[torch.dtype, type[Sum] | type[SumInPlace]]:
    """The dtype of a sum of so many products, and who adds them up.

    fp16, of little range, is always summed in fp32.
    """
    dtype = weight.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate == "fp32"):
        return torch.float32, Sum
    if dtype == torch.bfloat16 and accumulate == "auto" and count > 2:
        in_place = weight.numel() > 0 and run.can_accumulate(hidden, weight)
        return (dtype, SumInPlace) if in_place else (torch.float32, Sum)
    return dtype, Sum
