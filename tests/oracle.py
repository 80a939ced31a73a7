"""Naive fp64 references, straight from the definitions. Imports nothing of ours."""

import torch
from torch import Tensor


def z_of(x: Tensor, temperature=1.0, softcap=None) -> Tensor:
    """z = softcap · tanh(x / softcap) / temperature, in the dtype of x."""
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(x.dtype).unsqueeze(-1) if temperature.dim() else temperature
    return x / temperature


def logsumexp(x, **how):
    return torch.logsumexp(z_of(x, **how), -1)


def token_logprobs(x, ids, **how):
    logp = torch.log_softmax(z_of(x, **how), -1)
    if ids.dim() == x.dim():
        return logp.gather(-1, ids.long())
    return logp.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def entropy(x, **how):
    logp = torch.log_softmax(z_of(x, **how), -1)
    return -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)


def total(x, **how):
    return z_of(x, **how).sum(-1)


def picked(x, ids, **how):
    z = z_of(x, **how)
    if ids.dim() == x.dim():
        return z.gather(-1, ids.long())
    return z.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


def cross_entropy(
    x, target, *, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0,
    softcap=None, temperature=1.0, row_weight=None,
):  # fmt: skip
    """Cross-entropy by its definition, one dense log_softmax, no shortcuts."""
    z = z_of(x, temperature, softcap)
    V = z.shape[-1]
    logp = torch.log_softmax(z, -1)
    v = torch.ones(V, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    live = target != ignore_index
    at = torch.where(live, target, 0).long()
    nll = -logp.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    row = (1 - label_smoothing) * v[at] * nll
    if label_smoothing:
        row = row - label_smoothing / V * (logp * v).sum(-1)
    if z_loss:
        row = row + z_loss * torch.logsumexp(z, -1) ** 2
    if row_weight is not None:
        row = row * row_weight.to(z.dtype)
    row = torch.where(live, row, torch.zeros_like(row))
    if reduction == "none":
        return row
    if reduction == "sum":
        return row.sum()
    mass = (v[at] * live).sum()
    return row.sum() / mass if mass > 0 else row.sum()
