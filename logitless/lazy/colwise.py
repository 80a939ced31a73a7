"""The lazy logits of a fused head that ColwiseParallel spreads over ranks.

ColwiseParallel makes DTensors of a head's weight and hidden states, expects a DTensor of logits,
and hands on what its user asked for: whole rows on every rank, this rank's columns, or the DTensor.
`SpreadLogits` stands for that DTensor, and each of the three is lazy.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core import checks as _checks
from ..heads.linear import LinearLogits, as_autocast, autocasts, plain_logits
from ..parallel.dtensor import hidden_of_all
from .logits import LazyLogits, Made, warn_once


class SpreadHead(NamedTuple):
    """What the logits are made of."""

    parts: tuple  # hidden, weight and bias: DTensors, with history
    how: dict  # options of the LinearLogits
    module: nn.Module

    def whole(self, kind: type[LazyLogits] = LazyLogits) -> LazyLogits:
        """Logits of all columns on every rank: a loss of them is that of a VocabShard."""
        shard: Any = LinearLogits(*self.parts, **self.how)  # which DTensors make a VocabShard
        return Made.apply(*shard.source.parts, self.how, self.module, shard.over(None), kind)  # pyright: ignore

    def own_columns(self) -> LazyLogits:
        """Logits of this rank's columns, whose gradient of hidden is this rank's share."""
        hidden, *rest = self.parts
        rows = (None if t is None else t.to_local() for t in rest)
        head = LinearLogits(hidden_of_all(hidden, rest[0]), *rows, **self.how)
        return Made.apply(*head.parts, self.how, self.module)  # pyright: ignore


class SpreadLogits(LazyLogits):
    """Lazy logits with the methods of a DTensor that ColwiseParallel and its users call."""

    head: SpreadHead
    placements: tuple

    @property
    def device_mesh(self):
        return self.head.parts[1].device_mesh

    def redistribute(self, device_mesh=None, placements=None, **how) -> Tensor:
        """As another DTensor: lazy if it is replicated, or sharded by columns as it is."""
        places = by_number(placements, self.dim() - 1)
        columns = placements_of(self.head.parts[1], self.dim() - 1)
        if places == columns or all(p.is_replicate() for p in places):
            return spread(self.head, places)
        warn_once(
            f"logits of a fused head are materialised: output_layouts {places} must be"
            " Replicate() or Shard(-1) for them to stay lazy."
        )
        made: Any = made_logits(self.head.parts, self.head.how)
        return made.redistribute(device_mesh, placements, **how)

    def to_local(self, **_) -> LazyLogits:
        whole = all(p.is_replicate() for p in self.placements)
        return self.head.whole() if whole else self.head.own_columns()

    def full_tensor(self, **_) -> LazyLogits:
        return self.head.whole()


def by_number(placements, last: int) -> tuple:
    """Shard(-1) as that of the last dimension."""
    return tuple(type(p)(last) if _checks.is_shard(p, -1) else p for p in placements)


def placements_of(weight, last: int) -> tuple:
    """Of logits, from a weight sharded by rows."""
    return tuple(type(p)(last) if p.is_shard() else p for p in weight.placements)


def spread(head: SpreadHead, placements: tuple) -> SpreadLogits:
    z: Any = head.whole(SpreadLogits)
    z.head, z.placements = head, placements
    return z


def made_logits(parts: tuple, how: dict) -> Tensor:
    """A head's logits as a DTensor, in its logits_dtype."""
    dtype = how.get("logits_dtype")
    if dtype is None:
        return nn.functional.linear(*parts)
    hidden, weight, bias = map(as_autocast, parts) if autocasts(parts[0].device) else parts
    return plain_logits(hidden, weight, bias, dtype)


def spread_logits(parts: tuple, how: dict, module: nn.Module) -> Tensor:
    """The logits of a head of DTensors, lazy where its weight is sharded by rows."""
    hidden, weight, _ = parts
    sharded = [p for p in weight.placements if not p.is_replicate()]
    if len(sharded) != 1 or not _checks.is_shard(sharded[0], 0):
        return made_logits(parts, how)
    return spread(SpreadHead(parts, how, module), placements_of(weight, hidden.dim() - 1))
