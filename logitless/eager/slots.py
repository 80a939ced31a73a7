"""A divergence over the K slots of each row, and its gradient, in plain PyTorch.

The same contract as kernels/slots.py; the formulas are explained there.
"""

import torch
from torch import Tensor

RENORM_TEACHER = ("renorm_teacher", "renorm")  # supports that compare p/P
RENORM_STUDENT = ("renorm", "gathered")  # supports that compare q/Q


def at_the_ends(divergence: str, beta: float) -> tuple[str, float | None]:
    """The divergence to compute: JSD is forward KL at beta 0, reverse KL at 1; only JSD has one."""
    if divergence == "jsd":
        return {0.0: ("forward_kl", None), 1.0: ("reverse_kl", None)}.get(beta, (divergence, beta))
    return divergence, None


def slots(
    student: Tensor,  # (..., K), log q, or logits for "renorm" and "gathered"
    teacher: Tensor,  # (..., K), log p
    mask: Tensor | None,  # (..., K) bool, True for the slots that count; or (...), of whole rows
    student_tail: Tensor | None,  # (...), log mass of the student outside the slots
    teacher_tail: Tensor | None,  # (...), log mass of the teacher there; None is the rest to 1
    divergence: str,
    support: str,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """value (...), d_student (..., K) and, where there is a tail, d_tail (...)."""
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    if student.shape[-1] == 0:  # a row of no slots has nothing to compare
        value = student.new_zeros(student.shape[:-1], dtype=dtype)
        d_tail = None if student_tail is None else torch.zeros_like(value)
        return value, student.new_zeros(student.shape, dtype=dtype), d_tail

    how = at_the_ends(divergence, beta)
    log_q, log_p = (t.to(dtype).contiguous() for t in (student, teacher))
    if mask is not None:
        mask = mask if mask.dim() == student.dim() else mask.unsqueeze(-1)
        mask = mask.expand(student.shape).contiguous()
        log_q, log_p = (torch.where(mask, t, -torch.inf) for t in (log_q, log_p))
    if support in RENORM_TEACHER:
        log_p, _ = _normalised(log_p)
    some_q = None
    if support in RENORM_STUDENT:
        log_q, some_q = _normalised(log_q)
    q = log_q.exp()
    f, g = _terms(log_p, log_p.exp(), log_q, q, *how)
    value = f.sum(-1)
    if some_q is not None:  # a student of no mass at all has no gradient
        g = torch.where(some_q, g - q * g.sum(-1, keepdim=True), 0.0)
    if mask is not None:
        g = torch.where(mask, g, 0.0)
    if student_tail is None:
        return value, g, None

    log_p = _rest(log_p) if teacher_tail is None else teacher_tail
    log_q, log_p = (t.to(dtype).contiguous() for t in (student_tail, log_p))
    # Where nothing is left outside, what a teacher's rounding leaves there is nothing too.
    log_p = torch.where(log_q == -torch.inf, -torch.inf, log_p)
    f, g_tail = _terms(log_p, log_p.exp(), log_q, log_q.exp(), *how)
    if mask is not None:  # no slot, no row
        some = mask.any(-1)
        f, g_tail = (torch.where(some, t, 0.0) for t in (f, g_tail))
    return value + f, g, g_tail


def _normalised(z: Tensor) -> tuple[Tensor, Tensor]:
    """z - log Σ e^z, -inf in a row that is all -inf; and which rows are not, (..., 1)."""
    top = z.amax(-1, keepdim=True)
    d = z - torch.where(top.isinf(), 0.0, top)
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
        log_m = torch.log1p(torch.where(u > 0, beta, 1 - beta) * torch.expm1(-u.abs()))
        f_p = torch.where(p == 0, 0.0, p * (-u.clamp(min=0) - log_m))
        f_q = torch.where(q == 0, 0.0, q * (u.clamp(max=0) - log_m))
        return beta * f_p + (1 - beta) * f_q, (1 - beta) * f_q
    assert divergence == "tvd", divergence
    slope = torch.where(log_q == log_p, 0.0, torch.where(log_q > log_p, q, -q))
    return 0.5 * (p - q).abs(), 0.5 * slope
