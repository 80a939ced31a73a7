"""Losses against a dense teacher in plain PyTorch, one chunk of rows at a time.

The state (N, PAIR_STATE) holds the shift (the max of the logits, or 0 if infinite) and the
normaliser of the student, both of the teacher, and the `mean` of pair_losses.py. A partial state,
over some columns only, holds the max instead of the shift, and the sum c instead of the mean: in
nats, in both backends, because `merge_pairs` merges both.
"""

import torch
from torch import Tensor

from ..contract import PAIR_STATE, PAIR_SUMS, PRECISION, Pair, Reading
from .pair_losses import LOSSES, Side
from .rows import (
    by_row,
    capped,
    centred,
    chunks,
    fill_ignored,
    inverse_temperature,
    live_rows,
    written_back,
    written_to,
)


def pair_read(x: Tensor, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:  # x (..., V)
    """Returns the loss of each row, and the state (N, PAIR_STATE) for the backward."""

    def work(rows, y, t, rate):
        partial, q, p = _first_pass(y, t, rate, pair)
        sums = _second_pass(q, p, pair) if LOSSES[pair.kind].twice else None
        return _finished(partial, sums, pair)

    results = _by_chunks(x, reading, pair, 1 + PAIR_STATE, work)
    value, state = results.split((1, PAIR_STATE), 1)
    # cloned, because autograd forbids in-place writes to a view that a custom function returns
    return value.reshape(x.shape[:-1]).clone(), state.clone()


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the partial state (N, PAIR_STATE) of each row over the columns of x."""

    def work(rows, y, t, rate):
        return _first_pass(y, t, rate, pair)[0]

    return _by_chunks(x, reading, pair, PAIR_STATE, work)


def pair_sums(x: Tensor, reading: Reading, pair: Pair, whole: Tensor) -> Tensor:
    """Returns the sums (N, PAIR_SUMS) of the second pass over the columns of x, which simply add.

    `whole` (N, PAIR_STATE) is the partial state of whole rows.
    """
    state = with_shifts(whole)

    def work(rows, y, t, rate):
        return _second_pass(*_sides(y, t, rate, state[rows], pair), pair)

    return _by_chunks(x, reading, pair, PAIR_SUMS, work)


def pair_finish(
    whole: Tensor,  # (N, PAIR_STATE), the partial state of whole rows
    sums: Tensor | None,  # (N, PAIR_SUMS), for losses of two passes
    reading: Reading,
    pair: Pair,
) -> tuple[Tensor, Tensor]:
    """Returns the loss (N,) and the state (N, PAIR_STATE)."""
    results, live = _finished(whole, sums, pair), live_rows(reading)
    if live is not None:
        results = torch.where(live[:, None], results, 0.0)
    return results[:, 0].clone(), results[:, 1:].clone()


def merge_pairs(
    partials: Tensor,  # (parts, N, PAIR_STATE)
    reading: Reading,
    pair: Pair,
) -> Tensor:
    """Merges the partial states of several sets of columns."""
    loss, shape = LOSSES[pair.kind], partials.shape[:2]
    m_q, s_q, m_p, s_p, c = partials.unbind(-1)
    inv_t = inverse_temperature(reading, partials[0, :, :1])
    rate = 1.0 if inv_t is None else inv_t[:, 0]
    top_q, top_p = m_q.amax(0), m_p.amax(0)
    moved = ((_moved(m, top) * rate).reshape(-1, 1) for m, top in ((m_q, top_q), (m_p, top_p)))
    # sides without columns, for which `fold` only corrects c for the new max
    none = partials.new_empty((shape.numel(), 0))  # type: ignore
    q, p = (Side(none, s.reshape(-1, 1), m, none) for s, m in zip((s_q, s_p), moved, strict=True))
    if not loss.twice:
        c = loss.fold(c.reshape(-1, 1), q, p, pair.blend).view(shape)
    s_q, s_p = ((side.s * side.scale).view(shape).sum(0) for side in (q, p))
    return torch.stack((top_q, s_q, top_p, s_p, c.sum(0)), 1)


def _moved(m: Tensor, top: Tensor) -> Tensor:
    """Returns the max of each part minus the max of its row, or 0 for an empty part."""
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
    loss = LOSSES[pair.kind]
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    dx, into = written_to(x, into)
    live, inv_t = live_rows(reading), inverse_temperature(reading, state[:, :1])
    gain = torch.ones_like(state[:, :1]) * by_row(upstream, len(state)) * by_row(factor, len(state))
    gain = gain if inv_t is None else gain * inv_t

    fill_ignored(dx, live, before=True)
    for rows in chunks(flat, live, loss.divisor):
        y, slope = capped(flat[rows], reading.softcap)
        rate = None if inv_t is None else inv_t[rows]
        q, p = _sides(y, _teacher(other[rows], y, reading, pair), rate, state[rows], pair)
        dz, scale = loss.dz(q, p, state[rows, 4:], gain[rows], pair.blend)
        if loss.twice:
            scale = scale + 0.0 * (q.log_s + p.log_s)
        # a row whose logits are all -inf has no distribution: its gradient is 0
        dz *= torch.where(q.s == 0, 0.0, scale)
        dx[rows] = (dz if slope is None else dz.mul_(slope)).to(dx.dtype)
    fill_ignored(dx, live, before=False)
    return written_back(dx, into)


def _by_chunks(x: Tensor, reading: Reading, pair: Pair, width: int, work) -> Tensor:
    """Calls `work` per chunk of rows; returns the results (N, width), with 0 in ignored rows."""
    flat, other = (t.reshape(-1, x.shape[-1]) for t in (x, pair.teacher))
    live = live_rows(reading)
    results = torch.zeros((len(flat), width), dtype=PRECISION[x.dtype], device=x.device)
    inv_t = inverse_temperature(reading, results[:, :1])
    for rows in chunks(flat, live, LOSSES[pair.kind].divisor):
        rate = None if inv_t is None else inv_t[rows]
        y, _ = capped(flat[rows], reading.softcap)
        results[rows] = work(rows, y, _teacher(other[rows], y, reading, pair), rate)
    return results if live is None else results.masked_fill_(~live[:, None], 0)


def _teacher(t: Tensor, y: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the teacher's logits, or the smoothed target probabilities times class weights."""
    t = t.to(y.dtype)
    if not LOSSES[pair.kind].probs:
        return t
    v = t if pair.blend == 0 else t * (1 - pair.blend) + pair.blend / reading.vocab
    weight = reading.class_weight
    return v if weight is None else v * weight.to(t.dtype)


def _first_pass(y, t, rate, pair: Pair) -> tuple[Tensor, Side, Side]:
    """Returns the partial state of a chunk of rows, its student and its teacher."""
    loss, zero, m_q = LOSSES[pair.kind], torch.zeros_like(y[:, :1]), y.amax(1, keepdim=True)
    m_p = zero if loss.probs else t.amax(1, keepdim=True)
    start = torch.cat((_finite(m_q), zero, _finite(m_p), zero), 1)
    q, p = _sides(y, t, rate, start, pair)
    c = zero if loss.twice else loss.fold(zero, q, p, pair.blend)
    q.s, p.s = (side.e.sum(1, keepdim=True) for side in (q, p))
    return torch.cat((m_q, q.s, m_p, p.s, c), 1), q, p


def _second_pass(q: Side, p: Side, pair: Pair) -> Tensor:
    zero = torch.zeros_like(q.s)
    return torch.cat(LOSSES[pair.kind].fold((zero, zero, zero), q, p, pair.blend), 1)


def _sides(y, t, rate, state: Tensor, pair: Pair) -> tuple[Side, Side]:
    """Returns student and teacher with the shifts and normalisers of `state`."""
    shift_q, s_q, shift_p, s_p = state[:, :4].split(1, 1)
    still = torch.zeros_like(s_q)
    q = Side(centred(y, shift_q, rate), s_q, still)
    if LOSSES[pair.kind].probs:
        return q, Side(q.d, s_p, still, e=t)
    return q, Side(centred(t, shift_p, rate), s_p, still)


def _finished(partial: Tensor, sums: Tensor | None, pair: Pair) -> Tensor:
    """Returns the losses and the states, as (N, 1 + PAIR_STATE)."""
    state = with_shifts(partial)
    _, s_q, _, s_p, c = state.split(1, 1)
    q, p = Side(c, s_q, c), Side(c, s_p, c)  # of which `finish` reads only s
    loss = LOSSES[pair.kind]
    value, mean = loss.finish(c if sums is None else sums.split(1, 1), q, p, pair.blend)
    if sums is not None:
        # log_s is inf if all logits of a row are -inf; then 0 · inf makes the loss NaN
        value = value + 0.0 * (q.log_s + p.log_s)
    return torch.cat((value, state[:, :4], mean), 1)


def with_shifts(partial: Tensor) -> Tensor:
    """Replaces the maxima by shifts."""
    m_q, s_q, m_p, s_p, c = partial.split(1, 1)
    return torch.cat((_finite(m_q), s_q, _finite(m_p), s_p, c), 1)


def _finite(m: Tensor) -> Tensor:
    return torch.where(m.isinf(), 0.0, m)
