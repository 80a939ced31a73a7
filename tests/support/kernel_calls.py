"""Calls that together launch every kernel, at any size: compiled by aot.py, run by sanitizer.py.

Over logits (N, V), these are the calls of calls.py; over heads of V classes, over pairs of
embeddings and over the rows of a table, those below.
"""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.calls import Beside, beside, calls_of, normal


class Given(NamedTuple):
    x: Tensor  # (N, V), logits
    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    pairs: tuple[Tensor, Tensor]  # (P, D) each
    beside: Beside

    @property
    def target(self) -> Tensor:
        return self.beside.target


def make(rows: int, vocab: int, dtype: torch.dtype, width: int = 64, pairs: int = 5) -> Given:
    sizes = (rows, vocab), (rows, width), (vocab, width), (pairs, width), (pairs, width)
    x, h, w, *both = (
        normal(*size, seed=i, dtype=dtype).requires_grad_() for i, size in enumerate(sizes)
    )
    return Given(x, h, w, tuple(both), beside(rows, vocab))


def over_logits(name: str) -> Callable[[Given], tuple[Tensor, ...]]:
    return lambda g: calls_of(ll, g.beside)[name](g.x * 1)  # not a leaf, for losses in place


def over_a_head(cut: Callable, call: Callable, **how) -> Callable[[Given], tuple[Tensor, ...]]:
    """A call over a head that is cut as `cut` says."""

    def over(g: Given):
        with choose_cut.override(cut):
            return (call(ll.LinearLogits(g.hidden, g.weight, **how), g),)

    return over


def over_a_small_head(call: Callable) -> Callable[[Given], tuple[Tensor, ...]]:
    """A call over a head whose logits are all computed at once."""

    def over(g: Given):
        with mock.patch.object(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 1 << 30)):
            return (call(ll.LinearLogits(g.hidden, g.weight), g),)

    return over


def loss(z, g: Given, **how) -> Tensor:
    return ll.cross_entropy(z, g.target, **how)


def smoothed(z, g: Given) -> Tensor:
    return loss(z, g, label_smoothing=0.1)


def every_statistic(z, g: Given) -> Tensor:
    found = ll.row_stats(z, g.beside.ids, entropy=True, total=True, temperature=g.beside.rows)
    return found.logprob.sum(-1) + found.entropy + found.total


def rows_of_1(work) -> Cut:
    return Cut(1)


def two_blocks(work) -> Cut:
    return Cut(work.rows, -(-work.vocab // 16) * 8) if work.merges else Cut(1)


def on_chip(work) -> Cut:
    """A narrow head whose logits are never written to memory."""
    return Cut(work.rows, on_chip=work.narrow)


def as_a_weight(g: Given):
    """`d_weight` is summed over the chunks of 16 rows."""
    labels = torch.arange(16, device=g.x.device) % len(g.x)
    with choose_cut.override(rows_of_1):
        return (ll.linear_cross_entropy(g.x[:1].expand(16, -1), g.x, labels),)


def invariantly(g: Given):
    with ll.invariant():
        return over_a_head(rows_of_1, loss)(g)


def fused(weight: Tensor) -> torch.nn.Module:
    head = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    return ll.fuse(torch.nn.Sequential(head), head="0")


def beside_a_lazy_teacher(g: Given):
    model = fused(g.weight)
    with torch.no_grad(), ll.lazy_logits():
        teacher = model(g.hidden.flip(0))
    return (ll.kl_div(model(g.hidden), teacher, direction="forward"),)


def merged(g: Given):
    half = g.x.shape[1] // 2
    whole = ll.merge(ll.partial(g.x[:, :half]), ll.partial(g.x[:, half:]))
    return whole.lse, whole.entropy


def contrastive(g: Given, **how):
    a, b = g.pairs
    labels = torch.arange(len(a), device=a.device) % 3
    return (
        ll.contrastive(a, b, reduction="none"),
        ll.contrastive(a, b, labels=(labels, labels), mask=torch.eye(len(a)).to(a) > 1, **how),
    )


def sampled(g: Given, negatives: Tensor, **how):
    found = ll.sampled_softmax(g.hidden, g.weight, g.target, negatives, **how)
    return (found,)


CALLS: dict[str, Callable[[Given], tuple[Tensor, ...]]] = {
    **{name: over_logits(name) for name in calls_of(ll)},
    "merge": merged,
    "VocabShard": lambda g: (loss(ll.VocabShard(g.x, vocab=g.x.shape[1]), g),),
    "gathered_kl": lambda g: (ll.gathered_kl(g.x, g.beside.teacher.log_softmax(-1)),),
    "capture_sampled": lambda g: (ll.capture_sampled(g.x.detach(), 8).logprobs,),
    "head": over_a_head(rows_of_1, loss),
    "head by columns": over_a_head(two_blocks, loss),
    "head, fp32 logits": over_a_head(rows_of_1, loss, logits_dtype=torch.float32),
    "head on chip": over_a_head(on_chip, loss, drop_ignored=False),
    "head on chip, smoothed": over_a_head(on_chip, smoothed, drop_ignored=False),
    "head on chip, every statistic": over_a_head(on_chip, every_statistic, drop_ignored=False),
    "head, sums of a weight": as_a_weight,
    "small head": over_a_small_head(loss),
    "small head, smoothed": over_a_small_head(smoothed),
    "small head, z-loss": over_a_small_head(lambda z, g: loss(z, g, z_loss=0.1, reduction="sum")),
    "invariant": invariantly,
    "fuse": lambda g: (loss(fused(g.weight)(g.hidden), g),),
    "lazy_logits": beside_a_lazy_teacher,
    "contrastive": contrastive,
    "sigmoid_contrastive": lambda g: (ll.sigmoid_contrastive(*g.pairs, bias=-1.0),),
    "sampled_softmax": lambda g: sampled(g, g.beside.ids, reduction="none"),
    "sampled_softmax, shared": lambda g: sampled(g, torch.arange(5, device=g.x.device)),
}


def run(name: str, given: Given, finite: bool = True) -> None:
    """Runs forward and backward of a call, whose gradients must be finite."""
    results = [t for t in CALLS[name](given) if t.requires_grad]
    leaves = [given.x, given.hidden, given.weight, *given.pairs]
    if results:
        ones = [torch.ones_like(t) for t in results]
        found = torch.autograd.grad(results, leaves, ones, allow_unused=True)
        assert not finite or all(d is None or d.isfinite().all() for d in found), name
