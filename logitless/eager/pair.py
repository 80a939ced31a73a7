"""A student row beside a teacher row, in plain PyTorch, a few rows at a time.

The same contract as kernels/pair.py; the formulas are explained there. The five numbers saved of a
row are max and s of the student, of the teacher, and a mean, here in nats.
"""

import torch
from torch import Tensor

from .stats import _capped, _centred, _chunks, _inverse, _precision

FIELDS = 5


def _top(y: Tensor) -> Tensor:
    """What to subtract, (N, 1): the max, or 0 where it is ±inf and the bare e^y is right."""
    m = y.amax(1, keepdim=True)
    return torch.where(m.isinf(), 0.0, m)


def _expected(e: Tensor, h: Tensor) -> Tensor:
    """Σ e h over columns, (N, 1); where e is 0, h may be anything."""
    return torch.where(e == 0, 0.0, e * h).sum(1, keepdim=True)


def _target(t: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Mass of each class in soft cross-entropy: smoothed, times the class weight."""
    v = t if smoothing == 0 else t * (1 - smoothing) + smoothing / t.shape[1]
    return v if weight is None else v * weight.to(t.dtype)


def _log(s: Tensor) -> Tensor:
    """log s of a normaliser, for log p = d - log s. Of a row of -inf, p is 0."""
    return torch.where(s == 0, torch.inf, s).log()


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """For M = βp + (1-β)q of each element: its JSD, q, and log q/M. Finite for any logits.

    Of two -inf the gap is NaN, and any number will do.
    """
    gap = log_q - log_p
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_q, log_p).exp()
    # In the precision of the logits, so that β + (1-β) is 1 exactly: where p = q, nothing is left.
    least = torch.finfo(gap.dtype).eps / 2
    ours = torch.full((), min(max(beta, 1e-30), 1 - least), dtype=gap.dtype, device=gap.device)
    w = torch.where(more, ours, 1 - ours)
    mu = w * share + torch.where(more, 1 - ours, ours)
    log_mu = mu.log()
    q = torch.where(more, big, big * share)
    return -big * (w * share * a + mu * log_mu), q, torch.where(more, 0.0, -a) - log_mu


def _rows(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1)


def pair_fwd(
    x: Tensor,  # (..., V), the student
    teacher: Tensor,  # (..., V), logits; probabilities for "soft"
    weight: Tensor | None,  # (V,), of "soft"
    row_temperature: Tensor | None,  # (...)
    mask: Tensor | None,  # (...), bool: rows that count
    temperature: float,
    softcap: float | None,
    blend: float,  # β of "jsd", the label smoothing of "soft"
    kind: str,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, (...), and what its backward needs, (..., 5)."""
    shape, V = x.shape[:-1], x.shape[-1]
    flat, other, live = x.reshape(-1, V), teacher.reshape(-1, V), _rows(mask)
    loss = torch.zeros((flat.shape[0], 1), dtype=_precision(x), device=x.device)
    stats = loss.new_zeros((flat.shape[0], FIELDS))
    inv_t = _inverse(row_temperature, temperature, loss)

    for rows in _chunks(flat, live):
        rate = None if inv_t is None else inv_t[rows]
        y, _ = _capped(flat[rows], softcap)
        shift_q = _top(y)
        d_q = _centred(y, shift_q, rate)
        e_q = d_q.exp()
        s_q = e_q.sum(1, keepdim=True)
        t = other[rows].to(y.dtype)
        shift_p = mean = torch.zeros_like(s_q)
        if kind == "soft":
            v = _target(t, weight, blend)
            s_p = v.sum(1, keepdim=True)
            value = s_p * s_q.log() - _expected(v, d_q)
        else:
            shift_p = _top(t)
            d_p = _centred(t, shift_p, rate)
            e_p = d_p.exp()
            s_p = e_p.sum(1, keepdim=True)
            if kind == "forward":
                value = _expected(e_p, d_p - d_q) / s_p + (s_q / s_p).log()
            elif kind == "reverse":
                mean = _expected(e_q, d_q - d_p) / s_q
                value = mean + (s_p / s_q).log()
            else:
                log_q, log_p = _log(s_q), _log(s_p)
                terms, q, log_q_m = _mixture(d_q - log_q, d_p - log_p, blend)
                mean = (q * log_q_m).sum(1, keepdim=True)
                # A row without a distribution, or with a NaN, has no divergence: 0 · inf is NaN.
                value = terms.sum(1, keepdim=True) + 0.0 * (log_q + log_p)
            value = torch.where(value < 0, 0.0, value)  # by rounding; a NaN stays
        loss[rows] = value
        stats[rows] = torch.cat((shift_q, s_q, shift_p, s_p, mean), 1)

    if live is not None:
        loss.masked_fill_(~live[:, None], 0)
        stats.masked_fill_(~live[:, None], 0)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    return loss.view(shape).clone(), stats.view(*shape, FIELDS).clone()


def pair_bwd(
    x: Tensor,  # (..., V)
    teacher: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    mask: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    blend: float,
    kind: str,
    stats: Tensor,  # (..., 5)
    g: Tensor,  # (...), the gradient of each row's loss
    inplace: bool = False,  # which a CPU need not be
) -> Tensor:
    """The gradient of the student's logits, (..., V) in their dtype."""
    V = x.shape[-1]
    flat, other, live = x.reshape(-1, V), teacher.reshape(-1, V), _rows(mask)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    shift_q, s_q, shift_p, s_p, mean = stats.reshape(-1, FIELDS).split(1, 1)
    inv_t = _inverse(row_temperature, temperature, s_q)
    gain = g.reshape(-1, 1).to(s_q.dtype)
    gain = gain if inv_t is None else gain * inv_t
    alive = torch.where(s_q == 0, torch.inf, s_q)
    log_q, log_p = _log(s_q), _log(s_p)
    if kind == "reverse":
        gain = gain / alive
    elif kind == "jsd":
        gain = gain * (1 - blend) + 0.0 * (log_q + log_p)
    else:
        mean = s_p / alive
        gain = gain / s_p if kind == "forward" else gain
    # A student of -inf has no distribution, and nothing flows to it.
    gain = torch.where(s_q == 0, 0.0, gain)

    if live is not None and x.device.type == "cpu":
        dx.index_fill_(0, (~live).nonzero().squeeze(1), 0)  # the rest is about to be written
    for rows in _chunks(flat, live):
        rate = None if inv_t is None else inv_t[rows]
        y, slope = _capped(flat[rows], softcap)
        d_q = _centred(y, shift_q[rows], rate)
        t = other[rows].to(y.dtype)
        if kind == "soft":
            dz = d_q.exp_().mul_(mean[rows]).sub_(_target(t, weight, blend))
        else:
            d_p = _centred(t, shift_p[rows], rate)
            if kind == "forward":
                dz = d_q.exp_().mul_(mean[rows]).sub_(d_p.exp_())
            elif kind == "reverse":
                e_q = d_q.exp()
                dz = torch.where(e_q == 0, 0.0, e_q * (d_q - d_p - mean[rows]))
            else:
                _, q, log_q_m = _mixture(d_q - log_q[rows], d_p - log_p[rows], blend)
                dz = q * (log_q_m - mean[rows])
        dz *= gain[rows]
        if slope is not None:
            dz *= slope
        dx[rows] = dz.to(dx.dtype)
    if live is not None and x.device.type != "cpu":
        dx.masked_fill_(~live[:, None], 0)  # rows that could not be left out without asking the GPU
    return dx.view(x.shape)
