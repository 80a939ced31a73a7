"""The gradients of `hidden`, `weight` and `bias`, for a head that is computed in chunks of rows.

The gradient of a bf16 weight is summed in one of three formats. bf16 rounds to 8 bits after every
chunk, and over many chunks drifts away from one large GEMM. fp32 takes twice the memory. Block
floating point, int16 numbers with one exponent per 128 (kernels/gemms/blockfp_gemm.py), is as exact
as one GEMM and takes no more memory than bf16.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core.backend import Backend
from ..core.loss import RowLoss, Saved
from ..eager.rows import address
from .gemms import SLAB, gemm, two_parts
from .head import Head, Rows


class Needs(NamedTuple):
    """Whether each tensor needs a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    row_weight: bool = False
    row_inputs: tuple[bool, ...] = ()
    low_rank: bool = False

    @property
    def head(self) -> bool:
        return self.hidden or self.weight or self.bias or self.low_rank


class HeadGradients(NamedTuple):
    """The gradients of a loss over a head; None where not needed."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    row_weight: Tensor | None = None
    row_inputs: tuple[Tensor | None, ...] = ()
    low_rank: Tensor | None = None
    rest: Callable[[], None] | None = None  # adds what is missing, before the gradients are read

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of Head.tensors."""
        return self.hidden, self.weight, self.bias, self.low_rank

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> "HeadGradients":
        """A copy with new gradients, in the order of Head.tensors."""
        hidden, weight, bias, low_rank = tensors
        return self._replace(hidden=hidden, weight=weight, bias=bias, low_rank=low_rank)

    def like(self, tensors: tuple) -> "HeadGradients":
        """Converts each gradient to the shape and the dtype of its tensor."""
        return self.with_tensors(
            None if d is None else d.view(t.shape).to(t.dtype)
            for d, t in zip(self.tensors, tensors, strict=True)
        )

    def scale_(self, backend: Backend, number: Tensor) -> None:
        hidden, weight, bias, low_rank = self.hidden, self.weight, self.bias, self.low_rank
        if hidden is None or weight is None or hidden.dtype != weight.dtype:
            rest = (hidden, weight, bias, low_rank)
        else:
            backend.scale_two_(hidden, weight, number)
            rest = (bias, low_rank)
        for t in rest:
            if t is not None:
                backend.scale_(t.view(1, -1) if t.dim() == 1 else t, number)

    def times_rows(self, upstream: Tensor, scale: Tensor) -> "HeadGradients":
        """Multiplies the gradients that belong to rows: of `row_weight`, and of `row_inputs`."""
        by_weight, inputs = self.row_weight, self.row_inputs
        if by_weight is None and not inputs:
            return self
        return self._replace(
            row_weight=None if by_weight is None else by_weight * upstream,
            row_inputs=tuple(None if t is None else t * scale.to(t.dtype) for t in inputs),
        )

    def through(self, f: Callable[[tuple], tuple]) -> "HeadGradients":
        """Calls f with a flat tuple of all gradients, and returns its result as HeadGradients."""
        *head, row_weight = f((*self.row_inputs, *self.tensors, self.row_weight))
        row_inputs, head = head[:-4], head[-4:]
        gradients = HeadGradients(row_weight=row_weight, row_inputs=tuple(row_inputs))
        return gradients.with_tensors(head)


class GradientSums:
    """The gradients of the head's tensors, collected over all chunks of rows.

    Each chunk writes the gradient of `hidden` for its rows; all others are summed over chunks.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,  # (N, D)
        needs: Needs,
        chunks: int,  # the number of chunks of rows
        all_rows: bool,  # whether the chunks contain all rows
        blocks: Sequence[slice],  # blocks of columns; each block has its own sum
        into: Tensor | None = None,  # a tensor to which the weight's gradient is added
    ):
        backend, self.head, self.weight = head.backend(), head, head.weight.detach()
        self.left, self.rest = chunks, None
        self.low_rank, self.skips_first = None, head.skips_first
        if head.low_rank is not None:
            self.low_rank = head.low_rank.detach().to(hidden.dtype)
        self.d_hidden = self.over_ranks = self.d_bias = self.d_low_rank = None
        if needs.hidden:
            # Dropped rows are in no chunk, so their gradient keeps the initial value 0.
            blank = torch.empty_like if all_rows else torch.zeros_like
            # always contiguous, even if `hidden` is not
            self.d_hidden = blank(hidden, memory_format=torch.contiguous_format)
            self.put = partial(put, self.d_hidden)
            if head.columns is not None:
                self.over_ranks = head.columns.hidden_sum(self.d_hidden, chunks)
            if self.over_ranks is not None:
                self.put = self.over_ranks.put
        self.d_weight, self.weight_sums = into, []
        if needs.weight:
            kind = Sum
            if into is None:
                dtype, kind = way_to_sum(backend, chunks, hidden, self.weight, head.accumulate)
                make = torch.empty if chunks else torch.zeros
                self.d_weight = make(self.weight.shape, device=hidden.device, dtype=dtype)
            for block in blocks:
                self.weight_sums.append(kind(backend, self.d_weight[block], chunks, into is None))
        if needs.bias and head.bias is not None:
            self.d_bias = torch.zeros_like(head.bias.detach(), dtype=PRECISION[head.bias.dtype])
        self.low_rank_sums = []
        if needs.low_rank and self.low_rank is not None:
            make = torch.empty if chunks else torch.zeros
            full = PRECISION[hidden.dtype]
            self.d_low_rank = make(self.low_rank.shape, device=hidden.device, dtype=full)
            for block in blocks:
                self.low_rank_sums.append(Sum(backend, self.d_low_rank[block], chunks))

    def add(self, rows: Rows, h: Tensor, dz: Tensor) -> None:
        """Adds the gradients of a chunk of rows, where dz is the gradient of its logits.

        Over a head with `late`, those of the last chunk are added by `rest`.
        """
        self.left -= 1
        if self.head.late and not self.left and self.over_ranks is None:
            self.rest = partial(self._add, rows, h, dz)
        else:
            self._add(rows, h, dz)

    def _add(self, rows: Rows, h: Tensor, dz: Tensor) -> None:
        if dz.device.type == "cpu":
            clear_padding(dz)
        if self.d_hidden is not None:
            out = self.d_hidden[rows] if isinstance(rows, slice) else torch.empty_like(h)
            self.put(rows, self.head.d_hidden(dz, out))
        if self.d_bias is not None:
            self.d_bias += dz.sum(0, dtype=self.d_bias.dtype)
        self.add_weights(0, dz, h)

    def add_weights(self, block: int, dz: Tensor, h: Tensor) -> None:
        first, second = (
            (h, h) if self.low_rank is None else two_parts(h, self.weight, self.low_rank)
        )
        if self.weight_sums:
            self.weight_sums[block].add(dz, first)
        if self.low_rank_sums:
            self.low_rank_sums[block].add(dz, second)

    def result(self, late: bool = False) -> HeadGradients:
        """The gradients: `hidden` in its dtype, all others maybe fp32 even for 16-bit tensors.

        With `late`, the caller calls `rest`.
        """
        rest, self.rest = self.rest, None
        if rest is not None and not late:
            rest = rest()
        d_hidden = self.d_hidden if self.over_ranks is None else self.over_ranks.result()
        return HeadGradients(
            d_hidden, self.d_weight, self.d_bias, low_rank=self.d_low_rank, rest=rest
        )


class RowInputGradients:
    """The gradients of a loss's `row_inputs` (core/loss.py). Each chunk writes its own part."""

    def __init__(self, loss: RowLoss, needs: Sequence[bool]):
        self.loss = loss
        self.gradients = [
            torch.zeros(t.shape, device=t.device, dtype=t.dtype) if need else None
            for t, need in zip(loss.row_inputs, needs, strict=True)
        ]

    def add(self, results: Rows, loss: RowLoss, saved: Saved, scale: Tensor) -> None:
        """Writes them for some results, where `scale` is the upstream gradient of each."""
        for i, d in enumerate(loss.d_row_inputs(saved, scale)):
            total = self.gradients[i]
            if total is not None and d is not None:
                count = total.shape[: total.dim() - d.dim() + 1].numel()
                total.view(count, *d.shape[1:])[self.loss.place(i, results)] = d


def put(total: Tensor, rows: Rows, chunk: Tensor) -> None:
    """Copies `chunk` to total[rows], unless it is there already."""
    if not isinstance(rows, slice) or address(chunk) != address(total[rows]):
        total[rows] = chunk


def clear_padding(dz: Tensor) -> None:
    """Sets the padding between the rows of a gradient to 0, which only a CPU needs.

    The bf16 GEMM of oneDNN with AVX-512 reads a few numbers after each row and multiplies them by
    0, so a NaN there would make the result NaN.
    """
    width, step = dz.shape[1], dz.stride(0)
    if step > width > 0 and dz.stride(1) == 1:
        dz.as_strided((len(dz), step), (step, 1))[:, width:] = 0


# `Sum` and `SumInPlace` sum `count` matrix products in `total`. If `fresh`, the first overwrites
# it.


class Sum:
    """The sum of dz.T @ h over chunks, in the dtype of `total`."""

    def __init__(self, backend: Backend, total: Tensor, count: int, fresh: bool = True):
        self.total, self.fresh = total, fresh

    def add(self, dz: Tensor, h: Tensor) -> None:
        total, add = self.total, None if self.fresh else self.total
        if dz.dtype == total.dtype or dz.is_cuda:
            gemm(dz.t(), h, total, add)
        else:
            h, beta = h.to(total.dtype), 0 if self.fresh else 1
            step = max(SLAB // (total.element_size() * h.shape[1]), 1)
            for start in range(0, len(total), step):
                columns = slice(start, start + step)
                wide = dz[:, columns].t().to(total.dtype)
                torch.addmm(total[columns], wide, h, beta=beta, out=total[columns])
        self.fresh = False


class SumInPlace:
    """The sum of dz.T @ h over chunks, in block floating point with 16 bits per number.

    Its precision is 14 bits between chunks, and bf16 at the end.
    """

    def __init__(self, backend: Any, total: Tensor, count: int, fresh: bool = True):
        self.backend, self.total = backend, total
        self.exponents = backend.exponents(total)
        self.count, self.done = count, 0

    def add(self, dz: Tensor, h: Tensor) -> None:
        first, last = self.done == 0, self.done == self.count - 1
        self.backend.accumulate(dz, h, self.total, self.exponents, first, last)
        self.done += 1


def way_to_sum(
    backend: Backend, count: int, hidden: Tensor, weight: Tensor, accumulate: str
) -> tuple[torch.dtype, type[Sum] | type[SumInPlace]]:
    """The dtype and the class for a sum of `count` matrix products.

    fp16 products are always summed in fp32, because the range of fp16 is small.
    """
    dtype = weight.dtype
    if dtype == torch.float16 or (dtype == torch.bfloat16 and accumulate == "fp32"):
        return torch.float32, Sum
    if dtype == torch.bfloat16 and accumulate == "auto" and count > 2:
        in_place = weight.numel() > 0 and backend.can_accumulate(hidden, weight)
        return (dtype, SumInPlace) if in_place else (torch.float32, Sum)
    return dtype, Sum
