"""A ring of ranks, in which each rank sends blocks of embeddings to the next rank.

A block is the rows of `b` on one rank. In each of R steps, a rank pairs its own rows of `a` with
one block, and sends the block on. It holds at most two blocks, however many ranks there are. Sums
with one entry per row of `b`, such as its gradient, travel with the block: every rank adds its
part, in a fixed order, and after the last step they return to the owner of the block.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.call import thorough
from ..parallel.ranks import Alone, Ranks, ranks_of
from . import checks

Visit = Callable[[int, Sequence[Tensor], Sequence[Tensor]], None]


class Ring:
    """The ranks of a group (None: this process alone), and their numbers of rows of `a` and `b`."""

    rows: list[int]
    columns: list[int]

    def __init__(self, group):
        checks.group(group)
        self.ranks: Ranks = Alone() if group is None else ranks_of(group)
        self.index, self.count = self.ranks.index, self.ranks.count

    @contextlib.contextmanager
    def same_call(self, name: str, *args: Any) -> Iterator[None]:
        """Checks the arguments of a call in the `with` block.

        With LOGITLESS_CHECK=1, an error on one rank, or different options, raise on all ranks.
        """
        compares = self.count > 1 and thorough()
        try:
            yield
        except Exception as error:
            if compares:
                self.ranks.refuse(error)
            raise
        if compares:
            self.ranks.agree(f"{name} of {_text(args)}")

    def exchange_sizes(self, a: Tensor, b: Tensor) -> None:
        self.rows, self.columns = [len(a)], [len(b)]
        if self.count > 1:
            sizes = torch.tensor([len(a), len(b)], device=self.ranks.device)
            self.rows, self.columns = (list(t) for t in self.ranks.gather(sizes).t().tolist())

    @property
    def largest(self) -> int:
        return max(self.columns)

    def columns_before(self, owner: int) -> int:
        """The number of rows of `b` on all ranks before the rank `owner`."""
        return sum(self.columns[:owner])

    def around(self, given: Sequence[Tensor], sums: Sequence[Tensor], visit: Visit) -> list[Tensor]:
        """Calls visit(owner, given, sums) for the block of each rank; returns this rank's sums.

        The tensors have one entry per row of `b`. `visit` adds to `sums` in place, and the next
        block is sent while it computes.
        """
        given, sums = list(given), list(sums)
        for step in range(self.count):
            owner = (self.index - step) % self.count
            coming = self.columns[(owner - 1) % self.count]
            last = step == self.count - 1
            arriving = None if last else self.ranks.shift(given, coming)
            visit(owner, given, sums)
            if self.count > 1:
                sums = self.ranks.shift(sums, coming, len(given)).wait()
            if arriving is not None:
                given = arriving.wait()
        return sums

    def total(self, numbers: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in the order of the ranks."""
        return numbers if self.count == 1 else self.ranks.gather(numbers).sum(0)


def _text(value: Any) -> Any:
    """What is compared between ranks: not the number of rows, and no values."""
    if isinstance(value, (tuple, list)):
        return [_text(one) for one in value]
    if isinstance(value, Tensor):
        return value.dim(), value.shape[1:], value.dtype, value.requires_grad
    return value
