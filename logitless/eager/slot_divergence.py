"""A divergence over the K slots of each row, and its gradient, in plain PyTorch.

The same contract as kernels/slot_divergence.py, which has the formulas.
"""

import torch
from torch import Tensor

from ..contract import (
    A_IDS,
    COEFFICIENTS,
    D_LOGPROB_T1,
    LEAST_TAIL,
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
from .rows import lift_of, live_rows


def slots(
    student: Tensor,  # (..., K), log q; logits for the supports that normalise the student
    reading: Reading,
    sparse: Slots,
    tail: Tensor | None = None,  # (...), log mass of the student outside the slots
    logprob_t1: Tensor | None = None,  # (...), log p of the label at temperature 1
    temperature: float | Tensor | None = None,  # of the student's logits; one for all or (...)
) -> tuple[Tensor, Coefficients]:
    """kd_weight · divergence - ce_weight · logprob_t1 of each row, (...), and its coefficients."""
    dtype, K = PRECISION[student.dtype], student.shape[-1]
    shape = student.shape[:-1]
    log_q, log_p = (t.reshape(-1, K).to(dtype) for t in (student, sparse.teacher))
    live = live_rows(reading)
    mask_q = mask = None if live is None else live[:, None].expand(log_q.shape)
    if sparse.mask is not None:
        mask = sparse.mask.reshape(-1, K) if live is None else sparse.mask.reshape(-1, K) & mask_q
    if sparse.support != "gathered":  # where the student has all slots
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
    if sparse.support not in RENORM_STUDENT:  # log q = z - lse, whose gradient has -p Σ g
        rows[:, A], has = -g.sum(1), ("a",)
    if g_tail is not None:  # d tail / dz_i = p_i / e^tail - p_i outside, -p_i inside
        g_tail = g_tail * weight[:, 0]
        rows[:, A_IDS] = rows[:, A] - g_tail
        rows[:, A] = rows[:, A_IDS] * lift_of(tail).exp()
        rows[:, A] += g_tail * (-tail.clamp(min=LEAST_TAIL)).exp()
        has = ("a", "a_ids")
    if sparse.ce_weight:
        value = value - sparse.ce_weight * logprob_t1.reshape(-1)
        rows[:, D_LOGPROB_T1], has = -sparse.ce_weight, (*has, "logprob_t1")
    if live is not None:
        value = torch.where(live, value, 0.0)
        rows.masked_fill_(~live[:, None], 0)
    # Cloned, because a user may not write to a view that an autograd function returns.
    return value.view(shape).clone(), Coefficients(rows, has, g.view(student.shape))


def _compare(
    log_q: Tensor,  # (N, K)
    log_p: Tensor,  # (N, K)
    mask_q: Tensor | None,  # (N, K), slots of the student
    mask: Tensor | None,  # (N, K), slots that count
    log_q_tail: Tensor | None,  # (N,)
    sparse: Slots,
    temperature: float | Tensor | None,  # a number or (N, 1)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The divergence of each row, (N,), and its gradients by log_q and log_q_tail."""
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
    if has_mass is not None:  # a student without any mass has no gradient
        g = torch.where(has_mass, g - q * g.sum(-1, keepdim=True), 0.0)
        g = g if temperature is None else g / temperature
    if mask_q is not None:
        g = torch.where(mask_q, g, 0.0)
    if log_q_tail is None:
        return value, g, None

    log_p = _rest(log_p) if sparse.tail is None else sparse.tail.reshape(-1).to(log_q.dtype)
    # If the student's tail is empty, a teacher tail below 16-bit rounding counts as empty.
    no_tail = (log_q_tail == -torch.inf) & (log_p < LOG_ROUNDING)
    log_p = torch.where(no_tail, -torch.inf, log_p)
    f, g_tail = _terms(log_p, log_p.exp(), log_q_tail, log_q_tail.exp(), divergence, beta)
    g_tail = torch.where(log_q_tail == -torch.inf, 0.0, g_tail)  # an empty tail has no gradient
    if mask is not None:  # a row without a slot does not count
        counts = mask.any(-1)
        f, g_tail = (torch.where(counts, t, 0.0) for t in (f, g_tail))
    return value + f, g, g_tail


def _normalised(y: Tensor, temperature: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z - log Σ e^z with z = y / temperature, and a mask of the rows with a mass, (..., 1).

    A row of -inf stays -inf.
    """
    top = y.amax(-1, keepdim=True)
    d = y - torch.where(top.isinf(), 0.0, top)  # first, so that a common offset costs no digits
    d = d if temperature is None else d / temperature
    s = d.exp().sum(-1, keepdim=True)
    return d - torch.where(s == 0, 1.0, s).log(), s != 0


def _rest(log_p: Tensor) -> Tensor:
    """log(1 - P), (...); -inf where P is 1 or more. 1 minus the largest p is -expm1(log p)."""
    top, at = log_p.max(-1, keepdim=True)
    rest = -top.expm1().squeeze(-1) - log_p.exp().scatter(-1, at, 0.0).sum(-1)
    return torch.where(rest <= 0, -torch.inf, rest.log())


def _terms(log_p, p, log_q, q, divergence, beta):
    """f and g of each slot: its term of the divergence, and the derivative by log q."""
    if divergence == "forward_kl":
        return torch.where(p == 0, 0.0, p * (log_p - log_q)), -p
    if divergence == "reverse_kl":
        f = torch.where(q == 0, 0.0, q * (log_q - log_p))
        return f, f + q
    if divergence == "jsd":
        u = log_q - log_p
        # In the dtype of u, because torch.where of two numbers gives the default dtype.
        share = torch.full_like(u, 1 - beta).masked_fill(u > 0, beta)
        log_m = torch.log1p(share * torch.expm1(-u.abs()))
        f_p = torch.where(p == 0, 0.0, p * (-u.clamp(min=0) - log_m))
        f_q = torch.where(q == 0, 0.0, q * (u.clamp(max=0) - log_m))
        return beta * f_p + (1 - beta) * f_q, (1 - beta) * f_q
    assert divergence == "tvd", divergence
    slope = torch.where(log_q == log_p, 0.0, torch.where(log_q > log_p, q, -q))
    return 0.5 * (p - q).abs(), 0.5 * slope
