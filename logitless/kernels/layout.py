"""The layout of rows of logits in memory, and the loop over the columns of a row.

A kernel reads logits as a (B, T, V) view, and finds each row by the strides of B and T. Logits are
copied if they have no (B, T, V) view with contiguous rows.

A row can start between two 16-byte boundaries. A pack is 16 bytes that start on a 16-byte boundary.
The body of a row consists of its whole packs. A kernel loads the body 16 bytes at a time, for any
row stride. The fringe of a row consists of the columns before and after the body. Each side of the
fringe is shorter than one pack. A kernel loads the fringe as one tile of two packs.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

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
        """Whether every row starts on a 16-byte boundary."""
        return not any(step % self.pack for step in (self.lead, self.stride_b, self.stride_t))

    def aligned_like(self, other: "Rows") -> bool:
        """Whether `self` and `other` have the same address modulo 16 in every row."""
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
        """The layout of the same rows in new contiguous memory."""
        return self._replace(stride_b=self.rows_t * self.vocab, stride_t=self.vocab, lead=0)

    def written_to(self, place: "Place | None") -> "Rows":
        """Returns the layout of a gradient at `place`, or in new memory if `place` is None."""
        if place is None:
            return self.dense()
        offset, strides, itemsize = place
        assert len(strides) <= 2 or strides[-2] == self.vocab, strides
        stride = strides[0] if len(strides) == 2 else self.vocab
        rows = self._replace(stride_b=self.rows_t * stride, stride_t=stride)
        if itemsize >= self.itemsize:
            return rows._replace(lead=offset // self.itemsize)
        rows = rows._replace(lead=offset // itemsize, pack=16 // itemsize)
        # The elements of this gradient have fewer bytes than the elements of x. Kernels compute
        # `head` and `body` of a gradient row with the pack size of x. The results are correct only
        # if every row of the gradient starts on a 16-byte boundary.
        assert rows.starts_aligned
        return rows


# A Place is the tuple (address modulo 16, strides, bytes per element) of the memory for a gradient.
# Either the memory is contiguous and has the shape (..., V) of the logits x, or the memory has the
# shape (N, V). In the shape (N, V), padding can follow each row. If the gradient has fewer bytes
# per element than x, every row must start on a 16-byte boundary. Every call builds a Place. A Place
# is a plain tuple, because building a NamedTuple takes longer.
Place = tuple[int, tuple[int, ...], int]


def place_of(into: Tensor) -> Place:
    """Returns the `Place` of the tensor `into`."""
    return into.data_ptr() % 16, into.stride(), into.element_size()


def rows_of(x: Tensor) -> tuple[Tensor, Rows]:
    """Returns x (..., V) and the layout of its rows, or a contiguous copy and the copy's layout.

    x is copied only if x has no (B, T, V) view with contiguous rows. For example, logits[:, :-1]
    are not copied.
    """
    rows = describe(x.shape, x.stride(), x.data_ptr() % 16, x.element_size())
    if rows is None:
        return rows_of(x.contiguous())
    return x, rows


@functools.lru_cache(REMEMBERED)
def describe(shape: tuple, strides: tuple, offset: int, itemsize: int) -> Rows | None:
    """Returns the layout of a tensor's rows.

    The result is None if the tensor has no (B, T, V) view with contiguous rows. `offset` is the
    address of the first element modulo 16.
    """
    *shape, vocab = shape
    if 0 in shape:  # without rows, strides do not matter
        return Rows(0, vocab, 1, vocab, vocab, offset // itemsize, 16 // itemsize)
    if strides[-1] != 1 and vocab > 1:
        return None
    # `dims` holds pairs (size, stride). If neighbouring dimensions can be viewed as one dimension,
    # `dims` holds a single pair for these dimensions.
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=False):
        if size != 1:
            if dims and dims[-1][1] == size * stride:
                size *= dims.pop()[0]
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    # A dimension of size 1 gets the stride of a contiguous tensor, because its own stride is
    # arbitrary and could seem unaligned.
    (rows_t, stride_t) = dims.pop() if dims else (1, vocab)
    (batches, stride_b) = dims.pop() if dims else (1, rows_t * stride_t)
    pack = 16 // itemsize
    return Rows(batches * rows_t, vocab, rows_t, stride_b, stride_t, offset // itemsize, pack)


def numbers(t: Tensor | None) -> tuple[Tensor | None, int]:
    """Returns t, and the row stride of t.

    The row stride is 1 if t has one number per row, and 0 if t is one number for all rows.
    """
    if t is None or not any(t.stride()):
        return t, 0
    return t.contiguous(), 1


@triton.jit
def row_offset(row, rows_t, stride_b, stride_t):
    """Returns the offset of a row in a (B, T, V) view, in elements.

    The offset is int64, because a view can have more than 2^31 elements.
    """
    return (row // rows_t).to(tl.int64) * stride_b + (row % rows_t).to(tl.int64) * stride_t


@triton.jit
def split_row(offset, V, lead, PACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns (head, body).

    `head` is the number of elements of the row before the first 16-byte boundary. `body` is the
    number of elements in the whole packs that follow.
    """
    head = 0
    body = V
    if not ALIGNED:
        head = tl.minimum((PACK - (lead + offset) % PACK) % PACK, V).to(tl.int32)
        body = (V - head) // PACK * PACK
    return head, tl.multiple_of(body, PACK)


@triton.jit
def fringe_tile(head, body, V, PACK: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the columns of a row's fringe, and their mask, as one tile of WIDTH columns.

    The fringe has fewer than PACK columns before the body, and fewer than PACK columns after the
    body. So WIDTH must be at least 2 · PACK.
    """
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

    `f(state, args, start, offs, mask)` adds the columns `start + offs` to the state, and returns
    the new state. Columns where `mask` is False are left out. A mask of None selects all columns.
    For the body, `args` is `body_args`, and column 0 is column `head` of the row. For the fringe,
    `args` is `row_args`, and column 0 is the first column of the row. If MASKED is True, every
    block is masked, and the compiled code is shorter. If MASKED is False, only the last block is
    masked, and the kernel is faster.
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
