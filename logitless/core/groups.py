"""Groups of rows that have one result together, such as the rows of a sequence or of a pair."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)  # Dynamo of PyTorch 2.9 fails at the properties of a NamedTuple
class Groups:
    """How the rows of logits (*lead, V) form groups: by a dimension, or as runs of rows.

    `dim` is the dimension of `lead` that separates the groups; `lengths` are the row counts of
    packed sequences. "By group": all rows of group 0 first, then all rows of group 1, and so on.
    """

    lead: tuple[int, ...]
    dim: int = 0
    lengths: tuple[int, ...] | None = None
    owner: Tensor | None = None  # (N,), the number of each row's group, if there are `lengths`

    @staticmethod
    def packed(lengths: tuple[int, ...], device: torch.device) -> "Groups":
        """Runs of consecutive rows. The host does not wait for the device."""
        sizes = torch.tensor(lengths, dtype=torch.int64, pin_memory=device.type == "cuda")
        numbers, rows = torch.arange(len(lengths), device=device), sum(lengths)
        owner = numbers.repeat_interleave(sizes.to(device, non_blocking=True), output_size=rows)
        return Groups((rows,), 0, lengths, owner)

    @property
    def count(self) -> int:
        return self.lead[self.dim] if self.lengths is None else len(self.lengths)

    @property
    def rest(self) -> tuple[int, ...]:
        return (*self.lead[: self.dim], *self.lead[self.dim + 1 :])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.lengths if self.lengths is not None else (math.prod(self.rest),) * self.count

    @property
    def in_order(self) -> bool:
        """Whether the rows by group are the rows in their own order."""
        return self.lengths is not None or self.dim == 0

    def by_group(self, t: Tensor) -> Tensor:
        """Flattens the rows of t (*lead, ...), by group."""
        if self.lengths is not None:
            return t
        return t.movedim(self.dim, 0).flatten(0, len(self.lead) - 1)

    def shaped(self, t: Tensor) -> Tensor:
        """The inverse of `by_group`."""
        if self.lengths is not None:
            return t
        return t.view(self.count, *self.rest, *t.shape[1:]).movedim(0, self.dim)

    def cut(self, some: slice) -> "Groups":
        if self.lengths is not None:
            assert self.owner is not None
            lengths, rows = self.lengths[some], self.rows_of(some)
            return Groups((sum(lengths),), 0, lengths, self.owner[rows] - some.start)
        count = some.stop - some.start
        return replace(self, lead=(*self.lead[: self.dim], count, *self.lead[self.dim + 1 :]))

    def rows_of(self, some: slice) -> slice:
        """The rows of some consecutive groups, by group."""
        if self.lengths is None:
            size = math.prod(self.rest)
            return slice(size * some.start, size * some.stop)
        start = sum(self.lengths[: some.start])
        return slice(start, start + sum(self.lengths[some]))

    def spread(self, g: Tensor) -> Tensor:
        """Repeats one number per group for each of its rows, by group."""
        if self.owner is not None:
            return g[self.owner]
        return g.repeat_interleave(math.prod(self.rest))

    def sums(self, mask: Tensor) -> Tensor:
        """The number of True of each group, for a mask (N,) by group."""
        if self.owner is None:
            return mask.view(self.count, math.prod(self.rest)).sum(1)
        counts = torch.zeros(self.count, device=mask.device, dtype=torch.int64)
        return counts.index_add_(0, self.owner, mask.long())


def packed(counts: list[int], room: int) -> list[tuple[int, int]]:
    """Packs consecutive groups of `counts` rows into few pieces of about equal size.

    Returns (first group, one past the last) of each piece, which has at most `room` rows unless a
    single group is larger.
    """
    aim = sum(counts) / max(-(-sum(counts) // max(room, 1)), 1)
    found, start, here, done = [], 0, 0, 0
    for i, n in enumerate(counts):
        if here and n and (here + n > room or done + here >= aim * (len(found) + 1)):
            found.append((start, i))
            start, done, here = i, done + here, 0
        here += n
    return [*found, (start, len(counts))]
