"""The checks of `logitless doctor`: one for each family of kernels, and one for stores.

They find a broken driver or a broken build. What a function computes is the subject of tests/.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll

from ..heads import choose_cut
from ..heads.choose_cut import Cut

CLASSES = 16  # the vocabulary of a head
K = 3
LOGP, TAIL = (-1.5, -2.0, -2.5), -0.75  # a teacher's log-probabilities of K ids, and of the others


class Check(NamedTuple):
    """A function of the library, and a formula in PyTorch that is evaluated in fp64.

    Both take logits (N, V), N ids and a second matrix (N, V), and return a floating-point tensor.
    If `differentiable`, the two results are differentiated with respect to the logits.
    """

    name: str
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]
    naive: Callable[[Tensor, Tensor, Tensor], Tensor]
    least: int = 1  # smallest V that the check accepts
    differentiable: bool = True


per_row = partial(F.cross_entropy, reduction="none")


def in_place(x, ids, _):
    return ll.cross_entropy(x * 1, ids, reduction="none", inplace=True)


def row_stats(x, ids, _):
    """The mean logit is checked instead of the sum, which has a larger rounding error."""
    stats = ll.row_stats(x, ids, entropy=True, total=True)
    return torch.stack((stats.lse, stats.picked, stats.entropy, stats.total / x.shape[1]), -1)


def naive_row_stats(x, ids, _):
    logp = x.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = x.gather(-1, ids[:, None])[:, 0]
    return torch.stack((x.logsumexp(-1), picked, entropy, x.mean(-1)), -1)


def naive_jsd(x, _, t):
    p, q = t.log_softmax(-1), x.log_softmax(-1)
    m = torch.logaddexp(p, q) - log(2)
    return sum(F.kl_div(m, s, log_target=True, reduction="none").sum(-1) for s in (p, q)) / 2


def slots_of(x, ids):
    return (ids[:, None] + torch.arange(K, device=x.device)) % x.shape[1]


def distilled(x, ids, _):
    logp = torch.tensor(LOGP, device=x.device).expand(len(ids), K).contiguous()
    teacher = ll.SparseTargets(slots_of(x, ids), logp, torch.full_like(logp[:, 0], TAIL))
    how = {"divergence": "forward_kl", "support": "tail", "reduction": "none"}
    return ll.topk_distill(x, teacher, **how)


def naive_distilled(x, ids, _):
    logq, slots = x.log_softmax(-1), slots_of(x, ids)
    rest = logq.scatter(-1, slots, -torch.inf).logsumexp(-1, keepdim=True)
    logp = x.new_tensor((*LOGP, TAIL))
    return (logp.exp() * (logp - torch.cat((logq.gather(-1, slots), rest), -1))).sum(-1)


def weight_of(other: Tensor, classes: int = CLASSES) -> Tensor:
    """A weight (classes, D) with one nonzero entry per row, 1 or -0.5: logits have no rounding."""
    rows = torch.arange(classes, device=other.device)
    weight = other.new_zeros((classes, other.shape[1]))
    weight[rows, rows % other.shape[1]] = torch.where(rows % 2 == 0, 1.0, -0.5).to(other.dtype)
    return weight


def over_a_head(x, ids, other):
    with choose_cut.override(lambda work: Cut(1)):  # chunks of one row
        return ll.linear_cross_entropy(x, weight_of(other).requires_grad_(), ids % CLASSES)


def on_chip(x, ids, other):
    weight = weight_of(other[:, :16]).requires_grad_()
    logits = ll.LinearLogits(x[:, :16], weight, drop_ignored=False)
    with choose_cut.override(lambda work: Cut(work.rows, on_chip=work.narrow)):
        return ll.cross_entropy(logits, ids % CLASSES)


def naive_over_a_head(x, ids, other, width=None):
    return F.cross_entropy(x[:, :width] @ weight_of(other[:, :width]).T, ids % CLASSES)


def naive_contrastive(x, _, other):
    z = x @ weight_of(other, len(x)).T
    return (z.logsumexp(1) + z.logsumexp(0)) / 2 - z.diagonal()


def stored(x, ids, _):
    """The logits at the ids of a teacher that was written to a store and read back."""
    with tempfile.TemporaryDirectory() as folder:
        with ll.store.Writer(folder, vocab_size=x.shape[1], k=K) as writer:
            writer.add(ids, ll.capture_topk(x.detach(), K))
        _, found = ll.store.Store(folder)[0]
        return x.gather(-1, found.ids.long().to(x.device))


CHECKS = (
    Check(
        "cross_entropy",
        lambda x, ids, _: ll.cross_entropy(x, ids),
        lambda x, ids, _: F.cross_entropy(x, ids),
    ),
    Check(
        "cross_entropy, per row",
        lambda x, ids, _: ll.cross_entropy(x, ids, reduction="none", label_smoothing=0.1),
        lambda x, ids, _: per_row(x, ids, label_smoothing=0.1),
    ),
    Check("cross_entropy, in place", in_place, lambda x, ids, _: per_row(x, ids)),
    Check("row_stats", row_stats, naive_row_stats),
    Check(
        "capture_topk",
        lambda x, *_: ll.capture_topk(x, K).logprobs,
        lambda x, *_: x.log_softmax(-1).topk(K).values,
        least=K,
        differentiable=False,
    ),
    Check("jsd", lambda x, _, t: ll.jsd(x, t, reduction="none"), naive_jsd),
    Check("topk_distill", distilled, naive_distilled, least=K + 1),
    Check("linear_cross_entropy", over_a_head, naive_over_a_head),
    Check("linear_cross_entropy, narrow", on_chip, partial(naive_over_a_head, width=16)),
    Check(
        "contrastive",
        lambda x, _, other: ll.contrastive(x, weight_of(other, len(x)), reduction="none"),
        naive_contrastive,
    ),
    Check("store", stored, lambda x, *_: x.topk(K).values, least=K, differentiable=False),
)
