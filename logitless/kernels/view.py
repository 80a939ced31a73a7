"""The host's side of a row: any logits as rows of two strides, and where they start."""

import functools
from typing import NamedTuple

from torch import Tensor

from .launch import REMEMBERED


class Rows(NamedTuple):
    """Logits as kernels see them: row r at r // rows_t · stride_b + r % rows_t · stride_t."""

    count: int
    vocab: int
    rows_t: int
    stride_b: int
    stride_t: int
    lead: int  # elements from the 16-byte boundary before the base to the base
    pack: int  # elements in 16 bytes

    @property
    def itemsize(self) -> int:
        return 16 // self.pack

    @property
    def where(self) -> tuple[int, int, int]:
        return self.rows_t, self.stride_b, self.stride_t

    @property
    def aligned(self) -> bool:
        """Whether every row starts and ends on a 16-byte boundary."""
        steps = (self.lead, self.vocab, self.stride_b, self.stride_t)
        return not any(step % self.pack for step in steps)

    def in_step_with(self, other: "Rows") -> bool:
        """Whether every row starts as far from a 16-byte boundary as the other's."""
        return not (
            (self.lead - other.lead) % self.pack
            or (self.stride_b - other.stride_b) % self.pack
            or (self.stride_t - other.stride_t) % self.pack
        )

    def packed(self, x: Tensor) -> "Rows":
        """A contiguous tensor with these rows, numbered alike."""
        return self._replace(
            stride_b=self.rows_t * self.vocab, stride_t=self.vocab, lead=_lead(x, self.pack)
        )


def rows_of(x: Tensor) -> tuple[Tensor, Rows]:
    """(..., V) as rows, and the tensor they are in: x, or a copy where two strides are too few.

    Shifted logits[:, :-1] are not copied.
    """
    pack = 16 // x.element_size()
    rows = _describe(x.shape, x.stride(), _lead(x, pack), pack)
    if rows is None:
        return rows_of(x.contiguous())
    return x, rows


def _lead(x: Tensor, pack: int) -> int:
    return x.data_ptr() % 16 * pack // 16


@functools.lru_cache(REMEMBERED)
def _describe(shape: tuple, strides: tuple, lead: int, pack: int) -> Rows | None:
    *shape, vocab = shape
    if strides[-1] != 1 and vocab > 1:
        return None
    dims: list[tuple[int, int]] = []  # (size, stride), neighbours joined where one stride does
    for size, stride in zip(shape, strides, strict=False):
        if size != 1:
            if dims and dims[-1][1] == size * stride:
                size *= dims.pop()[0]
            dims.append((size, stride))
    if len(dims) > 2:
        return None
    # A dimension of one row has no stride to speak of; that of dense rows makes no odd one out.
    (rows_t, stride_t) = dims.pop() if dims else (1, vocab)
    (batches, stride_b) = dims.pop() if dims else (1, rows_t * stride_t)
    return Rows(batches * rows_t, vocab, rows_t, stride_b, stride_t, lead, pack)
