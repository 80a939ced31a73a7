"""What PyTorch says: each op as one writes it without a library, and a contender's distance from it
in fp64.

The same functions are timed, in the dtype of the logits, as PyTorch's own contender. Checking takes
a few rows at a time, so that the fp64 copies stay small beside the logits, and takes all of them.
"""

from __future__ import annotations

from math import log
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
ENTROPY_BONUS = 0.01  # the scalar that is differentiated for `score`: -(logprob + 0.01 · entropy)
CLIP = 0.2  # of the ratio of a policy and its older self
ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # of fp64 logits alive at once

# Bounds on our error, relative to max(1, |value|), and on ‖d - ref‖ / ‖ref‖ for gradients. Others
# may be off by ten times as much: some compute, or return their loss, in the dtype of the logits.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4}
# Where a ratio is clipped, the rounding of 16-bit logits decides about whole gradients: PyTorch's
# own error is 4e-2 there.
CLIPPED = {"policy_loss": 5}


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(wide(x), -1)


def cross_entropy(x, target):
    return F.cross_entropy(x, target)


def logsumexp(x, target):
    return torch.logsumexp(x, -1)


def at(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids[:, None])[:, 0]


def score(x, target):
    logp = log_softmax(x)
    lse = torch.logsumexp(wide(x), -1)
    return at(logp, target), -(logp.exp() * logp).sum(-1), lse, x.argmax(-1)


def policy_loss(x, target, old, advantage):
    return clipped(at(log_softmax(x), target), old, advantage).mean()


def clipped(logprob, old, advantage) -> Tensor:
    """Each token's loss in PPO and GRPO."""
    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def topk_distill(
    x, ids, logprobs, tail, labels=None, *, divergence, support, temperature=1.0,
    ce_weight=0.0, kd_weight=1.0,
):  # fmt: skip
    """forward_kl over the ids and the rest in one bucket; or over the ids alone, renormalised."""
    if support == "renorm":
        logp, logq = log_softmax(logprobs), log_softmax(x.gather(-1, ids))
        return (logp.exp() * (logp - logq)).sum(-1).mean()
    logq = log_softmax(x if temperature == 1 else x / temperature).gather(-1, ids)
    smallest = 1e-15 if logq.dtype == torch.float64 else 1e-7
    rest = torch.log1p(-logq.exp().sum(-1).clamp(max=1 - smallest))
    kl = ((logprobs.exp() * (logprobs - logq)).sum(-1) + tail.exp() * (tail - rest)).mean()
    return kl if labels is None else ce_weight * F.cross_entropy(x, labels) + kd_weight * kl


def capture_topk(x, k):
    values, ids = x.topk(k)
    logprobs = wide(values) - wide(x.logsumexp(-1, keepdim=True))
    tail = torch.log1p(-logprobs.exp().sum(-1))
    return SimpleNamespace(ids=ids, logprobs=logprobs, tail=tail)


def gathered_kl(x, logp):
    return (logp.exp() * (logp - log_softmax(x))).sum()


def kl_div(x, teacher, direction):
    pair = log_softmax(x), log_softmax(teacher)
    pair = pair if direction == "forward" else pair[::-1]
    return F.kl_div(*pair, log_target=True, reduction="sum") / len(x)


def jsd(x, teacher):
    q, p = log_softmax(x), log_softmax(teacher)
    m = torch.logaddexp(q, p) - log(2)
    return (0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)).mean()


def soft_cross_entropy(x, probs):
    return F.cross_entropy(x.to(probs), probs)


OPS = {
    f.__name__: f
    for f in (
        *(cross_entropy, logsumexp, score, policy_loss, topk_distill, capture_topk),
        *(gathered_kl, kl_div, jsd, soft_cross_entropy),
    )
}


def per_row(op: str, x: Tensor, target: Tensor, options: dict) -> Tensor:
    """(n, columns): what an op of (logits, target) says of each row."""
    if op == "cross_entropy":
        return cross_entropy_terms(x, target, **options)[:, None]
    return columns(op, OPS[op](x, target, **options))[0]


def cross_entropy_terms(
    x, target, weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0
) -> Tensor:
    """The sum of these over `denominator` is the mean."""
    z = (softcap * torch.tanh(x / softcap) if softcap else x) / temperature
    lse = z.logsumexp(-1)
    logp = z - lse[:, None]
    kept = target != IGNORED
    safe = target.where(kept, 0)
    weight = torch.ones_like(x[0]) if weight is None else weight.to(x)
    loss = -(1 - label_smoothing) * weight[safe] * at(logp, safe)
    loss = loss - label_smoothing * (weight * logp).mean(-1) + z_loss * lse.square()
    return loss * kept


def denominator(target: Tensor, weight: Tensor | None = None, **_) -> Tensor:
    """What a mean divides by: the rows that count, or their class weights."""
    kept = target != IGNORED
    return kept.sum() if weight is None else weight.double()[target[kept]].sum()


def columns(op: str, out) -> tuple[Tensor, Tensor | None]:
    """(n, columns) numbers of each row from what an op returns, and the (n, k) ids it names."""
    if op == "score":
        return torch.stack(tuple(out[:3]), -1), out[3][:, None]
    if op == "capture_topk":
        return torch.cat((out.logprobs, out.tail[:, None]), -1), out.ids
    return out[:, None], None


def scalar(op: str, out) -> Tensor:
    """What is differentiated."""
    return -(out[0] + ENTROPY_BONUS * out[1]).mean() if op == "score" else out


def compare(op: str, inputs, out, grads: tuple[Tensor, ...]) -> tuple[float, float | None]:
    """The errors of a contender's output and of the gradients of its leaves, if it has any."""
    x, rows = inputs.leaves[0], [t.flatten(0, inputs.leaves[0].dim() - 2) for t in inputs.rows]
    x, grads = x.flatten(0, -2), tuple(grad.flatten(0, -2) for grad in grads)
    head = [w.detach().double().requires_grad_(bool(grads)) for w in inputs.leaves[1:]]
    count = denominator(*rows, **inputs.options) if op == "cross_entropy" else len(x)
    found, ids = (None, None) if out_is_scalar(out) else columns(op, out)
    step = max(1, ELEMENTS[x.device.type] // (len(head[0]) if head else x.shape[1]))
    total, value, off, norm = torch.zeros(4, dtype=torch.float64, device=x.device)
    d_head: list[Tensor] = []
    for start in range(0, len(x), step):
        block = slice(start, start + step)
        leaf = x[block].detach().double().requires_grad_(bool(grads))
        z = leaf @ head[0].T if head else leaf
        given = [t[block].double() if t.is_floating_point() else t[block] for t in rows]
        wanted, loss = truth(op, z, given, inputs.options, count)
        total += loss.detach()
        if found is not None:
            value = torch.maximum(value, distance(found[block], wanted))
        if ids is not None:
            value = torch.maximum(value, misplaced(z.detach(), ids[block].long(), exact=not head))
        if grads:
            d_leaf, *d_block = torch.autograd.grad(loss, [leaf, *head])
            off += (grads[0][block].double() - d_leaf).square().sum()
            norm += d_leaf.square().sum()
            d_head = [a.add_(b) for a, b in zip(d_head, d_block, strict=False)] or d_block
    value = distance(out, total) if found is None else value
    gaps = [(off / norm).sqrt()]
    gaps += [(a.double() - b).norm() / b.norm() for a, b in zip(grads[1:], d_head, strict=True)]
    return value.item(), torch.stack(gaps).max().item() if grads else None


def truth(op: str, z: Tensor, rows: list[Tensor], options: dict, count) -> tuple[Tensor, Tensor]:
    """Of some rows of `count`: the numbers of each, and their part of what is differentiated."""
    if op == "cross_entropy":
        terms = cross_entropy_terms(z, *rows, **options)
        return terms, terms.sum() / count
    out = OPS[op](z, *rows, **options)
    share = 1.0 if op == "gathered_kl" else len(z) / count  # the one that is a sum, not a mean
    if out_is_scalar(out):
        return out, share * out
    return columns(op, out)[0], share * scalar(op, out) if op == "score" else z.new_zeros(())


def out_is_scalar(out) -> bool:
    return isinstance(out, Tensor) and out.dim() == 0


def misplaced(z: Tensor, ids: Tensor, *, exact: bool) -> Tensor:
    """How far the logits at these ids are from the largest: by value, as there may be equals."""
    gap = distance(z.gather(-1, ids), z.topk(ids.shape[-1]).values)
    return gap.where(gap == 0, torch.inf) if exact else gap


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.detach()
    return ((found.detach().double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max()
