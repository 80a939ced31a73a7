"""A ring of ranks, in which each rank sends blocks of embeddings to the next rank.

Each rank keeps its own rows of `a`. The rows of `b` on one rank form a block. In each step, a rank
computes the similarities of its own rows of `a` with one block, and sends the block to the next
rank. With R ranks, R steps compute the similarities of all pairs. A rank holds at most two blocks
at a time, so the memory of a rank does not grow with the number of ranks.

Some sums, such as the gradient of `b`, have one entry per row of `b`. The ranks send these sums
together with the block. Every rank adds its own contribution to the sums. After the last step, the
sums are sent to the rank that owns the block. The order of the additions is fixed.
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
    """The ranks of a group, and the numbers of rows of `a` and `b` on each rank.

    If the group is None, this process computes the loss alone.
    """

    rows: list[int]
    columns: list[int]

    def __init__(self, group):
        checks.group(group)
        self.ranks: Ranks = Alone() if group is None else ranks_of(group)
        self.index, self.count = self.ranks.index, self.ranks.count

    @contextlib.contextmanager
    def same_call(self, name: str, *args: Any) -> Iterator[None]:
        """Context manager for the code that checks the arguments of a call.

        With LOGITLESS_CHECK=1, all ranks raise an error if the `with` block raises an error on one
        rank. All ranks also raise an error if they pass different options.
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
        """The largest number of rows of `b` on any rank."""
        return max(self.columns)

    def columns_before(self, owner: int) -> int:
        """The total number of rows of `b` on all ranks before the rank `owner`."""
        return sum(self.columns[:owner])

    def around(self, given: Sequence[Tensor], sums: Sequence[Tensor], visit: Visit) -> list[Tensor]:
        """Calls visit(owner, given, sums) for the block of each rank, and returns this rank's sums.

        `given` and `sums` are lists of tensors of this rank's block. Each tensor has one entry per
        row of `b`. `visit` adds to `sums` in place. The next block is sent while `visit` computes.
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
    """Returns a description of an argument, which is compared between ranks.

    The description leaves out the number of rows and the values of a tensor, because ranks can have
    different rows.
    """
    if isinstance(value, (tuple, list)):
        return [_text(one) for one in value]
    if isinstance(value, Tensor):
        return value.dim(), value.shape[1:], value.dtype, value.requires_grad
    return value
