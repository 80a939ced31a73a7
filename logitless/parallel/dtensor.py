"""Converts DTensor logits, and LinearLogits of DTensors, to logits of this rank.

Logits that are sharded on the vocabulary become a VocabShard, and replicated ones a plain tensor.
Gradients are DTensors with the placements of the inputs.
"""

from typing import Any

import torch
from torch import Tensor

from ..contract import PER_CLASS, PER_ROW, TEACHER
from ..core import tensor_checks
from ..core.autograd import Node
from ..core.call import check_once
from ..core.capture import Capture, Captured
from ..core.choose_backend import captured
from ..core.evaluate import evaluate
from ..core.in_place import evaluate_in_place
from ..core.loss import RowLoss
from ..core.source import Source, converts, is_dtensor
from ..heads import checks as head_rules
from ..heads.gemms import autocasts, cast_by_autocast
from ..heads.linear import HeadLogits
from . import checks as rules
from .shard import Shard


def local(t, grad_placements=None) -> Tensor:
    """This rank's shard of a DTensor, after a collective that may still be writing it."""
    shard = t.to_local(grad_placements=grad_placements)
    return _Arrived.apply(shard) if hasattr(shard, "wait") else shard


class _Arrived(Node):
    """Waits until a collective has written the shard, because a kernel does not."""

    @staticmethod
    def forward(ctx, pending):
        return pending.wait().detach()

    @staticmethod
    def backward(ctx, g):
        return g


def shard_of(source: Any, mesh: Any, dim: int, vocab: int) -> Shard:
    """This rank's `Shard` of a vocabulary that is sharded over dimension `dim` of a mesh.

    DTensor splits as `torch.chunk` does, so each rank's columns are known without communication.
    """
    most = -(-vocab // mesh.size(dim))
    start = min(mesh.get_local_rank(dim) * most, vocab)
    rules.chunk(source.shape[-1], min(most, vocab - start))
    return Shard.of(source, mesh.get_group(dim), start, vocab)


@converts
def source_of_dtensor(logits: Any) -> Source | None:
    """The source for DTensor logits, or a LinearLogits of DTensors; None for all others."""
    if is_dtensor(logits):
        return DTensorLogits(logits)
    return shard_of_head(logits.head) if isinstance(logits, HeadLogits) else None


class DTensorLogits(Source):
    """DTensor logits. Labels and weights can be ordinary tensors or replicated DTensors."""

    def __init__(self, x: Any):
        self.x = x
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.requires_grad = x.requires_grad

    def local(self) -> "Shard | Tensor":
        """This rank's columns, or the whole logits if they are replicated."""
        x = self.x
        tensor_checks.placed("logits", x, x.dim() - 1)
        sharded = [dim for dim, place in enumerate(x.placements) if not place.is_replicate()]
        if not sharded:
            return local(x)
        return shard_of(local(x), x.device_mesh, sharded[0], x.shape[-1])

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        return self._call(evaluate, loss, reduction, row_weight)

    def evaluate_in_place(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        return self._call(evaluate_in_place, loss, reduction, row_weight)

    def _call(self, evaluate, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        def run():
            here = self.local()

            def teacher(t: Any) -> Any:
                if not is_dtensor(t):
                    return t
                return DTensorLogits(t).local() if isinstance(here, Shard) else t.full_tensor()

            plain = loss.map_tensors({PER_ROW: _whole, PER_CLASS: _whole, TEACHER: teacher})
            return evaluate(here, plain, reduction, _whole(row_weight))

        if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
            return torch.compiler.disable(run)()
        return run()

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        here = self.local()
        if isinstance(here, Source):
            return here.capture(capture, temperature, softcap)
        return captured(here.detach(), capture, temperature, softcap)


def _whole(t: Tensor | None) -> Tensor | None:
    if not is_dtensor(t):
        return t
    rules.replicated(t)
    return t.to_local()  # type: ignore


def hidden_of_all(hidden, weight) -> Tensor:
    """All-gathers the hidden states over the ranks that hold shards of the weight.

    The gradient of the result is `Partial`, so DTensor sums the gradients of all ranks.
    """
    # not at the head: importing torch.distributed.tensor takes half a second
    from torch.distributed.tensor import Partial, Replicate

    def placed(kind: type) -> list:
        pairs = zip(hidden.placements, weight.placements, strict=True)
        return [kind() if rows.is_shard() else place for place, rows in pairs]

    return local(hidden.redistribute(placements=placed(Replicate)), placed(Partial))


def shard_of_head(head: Any) -> Shard:
    """This rank's `Shard` of a head whose weight and bias are DTensors, sharded by rows."""
    hidden, weight, bias, _ = head.tensors
    (dim,) = [i for i, place in enumerate(weight.placements) if not place.is_replicate()]
    tokens = not hidden.placements[dim].is_replicate()
    hidden = hidden_of_all(hidden, weight) if tokens else local(hidden)
    weight_rows, bias_rows = weight.to_local(), None if bias is None else bias.to_local()
    if autocasts(hidden.device):
        hidden, weight_rows, bias_rows = map(cast_by_autocast, (hidden, weight_rows, bias_rows))
    check_once(
        head_rules.linear, hidden, weight_rows, bias_rows, head.main_grad, head.workspace,
        head.logits_dtype, head.accumulate, head.drop_ignored,
    )  # fmt: skip
    logits = HeadLogits(head.replace(hidden=hidden, weight=weight_rows, bias=bias_rows))
    shard = shard_of(logits, weight.device_mesh, dim, weight.shape[0])
    shard.sums_hidden = not tokens
    return shard
