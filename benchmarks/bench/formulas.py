"""Naive PyTorch formulas for the library's functions, and the errors of results against fp64.

A formula maps logits (n, V) and tensors with one entry per row to numbers or ids for each row.
They are timed in the dtype of the logits, as the contender "eager". `errors` evaluates and
differentiates them in fp64, a few rows at a time to save memory.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
CLIP = 0.2  # ratios of new to old probabilities are clipped to [1 - CLIP, 1 + CLIP]
ENTROPY_BONUS = 0.01  # `objective` turns the results of `score` into -(logprob + 0.01 · entropy)
ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # largest number of fp64 logits in memory at once

# Bounds on the errors of logitless: of a value relative to max(1, |value|), of a gradient d with
# fp64 reference r as ‖d - r‖ / ‖r‖. Other libraries get ten times as much, because some compute or
# return the loss in the dtype of the logits.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4}
# Factors on TOLERANCE for ops that clip probability ratios. Beyond the limit, a token gets no
# gradient, and near it, rounding errors of 16-bit logits decide: even the PyTorch formula of
# `policy_loss` has an error of 4e-2.
CLIPPED = {"policy_loss": 5}


class Inputs(NamedTuple):
    """The arguments of an op. The call is op(*leaves, *rows, **options)."""

    leaves: tuple[Tensor, ...]  # (rows, vocab) logits; or hidden states and the weight of a head
    rows: tuple[Tensor, ...]  # tensors with one entry per row of logits
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
    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)


def topk_distill(
    x, ids, logprobs, tail, labels=None, *, divergence, support, temperature=1.0,
    ce_weight=0.0, kd_weight=1.0,
):  # fmt: skip
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


def tvd(x, teacher):
    return 0.5 * (wide(x).softmax(-1) - wide(teacher).softmax(-1)).abs().sum(-1)


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
    "tvd": tvd,
    "soft_cross_entropy": lambda x, p: F.cross_entropy(x.to(p), p, reduction="none"),
}
BY_ROW = {"logsumexp", "score", "capture_topk"}  # ops with results per row; other ops return a mean


def objective(op: str, out) -> Tensor:
    """The tensor to differentiate, for `score` a weighted sum of the results."""
    return -(out[0] + ENTROPY_BONUS * out[1]) if op == "score" else out


def denominator(target: Tensor, weight: Tensor | None = None, **_) -> Tensor | int:
    """The divisor of a mean loss: the number, or total class weight, of rows not ignored."""
    kept = target[target != IGNORED]
    return len(kept) if weight is None else weight.double()[kept].sum()


def errors(op: str, inputs: Inputs, out, grads: tuple[Tensor, ...]) -> tuple[float, float | None]:
    """The error of the output, and that of the gradients, or None without gradients."""
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
        row_inputs = [t[block].double() if t.is_floating_point() else t[block] for t in rows]
        exact = FORMULAS[op](z, *row_inputs, **inputs.options)
        if op in BY_ROW:
            pairs = zip(as_tuple(out), as_tuple(exact), strict=True)
            gaps = [gap(z, ours[block], right, exact_logits=not head) for ours, right in pairs]
            value = torch.stack([value, *gaps]).max()
        if op not in BY_ROW or grads:
            loss = objective(op, exact).sum() / count
            total += loss.detach()
        if grads:
            loss.backward()  # also accumulates the gradient of the head's weight
            off += (grads[0][block].double() - leaf.grad).square().sum()
            norm += leaf.grad.square().sum()
    value = distance(out, total) if op not in BY_ROW else value
    if not grads:
        return value.item(), None
    gaps = [(off / norm).sqrt()]
    for d_weight, weight in zip(grads[1:], head, strict=True):
        gaps.append((d_weight.double() - weight.grad).norm() / weight.grad.norm())
    return value.item(), torch.stack(gaps).max().item()


def as_tuple(out) -> tuple[Tensor, ...]:
    """The results of an op that were requested, as a tuple."""
    return (out,) if isinstance(out, Tensor) else tuple(t for t in out if t is not None)


def gap(z: Tensor, got: Tensor, right: Tensor, *, exact_logits: bool) -> Tensor:
    """The largest error in `got`, a tensor of numbers or ids.

    The error of an id is the difference between its logit and that of the right id, so that ties
    are right. If the logits `z` have no rounding errors (`exact_logits`), any difference is
    infinite.
    """
    if got.is_floating_point():
        return distance(got, right)
    off = distance(*(z.gather(-1, ids.reshape(len(z), -1).long()) for ids in (got, right)))
    return off.where(off == 0, torch.inf) if exact_logits else off


def distance(got: Tensor, right: Tensor) -> Tensor:
    """The largest error of `got`, relative to max(1, |right|)."""
    right = right.detach()
    return ((got.detach().double() - right).abs() / right.abs().clamp(min=1.0)).max()
