"""A divergence over the K slots of each row, and its gradient, in plain PyTorch.

The same contract as kernels/slot_divergence.py; the formulas are explained there.
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
    student: Tensor,  # (..., K), log q, or logits where it is normalised here
    reading: Reading,  # whose label says which rows count
    given: Slots,
    tail: Tensor | None = None,  # (...), log mass of the student outside the slots
    logprob_t1: Tensor | None = None,  # (...), log p of the label at temperature 1
    temperature: float | Tensor | None = None,  # of student logits; one for all or (...)
) -> tuple[Tensor, Coefficients]:
    """kd_weight · divergence - ce_weight · logprob_t1 of each row, (...), and its coefficients."""
    dtype, K = PRECISION[student.dtype], student.shape[-1]
    shape = student.shape[:-1]
    log_q, log_p = (t.reshape(-1, K).to(dtype) for t in (student, given.teacher))
    live = live_rows(reading)
    own = mask = None if live is None else live[:, None].expand(log_q.shape)
    if given.mask is not None:
        mask = given.mask.reshape(-1, K) if live is None else given.mask.reshape(-1, K) & own
    if given.support != "gathered":  # whose student has all slots
        own = mask
    tail = None if tail is None else tail.reshape(-1).to(dtype)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1, 1).to(dtype)
    value, g, g_tail = _compare(log_q, log_p, own, mask, tail, given, temperature)
    weight = given.kd_weight
    if given.row_weight is not None:
        weight = weight * given.row_weight.reshape(-1, 1).to(dtype)
    weight = torch.as_tensor(weight, dtype=dtype, device=value.device).expand(value.shape[0], 1)
    value, g = value * weight[:, 0], g * weight
    rows = torch.zeros((value.shape[0], COEFFICIENTS), dtype=dtype, device=value.device)
    has = ()
    if given.support not in RENORM_STUDENT:  # of log q = z - lse
        rows[:, A], has = -g.sum(1), ("a",)
    if g_tail is not None:  # d tail / dz_i = p_i / e^tail - p_i outside, -p_i inside
        g_tail = g_tail * weight[:, 0]
        rows[:, A_IDS] = rows[:, A] - g_tail
        rows[:, A] = rows[:, A_IDS] * lift_of(tail).exp()
        rows[:, A] += g_tail * (-tail.clamp(min=LEAST_TAIL)).exp()
        has = ("a", "a_ids")
    if given.ce_weight:
        value = value - given.ce_weight * logprob_t1.reshape(-1)
        rows[:, D_LOGPROB_T1], has = -given.ce_weight, (*has, "logprob_t1")
    if live is not None:
        value = torch.where(live, value, 0.0)
        rows.masked_fill_(~live[:, None], 0)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    return value.view(shape).clone(), Coefficients(rows, has, g.view(student.shape))


def _compare(
    log_q: Tensor,  # (N, K)
    log_p: Tensor,  # (N, K)
    own: Tensor | None,  # (N, K), the student's slots
    mask: Tensor | None,  # (N, K), those that count
    log_q_tail: Tensor | None,  # (N,)
    given: Slots,
    temperature: float | Tensor | None,  # a number or (N, 1)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The divergence of each row, (N,), and its gradient by log_q and log_q_tail."""
    if log_q.shape[1] == 0:  # a row of no slots has nothing to compare
        value = log_q.new_zeros(log_q.shape[0])
        return value, log_q.clone(), None if log_q_tail is None else torch.zeros_like(value)
    how = at_the_ends(given.divergence, given.beta)
    if own is not None:
        log_q = torch.where(own, log_q, -torch.inf)
    if mask is not None:
        log_p = torch.where(mask, log_p, -torch.inf)
    if given.support in RENORM_TEACHER:
        log_p, _ = _normalised(log_p)
    some_q = None
    if given.support in RENORM_STUDENT:
        log_q, some_q = _normalised(log_q, temperature)
    q = log_q.exp()
    f, g = _terms(log_p, log_p.exp(), log_q, q, *how)
    value = f.sum(-1)
    if some_q is not None:  # a student of no mass at all has no gradient
        g = torch.where(some_q, g - q * g.sum(-1, keepdim=True), 0.0)
        g = g if temperature is None else g / temperature
    if own is not None:
        g = torch.where(own, g, 0.0)
    if log_q_tail is None:
        return value, g, None

    log_p = _rest(log_p) if given.tail is None else given.tail.reshape(-1).to(log_q.dtype)
    # Where nothing is left outside, what a teacher's rounding leaves there is nothing too.
    no_tail = (log_q_tail == -torch.inf) & (log_p < LOG_ROUNDING)
    log_p = torch.where(no_tail, -torch.inf, log_p)
    f, g_tail = _terms(log_p, log_p.exp(), log_q_tail, log_q_tail.exp(), *how)
    g_tail = torch.where(log_q_tail == -torch.inf, 0.0, g_tail)  # none to what is not there
    if mask is not None:  # no slot, no row
        some = mask.any(-1)
        f, g_tail = (torch.where(some, t, 0.0) for t in (f, g_tail))
    return value + f, g, g_tail


def _normalised(y: Tensor, temperature: float | Tensor | None = None) -> tuple[Tensor, Tensor]:
    """z - log Σ e^z, z = y / temperature, and which rows have a mass, (..., 1).

    -inf in a row that is all -inf.
    """
    top = y.amax(-1, keepdim=True)
    d = y - torch.where(top.isinf(), 0.0, top)  # first: a common offset costs no digits
    d = d if temperature is None else d / temperature
    s = d.exp().sum(-1, keepdim=True)
    return d - torch.where(s == 0, 1.0, s).log(), s != 0


def _rest(log_p: Tensor) -> Tensor:
    """log(1 - P), (...), with 1 less the largest p taken as -expm1; -inf where P is 1 or more."""
    top, at = log_p.max(-1, keepdim=True)
    rest = -top.expm1().squeeze(-1) - log_p.exp().scatter(-1, at, 0.0).sum(-1)
    return torch.where(rest <= 0, -torch.inf, rest.log())


def _terms(log_p, p, log_q, q, divergence, beta):
    """What a slot adds to the divergence, and the derivative of that by log q."""
    if divergence == "forward_kl":
        return torch.where(p == 0, 0.0, p * (log_p - log_q)), -p
    if divergence == "reverse_kl":
        f = torch.where(q == 0, 0.0, q * (log_q - log_p))
        return f, f + q
    if divergence == "jsd":
        u = log_q - log_p
        # In the dtype of u: torch.where of two numbers would be of the default one.
        share = torch.full_like(u, 1 - beta).masked_fill(u > 0, beta)
        log_m = torch.log1p(share * torch.expm1(-u.abs()))
        f_p = torch.where(p == 0, 0.0, p * (-u.clamp(min=0) - log_m))
        f_q = torch.where(q == 0, 0.0, q * (u.clamp(max=0) - log_m))
        return beta * f_p + (1 - beta) * f_q, (1 - beta) * f_q
    assert divergence == "tvd", divergence
    slope = torch.where(log_q == log_p, 0.0, torch.where(log_q > log_p, q, -q))
    return 0.5 * (p - q).abs(), 0.5 * slope
