"""Calls that together launch every kernel, for the tests that run each kernel once.

A call takes logits or embeddings `x` (N, V), N ids and a second matrix (N, V). It returns a tensor
or a tuple of tensors.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut

ITEMS = 16  # the number of rows of a table


def head_of(other: Tensor, classes: int = ITEMS) -> Tensor:
    return other[0].expand(classes, -1).clone()


def three_ids(ids: Tensor, vocab: int) -> Tensor:
    """Three ids per row, of which the first two are equal."""
    return torch.stack((ids, ids, (ids + 1) % vocab), -1)


def teacher(x: Tensor, ids: Tensor) -> ll.SparseTargets:
    logp = torch.tensor((-1.5, -2.0, -2.5), device=x.device).expand(len(ids), 3).contiguous()
    return ll.SparseTargets(three_ids(ids, x.shape[1]), logp, torch.full_like(logp[:, 0], -0.75))


def distilled(x, ids, _, **how):
    how |= {"divergence": "forward_kl", "reduction": "none"}
    return ll.topk_distill(x, teacher(x, ids), **how)


def over_a_head(x, ids, other, cut=lambda work: Cut(1)):
    """A head in chunks of one row."""
    with choose_cut.override(cut):
        return ll.linear_cross_entropy(x, head_of(other).requires_grad_(), ids % ITEMS)


def on_chip(x, ids, other, **how):
    """A narrow head whose logits are never written to memory."""
    weight = head_of(other[:, :16]).requires_grad_()
    logits = ll.LinearLogits(x[:, :16], weight, drop_ignored=False)
    with choose_cut.override(lambda work: Cut(work.rows, on_chip=work.narrow)):
        return ll.cross_entropy(logits, ids % ITEMS, **how)


def invariantly(x, ids, other):
    with ll.invariant():
        return over_a_head(x, ids, other)


def as_a_weight(x, _, other):
    """`d_weight` is summed over 16 chunks."""
    labels = torch.arange(ITEMS, device=x.device) % len(x)
    with choose_cut.override(lambda work: Cut(1)):
        return ll.linear_cross_entropy(head_of(other), x, labels)


def fused(other: Tensor) -> torch.nn.Module:
    head = torch.nn.Linear(other.shape[1], ITEMS, bias=False)
    head.weight = torch.nn.Parameter(head_of(other))
    return ll.fuse(torch.nn.Sequential(head), head="0")


def beside_a_lazy_teacher(x, _, other):
    model = fused(other)
    with torch.no_grad(), ll.lazy_logits():
        teacher = model(other)
    return ll.kl_div(model(x), teacher, direction="forward", reduction="none")


def merged(x, *_):
    half = x.shape[1] // 2
    whole = ll.merge(ll.partial(x[:, :half]), ll.partial(x[:, half:]))
    return whole.lse, whole.entropy


def kept(x, ids, _):
    """Each row keeps two ids, of which one is repeated, and has one empty slot."""
    kept = F.pad(three_ids(ids, x.shape[1]), (0, 1), value=-1)
    return tuple(ll.kept_scores(x, ids, kept, mass=True))


def of_slots(slots):
    return (slots.teacher.exp() * (slots.teacher - slots.student)).sum(-1)


def row_stats(x, ids, _):
    stats = ll.row_stats(x, ids, entropy=True, total=True, argmax=True)
    return stats.lse, stats.picked, stats.entropy, stats.total


def with_scores(x, ids, _):
    loss, scores = ll.cross_entropy_and_scores(x, ids, reduction="none")
    return loss, *scores[:3]


def sampled(hidden, table, target, negatives):
    return ll.sampled_softmax(hidden, table, target, negatives, reduction="none")


def of_a_table(x, _, other):
    target = torch.arange(ITEMS, device=x.device) % len(x)
    return sampled(head_of(other), x, target, three_ids((target + 1) % len(x), len(x)))


CALLS: dict[str, Callable] = {
    "logsumexp": lambda x, *_: ll.logsumexp(x),
    "entropy": lambda x, *_: ll.entropy(x),
    "token_logprobs": lambda x, ids, _: ll.token_logprobs(x, ids),
    "token_logprobs, several ids": lambda x, ids, _: ll.token_logprobs(
        x, three_ids(ids, x.shape[1])
    ),
    "score": lambda x, ids, _: tuple(ll.score(x, ids)[:3]),
    "kept_scores": lambda x, ids, _: ll.kept_scores(x, ids, three_ids(ids, x.shape[1])).logprob,
    "kept_scores, mass": kept,
    "row_stats": row_stats,
    "row_loss": lambda x, ids, _: ll.row_loss(
        lambda s: s.lse.sin() - s.logprob, x, ids, reduction="none"
    ),
    "merge": merged,
    "cross_entropy": lambda x, ids, _: ll.cross_entropy(x, ids, reduction="none"),
    "cross_entropy, mean": lambda x, ids, _: ll.cross_entropy(x, ids),
    "cross_entropy, every option": lambda x, ids, _: ll.cross_entropy(
        x, ids, softcap=5.0, temperature=0.7, z_loss=1e-3, label_smoothing=0.1
    ),
    "cross_entropy, in place": lambda x, ids, _: ll.cross_entropy(
        x * 1, ids, reduction="none", inplace=True
    ),
    "cross_entropy_and_scores": with_scores,
    "VocabShard": lambda x, ids, _: ll.cross_entropy(ll.VocabShard(x, vocab=x.shape[1]), ids),
    "linear_cross_entropy": over_a_head,
    "linear_cross_entropy, columns": lambda *args: over_a_head(
        *args, cut=lambda work: Cut(work.rows, 8)
    ),
    "linear_cross_entropy, narrow": on_chip,
    "linear_cross_entropy, smoothed": lambda *args: on_chip(*args, label_smoothing=0.1),
    "linear_cross_entropy, fp32": lambda x, ids, other: ll.linear_cross_entropy(
        x, head_of(other).requires_grad_(), ids % ITEMS, logits_dtype=torch.float32
    ),
    "linear_cross_entropy, weight": as_a_weight,
    "contrastive": lambda x, ids, other: ll.contrastive(
        x, head_of(other, len(x)), labels=ids % 3, reduction="none"
    ),
    "sigmoid_contrastive": lambda x, _, other: ll.sigmoid_contrastive(
        x, head_of(other, len(x)), bias=-1.0, reduction="none"
    ),
    "sampled_softmax": lambda x, ids, other: sampled(
        x, head_of(other), ids % ITEMS, three_ids((ids + 1) % ITEMS, ITEMS)
    ),
    "sampled_softmax, shared": lambda x, ids, other: sampled(
        x, head_of(other).requires_grad_(), ids % ITEMS, torch.arange(5, device=x.device)
    ),
    "sampled_softmax, table": of_a_table,
    "invariant": invariantly,
    "fuse": lambda x, ids, other: ll.cross_entropy(fused(other)(x), ids % ITEMS),
    "lazy_logits": beside_a_lazy_teacher,
    "kl_div": lambda x, _, t: ll.kl_div(x, t, direction="forward", reduction="none"),
    "jsd": lambda x, _, t: ll.jsd(x, t, reduction="none"),
    "tvd": lambda x, _, t: ll.tvd(x, t, reduction="none"),
    "soft_cross_entropy": lambda x, _, t: ll.soft_cross_entropy(x, t.float().softmax(-1)),
    "topk_distill, tail and a label": lambda x, ids, _: distilled(
        x, ids, _, support="tail", temperature=2.0, labels=ids, ce_weight=0.5
    ),
    "topk_distill, renorm": lambda x, ids, _: distilled(x, ids, _, support="renorm"),
    "slot_loss": lambda x, ids, _: ll.slot_loss(of_slots, x, teacher(x, ids), temperature=2.0),
    "gathered_kl": lambda x, _, t: ll.gathered_kl(x, t.float().log_softmax(-1)),
    "capture_topk": lambda x, *_: ll.capture_topk(x.detach(), 3).logprobs,
    "capture_sampled": lambda x, *_: ll.capture_sampled(x.detach(), 8).logprobs,
}


def run(name: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Runs forward and backward of a call on random inputs."""
    generator = torch.Generator().manual_seed(shape[1])
    x, other = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    ids = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    found = CALLS[name](x.requires_grad_(), ids, other)
    results = (found,) if isinstance(found, Tensor) else found
    results = [t for t in results if t.requires_grad]
    if results:
        (d_x,) = torch.autograd.grad(results, x, [torch.ones_like(t) for t in results])
        assert d_x.isfinite().all(), name
