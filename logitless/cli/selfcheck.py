"""The checks of `logitless doctor`. Each check compares a public function with a naive formula.

tests/cli/test_doctor.py verifies that the checks call every public function and launch every
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll

from ..heads import choose_cut
from ..heads.choose_cut import Cut, Work
from . import formulas
from . import selfcheck_items as items
from .formulas import at, wide
from .selfcheck_items import head_of, labels_of, three_ids


class Check(NamedTuple):
    """A function of the library, and a naive formula that is evaluated in fp64.

    The function and the formula have the same arguments: logits of shape (N, V), N ids and a second
    matrix of shape (N, V). The function returns a floating-point tensor, and so does the formula.
    If `differentiable` is True, these two tensors are differentiated with respect to the logits.
    """

    name: str  # name of the function, followed by ", case" if the function has several checks
    ours: Callable[[Tensor, Tensor, Tensor], Tensor]
    naive: Callable[[Tensor, Tensor, Tensor], Tensor]
    least: int = 1  # smallest V that the check accepts
    differentiable: bool = True


def naive_entropy(x: Tensor) -> Tensor:
    logp = x.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def ignoring(ids: Tensor) -> Tensor:
    """Returns the ids as targets. If there are several rows, the first target is -100 (ignored)."""
    return ids if len(ids) == 1 else ids.index_fill(0, ids.new_zeros(1), -100)


def cross_entropy(name: str, **options) -> Check:
    """Returns a check of `cross_entropy` with the given options."""
    of_formula = {name: value for name, value in options.items() if name != "inplace"}

    def naive(x, ids, _):
        return formulas.cross_entropy(x, ignoring(ids), **of_formula)

    def ours(x, ids, _):
        logits = x * 1 if options.get("inplace") else x
        return ll.cross_entropy(logits, ignoring(ids), reduction="none", **options)

    return Check(name, ours, naive)


LOGP = (-1.5, -2.0, -2.5)  # a teacher's log-probabilities of three ids
TAIL = -0.75  # the log of the teacher's mass outside the three ids


def teacher(x: Tensor, ids: Tensor) -> ll.SparseTargets:
    logp = torch.tensor(LOGP, device=x.device).expand(len(ids), 3).contiguous()
    tail = torch.full((len(ids),), TAIL, device=x.device)
    return ll.SparseTargets(three_ids(ids, x.shape[1]), logp, tail)


def naive_slots(x, ids, _):
    """Returns the KL divergence over three ids and a bucket of all other ids, at temperature 2."""
    log_q = (x / 2).log_softmax(-1)
    picked = three_ids(ids, x.shape[1])
    logp = x.new_tensor(LOGP)
    inside = log_q.gather(-1, picked)
    rest = log_q.scatter(-1, picked, -torch.inf).logsumexp(-1)
    tail = x.new_tensor(TAIL)
    return (logp.exp() * (logp - inside)).sum(-1) + tail.exp() * (tail - rest)


def naive_tail(x, ids, _):
    """Returns `naive_slots` plus 0.5 times the cross-entropy at temperature 1."""
    return naive_slots(x, ids, _) + 0.5 * F.cross_entropy(x, ids, reduction="none")


def naive_renorm(x, ids, _):
    logp = x.new_tensor(LOGP).log_softmax(-1)
    log_q = x.gather(-1, three_ids(ids, x.shape[1])).log_softmax(-1)
    return (logp.exp() * (logp - log_q)).sum(-1)


def in_chunks(work: Work) -> Cut:
    """Cuts a head into chunks of one row each."""
    return Cut(1)


def over_a_head(x, ids, other):
    """Returns the cross-entropy over a head, computed in several chunks."""
    with choose_cut.override(in_chunks):
        return ll.linear_cross_entropy(x, head_of(other).requires_grad_(), ids % 16)


def by_columns(x, ids, other):
    """Returns the cross-entropy over a head that is split into two blocks of columns."""
    logits = ll.LinearLogits(x, head_of(other).requires_grad_())
    with choose_cut.override(lambda work: Cut(work.rows, 8)):
        return ll.cross_entropy(logits, ids % 16)


def on_chip(x, ids, other, **options):
    """Returns the cross-entropy over a narrow head whose logits are never written to memory."""
    weight = head_of(other[:, :16]).requires_grad_()
    logits = ll.LinearLogits(x[:, :16], weight, drop_ignored=False)
    with choose_cut.override(lambda work: Cut(work.rows, on_chip=work.narrow)):
        return ll.cross_entropy(logits, ids % 16, **options)


def invariantly(x, ids, other):
    with ll.invariant():
        return over_a_head(x, ids, other)


def in_fp32(x, ids, other):
    full, weight = torch.promote_types(x.dtype, torch.float32), head_of(other).requires_grad_()
    return ll.linear_cross_entropy(x, weight, ids % 16, logits_dtype=full)


def by_a_fused_model(x, ids, other):
    head = torch.nn.Linear(x.shape[1], 16, bias=False)
    head.weight = torch.nn.Parameter(head_of(other))
    model = ll.fuse(torch.nn.Sequential(head), head="0")
    loss = ll.cross_entropy(model(x), ids % 16)
    ll.unfuse(model)
    return loss


def beside_a_lazy_teacher(x, _, other):
    head = torch.nn.Linear(x.shape[1], 16, bias=False)
    head.weight = torch.nn.Parameter(head_of(other))
    model = ll.fuse(torch.nn.Sequential(head), head="0")
    with torch.no_grad(), ll.lazy_logits():
        teacher = model(other)
    return ll.kl_div(model(x), teacher, direction="forward", reduction="none")


def naive_over_a_head(x, ids, other):
    return F.cross_entropy(x @ head_of(other).T, ids % 16)


def as_a_weight(x, _, other):
    with choose_cut.override(in_chunks):  # `d_weight` is summed over 16 chunks
        return ll.linear_cross_entropy(head_of(other), x, labels_of(x))


def row_stats(x, ids, _):
    """Returns `lse`, `picked` (the logit at the id), `entropy` and the mean logit of each row.

    The mean logit is checked instead of the sum, because the sum has a larger rounding error.
    """
    stats = ll.row_stats(x, ids, entropy=True, total=True, argmax=True)
    statistics = (stats.lse, stats.picked, stats.entropy, stats.total)
    columns = torch.stack([t for t in statistics if t is not None], -1)
    return columns * columns.new_tensor([1, 1, 1, 1 / x.shape[1]])


def merged(x, *_):
    half = x.shape[1] // 2
    whole = ll.merge(ll.partial(x[:, :half]), ll.partial(x[:, half:]))
    return torch.stack((whole.lse, whole.entropy), -1)


def of_scores(x, ids, _):
    return torch.stack(tuple(ll.score(x, ids)[:3]), -1)


def of_kept(x, ids, _):
    """Returns three scores. Each row keeps two ids. One id is repeated, and one slot is empty."""
    kept = F.pad(three_ids(ids, x.shape[1]), (0, 1), value=-1)
    return torch.stack(tuple(ll.kept_scores(x, ids, kept, mass=True)), -1)


def naive_of_kept(x, ids, _):
    """Returns the same scores as `of_kept`. The logits outside the kept ids are set to -inf."""
    inside = torch.zeros_like(x, dtype=torch.bool).scatter(-1, three_ids(ids, x.shape[1]), True)
    log_q = torch.where(inside, x, -torch.inf).log_softmax(-1)
    mass = torch.where(inside, x.log_softmax(-1), -torch.inf).logsumexp(-1)
    entropy = -(log_q.exp() * torch.where(inside, log_q, 0.0)).sum(-1)
    return torch.stack((at(log_q, ids), entropy, mass), -1)


def at_kept(x, ids, _):
    """Returns only the log-probability, computed from the kept logits alone."""
    return ll.kept_scores(x, ids, three_ids(ids, x.shape[1])).logprob


def of_slots(slots):
    """Returns the forward KL divergence over the slots and the tail of each row."""
    p = torch.cat((slots.teacher, slots.teacher_tail.unsqueeze(-1)), -1)
    q = torch.cat((slots.student, slots.student_tail.unsqueeze(-1)), -1)
    return (p.exp() * (p - q)).sum(-1)


def with_scores(x, ids, _):
    """Returns the loss and three scores for each row. Only the loss has a gradient."""
    loss, scores = ll.cross_entropy_and_scores(x, ids, reduction="none")
    return torch.stack((loss, *scores[:3]), -1)


def naive_with_scores(x, ids, _):
    scores = [t.detach() for t in formulas.score(x, ids)[:3]]
    return torch.stack((formulas.cross_entropy(x, ids), *scores), -1)


CHECKS = (
    Check("logsumexp", lambda x, *_: ll.logsumexp(x), lambda x, *_: x.logsumexp(-1)),
    Check("entropy", lambda x, *_: ll.entropy(x), lambda x, *_: naive_entropy(x)),
    Check(
        "token_logprobs",
        lambda x, ids, _: ll.token_logprobs(x, ids),
        lambda x, ids, _: at(x.log_softmax(-1), ids),
    ),
    Check(
        "token_logprobs, several ids",
        lambda x, ids, _: ll.token_logprobs(x, three_ids(ids, x.shape[1])),
        lambda x, ids, _: x.log_softmax(-1).gather(-1, three_ids(ids, x.shape[1])),
    ),
    Check("score", of_scores, lambda x, ids, _: torch.stack(formulas.score(x, ids)[:3], -1)),
    Check("kept_scores", at_kept, lambda x, ids, _: naive_of_kept(x, ids, _)[:, 0]),
    Check("kept_scores, mass", of_kept, naive_of_kept),
    Check(
        "row_stats",
        row_stats,
        lambda x, ids, _: torch.stack(
            (x.logsumexp(-1), at(x, ids), naive_entropy(x), x.mean(-1)), -1
        ),
    ),
    Check(
        "row_loss",
        lambda x, ids, _: ll.row_loss(lambda s: s.lse.sin() - s.logprob, x, ids, reduction="none"),
        lambda x, ids, _: x.logsumexp(-1).sin() - at(x.log_softmax(-1), ids),
    ),
    Check(
        "partial", lambda x, *_: ll.partial(x).lse, lambda x, *_: x.logsumexp(-1)
    ),
    Check(
        "merge", merged, lambda x, *_: torch.stack((x.logsumexp(-1), naive_entropy(x)), -1)
    ),
    cross_entropy("cross_entropy"),
    cross_entropy("cross_entropy, smoothed", label_smoothing=0.1),
    cross_entropy(
        "cross_entropy, every option", softcap=5.0, temperature=0.7, z_loss=1e-3
    ),
    cross_entropy("cross_entropy, in place", inplace=True),
    Check("cross_entropy_and_scores", with_scores, naive_with_scores),
    Check(
        "VocabShard",
        lambda x, ids, _: ll.cross_entropy(ll.VocabShard(x, vocab=x.shape[1]), ids),
        lambda x, ids, _: F.cross_entropy(x, ids),
    ),
    Check(
        "global_mean",
        lambda x, ids, _: ll.global_mean(ll.cross_entropy(x, ids, reduction="sum"), len(ids)),
        lambda x, ids, _: F.cross_entropy(x, ids),
    ),
    Check("linear_cross_entropy", over_a_head, naive_over_a_head),
    Check("linear_cross_entropy, columns", by_columns, naive_over_a_head),
    Check(
        "linear_cross_entropy, narrow",
        on_chip,
        lambda x, ids, other: naive_over_a_head(x[:, :16], ids, other[:, :16]),
    ),
    Check(
        "linear_cross_entropy, smoothed",
        partial(on_chip, label_smoothing=0.1),
        lambda x, ids, other: F.cross_entropy(
            x[:, :16] @ head_of(other[:, :16]).T, ids % 16, label_smoothing=0.1
        ),
    ),
    Check("linear_cross_entropy, fp32", in_fp32, naive_over_a_head),
    Check("contrastive", items.by_pairs, items.naive_by_pairs),
    Check("sigmoid_contrastive", items.by_sigmoids, items.naive_by_sigmoids),
    Check("sampled_softmax", items.over_own, items.naive_over_own),
    Check("sampled_softmax, shared", items.over_shared, items.naive_over_shared),
    Check("sampled_softmax, table", items.of_a_table, items.naive_of_a_table),
    Check("invariant", invariantly, naive_over_a_head),
    Check("fuse", by_a_fused_model, naive_over_a_head),
    Check(
        "lazy_logits",
        beside_a_lazy_teacher,
        lambda x, _, t: formulas.kl_div(x @ head_of(t).T, t @ head_of(t).T, "forward"),
    ),
    Check(
        "linear_cross_entropy, weight",
        as_a_weight,
        lambda x, _, other: F.cross_entropy(head_of(other) @ x.T, labels_of(x)),
    ),
    Check(
        "kl_div",
        lambda x, _, t: ll.kl_div(x, t, direction="forward", reduction="none"),
        lambda x, _, t: formulas.kl_div(x, t, "forward"),
    ),
    Check(
        "jsd",
        lambda x, _, t: ll.jsd(x, t, reduction="none"),
        lambda x, _, t: formulas.jsd(x, t),
    ),
    Check(
        "tvd",
        lambda x, _, t: ll.tvd(x, t, reduction="none"),
        lambda x, _, t: formulas.tvd(x, t),
    ),
    Check(
        "soft_cross_entropy",
        lambda x, _, t: ll.soft_cross_entropy(x, wide(t).softmax(-1), reduction="none"),
        lambda x, _, t: -(t.softmax(-1) * x.log_softmax(-1)).sum(-1),
    ),
    Check(
        "topk_distill, tail and a label",
        lambda x, ids, _: ll.topk_distill(
            x, teacher(x, ids), divergence="forward_kl", support="tail", temperature=2.0,
            labels=ids, ce_weight=0.5, reduction="none",
        ),
        naive_tail,
        least=3,
    ),
    Check(
        "topk_distill, renorm",
        lambda x, ids, _: ll.topk_distill(
            x, teacher(x, ids), divergence="forward_kl", support="renorm", reduction="none"
        ),
        naive_renorm,
        least=3,
    ),
    Check(
        "slot_loss",
        lambda x, ids, _: ll.slot_loss(
            of_slots, x, teacher(x, ids), temperature=2.0, reduction="none"
        ),
        naive_slots,
        least=3,
    ),
    Check(
        "gathered_kl",
        lambda x, _, t: ll.gathered_kl(x, wide(t).log_softmax(-1), reduction="none"),
        lambda x, _, t: formulas.kl_div(x, t, "forward"),
    ),
    Check(
        "capture_topk",
        lambda x, *_: ll.capture_topk(x, 3).logprobs,
        lambda x, *_: x.log_softmax(-1).topk(3).values,
        least=3,
        differentiable=False,
    ),
    Check(
        "capture_sampled",
        items.outside_draws,
        lambda x, *_: x.new_zeros((len(x), items.DRAWS)),
        differentiable=False,
    ),
)  # fmt: skip
