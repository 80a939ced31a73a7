"""Row statistics in plain PyTorch, a few rows at a time.

The same contract as the kernels' read, partial, merge and finish, with the working set kept in a
CPU's cache. The formulas are those of contract.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import contract as fields
from ..contract import PRECISION, Partials, Reading, Statistics
from .rows import (
    capped,
    centred,
    chunks,
    inverse_temperature,
    is_bad,
    live_rows,
    locate,
    max_of,
    needs_no_centring,
    own_columns,
)


class _Sums:
    """What is added up of each row, (N, 1) each but for the ids."""

    def __init__(self, flat: Tensor, reading: Reading):
        rows, wants = flat.shape[0], reading.wants
        column = torch.zeros((rows, 1), dtype=PRECISION[flat.dtype], device=flat.device)
        self.shift, self.s = column, torch.zeros_like(column)
        self.w, self.c, self.rest, self.s1 = (torch.zeros_like(column) for _ in range(4))
        self.argmax = None
        if "argmax" in wants:
            self.argmax = torch.full((rows,), -1, device=flat.device)
        self.label = self.ids = (column, column)  # columns, and which of them are real
        self.y_label = self.y_ids = None
        if reading.label is not None and {"nll", "logprob_t1", "picked", "logprob"} & set(wants):
            self.label = locate(reading.label, rows, flat.shape[1])
            self.y_label = torch.zeros_like(column)
        if reading.ids is not None:
            self.ids = locate(reading.ids, rows, flat.shape[1])
            self.y_ids = column.expand(self.ids[0].shape).clone()


def read(x: Tensor, reading: Reading) -> Statistics:
    """The statistics that `reading` wants of each row of x (..., V)."""
    flat = x.reshape(-1, x.shape[-1])
    sums, live = _Sums(flat, reading), live_rows(reading)
    inv_t = inverse_temperature(reading, sums.shift)
    for rows in chunks(flat, live):
        _add_rows(sums, flat, rows, reading, None if inv_t is None else inv_t[rows])
    return _finish(sums, reading, live, inv_t, x.shape[:-1])


def _add_rows(sums: _Sums, flat: Tensor, rows, reading: Reading, inv_t: Tensor | None) -> None:
    wants = reading.wants
    y, _ = capped(flat[rows], reading.softcap)
    m = sums.shift[rows] = max_of(y)
    if sums.argmax is not None:
        sums.argmax[rows] = y.argmax(1)
    if sums.y_label is not None:
        sums.y_label[rows] = y.gather(1, sums.label[0][rows])
    if sums.y_ids is not None:
        sums.y_ids[rows] = y.gather(1, sums.ids[0][rows])
    if "logprob_t1" in wants and inv_t is not None:
        sums.s1[rows] = (y - m).exp_().sum(1, keepdim=True)
    more = {"entropy", "total", "log_total", "tail"} & set(wants)
    if not more and needs_no_centring(m, inv_t):
        own = y.dtype != flat.dtype or reading.softcap is not None  # not a view of the logits
        sums.s[rows] = torch.exp(y, out=y if own else None).sum(1, keepdim=True) * (-m).exp()
        return
    d = centred(y, m, inv_t)
    if "total" in wants or "log_total" in wants:
        sums.c[rows] = _weighted_sum(d if "log_total" in wants else y, reading.class_weight)
    if "tail" in wants:
        at, inside = sums.ids
        sums.rest[rows] = _rest(d, at[rows], inside[rows])
    e = d.exp() if "entropy" in wants else d.exp_()
    if "entropy" in wants:
        sums.w[rows] = torch.where(e > 0, d.mul_(e), 0.0).sum(1, keepdim=True)
    sums.s[rows] = e.sum(1, keepdim=True)


def _rest(d: Tensor, at: Tensor, inside: Tensor) -> Tensor:
    """log Σ e^d over the columns that are not among the ids, (N, 1)."""
    columns = own_columns(at, inside)
    left = torch.where(inside.any(1, keepdim=True), -torch.inf, d.gather(1, columns))
    return d.scatter(1, columns, left).logsumexp(1, keepdim=True)


def outside(x: Tensor, reading: Reading, found: Statistics) -> Tensor:
    """log of the mass outside reading.ids, (...), of rows whose state is known."""
    flat = x.reshape(-1, x.shape[-1])
    rest = torch.zeros_like(found.state[:, :1])
    inv_t, (at, inside) = inverse_temperature(reading, rest), locate(reading.ids, *flat.shape)
    shift, log_s = (found.state[:, i : i + 1] for i in (fields.SHIFT, fields.LOG_S))
    for rows in chunks(flat, live_rows(reading)):
        y, _ = capped(flat[rows], reading.softcap)
        d = centred(y, shift[rows], None if inv_t is None else inv_t[rows])
        rest[rows] = _rest(d, at[rows], inside[rows]) - log_s[rows]
    return rest.view(x.shape[:-1])


def with_repeats(state: Tensor, ids: Tensor) -> Tensor:
    """The state itself, because `gradient` adds repeated ids by scatter_add_ without REPEATS."""
    return state


def _weighted_sum(z: Tensor, weight: Tensor | None) -> Tensor:
    """Σ v z over columns, (N, 1). A class of weight 0 is not read."""
    if weight is None:
        return z.sum(1, keepdim=True)
    v = weight.to(z.dtype)
    return torch.where(v == 0, 0.0, v * z).sum(1, keepdim=True)


def _finish(
    sums: _Sums, reading: Reading, live: Tensor | None, inv_t: Tensor | None, shape
) -> Statistics:
    """Statistics from what was added up; 0 for ignored rows, whatever was in them."""
    wants, shift, s = reading.wants, sums.shift, sums.s
    rate = torch.ones_like(s) if inv_t is None else inv_t
    log_s = s.log()
    log_s1 = log_s if inv_t is None else sums.s1.log()
    found: dict[str, Tensor] = {"lse": shift * rate + log_s}
    y, at = (sums.y_label, sums.label) if sums.y_ids is None else (sums.y_ids, sums.ids)
    inside = at[1]
    if "picked" in wants:
        found["picked"] = (y * rate).masked_fill(~inside, torch.nan)
    if "logprob" in wants:
        found["logprob"] = ((y - shift) * rate - log_s).masked_fill(~inside, torch.nan)
    if "nll" in wants:
        nll = log_s - (sums.y_label - shift) * rate
        found["nll"] = nll.masked_fill(~sums.label[1], torch.nan)
    if "logprob_t1" in wants:
        logprob_t1 = sums.y_label - shift - log_s1
        found["logprob_t1"] = logprob_t1.masked_fill(~sums.label[1], torch.nan)
    if "entropy" in wants:
        found["entropy"] = torch.where(s == 0, 0.0, log_s - sums.w / s)
    if "total" in wants:
        found["total"] = sums.c * rate
    if "log_total" in wants:
        weight = reading.class_weight
        mass = reading.vocab if weight is None else weight.to(s.dtype).sum()
        found["log_total"] = sums.c - mass * log_s
    if "tail" in wants:
        bad = is_bad(reading.ids, sums.ids[1])
        found["tail"] = (sums.rest - log_s).masked_fill(bad, torch.nan)
    zero = torch.zeros_like(s)
    kept = [shift, log_s, log_s1, found.get("entropy", zero), found.get("tail", zero), zero]
    state = torch.cat(kept, 1)
    if live is not None:
        for t in (state, *found.values()):
            t.masked_fill_(~live[:, None], 0)
        if sums.argmax is not None:
            sums.argmax.masked_fill_(~live, -1)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    K = () if reading.ids is None else (reading.ids.shape[-1],)
    lengths = {"picked": K, "logprob": K}
    shaped = {
        name: t.view((*shape, *lengths.get(name, ()))).clone()
        for name, t in found.items()
        if name in wants
    }
    if sums.argmax is not None:
        shaped["argmax"] = sums.argmax.view(shape).clone()
    return Statistics(state, **shaped)


def partial(x: Tensor, reading: Reading, start: int = 0) -> Partials:
    """One part of each row: x is the columns from `start` of a vocabulary, in which ids count."""
    flat = x.reshape(-1, x.shape[-1])
    rows, V = flat.shape
    live = live_rows(reading)
    y, _ = capped(flat, reading.softcap)
    state = y.new_zeros((rows, 1, fields.PART))
    part = state[:, 0]
    inv_t = inverse_temperature(reading, part[:, :1])
    weight = reading.class_weight
    v = y.new_ones(V) if weight is None else weight[start : start + V].to(y.dtype)
    m = y.amax(1, keepdim=True) if V else y.new_full((rows, 1), -torch.inf)
    shift = torch.where(m.isinf(), 0.0, m)
    d = centred(y, shift, None)
    e = (d if inv_t is None else d * inv_t).exp()
    ref = y[:, :512].mean(1, keepdim=True) if V else torch.zeros_like(shift)
    ref = torch.where(ref.isfinite(), ref, 0.0)
    part[:, fields.M] = m[:, 0]
    part[:, fields.S] = e.sum(1)
    part[:, fields.W] = torch.where(e > 0, d * e, 0.0).sum(1)
    part[:, fields.C] = torch.where(v == 0, 0.0, v * (y - ref)).sum(1)
    part[:, fields.N], part[:, fields.REF] = v.sum(), ref[:, 0]
    if "argmax" in reading.wants:
        part[:, fields.ARG] = (y.argmax(1) + start).to(y.dtype) if V else float(2**31)
    part[:, fields.S1] = d.exp().sum(1)
    if reading.label is not None and V:
        at, inside = locate(reading.label - start, rows, V)
        part[:, fields.Y_LABEL] = torch.where(inside, y.gather(1, at), 0.0)[:, 0]
    picked = None
    if reading.ids is not None:
        at, inside = locate(reading.ids - start, rows, V)
        picked = torch.where(inside, y.gather(1, at), 0.0) if V else y.new_zeros(at.shape)
    if live is not None:
        part.masked_fill_(~live[:, None], 0)
    return Partials(state, picked)


def merge(several: Sequence[Partials], reading: Reading) -> Partials:
    """Parts of the same rows as one part; what they hold of the ids adds up."""
    state = torch.cat([part.state for part in several], 1)
    state = torch.nn.functional.pad(state, (0, fields.PART - state.shape[2]))
    picked = None
    if several[0].picked is not None:
        picked = torch.stack([part.picked for part in several]).sum(0)
    own, s = state[..., fields.M], state[..., fields.S]
    m = own.amax(1, keepdim=True)
    # An empty part, or one whose max is that of all, moves by 0: -inf minus -inf is never taken.
    moved = torch.where((s == 0) | (own == m), 0.0, own - m).clamp_min(-1e38)
    inv_t = inverse_temperature(reading, m)
    scale = (moved if inv_t is None else moved * inv_t).exp()
    merged = state.sum(1, keepdim=True)  # right for y of the label, and for the weights' sum
    part = merged[:, 0]
    part[:, fields.M], part[:, fields.S] = m[:, 0], (s * scale).sum(1)
    # In this order: a part that is far below has moved by 1e38, and weighs 0.
    part[:, fields.W] = (state[..., fields.W] * scale + moved * (s * scale)).sum(1)
    part[:, fields.S1] = (state[..., fields.S1] * moved.exp()).sum(1)
    c, n, ref = (state[..., field] for field in (fields.C, fields.N, fields.REF))
    # One reference for all, of a part that has columns: an empty part's 0 may be far away.
    one = torch.where(n != 0, ref, -torch.inf).amax(1, keepdim=True)
    one = torch.where(one == -torch.inf, 0.0, one)
    part[:, fields.REF], part[:, fields.C] = one[:, 0], (c + n * (ref - one)).sum(1)
    part[:, fields.ARG] = torch.where(own == m, state[..., fields.ARG], torch.inf).amin(1)
    return Partials(merged, picked)


def finish(parts: Partials, reading: Reading, shape: tuple[int, ...] | None = None) -> Statistics:
    """Statistics of whole rows from their parts, wherever those were computed.

    shape is (...), the rows'; where it is None, that of the reading's tensors, or (N,).
    """
    shape = _lead(reading, parts.state) if shape is None else shape
    whole, picked = merge([parts], reading)
    m, s, y_label, w, arg, s1, c, n, ref = whole[:, 0].split(1, 1)
    sums = _Sums(m.expand(-1, max(reading.vocab, 1)), reading)
    inv_t = inverse_temperature(reading, m)
    sums.shift, sums.s, sums.s1 = torch.where(m.isinf(), 0.0, m), s, s1
    sums.w = w if inv_t is None else w * inv_t
    sums.c = c + n * ref
    if "log_total" in reading.wants:
        total = c - n * (sums.shift - ref)
        sums.c = total if inv_t is None else total * inv_t
    if sums.argmax is not None:
        sums.argmax = torch.where(arg.isinf(), 0, arg)[:, 0].long()
    if sums.y_label is not None:
        sums.y_label = y_label
    sums.y_ids = picked
    return _finish(sums, reading, live_rows(reading), inv_t, shape)


def _lead(reading: Reading, state: Tensor) -> torch.Size:
    """The rows' shape, as far as the reading tells."""
    if reading.ids is not None:
        return reading.ids.shape[:-1]
    return state.shape[:1] if reading.label is None else reading.label.shape
