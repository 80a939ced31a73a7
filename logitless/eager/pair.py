"""Losses against a dense teacher in plain PyTorch, computed for one chunk of rows at a time.

The functions `pair_read`, `pair_partial`, `pair_finish` and `pair_gradient` have the same interface
as in kernels/. The formulas of the losses and gradients are in kernels/pair_fwd.py and
kernels/pair_bwd.py. kernels/pair_state.py defines all symbols except d, which is defined below.

The forward saves a state of shape (N, PAIR_STATE), which holds five numbers per row. These numbers
are the shift and the normaliser of the student, the shift and the normaliser of the teacher, and a
mean in nats. A shift is the max of the logits, or 0 if the max is infinite. In this file, the
exponents d are (logit - shift) / temperature, and the normaliser is Σ e^d. The mean is an
expectation under the student's probabilities q. For reverse KL, the mean is Σ q (d_q - d_p), where
d_q and d_p are the exponents of the student and of the teacher. For JSD, the mean is
Σ q log(q / M), where M is the mixture of student and teacher. For a skewed KL, the mean is Σ q g,
where g is a result of `_skewed`. For total variation (TVD), the mean is replaced by a ratio of two
masses of the student (see `ratio`). For the other losses, the mean is 0. The Triton kernels save
the mean in other units (kernels/pair_state.py).

A partial state covers only some columns of a row. A partial state holds the max instead of the
shift, and a sum c instead of the mean. The sum c is in nats. kernels/pair_fwd.py defines c for each
loss.
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

# For each kind of loss, the default chunk size is divided by the number in _DIVISORS. JSD, a skewed
# KL and TVD need smaller chunks, because these losses keep more tensors of a chunk's size in
# memory. JSD and a skewed KL keep about twenty such tensors. TVD keeps about ten such tensors, and
# the other losses keep six such tensors.
_DIVISORS = {"jsd": 8, "skewed_forward": 8, "skewed_reverse": 8, "tvd": 2}


def _expected(e: Tensor, h: Tensor) -> Tensor:
    """Returns Σ e · h of each row. A column where e is 0 adds 0, even if h is infinite."""
    return torch.where(e == 0, 0.0, e * h).sum(1, keepdim=True)


def _target(t: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the smoothed target probability of each class, times the class weight."""
    v = t if pair.blend == 0 else t * (1 - pair.blend) + pair.blend / reading.vocab
    weight = reading.class_weight
    return v if weight is None else v * weight.to(t.dtype)


def _log(s: Tensor) -> Tensor:
    """Returns log s, where s = Σ e^d is the normaliser of a row.

    If all logits of a row are -inf, s is 0, and the function returns +inf instead of log 0 = -inf.
    Subtracting +inf makes all log-probabilities of the row -inf, and all probabilities 0.
    """
    return torch.where(s == 0, torch.inf, s).log()


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each column, the JSD term, the probability q, and log(q / M).

    The mixture M is βp + (1-β)q. The results are finite for any logits. If log q and log p are both
    -inf, their difference is NaN. The function replaces this NaN with 1e4. Any number would give
    the same result, because p = q = 0.
    """
    gap = log_q - log_p
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_q, log_p).exp()
    # β is rounded to the dtype of log q, so that β + (1-β) is exactly 1. Without this rounding, JSD
    # could differ from 0 for p = q.
    least = torch.finfo(gap.dtype).eps / 2
    b = torch.full((), min(max(beta, 1e-30), 1 - least), dtype=gap.dtype, device=gap.device)
    w = torch.where(more, b, 1 - b)
    mu = w * share + torch.where(more, 1 - b, b)
    log_mu = mu.log()
    q = torch.where(more, big, big * share)
    return -big * (w * share * a + mu * log_mu), q, torch.where(more, 0.0, -a) - log_mu


def _skewed(log_q: Tensor, log_p: Tensor, skew: float, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each column, the term of a skewed KL, the probability q, and the derivative g.

    For forward KL, the divergence is Σ p log(p / M) with M = αp + (1-α)q. For reverse KL, the
    divergence is Σ q log(q / M) with M = αq + (1-α)p. The divergence of a distribution r from M is
    computed as Σ (r log(r / M) + M - r). In this sum, no term is negative. The results are finite
    for any logits, as in `_mixture`. The derivative g is taken with respect to q. A constant is
    added to g, so that g is 0 for p = q.
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
    """Returns the probabilities of each row from its exponents d and its normaliser s.

    If all logits of a row are -inf, s is 0, and all probabilities are 0.
    """
    return d.exp() / torch.where(s == 0, torch.inf, s)


def _above(q: Tensor, gap: Tensor) -> Tensor:
    """Returns q where q > p, q / 2 where q = p, and 0 elsewhere. The argument `gap` is q - p."""
    return torch.where(gap > 0, q, torch.where(gap == 0, q / 2, 0.0))


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns above / below, or infinity if `below` is 0.

    `above` is Σ q over the columns with q > p, and `below` is Σ q over the columns with q < p. For
    a column with q = p, one half of q is added to `above`, and the other half is added to `below`.
    """
    return torch.where(below == 0, torch.inf, above / torch.where(below == 0, 1.0, below))


def _slopes(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns below / (above + below) and above / (above + below) from ratio = above / below.

    Both results have full relative precision, even if one of the results is tiny.
    """
    below = 1 / (1 + ratio)
    return below, torch.where(ratio > 1, 1 - below, ratio * below)


def pair_read(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    # (N, PAIR_STATE), shift and normaliser of whole rows. JSD and TVD need `norms` if the logits
    # are sharded over ranks.
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, and the state (N, PAIR_STATE) that the backward needs.

    If `norms` is given, x holds only some columns of each row. Then the returned loss and the last
    column of the returned state are sums over these columns. For TVD, the last two columns of the
    returned state hold the sums `above` and `below` (see `ratio`). The caller adds the sums of all
    ranks. Then `pair_join` computes the loss and the last column of the final state from the added
    sums.
    """
    results = _by_chunks(x, reading, pair, 1 + PAIR_STATE, norms, _value_and_state)
    value, state = results.split((1, PAIR_STATE), 1)
    # The results are cloned, because autograd forbids in-place writes to a view that a custom
    # autograd function returns.
    return value.reshape(x.shape[:-1]).clone(), state.clone()


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the partial state of each row over the columns of x, in shape (N, PAIR_STATE)."""
    return _by_chunks(x, reading, pair, PAIR_STATE, None, lambda *args: _partial_state(*args)[0])


def _by_chunks(x: Tensor, reading: Reading, pair: Pair, width: int, norms, work) -> Tensor:
    """Calls `work` once per chunk of rows, and returns all results in one tensor (N, width).

    The results of ignored rows are 0.
    """
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
    """Returns the partial state of a chunk of rows, and the exponents of student and teacher.

    The partial state has shape (N, PAIR_STATE). The exponents, (logit - shift) / temperature, have
    shape (N, V).
    """
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
    """Returns the loss and the state of each row in a chunk, as one tensor (N, 1 + PAIR_STATE)."""
    partial, d_q, d_p = _partial_state(y, t, rate, reading, pair, norms)
    value, state = pair_finish(partial, pair.kind)
    if pair.kind == "jsd":
        log_q, log_p = _log(state[:, 1:2]), _log(state[:, 3:4])
        terms, q, log_q_m = _mixture(d_q - log_q, d_p - log_p, pair.blend)
        # If all logits of the student's row are -inf, `log_q` is inf. If all logits of the
        # teacher's row are -inf, `log_p` is inf. If `log_q` or `log_p` is inf, the term 0 · inf
        # makes the loss NaN.
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
        # As for JSD, the loss is NaN if all logits of the student or of the teacher are -inf.
        value = gap.abs().sum(1, keepdim=True) / 2 + 0.0 * (_log(s_q) + _log(s_p))
        part = _above(q, gap)
        above, below = (t.sum(1, keepdim=True) for t in (part, q.sub_(part)))
        if norms is None:
            value, state[:, 4:] = pair_join(torch.cat((value, above, below), 1), "tvd")
        else:
            state = torch.cat((state[:, :3], above, below), 1)
    return torch.cat((value, state), 1)


def pair_join(sums: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Computes the loss (N, 1) and the last column (N, 1) of the state from `sums`.

    `sums` (N, PAIR_SUMS[kind]) holds sums over all columns of each row. The total variation is at
    most 1. If rounding errors make the value larger than 1, the value is set to 1. NaN stays NaN.
    """
    value, *masses = sums.split(1, 1)
    if kind != "tvd":
        return value, masses[0]
    return torch.where(value > 1, 1.0, value), ratio(*masses)


def pair_finish(partial: Tensor, kind: str, inv_t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the loss (N, 1) and the state (N, PAIR_STATE) from a merged partial state.

    For the kinds in PAIR_SUMS, the loss and the mean need another pass over the logits. For these
    kinds, the function returns 0 as the loss, and 0 as the mean in the state. The argument `inv_t`
    (N, 1) is 1 / temperature. This function does not use `inv_t`. The function `pair_finish` in
    kernels/ uses `inv_t` to convert the mean from nats to the unit of the logits y.
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
    """Replaces negative values, which are rounding errors, with 0. NaN stays NaN."""
    return torch.where(value < 0, 0.0, value)


def merge_pairs(
    partials: Tensor,  # (splits, N, PAIR_STATE)
    kind: str,
    inv_t: Tensor | None,  # (N, 1)
) -> Tensor:
    """Merges the partial states of all splits into one partial state per row (N, PAIR_STATE)."""
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
    """Returns the gradient of the student's logits, in the dtype of the logits."""
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
    # If all logits of a student's row are -inf, the row has no distribution, and its gradient is 0.
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
