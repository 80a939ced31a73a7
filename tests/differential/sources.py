"""Where logits come from: tensors in memory in several ways, and heads of several chunks.

A source is made of a `Given`: the parts of a head, and its logits as numbers.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import logitless as ll
from logitless.heads import gemms
from logitless.heads.choose_cut import Cut
from logitless.heads.head import Head
from tests.support.rank_threads import on_ranks
from tests.support.sizes import DEVICE

from .case import Case, Maker

FROZEN = "head, frozen"
MOST_D = 4  # the sums of wider heads would not be exact in bf16


class Given(NamedTuple):
    logits: Tensor  # (..., V), constants
    hidden: Tensor  # (..., D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)

    def parts(self) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: t for name, t in named.items() if t is not None}


def given(case: Case) -> Given:
    """The parts, and their product with the special values that this case asks for."""
    m = case.make("logits")
    width = MOST_D - case.seed % MOST_D
    hidden, weight = m.normal(*case.lead, width), m.normal(case.vocab, width)
    bias = m.normal(case.vocab) if case.seed % 3 else None
    values = VALUES[case.values]
    if values.head is not None:
        hidden, weight, bias = values.head(m, hidden, weight, bias)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if values.dense is not None:
        logits = values.dense(m, logits).to(logits.dtype)
    return Given(logits, hidden, weight, bias)


class Values(NamedTuple):
    """Special values, put into the parts of a head or, where they cannot be, into logits."""

    head: Callable | None = None
    dense: Callable | None = None
    wide: bool = False  # needs more than 16 bits to be exact


def _bias(change: Callable[[Maker, Tensor], Tensor]) -> Callable:
    def head(m, hidden, weight, bias):
        return hidden, weight, change(m, torch.zeros_like(weight[:, 0]) if bias is None else bias)

    return head


def _some(value: float, share: float = 0.3) -> Callable[[Maker, Tensor], Tensor]:
    return lambda m, t: t.masked_fill(m.some(t.shape, share), value)


def _some_rows(value: float) -> Callable[[Maker, Tensor], Tensor]:
    return lambda m, t: t.masked_fill(m.some(t.shape[:-1]).unsqueeze(-1), value)


VALUES = {
    "plain": Values(),
    "spread": Values(lambda m, h, w, b: (h * 4, w * 2, b)),
    "all equal": Values(lambda m, h, w, b: (h * 0, w, b)),
    "two values": Values(lambda m, h, w, b: (h.sign(), w * 0 + 0.5, None)),
    "offset": Values(_bias(lambda m, b: b + 1e4), wide=True),
    "-inf in columns": Values(_bias(_some(-torch.inf))),
    "-inf everywhere": Values(_bias(lambda m, b: b - torch.inf)),
    "NaN in rows": Values(lambda m, h, w, b: (_some_rows(torch.nan)(m, h), w, b)),
    "-inf": Values(dense=_some(-torch.inf)),
    "-inf in rows": Values(dense=_some_rows(-torch.inf)),
    "+inf": Values(dense=_some(torch.inf, 0.1)),
    "NaN": Values(dense=_some(torch.nan, 0.1)),
    "any": Values(dense=lambda m, t: t + m.rand(t.shape, -6, 6, torch.float64)),
    "large": Values(dense=lambda m, t: t * 1000),
}


def logits_of(case: Case) -> tuple[str, ...]:
    """The sources that can have the values of a case."""
    values, exact = VALUES[case.values], case.dtype in ("float32", "float64")
    if values.dense is not None or (values.wide and not exact):
        return (*TENSORS, *SHARDS)
    return tuple(SOURCES)


def _copied(like: Callable[[Tensor], Tensor]) -> Callable[[Given], tuple[Any, dict]]:
    """Logits as a leaf in the memory that `like` makes room for."""

    def source(g: Given):
        leaf = like(g.logits).copy_(g.logits).requires_grad_(g.logits.is_floating_point())
        return leaf, {"logits": leaf}

    return source


def _head(
    rows: int | None, trained: tuple[str, ...] = ("hidden", "weight", "bias"), **how
) -> Callable[[Given], tuple[Any, dict]]:
    """A head with a workspace of so many rows; None is of all."""

    def source(g: Given):
        parts = {name: t.clone().requires_grad_(name in trained) for name, t in g.parts().items()}
        width = -(-g.weight.shape[0] // 8) * 8 * g.weight.element_size()
        workspace = None if rows is None else rows * width
        leaves = {name: t for name, t in parts.items() if t.requires_grad}
        return ll.LinearLogits(**parts, workspace=workspace, **how), leaves

    return source


class _CutHead(Head):
    def cut(self, work):
        return Cut(2, 8) if work.merges else Cut(2)


class _HeadOnChip(Head):
    def cut(self, work):
        return Cut(work.rows, on_chip=work.merges and work.narrow)


class _SplitHead(Head):
    """A head whose GEMMs are split on every device, into even sizes and a rest of 1."""

    @contextlib.contextmanager
    def ready(self, loss):
        split = mock.patch.multiple(gemms, reads_vectors=lambda t: True, UNIT=2)
        with split, super().ready(loss):
            yield


def _cut_by(kind: type[Head], **how) -> Callable[[Given], tuple[Any, dict]]:
    """A head with a cut or with GEMMs of its own."""

    def source(g: Given):
        head, leaves = _head(1, **how)(g)
        # `replace` makes a Head without a Signature, because the Signature belongs to a plain Head.
        head.head = head._source.head = kind(**vars(head.head.replace()))
        return head, leaves

    return source


class Shards:
    """Logits (..., V) in parts, one for each of several ranks that are threads."""

    def __init__(self, leaf: Tensor, widths: tuple[int, ...]):
        self.leaf, self.widths = leaf, widths

    def call(self, function: Callable, how: dict[str, Any]) -> Any:
        """What all ranks return, as one result that depends on all of them."""
        parts = [part.clone() for part in self.leaf.split(self.widths, -1)]

        def work(ranks):
            own = how if ranks.index == 0 else {name: _copied_leaves(t) for name, t in how.items()}
            return function(ll.VocabShard(parts[ranks.index], ranks), **own)

        found = [named(one) for one in on_ranks(len(parts), work)]
        return {name: _Joined.apply(*(one[name] for one in found)) for name in found[0]}


def named(found: Any) -> dict[str, Tensor]:
    """Results by name: of a tensor, a named tuple, a mapping, SparseTargets, or (loss, *more)."""
    if isinstance(found, Tensor):
        return {"result": found}
    if hasattr(found, "_asdict"):
        found = found._asdict()
    elif isinstance(found, tuple):
        loss, *more = found
        scores = named(more[0]) if hasattr(more[0], "_asdict") else None
        found = {"result": loss} | (scores or {f"more[{i}]": t for i, t in enumerate(more)})
    elif not isinstance(found, dict):
        found = vars(found)
    return {name: t for name, t in found.items() if t is not None}


def _copied_leaves(t: Any) -> Any:
    """The same with leaves of its own: each rank has the whole gradient of what is not sharded."""
    if isinstance(t, (list, tuple)):
        return type(t)(map(_copied_leaves, t))
    wanted = isinstance(t, Tensor) and t.requires_grad
    return t.detach().clone().requires_grad_() if wanted else t


class _Joined(torch.autograd.Function):
    """The first of several results that are the same, whose gradient goes to all."""

    @staticmethod
    def forward(ctx, *results):
        ctx.count = len(results)
        for t in results[1:]:
            same = (t == results[0]) | (t.isnan() & results[0].isnan())
            assert same.all(), "ranks differ"
        if not results[0].is_floating_point():
            ctx.mark_non_differentiable(results[0])
        return results[0].clone()

    @staticmethod
    def backward(ctx, upstream):
        return (upstream,) * ctx.count


def _shards(*shares: int) -> Callable[[Given], tuple[Any, dict]]:
    """Ranks with so many parts of the vocabulary each; the last has the rest."""

    def source(g: Given):
        V, part = g.logits.shape[-1], g.logits.shape[-1] // (sum(shares) + 1)
        widths = tuple(share * part for share in shares)
        leaf = g.logits.clone().requires_grad_(g.logits.is_floating_point())
        return Shards(leaf, (*widths, V - sum(widths))), {"logits": leaf}

    return source


def _fused_head(g: Given):
    leaves = {name: t.clone().requires_grad_() for name, t in g.parts().items()}
    V, bias = g.weight.shape[0], g.bias is not None
    module = ll.nn.FusedHead(g.weight.shape[1], V, bias=bias, device=DEVICE, dtype=g.weight.dtype)
    hidden = leaves["hidden"]
    parameters = {name: t for name, t in leaves.items() if name != "hidden"}
    return torch.func.functional_call(module, parameters, (hidden,)), leaves


def _room(t: Tensor, before: int, after: int, step: int = 1) -> Tensor:
    """Memory for t inside rows that are longer."""
    V = t.shape[-1]
    wide = torch.full((*t.shape[:-1], before + V * step + after), 7, device=t.device).to(t.dtype)
    return wide[..., before : before + V * step : step]


def _transposed(t: Tensor) -> Tensor:
    """Memory for t whose first dimension is innermost but for the last."""
    order = (*range(1, t.dim() - 1), 0, t.dim() - 1) if t.dim() > 1 else (0,)
    shuffled = torch.empty([t.shape[i] for i in order], device=t.device, dtype=t.dtype)
    return shuffled.permute([order.index(i) for i in range(t.dim())])


# The first is what the others are held against.
SOURCES: dict[str, Callable[[Given], tuple[Any, dict[str, Tensor]]]] = {
    "tensor": _copied(torch.empty_like),
    "tensor, long rows": _copied(lambda t: _room(t, 0, 3)),
    "tensor, unaligned rows": _copied(lambda t: _room(t, 1, 2)),
    "tensor, every second column": _copied(lambda t: _room(t, 0, 0, 2)),
    "tensor, transposed rows": _copied(_transposed),
    "tensor, columns outermost": _copied(
        lambda t: t.new_empty(t.movedim(-1, 0).shape).movedim(0, -1)
    ),
    "head, one row": _head(1),
    "head, two rows": _head(2),
    "head, all rows": _head(None),
    "head, kept logits": _head(9),  # if there are more than two rows; else it is small
    FROZEN: _head(2, ("hidden",)),
    "head, nothing dropped": _head(2, drop_ignored=False),
    "head, fp32 sums": _head(2, accumulate="fp32"),
    "head, by columns": _cut_by(_CutHead, drop_ignored=DEVICE == "cpu"),
    "head, on chip": _cut_by(_HeadOnChip),
    "head, on chip, nothing dropped": _cut_by(_HeadOnChip, drop_ignored=False),
    "head, split GEMMs": _cut_by(_SplitHead),
    "nn.FusedHead": _fused_head,
    "shards, two": _shards(1),
    "shards, uneven and empty": _shards(2, 0, 1),
}
TENSORS = tuple(name for name in SOURCES if name.startswith("tensor"))
SHARDS = tuple(name for name in SOURCES if name.startswith("shards"))
