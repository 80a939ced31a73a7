"""A student row beside a teacher row, in plain PyTorch, a few rows at a time.

The same contract as the kernels' pair_read and pair_gradient, whose formulas are in
kernels/pair_state.py. The five numbers saved of a row are max and s of the student, of the teacher,
and a mean, here in nats.
"""

import torch
from torch import Tensor

from .._contract import PAIR_STATE, Pair, Reading
from .rows import (
    by_row,
    capped,
    centred,
    chunks,
    fill_ignored,
    give,
    inverse_temperature,
    live_rows,
    max_of,
    written_to,
)

_PARTS = {"jsd": 8}  # which has some twenty tensors alive, where the others have six


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


def pair_read(x: Tensor, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:
    """The loss of each row, (...), and what its gradient needs, (N, PAIR_STATE)."""
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    live = live_rows(reading)
    state = capped(flat[:, :1], None)[0].new_zeros((flat.shape[0], PAIR_STATE))
    loss = torch.zeros_like(state[:, :1])
    inv_t = inverse_temperature(reading, loss)
    for rows in chunks(flat, live, _PARTS.get(pair.kind, 1)):
        rate = None if inv_t is None else inv_t[rows]
        y, _ = capped(flat[rows], reading.softcap)
        loss[rows], state[rows] = _compare(y, other[rows].to(y.dtype), rate, reading, pair)
    if live is not None:
        loss.masked_fill_(~live[:, None], 0)
        state.masked_fill_(~live[:, None], 0)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    return loss.view(x.shape[:-1]).clone(), state


def _compare(y, t, rate, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:
    """Loss (N, 1) and state (N, PAIR_STATE) of some rows."""
    shift_q = max_of(y)
    d_q = centred(y, shift_q, rate)
    e_q = d_q.exp()
    s_q = e_q.sum(1, keepdim=True)
    shift_p = mean = torch.zeros_like(s_q)
    if pair.kind == "soft":
        v = _target(t, reading.class_weight, pair.blend)
        s_p = v.sum(1, keepdim=True)
        value = s_p * s_q.log() - _expected(v, d_q)
        return value, torch.cat((shift_q, s_q, shift_p, s_p, mean), 1)
    shift_p = max_of(t)
    d_p = centred(t, shift_p, rate)
    e_p = d_p.exp()
    s_p = e_p.sum(1, keepdim=True)
    if pair.kind == "forward":
        value = _expected(e_p, d_p - d_q) / s_p + (s_q / s_p).log()
    elif pair.kind == "reverse":
        mean = _expected(e_q, d_q - d_p) / s_q
        value = mean + (s_p / s_q).log()
    else:
        log_q, log_p = _log(s_q), _log(s_p)
        terms, q, log_q_m = _mixture(d_q - log_q, d_p - log_p, pair.blend)
        mean = (q * log_q_m).sum(1, keepdim=True)
        # A row without a distribution, or with a NaN, has no divergence: 0 · inf is NaN.
        value = terms.sum(1, keepdim=True) + 0.0 * (log_q + log_p)
    value = torch.where(value < 0, 0.0, value)  # by rounding; a NaN stays
    return value, torch.cat((shift_q, s_q, shift_p, s_p, mean), 1)


def pair_gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    state: Tensor,  # (N, PAIR_STATE)
    upstream: Tensor,  # () or one a row
    factor: Tensor | None = None,  # () or one a row
    into: Tensor | None = None,  # (..., V), written to; x itself if in place
) -> Tensor:
    """The gradient of the student's logits, (..., V) in their dtype."""
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    dx, into = written_to(x, into)
    live = live_rows(reading)
    shift_q, s_q, shift_p, s_p, mean = state.split(1, 1)
    inv_t = inverse_temperature(reading, s_q)
    gain = torch.ones_like(s_q) * by_row(upstream, len(state)) * by_row(factor, len(state))
    gain = gain if inv_t is None else gain * inv_t
    alive = torch.where(s_q == 0, torch.inf, s_q)
    log_q, log_p = _log(s_q), _log(s_p)
    if pair.kind == "reverse":
        gain = gain / alive
    elif pair.kind == "jsd":
        gain = gain * (1 - pair.blend) + 0.0 * (log_q + log_p)
    else:
        mean = s_p / alive
        gain = gain / s_p if pair.kind == "forward" else gain
    # A student of -inf has no distribution, and nothing flows to it.
    gain = torch.where(s_q == 0, 0.0, gain)

    fill_ignored(dx, live, before=True)
    for rows in chunks(flat, live, _PARTS.get(pair.kind, 1)):
        rate = None if inv_t is None else inv_t[rows]
        y, slope = capped(flat[rows], reading.softcap)
        d_q, t = centred(y, shift_q[rows], rate), other[rows].to(y.dtype)
        if pair.kind == "soft":
            dz = d_q.exp_().mul_(mean[rows]).sub_(_target(t, reading.class_weight, pair.blend))
        else:
            d_p = centred(t, shift_p[rows], rate)
            if pair.kind == "forward":
                dz = d_q.exp_().mul_(mean[rows]).sub_(d_p.exp_())
            elif pair.kind == "reverse":
                e_q = d_q.exp()
                dz = torch.where(e_q == 0, 0.0, e_q * (d_q - d_p - mean[rows]))
            else:
                _, q, log_q_m = _mixture(d_q - log_q[rows], d_p - log_p[rows], pair.blend)
                dz = q * (log_q_m - mean[rows])
        dz *= gain[rows]
        dx[rows] = (dz if slope is None else dz.mul_(slope)).to(dx.dtype)
    fill_ignored(dx, live, before=False)
    return give(dx, into)
