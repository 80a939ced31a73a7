"""Calls of every public function that reads logits, for tests that cover all functions.

Each call takes a source of logits (6, 37), a tensor or a head, and returns a tuple of tensors.
"""

from collections.abc import Callable

import torch

import logitless as ll
from tests.support.sizes import DEVICE

N, D, V, K = 6, 5, 37, 4


def normal(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


IDS = torch.randint(V, (N, K), generator=torch.Generator().manual_seed(3)).to(DEVICE)
TARGET = IDS[:, 0].index_fill(0, torch.tensor([2], device=DEVICE), -100)
# Row 0 has an empty slot, row 1 repeats its target, and row 3 keeps only its target.
KEPT = IDS.clone()
KEPT[0, 1], KEPT[1, 3], KEPT[3, 1:] = -1, IDS[1, 0], -1
ROWS = normal(N, seed=5).abs() + 0.5
MASK = torch.tensor([True, False, True, True, True, True], device=DEVICE)
CLASSES = normal(V, seed=6).abs()
TEACHER = normal(N, V, seed=7)
SPARSE = ll.capture_topk(normal(N, V, seed=4), K)


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


def calls_of(ll) -> dict[str, Callable]:
    """Calls of the functions of `ll`, which is this library or a namespace with the same names."""

    def distill(divergence, support, **how):
        how |= {"divergence": divergence, "support": support}
        return lambda x: (ll.topk_distill(x, SPARSE, **how),)

    def scored(found):
        loss, scores = found
        return loss, *(t for t in scores if t is not None)

    return {
        "logsumexp": lambda x: (ll.logsumexp(x),),
        "entropy": lambda x: (ll.entropy(x, temperature=2.0),),
        "token_logprobs": lambda x: (ll.token_logprobs(x, IDS[:, 1]),),
        "token_logprobs, K ids": lambda x: (ll.token_logprobs(x, IDS, softcap=3.0),),
        "score": lambda x: tuple(ll.score(x, TARGET, temperature=ROWS, rank=True)),
        "kept_scores": lambda x: tuple(ll.kept_scores(x, TARGET, KEPT, temperature=ROWS)[:2]),
        "kept_scores, mass": lambda x: tuple(
            ll.kept_scores(x, TARGET, KEPT, softcap=3.0, temperature=2.0, mass=True)
        ),
        "row_stats": lambda x: tuple(
            t for t in ll.row_stats(x, IDS, entropy=True, total=True, argmax=True, rank=True)
        ),
        "row_loss": lambda x: (
            ll.row_loss(formula, x, IDS[:, 1], rows=(ROWS,), entropy=True, row_weight=ROWS),
        ),
        "row_loss, more": lambda x: ll.row_loss(
            with_more, x, TARGET, rows=(ROWS,), entropy=True, argmax=True, ignore_index=-100
        ),
        "group_loss": lambda x: (
            ll.group_loss(
                lambda stats, old: formula(stats, old) - stats.lse, x, TARGET, rows=(ROWS,),
                entropy=True,
            ),
        ),
        "group_loss, packed": lambda x: ll.group_loss(
            group_formula, x, TARGET, groups=[2, 1, 3], rows=(ROWS, ROWS[:3]), temperature=ROWS,
        ),
        "slot_loss": lambda x: (
            ll.slot_loss(slot_formula, x, SPARSE, rows=(ROWS,), labels=TARGET, row_weight=ROWS),
        ),
        "slot_loss, no tail": lambda x: (
            ll.slot_loss(
                lambda slots: (slots.teacher - slots.student).square().sum(-1), x, SPARSE,
                tail=False, softcap=3.0, temperature=2.0,
            ),
        ),
        "cross_entropy": lambda x: (ll.cross_entropy(x, TARGET),),
        "cross_entropy, none": lambda x: (ll.cross_entropy(x, TARGET, reduction="none"),),
        "cross_entropy, every option": lambda x: (
            ll.cross_entropy(
                x, TARGET, weight=CLASSES, label_smoothing=0.1, z_loss=0.01, softcap=4.0,
                temperature=ROWS, row_weight=ROWS,
            ),
        ),
        "cross_entropy, in place": lambda x: (
            ll.cross_entropy(x, TARGET, weight=CLASSES, row_weight=ROWS, inplace=True),
        ),
        "cross_entropy, in place, every option": lambda x: (
            ll.cross_entropy(
                x, TARGET, label_smoothing=0.1, z_loss=0.01, softcap=4.0, temperature=2.0,
                inplace=True,
            ),
        ),
        "cross_entropy_and_scores": lambda x: scored(
            ll.cross_entropy_and_scores(x, TARGET, temperature=ROWS)
        ),
        "cross_entropy_and_scores, every option": lambda x: scored(
            ll.cross_entropy_and_scores(
                x, TARGET, weight=CLASSES, label_smoothing=0.1, z_loss=0.01, softcap=4.0,
                temperature=2.0, row_weight=ROWS, reduction="none", rank=True,
            )
        ),
        "cross_entropy_and_scores, in place": lambda x: scored(
            ll.cross_entropy_and_scores(x, TARGET, label_smoothing=0.1, inplace=True)
        ),
        "kl_div": lambda x: (ll.kl_div(x, TEACHER, direction="forward", mask=MASK),),
        "kl_div, reverse": lambda x: (
            ll.kl_div(x, TEACHER, direction="reverse", temperature=ROWS, t_squared=True),
        ),
        "kl_div, skewed": lambda x: (
            ll.kl_div(x, TEACHER, direction="forward", skew=0.1, mask=MASK, reduction="none"),
        ),
        "kl_div, skewed reverse": lambda x: (
            ll.kl_div(x, TEACHER, direction="reverse", skew=0.3, temperature=ROWS),
        ),
        "jsd": lambda x: (ll.jsd(x, TEACHER, beta=0.3, temperature=2.0, t_squared=True),),
        "tvd": lambda x: (ll.tvd(x, TEACHER, temperature=ROWS, mask=MASK, reduction="none"),),
        "soft_cross_entropy": lambda x: (
            ll.soft_cross_entropy(x, TEACHER.softmax(-1), weight=CLASSES, label_smoothing=0.1),
        ),
        "topk_distill": distill("forward_kl", "tail", row_weight=ROWS),
        "topk_distill, reverse": distill("reverse_kl", "truncate", temperature=2.0, t_squared=True),
        "topk_distill, jsd": distill("jsd", "tail", beta=0.3, temperature=ROWS, t_squared=True),
        "topk_distill, with labels": distill(
            "jsd", "renorm_teacher", labels=TARGET, ce_weight=0.5, temperature=2.0
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


def outcome(name: str, source: str, dtype=torch.float32) -> list[torch.Tensor]:
    """The results of a call, and the gradients of the tensors of its source."""
    parts = [t.requires_grad_() for t in leaves(source, dtype)]
    found = CALLS[name](made(source, parts))
    if name in NOT_DIFFERENTIABLE:
        return list(found)
    real = [t for t in found if t.is_floating_point()]
    scalar = sum((t.double() * (i + 1)).sum() for i, t in enumerate(real))
    return [t.detach() for t in found] + list(torch.autograd.grad(scalar, parts))
