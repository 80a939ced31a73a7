"""Divergences over the K slots of each row, and their gradients, in plain PyTorch.

kernels/at_ids/slot_divergence.py gives the formulas, and explains the values of `support`.
"""

import torch
from torch import Tensor

from ..contract import (
    A_IDS,
    COEFFICIENTS,
    D_LOGPROB_T1,
    LOG_ROUNDING,
    PRECISION,
    RENORM_STUDENT,
    RENORM_TEACHER,
    A,
    Coefficients,
    Reading,
    Slots,
    at_the_ends,
)
from .rows import live_rows, tail_coefficients


def slots(
    student: Tensor,  # (..., K), log q, or logits if the support is in RENORM_STUDENT
    reading: Reading,
    sparse: Slots,
    tail: Tensor | None = None,  # (...), log of the student's mass outside the slots
    logprob_t1: Tensor | None = None,  # (...), log q of the label at temperature 1
    temperature: float | Tensor | None = None,  # temperature of the student's logits, () or (...)
) -> tuple[Tensor, Coefficients]:
    """Returns kd_weight · row_weight · divergence - ce_weight · logprob_t1 of each row, and the
    coefficients of the backward formula.
    """
    dtype, K = PRECISION[student.dtype], student.shape[-1]
    shape = student.shape[:-1]
    log_q, log_p = (t.reshape(-1, K).to(dtype) for t in (student, sparse.teacher))
    live = live_rows(reading)
    mask_q = mask = None if live is None else live[:, None].expand(log_q.shape)
    if sparse.mask is not None:
        mask = sparse.mask.reshape(-1, K) if live is None else sparse.mask.reshape(-1, K) & mask_q
    # "gathered": the student's softmax is over all slots, even masked ones
    if sparse.support != "gathered":
        mask_q = mask
    tail = None if tail is None else tail.reshape(-1).to(dtype)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1, 1).to(dtype)
    value, g, g_tail = _compare(log_q, log_p, mask_q, mask, tail, sparse, temperature)
    weight = sparse.kd_weight
    if sparse.row_weight is not None:
        weight = weight * sparse.row_weight.reshape(-1, 1).to(dtype)
    weight = torch.as_tensor(weight, dtype=dtype, device=value.device).expand(value.shape[0], 1)
    value, g = value * weight[:, 0], g * weight
    rows = torch.zeros((value.shape[0], COEFFICIENTS), dtype=dtype, device=value.device)
    has = ()
    # g is the gradient with respect to log q = z - lse at the slots, so that of every logit has the
    # term -softmax(z) Σ g
    if sparse.support not in RENORM_STUDENT:
        rows[:, A], has = -g.sum(1), ("a",)
    if g_tail is not None:
        g_tail = g_tail * weight[:, 0]
        rows[:, A], rows[:, A_IDS] = tail_coefficients(rows[:, A], g_tail, tail)
        has = ("a", "a_ids")
    if sparse.ce_weight:
        value = value - sparse.ce_weight * logprob_t1.reshape(-1)
        rows[:, D_LOGPROB_T1], has = -sparse.ce_weight, (*has, "logprob_t1")
    if live is not None:
        value = torch.where(live, value, 0.0)
        rows.masked_fill_(~live[:, None], 0)
    # cloned for autograd, as in `pair_read`
    return value.view(shape).clone(), Coefficients(rows, has, g.view(student.shape))


def _compare(
    log_q: Tensor,  # (N, K)
    log_p: Tensor,  # (N, K)
    mask_q: Tensor | None,  # (N, K), True for slots in the student's softmax
    mask: Tensor | None,  # (N, K), True for unmasked slots of rows that are not ignored
    log_q_tail: Tensor | None,  # (N,)
    sparse: Slots,
    temperature: float | Tensor | None,  # a number or (N, 1)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the divergence of each row, and its gradients by `log_q` and `log_q_tail`."""
    if log_q.shape[1] == 0:  # rows without slots have a divergence of 0
        value = log_q.new_zeros(log_q.shape[0])
        return value, log_q.clone(), None if log_q_tail is None else torch.zeros_like(value)
    divergence, beta = at_the_ends(sparse.divergence, sparse.beta)
    if mask_q is not None:
        log_q = torch.where(mask_q, log_q, -torch.inf)
    if mask is not None:
        log_p = torch.where(mask, log_p, -torch.inf)
    if sparse.support in RENORM_TEACHER:
        log_p, _ = _normalised(log_p)
    has_mass = None
    if sparse.support in RENORM_STUDENT:
        log_q, has_mass = _normalised(log_q, temperature)
    q = log_q.exp()
    f, g = _terms(log_p, log_p.exp(), log_q, q, divergence, beta)
    value = f.sum(-1)
    if has_mass is not None:  # the gradient is 0 if the student has no mass on the slots
        g = torch.where(has_mass, g - q * g.sum(-1, keepdim=True), 0.0)
        g = g if temperature is None else g / temperature
    if mask_q is not None:
        g = torch.where(mask_q, g, 0.0)
    if log_q_tail is None:
        return value, g, None

    log_p = rest(log_p) if sparse.tail is None else sparse.tail.reshape(-1).to(log_q.dtype)
    # The teacher's p may be stored in 16 bits, so its tail below LOG_ROUNDING can be a rounding
    # error: it counts as empty where the student's is.
    no_tail = (log_q_tail == -torch.inf) & (log_p < LOG_ROUNDING)
    log_p = torch.where(no_tail, -torch.inf, log_p)
    f, g_tail = _terms(log_p, log_p.exp(), log_q_tail, log_q_tail.exp(), divergence, beta)
    if mask is not None:  # if all slots of a row are masked, its tail adds 0
        counts = mask.any(-1)
        f, g_tail = (torch.where(counts, t, 0.0) for t in (f, g_tail))
    return value + f, g, g_tail


def _normalised(y: Tensor, temperature: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns log softmax(y / temperature), and a mask (..., 1) of rows that are not all -inf."""
    top = y.amax(-1, keepdim=True)
    # before dividing by the temperature, which would cost digits under a large common offset
    d = y - torch.where(top.isinf(), 0.0, top)
    d = d if temperature is None else d / temperature
    s = d.exp().sum(-1, keepdim=True)
    return d - torch.where(s == 0, 1.0, s).log(), s != 0


def rest(log_p: Tensor) -> Tensor:
    """Returns log(1 - Σ p) of each row, or -inf where Σ p ≥ 1.

    1 - max p is computed as -expm1(log p), which keeps its digits.
    """
    top, at = log_p.max(-1, keepdim=True)
    outside = -top.expm1().squeeze(-1) - log_p.exp().scatter(-1, at, 0.0).sum(-1)
    return torch.where(outside <= 0, -torch.inf, outside.log())


def _terms(log_p, p, log_q, q, divergence, beta):
    """Returns f and g of kernels/at_ids/slot_divergence.py."""
    if divergence == "forward_kl":
        return torch.where(p == 0, 0.0, p * (log_p - log_q)), -p
    if divergence == "reverse_kl":
        f = torch.where(q == 0, 0.0, q * (log_q - log_p))
        return f, f + q
    if divergence == "jsd":
        u = log_q - log_p
        # full_like keeps the dtype; `torch.where` of two Python numbers would return the default
        # dtype
        share = torch.full_like(u, 1 - beta).masked_fill(u > 0, beta)
        log_m = torch.log1p(share * torch.expm1(-u.abs()))
        f_p = torch.where(p == 0, 0.0, p * (-u.clamp(min=0) - log_m))
        f_q = torch.where(q == 0, 0.0, q * (u.clamp(max=0) - log_m))
        return beta * f_p + (1 - beta) * f_q, (1 - beta) * f_q
    assert divergence == "tvd", divergence
    slope = torch.where(log_q == log_p, 0.0, torch.where(log_q > log_p, q, -q))
    return 0.5 * (p - q).abs(), 0.5 * slope
