"""The answer in fp64, written as naively as it can be, and how far a contender is from it.

Nothing here uses the library. Rows are taken a few at a time, so that the fp64 copies stay small
beside the logits, and every row is checked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
ENTROPY_BONUS = 0.01  # the scalar that is differentiated for `score`: -(logprob + 0.01 · entropy)
ELEMENTS = {"cpu": 2**22, "cuda": 2**25}  # of fp64 logits alive at once

# Bounds on the error, relative to max(1, |value|), and on ‖d - ref‖ / ‖ref‖ for gradients. A
# contender may return its loss in the dtype of the logits, hence the room in half precision.
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp64": 1e-10}


class Errors(NamedTuple):
    value: float
    grad: float | None

    def worst(self) -> float:
        """NaN, which compares false with everything, counts as infinite."""
        return max(float("inf") if e != e else e for e in (self.value, self.grad or 0.0))


def per_row(op: str, x: Tensor, target: Tensor, options: dict) -> Tensor:
    """The numbers that `op` promises of each row: (n, 1), and (n, 3) for `score`."""
    if cap := options.get("softcap"):
        x = cap * torch.tanh(x / cap)
    z = x / options.get("temperature", 1.0)
    lse = torch.logsumexp(z, -1)
    if op == "logsumexp":
        return lse[:, None]
    logp = z - lse[:, None]
    kept = target != IGNORED
    safe = target.where(kept, 0)
    picked = logp.gather(-1, safe[:, None])[:, 0]
    if op == "score":
        return torch.stack((picked, -(logp.exp() * logp).sum(-1), lse), -1)
    weight = options.get("weight")
    weight = torch.ones_like(x[0]) if weight is None else weight.to(x)
    smooth = options.get("label_smoothing", 0.0)
    loss = -(1 - smooth) * weight[safe] * picked - smooth * (weight * logp).mean(-1)
    loss = loss + options.get("z_loss", 0.0) * lse.square()
    return (loss * kept)[:, None]


def denominator(op: str, target: Tensor, options: dict) -> Tensor:
    """What a mean divides by: the rows that count, or their class weights."""
    kept = target != IGNORED if op == "cross_entropy" else torch.ones_like(target, dtype=torch.bool)
    weight = options.get("weight")
    return kept.sum() if weight is None else weight.double()[target[kept]].sum()


def to_scalar(op: str, numbers: Tensor) -> Tensor:
    """Sum over rows of what is differentiated, from `per_row` or a contender's own columns."""
    if op != "score":
        return numbers.sum()
    return -(numbers[:, 0] + ENTROPY_BONUS * numbers[:, 1]).sum()


def columns(op: str, out) -> Tensor:
    """A contender's output as `per_row` has it; a mean cross-entropy stays a scalar."""
    if op == "cross_entropy":
        return out
    return out[:, None] if op == "logsumexp" else torch.stack(tuple(out[:3]), -1)


def compare(op: str, x: Tensor, target: Tensor, options: dict, out, grad: Tensor | None) -> Errors:
    """Errors of `out` and `grad` for logits x (N, V) against fp64, a block of rows at a time."""
    found = columns(op, out).detach()
    count = denominator(op, target, options)
    step = max(1, ELEMENTS[x.device.type] // x.shape[1])
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    value_error, off, norm = total.clone(), total.clone(), total.clone()
    for start in range(0, len(x), step):
        block = slice(start, start + step)
        z = x[block].detach().double().requires_grad_(grad is not None)
        wanted = per_row(op, z, target[block], options)
        if op == "cross_entropy":
            total += wanted.detach().sum()
        else:
            value_error = torch.maximum(value_error, distance(found[block], wanted))
        if grad is not None:
            (d_z,) = torch.autograd.grad(to_scalar(op, wanted) / count, z)
            off += (grad[block].double() - d_z).square().sum()
            norm += d_z.square().sum()
    if op == "cross_entropy":
        value_error = distance(found, total / count)
    if op == "score":
        best = x.gather(-1, out[3][:, None])[:, 0]  # by value: the largest logit may not be unique
        value_error = value_error.where((best == x.amax(-1)).all(), torch.inf)
    return Errors(value_error.item(), None if grad is None else (off / norm).sqrt().item())


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    wanted = wanted.detach()
    return ((found.double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max()
