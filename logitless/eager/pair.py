"""Losses against a dense teacher in plain PyTorch, one chunk of rows at a time.

kernels/pair_fwd.py and kernels/pair_bwd.py give the formulas, kernels/pair_state.py the symbols.
Here d = (logit - shift) / temperature, where the shift is the max of the logits, or 0 if infinite.
The state (N, PAIR_STATE) holds shift and Σ e^d of the student, both of the teacher, and, in nats,

    reverse       Σ q (d_q - d_p)
    jsd           Σ q log(q / M), where M is the mixture of student and teacher
    skewed KL     Σ q g, where g is a result of `_skewed`
    tvd           the ratio of two masses of the student, see `ratio`

and 0 for the other losses. A partial state, over some columns only, holds the max instead of the
shift, and the sum c of kernels/pair_fwd.py, in nats, instead of the mean.
"""

import torch
from torch import Tensor

from ..contract import PAIR_STATE, PAIR_SUMS, PRECISION, Pair, Reading
from .rows import (
    by_row,
    capped,
    centred,
    chunks,
    fill_ignored,
    inverse_temperature,
    live_rows,
    max_of,
    written_back,
    written_to,
)

# divisors of the chunk size: JSD and a skewed KL keep about twenty tensors of a chunk's size, TVD
# about ten, the other losses six
_DIVISORS = {"jsd": 8, "skewed_forward": 8, "skewed_reverse": 8, "tvd": 2}


def _expected(e: Tensor, h: Tensor) -> Tensor:
    """Returns Σ e · h of each row. A column where e is 0 adds 0, even if h is infinite."""
    return torch.where(e == 0, 0.0, e * h).sum(1, keepdim=True)


def _target(t: Tensor, reading: Reading, pair: Pair) -> Tensor:
    v = t if pair.blend == 0 else t * (1 - pair.blend) + pair.blend / reading.vocab
    weight = reading.class_weight
    return v if weight is None else v * weight.to(t.dtype)


def _log(s: Tensor) -> Tensor:
    """Returns log Σ e^d, but +inf for a row that is all -inf: subtracting it makes every p of the
    row 0.
    """
    return torch.where(s == 0, torch.inf, s).log()


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each column, the JSD term, the probability q, and log(q / M), M = βp + (1-β)q.

    All are finite. If log q and log p are both -inf, their difference is NaN and becomes 1e4; any
    number would do, because p = q = 0.
    """
    gap = log_q - log_p
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_q, log_p).exp()
    # β in the dtype of log q, so that β + (1-β) is exactly 1 and JSD is 0 for p = q
    least = torch.finfo(gap.dtype).eps / 2
    b = torch.full((), min(max(beta, 1e-30), 1 - least), dtype=gap.dtype, device=gap.device)
    w = torch.where(more, b, 1 - b)
    mu = w * share + torch.where(more, 1 - b, b)
    log_mu = mu.log()
    q = torch.where(more, big, big * share)
    return -big * (w * share * a + mu * log_mu), q, torch.where(more, 0.0, -a) - log_mu


def _skewed(log_q: Tensor, log_p: Tensor, skew: float, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each column, the term of a skewed KL, the probability q, and the derivative g.

    The formulas are those of `skewed` in kernels/jsd_math.py, but g is 0 for p = q. All results are
    finite, as in `_mixture`.
    """
    forward = kind == "skewed_forward"
    log_own, log_other = (log_p, log_q) if forward else (log_q, log_p)
    gap = log_other - log_own
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_q, log_p).exp()
    b = torch.full((), max(skew, 1e-30), dtype=gap.dtype, device=gap.device)
    log_mu = (share + torch.where(more, 1 - b, b) * (1 - share)).log()
    own, other = (torch.where(m, big * share, big) for m in (more, ~more))
    log_own_m, log_other_m = (torch.where(m, -a, 0.0) - log_mu for m in (more, ~more))
    terms = own * log_own_m + (1 - b) * (other - own)
    if forward:
        return terms, other, -(1 - b) * log_own_m.expm1()
    return terms, own, log_own_m + (1 - b) * log_other_m.expm1()


def _probabilities(d: Tensor, s: Tensor) -> Tensor:
    return d.exp() / torch.where(s == 0, torch.inf, s)


def _above(q: Tensor, gap: Tensor) -> Tensor:
    """Returns q where q > p, q / 2 where q = p, and 0 elsewhere; gap = q - p."""
    return torch.where(gap > 0, q, torch.where(gap == 0, q / 2, 0.0))


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns above / below, or infinity if `below` is 0.

    They are Σ q over the columns with q > p, and with q < p. A column with q = p counts half to
    each.
    """
    return torch.where(below == 0, torch.inf, above / torch.where(below == 0, 1.0, below))


def _slopes(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns below / (above + below) and above / (above + below), each to full precision."""
    below = 1 / (1 + ratio)
    return below, torch.where(ratio > 1, 1 - below, ratio * below)


def pair_read(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    # (N, PAIR_STATE), shift and normaliser of whole rows, for JSD and TVD over sharded columns
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, and the state (N, PAIR_STATE) for the backward.

    With `norms`, x holds some columns of each row: the loss and the last column of the state (for
    TVD the last two, `above` and `below` of `ratio`) are sums over them, which the caller adds over
    ranks and passes to `pair_join`.
    """
    results = _by_chunks(x, reading, pair, 1 + PAIR_STATE, norms, _value_and_state)
    value, state = results.split((1, PAIR_STATE), 1)
    # cloned, because autograd forbids in-place writes to a view that a custom function returns
    return value.reshape(x.shape[:-1]).clone(), state.clone()


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the partial state (N, PAIR_STATE) of each row over the columns of x."""
    return _by_chunks(x, reading, pair, PAIR_STATE, None, lambda *args: _partial_state(*args)[0])


def _by_chunks(x: Tensor, reading: Reading, pair: Pair, width: int, norms, work) -> Tensor:
    """Calls `work` per chunk of rows; returns the results (N, width), with 0 in ignored rows."""
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    live = live_rows(reading)
    results = torch.zeros((len(flat), width), dtype=PRECISION[x.dtype], device=x.device)
    inv_t = inverse_temperature(reading, results[:, :1])
    for rows in chunks(flat, live, _DIVISORS.get(pair.kind, 1)):
        rate = None if inv_t is None else inv_t[rows]
        y, _ = capped(flat[rows], reading.softcap)
        known = None if norms is None else norms[rows]
        results[rows] = work(y, other[rows].to(y.dtype), rate, reading, pair, known)
    return results if live is None else results.masked_fill_(~live[:, None], 0)


def _partial_state(
    y, t, rate, reading: Reading, pair: Pair, norms
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the partial state of a chunk of rows, and the exponents d of student and teacher."""
    kind, shift_q = pair.kind, max_of(y) if norms is None else norms[:, :1]
    d_q = centred(y, shift_q, rate)
    if kind == "soft":
        v = _target(t, reading, pair)
        s_p = v.sum(1, keepdim=True)
        m_q, s_q = y.amax(1, keepdim=True), d_q.exp().sum(1, keepdim=True)
        state = (m_q, s_q, torch.zeros_like(s_p), s_p, -_expected(v, d_q))
        return torch.cat(state, 1), d_q, d_q
    d_p = centred(t, max_of(t) if norms is None else norms[:, 2:3], rate)
    if norms is not None:
        return norms, d_q, d_p
    e_q, e_p = d_q.exp(), d_p.exp()
    s_q, s_p = e_q.sum(1, keepdim=True), e_p.sum(1, keepdim=True)
    c = torch.zeros_like(s_q)
    if kind not in PAIR_SUMS:
        c = _expected(e_p, d_p - d_q) if kind == "forward" else _expected(e_q, d_q - d_p)
    m_q, m_p = y.amax(1, keepdim=True), t.amax(1, keepdim=True)
    return torch.cat((m_q, s_q, m_p, s_p, c), 1), d_q, d_p


def _value_and_state(y, t, rate, reading: Reading, pair: Pair, norms) -> Tensor:
    partial, d_q, d_p = _partial_state(y, t, rate, reading, pair, norms)
    value, state = pair_finish(partial, pair.kind)
    if pair.kind == "jsd":
        log_q, log_p = _log(state[:, 1:2]), _log(state[:, 3:4])
        terms, q, log_q_m = _mixture(d_q - log_q, d_p - log_p, pair.blend)
        # log_q or log_p is inf if all logits of its row are -inf; then 0 · inf makes the loss NaN
        value = _positive(terms.sum(1, keepdim=True) + 0.0 * (log_q + log_p))
        state[:, 4:] = (q * log_q_m).sum(1, keepdim=True)
    elif pair.kind.startswith("skewed"):
        log_q, log_p = _log(state[:, 1:2]), _log(state[:, 3:4])
        terms, q, g = _skewed(d_q - log_q, d_p - log_p, pair.blend, pair.kind)
        value = _positive(terms.sum(1, keepdim=True) + 0.0 * (log_q + log_p))
        state[:, 4:] = (q * g).sum(1, keepdim=True)
    elif pair.kind == "tvd":
        s_q, s_p = state[:, 1:2], state[:, 3:4]
        q = _probabilities(d_q, s_q)
        gap = q - _probabilities(d_p, s_p)
        # NaN if all logits of a row are -inf, as for JSD
        value = gap.abs().sum(1, keepdim=True) / 2 + 0.0 * (_log(s_q) + _log(s_p))
        part = _above(q, gap)
        above, below = (t.sum(1, keepdim=True) for t in (part, q.sub_(part)))
        if norms is None:
            value, state[:, 4:] = pair_join(torch.cat((value, above, below), 1), "tvd")
        else:
            state = torch.cat((state[:, :3], above, below), 1)
    return torch.cat((value, state), 1)


def pair_join(sums: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Computes the loss (N, 1) and the last column (N, 1) of the state from sums over whole rows.

    `sums` is (N, PAIR_SUMS[kind]). Rounding can raise a total variation above 1, which is clamped.
    """
    value, *masses = sums.split(1, 1)
    if kind != "tvd":
        return value, masses[0]
    return torch.where(value > 1, 1.0, value), ratio(*masses)


def pair_finish(partial: Tensor, kind: str, inv_t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the loss (N, 1) and the state (N, PAIR_STATE) from a merged partial state.

    Loss and mean are 0 for the kinds in PAIR_SUMS, which need another pass over the logits. Only
    `pair_finish` in kernels/ needs `inv_t`, because the unit of its mean is that of the logits.
    """
    m_q, s_q, m_p, s_p, c = partial.split(1, 1)
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
    """Clamps rounding errors below 0; NaN stays NaN."""
    return torch.where(value < 0, 0.0, value)


def merge_pairs(
    partials: Tensor,  # (splits, N, PAIR_STATE)
    kind: str,
    inv_t: Tensor | None,  # (N, 1)
) -> Tensor:
    m_q, s_q, m_p, s_p, c = partials.unbind(-1)
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
    """Returns the max of each split minus the max of its row, or 0 for an empty split."""
    return torch.where((m == top) | (m == -torch.inf), 0.0, m - top).clamp_min(-1e38)


def pair_gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    state: Tensor,  # (N, PAIR_STATE)
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,  # (..., V), output, can be x; None means a new tensor
) -> Tensor:
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
    elif pair.kind in PAIR_SUMS:
        gain = gain + 0.0 * (log_q + log_p)
    else:
        mean = s_p / alive
        gain = gain / s_p if pair.kind == "forward" else gain
    # a row whose logits are all -inf has no distribution: its gradient is 0
    gain = torch.where(s_q == 0, 0.0, gain)

    fill_ignored(dx, live, before=True)
    for rows in chunks(flat, live, _DIVISORS.get(pair.kind, 1)):
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
            elif pair.kind == "tvd":
                q = _probabilities(d_q, s_q[rows])
                gap = q - _probabilities(d_p, s_p[rows])
                below, above = _slopes(mean[rows])
                slopes = torch.where(gap < 0, -above, (below - above) / 2)
                dz = q * torch.where(gap > 0, below, slopes)
            else:
                logs = d_q - log_q[rows], d_p - log_p[rows]
                if pair.kind == "jsd":
                    _, q, g = _mixture(*logs, pair.blend)
                else:
                    _, q, g = _skewed(*logs, pair.blend, pair.kind)
                dz = q * (g - mean[rows])
        dz *= gain[rows]
        dx[rows] = (dz if slope is None else dz.mul_(slope)).to(dx.dtype)
    fill_ignored(dx, live, before=False)
    return written_back(dx, into)
