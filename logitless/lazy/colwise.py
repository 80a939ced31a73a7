"""Lazy logits for a fused head whose weight ColwiseParallel shards over ranks.

ColwiseParallel turns a head's weight and hidden states into DTensors, and expects the head to
return the logits as a DTensor. ColwiseParallel then outputs a tensor with all columns, a tensor
with only the columns of this rank, or the DTensor itself. Its options `output_layouts` and
`use_local_output` select one of these outputs. A fused head returns a `SpreadLogits` instead of the
DTensor, so that each of these outputs is lazy.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core import tensor_checks
from ..heads.gemms import autocasts, cast_by_autocast, dense_logits
from ..heads.linear import checked_head
from ..parallel.dtensor import hidden_of_all, shard_of_head
from .logits import LazyLogits, lazy_logits_of
from .report import warn_once


class SpreadHead(NamedTuple):
    """The tensors and options of a head that ColwiseParallel shards."""

    tensors: tuple  # hidden, weight and bias, as DTensors with autograd history
    options: dict  # options of LinearLogits
    module: nn.Module

    def whole(self, kind: type[LazyLogits] = LazyLogits) -> LazyLogits:
        """Logits with all columns on every rank.

        In a loss over these logits, each rank computes only its own columns, as with a VocabShard.
        """
        head = checked_head(*self.tensors, **self.options).replace(module=self.module)
        shard = shard_of_head(head)
        return lazy_logits_of(shard.source.head, shard.over(None), kind)

    def own_columns(self) -> LazyLogits:
        """The logits of this rank's columns.

        The head's backward does not sum the gradient of `hidden` over the ranks, because DTensor
        already sums this gradient.
        """
        hidden, weight, bias = self.tensors
        rows = (None if t is None else t.to_local() for t in (weight, bias))
        head = checked_head(hidden_of_all(hidden, weight), *rows, **self.options)
        return lazy_logits_of(head.replace(module=self.module))


class SpreadLogits(LazyLogits):
    """Lazy logits with the DTensor methods that ColwiseParallel and its users call."""

    head: SpreadHead
    placements: tuple

    @property
    def device_mesh(self):
        return self.head.tensors[1].device_mesh

    def redistribute(self, device_mesh=None, placements=None, **options) -> Tensor:
        """Returns the logits with new placements.

        The logits stay lazy if the new placements replicate the logits or shard their columns.
        """
        places = from_the_front(placements, self.dim() - 1)
        columns = placements_of(self.head.tensors[1], self.dim() - 1)
        if places == columns or all(p.is_replicate() for p in places):
            return spread(self.head, places)
        warn_once(
            f"logits of a fused head are materialised, because output_layouts is {places}. With"
            " Replicate() or Shard(-1), the logits stay lazy."
        )
        plain: Any = spread_plain_logits(self.head.tensors, self.head.options)
        return plain.redistribute(device_mesh, placements, **options)

    def to_local(self, **_) -> LazyLogits:
        whole = all(p.is_replicate() for p in self.placements)
        return self.head.whole() if whole else self.head.own_columns()

    def full_tensor(self, **_) -> LazyLogits:
        return self.head.whole()


def from_the_front(placements, last: int) -> tuple:
    """Replaces Shard(-1) in the placements by Shard(last), where `last` is the last dimension."""
    return tuple(type(p)(last) if tensor_checks.is_shard(p, -1) else p for p in placements)


def placements_of(weight, last: int) -> tuple:
    """Returns the placements of the logits for a weight that is sharded by rows."""
    return tuple(type(p)(last) if p.is_shard() else p for p in weight.placements)


def spread(head: SpreadHead, placements: tuple) -> SpreadLogits:
    z: Any = head.whole(SpreadLogits)
    z.head, z.placements = head, placements
    return z


def spread_plain_logits(tensors: tuple, options: dict) -> Tensor:
    """The materialised logits of a head as a DTensor, in the dtype that `logits_dtype` selects."""
    dtype = options.get("logits_dtype")
    if dtype is None:
        return nn.functional.linear(*tensors)
    cast = autocasts(tensors[0].device)
    hidden, weight, bias = map(cast_by_autocast, tensors) if cast else tensors
    return dense_logits(hidden, weight, bias, None, dtype)


def spread_logits(tensors: tuple, options: dict, module: nn.Module) -> Tensor:
    """Returns the logits of a head whose tensors are DTensors.

    The logits are lazy if the weight is sharded by rows.
    """
    hidden, weight, _ = tensors
    sharded = [p for p in weight.placements if not p.is_replicate()]
    if len(sharded) != 1 or not tensor_checks.is_shard(sharded[0], 0):
        return spread_plain_logits(tensors, options)
    return spread(SpreadHead(tensors, options, module), placements_of(weight, hidden.dim() - 1))
