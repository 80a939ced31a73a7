"""A student row beside a teacher row, in plain PyTorch, a few rows at a time.

The same contract as the kernels' pair_read and pair_gradient, whose formulas are in
kernels/pair_state.py. The five numbers saved of a row are max and s of the student, of the teacher,
and a mean, here in nats.
"""

import torch
from torch import Tensor

from ..contract import PAIR_STATE, PRECISION, Pair, Reading
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


def _target(t: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Mass of each class in soft cross-entropy: smoothed, times the class weight."""
    v = t if pair.blend == 0 else t * (1 - pair.blend) + pair.blend / reading.vocab
    weight = reading.class_weight
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


def pair_read(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    norms: Tensor | None = None,  # (N, PAIR_STATE), where "jsd" knows those of whole rows
) -> tuple[Tensor, Tensor]:
    """The loss of each row, (...), and what its gradient needs, (N, PAIR_STATE)."""
    result = _each(x, reading, pair, 1 + PAIR_STATE, norms, _compare)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    return result[:, 0].reshape(x.shape[:-1]).clone(), result[:, 1:].clone()


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """(N, PAIR_STATE) of some columns: max and s of the student, of the teacher, and a sum."""
    return _each(x, reading, pair, PAIR_STATE, None, lambda *given: _sums(*given)[0])


def _each(x: Tensor, reading: Reading, pair: Pair, width: int, norms, work) -> Tensor:
    """What `work` finds of a few rows at a time, (N, width); 0 of ignored ones."""
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    live = live_rows(reading)
    result = torch.zeros((len(flat), width), dtype=PRECISION[x.dtype], device=x.device)
    inv_t = inverse_temperature(reading, result[:, :1])
    for rows in chunks(flat, live, _PARTS.get(pair.kind, 1)):
        rate = None if inv_t is None else inv_t[rows]
        y, _ = capped(flat[rows], reading.softcap)
        known = None if norms is None else norms[rows]
        result[rows] = work(y, other[rows].to(y.dtype), rate, reading, pair, known)
    return result if live is None else result.masked_fill_(~live[:, None], 0)


def _sums(y, t, rate, reading: Reading, pair: Pair, norms) -> tuple[Tensor, Tensor, Tensor]:
    """The partial state of some rows, (N, PAIR_STATE), and d of student and teacher."""
    kind, shift_q = pair.kind, max_of(y) if norms is None else norms[:, :1]
    d_q = centred(y, shift_q, rate)
    if kind == "soft":
        v = _target(t, reading, pair)
        s_p = v.sum(1, keepdim=True)
        result = (y.amax(1, keepdim=True), d_q.exp().sum(1, keepdim=True), torch.zeros_like(s_p))
        return torch.cat((*result, s_p, -_expected(v, d_q)), 1), d_q, d_q
    d_p = centred(t, max_of(t) if norms is None else norms[:, 2:3], rate)
    if norms is not None:
        return norms, d_q, d_p
    e_q, e_p = d_q.exp(), d_p.exp()
    s_q, s_p = e_q.sum(1, keepdim=True), e_p.sum(1, keepdim=True)
    c = torch.zeros_like(s_q)
    if kind != "jsd":
        c = _expected(e_p, d_p - d_q) if kind == "forward" else _expected(e_q, d_q - d_p)
    m_q, m_p = y.amax(1, keepdim=True), t.amax(1, keepdim=True)
    return torch.cat((m_q, s_q, m_p, s_p, c), 1), d_q, d_p


def _compare(y, t, rate, reading: Reading, pair: Pair, norms) -> Tensor:
    """Loss and state of some rows, (N, 1 + PAIR_STATE)."""
    part, d_q, d_p = _sums(y, t, rate, reading, pair, norms)
    value, state = pair_finish(part, pair.kind)
    if pair.kind == "jsd":
        log_q, log_p = _log(state[:, 1:2]), _log(state[:, 3:4])
        terms, q, log_q_m = _mixture(d_q - log_q, d_p - log_p, pair.blend)
        # A row without a distribution, or with a NaN, has no divergence: 0 · inf is NaN.
        value = _positive(terms.sum(1, keepdim=True) + 0.0 * (log_q + log_p))
        state[:, 4:] = (q * log_q_m).sum(1, keepdim=True)
    return torch.cat((value, state), 1)


def pair_finish(part: Tensor, kind: str, inv_t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loss (N, 1) and state (N, PAIR_STATE) of whole rows; of "jsd", the state but for the mean.

    inv_t (N, 1), one over the temperature, is for the kernels' sake.
    """
    m_q, s_q, m_p, s_p, c = part.split(1, 1)
    shift_q, shift_p = (torch.where(m.isinf(), 0.0, m) for m in (m_q, m_p))
    mean = value = torch.zeros_like(c)
    if kind == "soft":
        value = s_p * s_q.log() + c
    elif kind == "forward":
        value = _positive(c / s_p + (s_q / s_p).log())
    elif kind == "reverse":
        mean = c / s_q
        value = _positive(mean + (s_p / s_q).log())
    return value, torch.cat((shift_q, s_q, shift_p, s_p, mean), 1)


def _positive(value: Tensor) -> Tensor:
    """Not negative by rounding; a NaN stays."""
    return torch.where(value < 0, 0.0, value)


def merge_pairs(
    parts: Tensor,  # (parts, N, PAIR_STATE)
    kind: str,
    inv_t: Tensor | None,  # (N, 1)
) -> Tensor:
    """The partial states of the columns of each row as one, (N, PAIR_STATE)."""
    m_q, s_q, m_p, s_p, c = parts.unbind(-1)
    rate = 1.0 if inv_t is None else inv_t[:, 0]
    top_q, top_p = m_q.amax(0), m_p.amax(0)
    moved_q, moved_p = _moved(m_q, top_q) * rate, _moved(m_p, top_p) * rate
    scale_q, scale_p = moved_q.exp(), moved_p.exp()
    if kind == "soft":
        c = c - torch.where(s_p == 0, 0.0, moved_q * s_p)
    elif kind == "forward":
        c = torch.where(scale_p == 0, 0.0, c * scale_p + s_p * ((moved_p - moved_q) * scale_p))
    elif kind == "reverse":
        c = torch.where(scale_q == 0, 0.0, c * scale_q + s_q * ((moved_q - moved_p) * scale_q))
    s_q, s_p = s_q * scale_q, s_p * (1.0 if kind == "soft" else scale_p)
    return torch.stack((top_q, s_q.sum(0), top_p, s_p.sum(0), c.sum(0)), 1)


def _moved(m: Tensor, top: Tensor) -> Tensor:
    """How far the max of a part is below that of the row; 0 of an empty part."""
    return torch.where((m == top) | (m == -torch.inf), 0.0, m - top).clamp_min(-1e38)


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
            dz = d_q.exp_().mul_(mean[rows]).sub_(_target(t, reading, pair))
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
