"""DTensors as logits, and as the weight of a head: what they are on this rank.

Sharded on the vocabulary they are a VocabShard, replicated a plain tensor; gradients come back as
DTensors of the same placements. Whatever else a DTensor may be is refused by name.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..core import checks as _checks
from ..core.autograd import Node
from ..core.later import later
from ..core.loss import RowLoss
from ..heads.linear import LinearLogits
from . import checks as _rules
from .shard import VocabShard


def local(t, grad_placements=None) -> Tensor:
    """This rank's part of a DTensor; of one that is still being gathered, once it is there."""
    here = t.to_local(grad_placements=grad_placements)
    return _Arrived.apply(here) if hasattr(here, "wait") else here  # pyright: ignore


class _Arrived(Node):
    """The tensor that a collective has filled: kernels read memory, and would not wait for it."""

    @staticmethod
    def forward(ctx, pending):
        return pending.wait().detach()

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


def source_of(x) -> VocabShard | Tensor:
    """DTensor logits as this rank has them: its columns, or the whole."""
    _checks.placed("logits", x, x.dim() - 1)
    sharded = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    if not sharded:
        return local(x)
    return VocabShard(local(x), x.device_mesh.get_group(sharded[0]), vocab=x.shape[-1])


def evaluated(evaluate: Callable, x, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """evaluate(...) of DTensor logits; what is beside them is plain, or a DTensor too."""

    def run():
        here = source_of(x)

        def teacher_of(t):
            if not hasattr(t, "placements"):
                return t
            return source_of(t) if isinstance(here, VocabShard) else t.full_tensor()

        tensors = [t if i > 3 else _whole(t) for i, t in enumerate(loss.tensors)]
        own = loss.with_tensors(tensors).with_columns(teacher_of)
        return evaluate(here, own, reduction, _whole(row_weight))

    if torch.compiler.is_compiling():  # torch.compile breaks the graph here
        return torch.compiler.disable(run)()  # pyright: ignore[reportCallIssue]
    return run()


def _whole(t: Tensor | None) -> Tensor | None:
    if not hasattr(t, "placements"):
        return t
    _rules.replicated(t)
    return t.to_local()  # pyright: ignore


def hidden_of_all(hidden, weight) -> Tensor:
    """Hidden states of all tokens beside a weight's rows; their gradient is this rank's share."""
    from torch.distributed.tensor import Partial, Replicate  # late: it takes half a second

    def placed(kind: type) -> list:
        pairs = zip(hidden.placements, weight.placements, strict=True)
        return [kind() if rows.is_shard() else own for own, rows in pairs]

    return local(hidden.redistribute(placements=placed(Replicate)), placed(Partial))


def head_of(hidden, weight, bias=None, **how) -> VocabShard:
    """A LinearLogits of DTensors, weight and bias sharded on the vocabulary."""
    _rules.head_placements(hidden, weight, bias)
    mesh = weight.device_mesh
    (dim,) = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    tokens = not hidden.placements[dim].is_replicate()
    hidden = hidden_of_all(hidden, weight) if tokens else local(hidden)
    bias = None if bias is None else bias.to_local()
    head = LinearLogits(hidden, weight.to_local(), bias, **how)
    shard = VocabShard(head, mesh.get_group(dim), vocab=weight.shape[0])
    shard.adds_up = not tokens
    return shard


later.evaluate_dtensor, later.source_of_dtensor = evaluated, source_of
later.head_of_dtensor = head_of
