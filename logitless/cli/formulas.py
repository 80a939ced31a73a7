"""Each op as one writes it in plain PyTorch, and an answer's distance from that in fp64.

A formula takes logits (n, V) and what belongs to their rows, and returns numbers or ids for each
row: what `doctor` compares with. `bench` times its mean in the dtype of the logits, and checks by
its sum over a few rows at a time in fp64, differentiated by autograd: fp64 copies stay small.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
CLIP = 0.2  # of the ratio of a policy and its older self
ENTROPY_BONUS = 0.01  # the scalar that is differentiated for `score`: -(logprob + 0.01 · entropy)
ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # of fp64 logits alive at once

# Bounds on our error, relative to max(1, |value|), and on ‖d - ref‖ / ‖ref‖ for gradients. Others
# may be off by ten times as much: some compute, or return their loss, in the dtype of the logits.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4}
# Where a ratio is clipped, the rounding of 16-bit logits decides about whole gradients: PyTorch's
# own error is 4e-2 there.
CLIPPED = {"policy_loss": 5}


class Inputs(NamedTuple):
    """What a contender is called with: f(*leaves, *rows, **options)."""

    leaves: tuple[Tensor, ...]  # (rows, vocab) logits; or hidden states and the weight of a head
    rows: tuple[Tensor, ...]  # each with one entry for each row of logits
    options: dict[str, Any]


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(wide(x), -1)


def at(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids[:, None])[:, 0]


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    return F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)


def cross_entropy(
    x, target, weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0
) -> Tensor:
    z = (softcap * torch.tanh(x / softcap) if softcap else x) / temperature
    weight = None if weight is None else weight.to(x)
    loss = F.cross_entropy(z, target, weight, reduction="none", label_smoothing=label_smoothing)
    return loss + z_loss * z.logsumexp(-1).square() * (target != IGNORED)


def score(x, target):
    logp, lse = log_softmax(x), torch.logsumexp(wide(x), -1)
    return at(logp, target), -(logp.exp() * logp).sum(-1), lse, x.argmax(-1)


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
        return kl(log_softmax(logprobs), log_softmax(x.gather(-1, ids)))
    logq = log_softmax(x if temperature == 1 else x / temperature).gather(-1, ids)
    smallest = 1e-15 if logq.dtype == torch.float64 else 1e-7
    rest = torch.log1p(-logq.exp().sum(-1).clamp(max=1 - smallest))
    loss = kl(logprobs, logq) + tail.exp() * (tail - rest)
    return loss if labels is None else ce_weight * cross_entropy(x, labels) + kd_weight * loss


def capture_topk(x, k):
    values, ids = x.topk(k)
    logprobs = wide(values) - wide(x.logsumexp(-1, keepdim=True))
    return ids, logprobs, torch.log1p(-logprobs.exp().sum(-1))


def kl_div(x, teacher, direction):
    pair = log_softmax(teacher), log_softmax(x)
    return kl(*(pair if direction == "forward" else pair[::-1]))


def jsd(x, teacher):
    q, p = log_softmax(x), log_softmax(teacher)
    m = torch.logaddexp(q, p) - log(2)
    return 0.5 * kl(p, m) + 0.5 * kl(q, m)


FORMULAS = {
    "cross_entropy": cross_entropy,
    "logsumexp": lambda x, target: torch.logsumexp(x, -1),
    "score": score,
    "policy_loss": lambda x, target, *rows: clipped(at(log_softmax(x), target), *rows),
    "topk_distill": topk_distill,
    "capture_topk": capture_topk,
    "gathered_kl": lambda x, logp: kl(logp, log_softmax(x)),
    "kl_div": kl_div,
    "jsd": jsd,
    "soft_cross_entropy": lambda x, p: F.cross_entropy(x.to(p), p, reduction="none"),
}
BY_ROW = {"logsumexp", "score", "capture_topk"}  # numbers and ids of each row; the rest are means


def objective(op: str, out) -> Tensor:
    """What is differentiated: the loss, or some of the numbers of each row."""
    return -(out[0] + ENTROPY_BONUS * out[1]) if op == "score" else out


def denominator(target: Tensor, weight: Tensor | None = None, **_) -> Tensor | int:
    """What the mean of a cross-entropy divides by: the rows that count, or their class weights."""
    kept = target[target != IGNORED]
    return len(kept) if weight is None else weight.double()[kept].sum()


def errors(op: str, inputs: Inputs, out, grads: tuple[Tensor, ...]) -> tuple[float, float | None]:
    """Of a contender's output, and of the gradients of its leaves if it has any."""
    x, *head = (leaf.detach() for leaf in inputs.leaves)
    rows = [t.flatten(0, x.dim() - 2) for t in inputs.rows]
    x, grads = x.flatten(0, -2), tuple(grad.flatten(0, -2) for grad in grads)
    head = [weight.double().requires_grad_(bool(grads)) for weight in head]
    count = denominator(*rows, **inputs.options) if op == "cross_entropy" else len(x)
    step = max(1, ELEMENTS[x.device.type] // (len(head[0]) if head else x.shape[1]))
    total, value, off, norm = torch.zeros(4, dtype=torch.float64, device=x.device)
    for block in (slice(start, start + step) for start in range(0, len(x), step)):
        leaf = x[block].double().requires_grad_(bool(grads))
        z = leaf @ head[0].T if head else leaf
        given = [t[block].double() if t.is_floating_point() else t[block] for t in rows]
        wanted = FORMULAS[op](z, *given, **inputs.options)
        if op in BY_ROW:
            pairs = zip(several(out), several(wanted), strict=True)
            gaps = [gap(z, found[block], right, exact=not head) for found, right in pairs]
            value = torch.stack([value, *gaps]).max()
        if op not in BY_ROW or grads:
            loss = objective(op, wanted).sum() / count
            total += loss.detach()
        if grads:
            loss.backward()  # which adds to the gradient of a head's weight
            off += (grads[0][block].double() - leaf.grad).square().sum()
            norm += leaf.grad.square().sum()
    value = distance(out, total) if op not in BY_ROW else value
    if not grads:
        return value.item(), None
    gaps = [(off / norm).sqrt()]
    for d_weight, weight in zip(grads[1:], head, strict=True):
        gaps.append((d_weight.double() - weight.grad).norm() / weight.grad.norm())
    return value.item(), torch.stack(gaps).max().item()


def several(out) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def gap(z: Tensor, found: Tensor, wanted: Tensor, *, exact: bool) -> Tensor:
    """Of two numbers; of two ids, of the logits at them: equal logits may be in any order."""
    if found.is_floating_point():
        return distance(found, wanted)
    off = distance(*(z.gather(-1, ids.reshape(len(z), -1).long()) for ids in (found, wanted)))
    return off.where(off == 0, torch.inf) if exact else off


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.detach()
    return ((found.detach().double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max()
