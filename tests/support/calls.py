"""Calls of every public function that reads logits, for tests that cover all functions.

Each call takes a source of logits (6, 37), a tensor or a head, and returns a tuple of tensors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import logitless as ll
from tests.support.sizes import DEVICE

N, D, V, K = 6, 5, 37, 4


def normal(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


class Beside(NamedTuple):
    """What the calls take beside logits (N, V)."""

    ids: Tensor  # (N, K)
    target: Tensor  # (N), the third of six rows is ignored
    kept: Tensor  # (N, K)
    rows: Tensor  # (N), a temperature, or a weight
    groups: list[int]
    of_groups: Tensor  # (3)
    mask: Tensor  # (N)
    classes: Tensor  # (V)
    teacher: Tensor  # (N, V)
    sparse: ll.SparseTargets


def beside(rows: int, vocab: int) -> Beside:
    ids = torch.randint(vocab, (rows, K), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    target, kept = ids[:, 0].clone(), ids.clone()
    target[2::6] = -100
    # Row 0 has an empty slot, row 1 repeats its target, and row 3 keeps only its target.
    kept[0, 1], kept[1::6, 3], kept[3::6, 1:] = -1, ids[1::6, 0], -1
    numbers = normal(max(rows, 3), seed=5).abs() + 0.5
    return Beside(
        ids,
        target,
        kept,
        numbers[:rows],
        [rows // 3, rows // 6, rows - rows // 3 - rows // 6],
        numbers[:3],
        torch.arange(rows, device=DEVICE) != 1,
        normal(vocab, seed=6).abs(),
        normal(rows, vocab, seed=7),
        ll.capture_topk(normal(rows, vocab, seed=4), K),
    )


GIVEN = beside(N, V)
IDS, TARGET, ROWS, MASK = GIVEN.ids, GIVEN.target, GIVEN.rows, GIVEN.mask
CLASSES, TEACHER, SPARSE = GIVEN.classes, GIVEN.teacher, GIVEN.sparse


def formula(stats, old):
    return -(stats.logprob - old).exp() + 0.1 * stats.entropy


def with_more(stats, old):
    return formula(stats, old), stats.logprob - old, stats.argmax, stats.entropy > 1


def group_formula(stats, old, scale):
    """Two groups of three rows: nothing of it is a sum over rows."""
    sums = stats.lse.new_zeros(len(scale)).index_add(0, stats.group, stats.logprob - old)
    return (sums * scale).sigmoid(), sums.detach()


def slot_formula(slots, share):
    """A mixture of forward and reverse KL over the slots and the tails."""
    p = torch.cat((slots.teacher, slots.teacher_tail[:, None]), -1)
    q = torch.cat((slots.student, slots.student_tail[:, None]), -1)
    return ((share[:, None] * p.exp() - q.exp()) * (p - q)).sum(-1)


def calls_of(ll, given: Beside = GIVEN) -> dict[str, Callable]:
    """Calls of the functions of `ll`, which is this library or a namespace with the same names."""
    ids, target, rows, classes = given.ids, given.target, given.rows, given.classes
    mask, teacher, sparse = given.mask, given.teacher, given.sparse

    def distill(divergence, support, **how):
        how |= {"divergence": divergence, "support": support}
        return lambda x: (ll.topk_distill(x, sparse, **how),)

    def scored(found):
        loss, scores = found
        return loss, *(t for t in scores if t is not None)

    return {
        "logsumexp": lambda x: (ll.logsumexp(x),),
        "entropy": lambda x: (ll.entropy(x, temperature=2.0),),
        "token_logprobs": lambda x: (ll.token_logprobs(x, ids[:, 1]),),
        "token_logprobs, K ids": lambda x: (ll.token_logprobs(x, ids, softcap=3.0),),
        "score": lambda x: tuple(ll.score(x, target, temperature=rows, rank=True)),
        "kept_scores": lambda x: tuple(ll.kept_scores(x, target, given.kept, temperature=rows)[:2]),
        "kept_scores, mass": lambda x: tuple(
            ll.kept_scores(x, target, given.kept, softcap=3.0, temperature=2.0, mass=True)
        ),
        "row_stats": lambda x: tuple(
            t for t in ll.row_stats(x, ids, entropy=True, total=True, argmax=True, rank=True)
        ),
        "row_loss": lambda x: (
            ll.row_loss(formula, x, ids[:, 1], rows=(rows,), entropy=True, row_weight=rows),
        ),
        "row_loss, more": lambda x: ll.row_loss(
            with_more, x, target, rows=(rows,), entropy=True, argmax=True, ignore_index=-100
        ),
        "group_loss": lambda x: (
            ll.group_loss(
                lambda stats, old: formula(stats, old) - stats.lse, x, target, rows=(rows,),
                entropy=True,
            ),
        ),
        "group_loss, packed": lambda x: ll.group_loss(
            group_formula, x, target, groups=given.groups, rows=(rows, given.of_groups),
            temperature=rows,
        ),
        "slot_loss": lambda x: (
            ll.slot_loss(slot_formula, x, sparse, rows=(rows,), labels=target, row_weight=rows),
        ),
        "slot_loss, no tail": lambda x: (
            ll.slot_loss(
                lambda slots: (slots.teacher - slots.student).square().sum(-1), x, sparse,
                tail=False, softcap=3.0, temperature=2.0,
            ),
        ),
        "cross_entropy": lambda x: (ll.cross_entropy(x, target),),
        "cross_entropy, none": lambda x: (ll.cross_entropy(x, target, reduction="none"),),
        "cross_entropy, every option": lambda x: (
            ll.cross_entropy(
                x, target, weight=classes, label_smoothing=0.1, z_loss=0.01, softcap=4.0,
                temperature=rows, row_weight=rows,
            ),
        ),
        "cross_entropy, in place": lambda x: (
            ll.cross_entropy(x, target, weight=classes, row_weight=rows, inplace=True),
        ),
        "cross_entropy, in place, every option": lambda x: (
            ll.cross_entropy(
                x, target, label_smoothing=0.1, z_loss=0.01, softcap=4.0, temperature=2.0,
                inplace=True,
            ),
        ),
        "cross_entropy_and_scores": lambda x: scored(
            ll.cross_entropy_and_scores(x, target, temperature=rows)
        ),
        "cross_entropy_and_scores, every option": lambda x: scored(
            ll.cross_entropy_and_scores(
                x, target, weight=classes, label_smoothing=0.1, z_loss=0.01, softcap=4.0,
                temperature=2.0, row_weight=rows, reduction="none", rank=True,
            )
        ),
        "cross_entropy_and_scores, in place": lambda x: scored(
            ll.cross_entropy_and_scores(x, target, label_smoothing=0.1, inplace=True)
        ),
        "kl_div": lambda x: (ll.kl_div(x, teacher, direction="forward", mask=mask),),
        "kl_div, reverse": lambda x: (
            ll.kl_div(x, teacher, direction="reverse", temperature=rows, t_squared=True),
        ),
        "kl_div, skewed": lambda x: (
            ll.kl_div(x, teacher, direction="forward", skew=0.1, mask=mask, reduction="none"),
        ),
        "kl_div, skewed reverse": lambda x: (
            ll.kl_div(x, teacher, direction="reverse", skew=0.3, temperature=rows),
        ),
        "jsd": lambda x: (ll.jsd(x, teacher, beta=0.3, temperature=2.0, t_squared=True),),
        "tvd": lambda x: (ll.tvd(x, teacher, temperature=rows, mask=mask, reduction="none"),),
        "soft_cross_entropy": lambda x: (
            ll.soft_cross_entropy(x, teacher.softmax(-1), weight=classes, label_smoothing=0.1),
        ),
        "topk_distill": distill("forward_kl", "tail", row_weight=rows),
        "topk_distill, reverse": distill("reverse_kl", "truncate", temperature=2.0, t_squared=True),
        "topk_distill, jsd": distill("jsd", "tail", beta=0.3, temperature=rows, t_squared=True),
        "topk_distill, with labels": distill(
            "jsd", "renorm_teacher", labels=target, ce_weight=0.5, temperature=2.0
        ),
        "topk_distill, tvd": distill("tvd", "renorm"),
        "capture_topk": lambda x: tuple(
            getattr(ll.capture_topk(x, K), name) for name in ("ids", "logprobs", "tail")
        ),
    }  # fmt: skip


CALLS = calls_of(ll)
NOT_DIFFERENTIABLE = ("capture_topk",)
SOURCES = ("tensor", "head", "head of two chunks")


def leaves(source: str, dtype=torch.float32):
    """The tensors from which a source is built."""
    if source == "tensor":
        return [normal(N, V, seed=1, dtype=dtype)]
    return [normal(*size, seed=i, dtype=dtype) for i, size in enumerate([(N, D), (V, D), (V,)])]


def made(source: str, parts):
    if source == "tensor":
        return parts[0] * 1  # not a leaf, because a loss in place must not overwrite a leaf
    chunk = None if source == "head" else 3 * V * parts[0].element_size()
    return ll.LinearLogits(*parts, workspace=chunk)


def outcome(
    name: str, source: str, dtype=torch.float32, through: Callable = lambda f, *parts: f(*parts)
) -> list[torch.Tensor]:
    """The results of a call, and the gradients of the tensors of its source."""
    parts = [t.requires_grad_() for t in leaves(source, dtype)]
    found = through(lambda *parts: CALLS[name](made(source, parts)), *parts)
    if name in NOT_DIFFERENTIABLE:
        return list(found)
    real = [t for t in found if t.is_floating_point()]
    scalar = sum((t.double() * (i + 1)).sum() for i, t in enumerate(real))
    return [t.detach() for t in found] + list(torch.autograd.grad(scalar, parts))
