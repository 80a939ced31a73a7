"""The layout of rows of logits in memory, and the loop over the columns of a row.

A kernel reads logits as a (B, T, V) view with contiguous rows; logits without one are copied. A row
can start between two 16-byte boundaries. Its body is the whole packs (a pack is 16 bytes on a
16-byte boundary), which are loaded 16 bytes at a time for any row stride. Its fringe is the columns
before and after, less than a pack on each side, which are loaded as one tile of two packs.
"""

import functools
from operator import attrgetter
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from .launch import REMEMBERED


class Rows(NamedTuple):
    """Rows in memory. Row (b · rows_t + t) starts at element (b · stride_b + t · stride_t)."""

    count: int
    vocab: int
    rows_t: int
    stride_b: int
    stride_t: int
    lead: int  # number of elements between row 0 and the last 16-byte boundary before row 0
    pack: int  # elements in 16 bytes

    @property
    def itemsize(self) -> int:
        return 16 // self.pack

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.rows_t, self.stride_b, self.stride_t

    @property
    def aligned(self) -> bool:
        """Whether every row starts and ends on a 16-byte boundary."""
        steps = (self.lead, self.vocab, self.stride_b, self.stride_t)
        return not any(step % self.pack for step in steps)

    @property
    def starts_aligned(self) -> bool:
        return not any(step % self.pack for step in (self.lead, self.stride_b, self.stride_t))

    def aligned_like(self, other: "Rows") -> bool:
        """Whether both have the same address modulo 16 in every row."""
        if self.starts_aligned and other.starts_aligned:
            return True
        return (
            self.pack == other.pack
            and self.rows_t == other.rows_t
            and not (self.lead - other.lead) % self.pack
            and not (self.stride_b - other.stride_b) % self.pack
            and not (self.stride_t - other.stride_t) % self.pack
        )

    def dense(self) -> "Rows":
        return self._replace(stride_b=self.rows_t * self.vocab, stride_t=self.vocab, lead=0)

    def written_to(self, place: "Place | None") -> "Rows":
        """Returns the layout of a gradient at `place`, or in new memory if it is None."""
        if place is None:
            return self.dense()
        offset, strides, itemsize = place
        assert len(strides) <= 2 or strides[-2] == self.vocab, strides
        stride = strides[0] if len(strides) == 2 else self.vocab
        rows = self._replace(stride_b=self.rows_t * stride, stride_t=stride)
        if itemsize >= self.itemsize:
            return rows._replace(lead=offset // self.itemsize)
        rows = rows._replace(lead=offset // itemsize, pack=16 // itemsize)
        # fewer bytes per element than x: `head` and `body`, computed with the pack of x, are right
        # only for rows that start on a 16-byte boundary
        assert rows.starts_aligned
        return rows


# (address modulo 16, strides, bytes per element) of the memory for a gradient: contiguous (..., V),
# or (N, V), where padding can follow each row. With fewer bytes per element than x, every row
# starts on a 16-byte boundary. A plain tuple, because every call builds one and a NamedTuple takes
# longer.
Place = tuple[int, tuple[int, ...], int]


def place_of(into: Tensor) -> Place:
    return into.data_ptr() % 16, into.stride(), into.element_size()


def rows_of(x: Tensor) -> tuple[Tensor, Rows]:
    """Returns x (..., V) and the layout of its rows, or those of a contiguous copy.

    logits[:, :-1], for example, need no copy.
    """
    rows = describe(x.shape, x.stride(), x.data_ptr() % 16, x.element_size())
    if rows is None:
        return rows_of(x.contiguous())
    return x, rows


@functools.lru_cache(REMEMBERED)
def describe(shape: tuple, strides: tuple, offset: int, itemsize: int) -> Rows | None:
    """Returns the layout of a tensor's rows at address `offset` modulo 16.

    None if the tensor has no (B, T, V) view with contiguous rows.
    """
    *shape, vocab = shape
    if 0 in shape:  # without rows, strides do not matter
        return Rows(0, vocab, 1, vocab, vocab, offset // itemsize, 16 // itemsize)
    if strides[-1] != 1 and vocab > 1:
        return None
    # (size, stride), with neighbouring dimensions merged where they can be viewed as one
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=False):
        if size != 1:
            if dims and dims[-1][1] == size * stride:
                size *= dims.pop()[0]
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    # contiguous if of size 1: such a dimension's own stride is arbitrary and could seem unaligned
    (rows_t, stride_t) = dims.pop() if dims else (1, vocab)
    (batches, stride_b) = dims.pop() if dims else (1, rows_t * stride_t)
    pack = 16 // itemsize
    return Rows(batches * rows_t, vocab, rows_t, stride_b, stride_t, offset // itemsize, pack)


def numbers(t: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns t and its row stride: 1 for one number per row, 0 for one for all rows."""
    if t is None or not any(t.stride()):
        return t, 0
    return t.contiguous(), 1


def contiguous(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def aligned(weight: Tensor | None) -> Tensor | None:
    """Returns the class weights, copied unless contiguous and on a 16-byte boundary."""
    if weight is None or (weight.is_contiguous() and weight.data_ptr() % 16 == 0):
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


# what a plan depends on in a Reading; the temperature is None if each row has its own
options_of = attrgetter("temperature", "softcap", "ignore_index")


def temperature_of(reading: Reading) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """Returns the temperature as the last tensors or the first numbers of a launch."""
    t = contiguous(reading.row_temperature)
    return ((), (reading.temperature,)) if t is None else ((t,), ())


@triton.constexpr_function
def pack_of(P):
    """Returns the number of elements in 16 bytes."""
    return 128 // P.dtype.element_ty.primitive_bitwidth


@triton.jit
def row_offset(row, rows_t, stride_b, stride_t):
    """Returns the offset of a row in elements, in int64: a view can have more than 2^31."""
    return (row // rows_t).to(tl.int64) * stride_b + (row % rows_t).to(tl.int64) * stride_t


@triton.jit
def load_label(LABEL, row):
    if LABEL is not None:
        return tl.load(LABEL + row)
    else:
        return 0


@triton.jit
def is_live(label, ignore_index):
    """Whether a row is not ignored; the logits of an ignored row are not read."""
    if ignore_index is not None:
        return label != ignore_index
    else:
        return True


@triton.jit
def split_row(offset, V, lead, PACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns the number of elements before the first 16-byte boundary, and of the body."""
    head = 0
    body = V
    if not ALIGNED:
        head = tl.minimum((PACK - (lead + offset) % PACK) % PACK, V).to(tl.int32)
        body = (V - head) // PACK * PACK
    return head, tl.multiple_of(body, PACK)


@triton.jit
def fringe_tile(head, body, V, PACK: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the columns of a row's fringe and their mask, as a tile of WIDTH ≥ 2 · PACK."""
    j = tl.arange(0, WIDTH)
    cols = tl.where(j < PACK, j, head + body + j - PACK)
    return cols, tl.where(j < PACK, j < head, cols < V)


@triton.jit
def walk(
    f: tl.constexpr, state, body_args, row_args, head, body, V, lo, hi,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_V: tl.constexpr, FRINGE: tl.constexpr,
):  # fmt: skip
    """Folds f over the columns [lo, hi) of a row's body, and over the fringe if lo = 0.

    `f(state, args, start, offs, mask)` adds the columns `start + offs` to the state; a mask of None
    selects all. In the body, `args` is `body_args` and column 0 is column `head` of the row; in the
    fringe, `args` is `row_args`. With MASKED, every block is masked and the code is shorter;
    otherwise only the last one is, and the kernel is faster.
    """
    offs = tl.arange(0, BLOCK_V)
    hi = tl.multiple_of(tl.minimum(hi, body), PACK)
    if MASKED:
        for start in range(lo, hi, BLOCK_V):
            state = f(state, body_args, start, offs, start + offs < hi)
    else:
        full = lo + tl.maximum(hi - lo, 0) // BLOCK_V * BLOCK_V
        for start in range(lo, full, BLOCK_V):
            state = f(state, body_args, start, offs, None)
        if full < hi:
            state = f(state, body_args, full, offs, full + offs < hi)
    if not ALIGNED:
        if lo == 0:
            ends, mask = fringe_tile(head, body, V, PACK, FRINGE)
            state = f(state, row_args, 0, ends, mask)
    return state
