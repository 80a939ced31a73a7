"""Row statistics in plain PyTorch, one chunk of rows at a time, which fits into a CPU's cache.

contract.py defines the statistics.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import contract as fields
from ..contract import NOWHERE, PRECISION, Partials, Reading, Statistics, as_bits, of_bits
from .rows import (
    Index,
    capped,
    centred,
    chunks,
    inverse_temperature,
    is_bad,
    live_rows,
    locate,
    max_of,
    needs_no_centring,
    real_columns,
)


class _Sums(NamedTuple):
    """Sums over whole rows, of shape (N, 1) if not noted; None if no statistic needs them.

    y are the logits after the softcap, v the class weights, and d = (y - shift) / temperature.
    """

    shift: Tensor  # max y, or 0 where the max is infinite
    s: Tensor  # Σ e^d
    s1: Tensor | None = None  # Σ e^(y - shift)
    w: Tensor | None = None  # Σ d e^d
    total: Tensor | None = None  # Σ v y
    log_total: Tensor | None = None  # Σ v d
    tail: Tensor | None = None  # log Σ e^d over the columns outside the ids
    argmax: Tensor | None = None  # (N,), int64
    rank: Tensor | None = None  # (N,), int64
    y_label: Tensor | None = None
    y_ids: Tensor | None = None  # (N, K)


def _empty_sums(reading: Reading, rows: int, dtype: torch.dtype, device) -> _Sums:
    wants, ids = reading.wants, reading.ids
    of_label = {"nll", "logprob_t1", "picked", "logprob", "rank"}
    at_label = reading.label is not None and of_label & {*wants}
    needed = {
        "shift": True,
        "s": True,
        "s1": "logprob_t1" in wants and not reading.at_temperature_1,
        "w": "entropy" in wants,
        "total": "total" in wants,
        "log_total": "log_total" in wants,
        "tail": "tail" in wants,
        "y_label": at_label,
    }
    like = {"dtype": dtype, "device": device}
    return _Sums(
        **{name: torch.zeros((rows, 1), **like) for name, need in needed.items() if need},  # type: ignore
        argmax=torch.full((rows,), -1, device=device) if "argmax" in wants else None,
        rank=torch.full((rows,), -1, device=device) if "rank" in wants else None,
        y_ids=None if ids is None else torch.zeros((rows, ids.shape[-1]), **like),  # type: ignore
    )


def read(x: Tensor, reading: Reading) -> Statistics:
    """Returns the statistics in `reading.wants`, and the state that `gradient` needs."""
    flat = x.reshape(-1, x.shape[-1])
    sums, live = _empty_sums(reading, len(flat), PRECISION[x.dtype], x.device), live_rows(reading)
    inv_t = inverse_temperature(reading, sums.shift)
    label = None if sums.y_label is None else locate(reading.label, *flat.shape)
    ids = None if sums.y_ids is None else locate(reading.ids, *flat.shape)
    for rows in chunks(flat, live):
        _add_rows(sums, flat, rows, reading, None if inv_t is None else inv_t[rows], label, ids)
    return _finish(sums, reading, live, inv_t, x.shape[:-1])


def _add_rows(
    sums: _Sums, flat: Tensor, rows: Index, reading: Reading, inv_t: Tensor | None,
    label: tuple[Tensor, Tensor] | None, ids: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Computes the sums of one chunk of rows. `label` and `ids` are results of `locate`."""
    y, _ = capped(flat[rows], reading.softcap)
    m = sums.shift[rows] = max_of(y)
    if sums.argmax is not None:
        sums.argmax[rows] = y.argmax(1)
    if sums.y_label is not None:
        sums.y_label[rows] = y.gather(1, label[0][rows])
    if sums.y_ids is not None:
        sums.y_ids[rows] = y.gather(1, ids[0][rows])
    if sums.rank is not None:
        y0, first = (sums.y_label, label) if ids is None else (sums.y_ids, ids)
        y0 = torch.where(first[1][rows], y0[rows], torch.nan)[:, :1]
        sums.rank[rows] = _count_above(y, y0)
    if sums.s1 is not None:
        sums.s1[rows] = (y - m).exp_().sum(1, keepdim=True)
    if sums.total is not None:
        sums.total[rows] = _weighted_sum(y, reading.class_weight)
    only_s = sums.w is None and sums.total is None and sums.log_total is None and sums.tail is None
    # If only s is needed, and e^y is exact enough, the max is not subtracted. That changes the
    # rounding, so `invariant` forbids it: a log-probability must not depend on what else is
    # computed.
    if only_s and not reading.invariant and needs_no_centring(m, inv_t):
        y_is_copy = y.dtype != flat.dtype or reading.softcap is not None
        sums.s[rows] = torch.exp(y, out=y if y_is_copy else None).sum(1, keepdim=True) * (-m).exp()
        return
    d = centred(y, m, inv_t)
    if sums.log_total is not None:
        sums.log_total[rows] = _weighted_sum(d, reading.class_weight)
    if sums.tail is not None:
        sums.tail[rows] = _log_sum_outside(d, ids[0][rows], ids[1][rows])
    e = d.exp_() if sums.w is None else d.exp()
    if sums.w is not None:
        sums.w[rows] = torch.where(e > 0, d.mul_(e), 0.0).sum(1, keepdim=True)
    sums.s[rows] = e.sum(1, keepdim=True)


def _count_above(y: Tensor, y0: Tensor) -> Tensor:
    """Counts the logits y (n, V) greater than y0 (n, 1). A NaN, in y or y0, counts as greater."""
    return y.shape[1] - (y <= y0).sum(1)


def above(x: Tensor, reading: Reading, y0: Tensor) -> Tensor:
    """Counts the softcapped logits above each row's y0 (N,), as int64. NaN counts as above."""
    flat, live = x.reshape(-1, x.shape[-1]), live_rows(reading)
    count = torch.zeros(len(flat), device=x.device, dtype=torch.int64)
    for rows in chunks(flat, live):
        count[rows] = _count_above(capped(flat[rows], reading.softcap)[0], y0[rows, None])
    return count if live is None else torch.where(live, count, 0)


def _log_sum_outside(d: Tensor, at: Tensor, inside: Tensor) -> Tensor:
    """Returns log Σ e^d of each row over the columns outside the ids."""
    columns = real_columns(at, inside)
    left = torch.where(inside.any(1, keepdim=True), -torch.inf, d.gather(1, columns))
    return d.scatter(1, columns, left).logsumexp(1, keepdim=True)


def outside(x: Tensor, reading: Reading, statistics: Statistics) -> Tensor:
    """Returns the log of each row's mass outside the ids; `statistics` holds all others."""
    flat, state = x.reshape(-1, x.shape[-1]), statistics.state
    tail = torch.zeros_like(state[:, :1])
    inv_t, (at, inside) = inverse_temperature(reading, tail), locate(reading.ids, *flat.shape)
    shift, log_s = (state[:, i : i + 1] for i in (fields.SHIFT, fields.LOG_S))
    for rows in chunks(flat, live_rows(reading)):
        y, _ = capped(flat[rows], reading.softcap)
        d = centred(y, shift[rows], None if inv_t is None else inv_t[rows])
        tail[rows] = _log_sum_outside(d, at[rows], inside[rows]) - log_s[rows]
    return tail.view(x.shape[:-1])


def with_repeats(state: Tensor, ids: Tensor) -> Tensor:
    """Sets the field REPEATS, which `gradient` does not read here: it adds by `scatter_add_`."""
    return state


def _weighted_sum(z: Tensor, weight: Tensor | None) -> Tensor:
    """Returns Σ v z of each row. A class of weight v = 0 adds 0, even if its z is infinite."""
    if weight is None:
        return z.sum(1, keepdim=True)
    v = weight.to(z.dtype)
    return torch.where(v == 0, 0.0, v * z).sum(1, keepdim=True)


def _finish(
    sums: _Sums, reading: Reading, live: Tensor | None, inv_t: Tensor | None, shape
) -> Statistics:
    wants, shift, s = reading.wants, sums.shift, sums.s
    rate = torch.ones_like(s) if inv_t is None else inv_t
    log_s = s.log()
    log_s1 = log_s if sums.s1 is None else sums.s1.log()
    values: dict[str, Tensor] = {"lse": shift * rate + log_s}
    y, columns = sums.y_ids, reading.ids
    if columns is None:
        y, columns = sums.y_label, reading.label
    if "picked" in wants:
        values["picked"] = _nan_if_bad(y * rate, columns, reading)
    if "logprob" in wants:
        values["logprob"] = _nan_if_bad((y - shift) * rate - log_s, columns, reading)
    if "nll" in wants:
        nll = log_s - (sums.y_label - shift) * rate
        values["nll"] = _nan_if_bad(nll, reading.label, reading)
    if "logprob_t1" in wants:
        logprob_t1 = sums.y_label - shift - log_s1
        values["logprob_t1"] = _nan_if_bad(logprob_t1, reading.label, reading)
    if sums.w is not None:
        values["entropy"] = torch.where(s == 0, 0.0, log_s - sums.w / s)
    if sums.total is not None:
        values["total"] = sums.total * rate
    if sums.log_total is not None:
        weight = reading.class_weight
        mass = reading.vocab if weight is None else weight.to(s.dtype).sum()
        values["log_total"] = sums.log_total - mass * log_s
    if sums.tail is not None:
        bad = is_bad(reading.ids, locate(reading.ids, len(s), reading.vocab)[1])
        values["tail"] = (sums.tail - log_s).masked_fill(bad, torch.nan)
    # the last is REPEATS, see `with_repeats`
    zero = torch.zeros_like(s)
    kept = [shift, log_s, log_s1, values.get("entropy", zero), values.get("tail", zero), zero]
    state = torch.cat(kept, 1)
    whole = {"argmax": sums.argmax, "rank": sums.rank}
    if live is not None:
        for t in (state, *values.values()):
            t.masked_fill_(~live[:, None], 0)
        whole = {n: None if t is None else t.masked_fill(~live, -1) for n, t in whole.items()}
    # cloned for autograd, as in `pair_read`
    K = () if reading.ids is None else (reading.ids.shape[-1],)
    lengths = {"picked": K, "logprob": K}
    shaped = {
        name: t.view((*shape, *lengths.get(name, ()))).clone()
        for name, t in values.items()
        if name in wants
    }
    shaped |= {name: t.view(shape).clone() for name, t in whole.items() if t is not None}
    return Statistics(state, **shaped)


def _nan_if_bad(value: Tensor, columns: Tensor, reading: Reading) -> Tensor:
    inside = locate(columns, len(value), reading.vocab)[1]
    return value.masked_fill(~inside, torch.nan)


def partial(x: Tensor, reading: Reading, start: int = 0) -> Partials:
    """Returns the partial statistics over the columns of x. The first has the id `start`."""
    flat = x.reshape(-1, x.shape[-1])
    rows, V = flat.shape
    live = live_rows(reading)
    y, _ = capped(flat, reading.softcap)
    state = y.new_zeros((rows, 1, fields.PART))
    split = state[:, 0]
    inv_t = inverse_temperature(reading, split[:, :1])
    weight = reading.class_weight
    v = y.new_ones(V) if weight is None else weight[start : start + V].to(y.dtype)
    m = y.amax(1, keepdim=True) if V else y.new_full((rows, 1), -torch.inf)
    shift = torch.where(m.isinf(), 0.0, m)
    d = centred(y, shift, None)
    e = (d if inv_t is None else d * inv_t).exp()
    ref = y[:, :512].mean(1, keepdim=True) if V else torch.zeros_like(shift)
    ref = torch.where(ref.isfinite(), ref, 0.0)
    split[:, fields.M] = m[:, 0]
    split[:, fields.S] = e.sum(1)
    split[:, fields.W] = torch.where(e > 0, d * e, 0.0).sum(1)
    split[:, fields.C] = torch.where(v == 0, 0.0, v * (y - ref)).sum(1)
    split[:, fields.N], split[:, fields.REF] = v.sum(), ref[:, 0]
    if "argmax" in reading.wants:
        column = y.argmax(1) + start if V else torch.full((rows,), NOWHERE, device=x.device)
        split[:, fields.ARG] = as_bits(column, y.dtype)
    split[:, fields.S1] = d.exp().sum(1)
    if reading.label is not None and V:
        at, inside = locate(reading.label - start, rows, V)
        split[:, fields.Y_LABEL] = torch.where(inside, y.gather(1, at), 0.0)[:, 0]
    picked = None
    if reading.ids is not None:
        at, inside = locate(reading.ids - start, rows, V)
        picked = torch.where(inside, y.gather(1, at), 0.0) if V else y.new_zeros(at.shape)
    if live is not None:
        split.masked_fill_(~live[:, None], 0)
    return Partials(state, picked)


def merge(several: Sequence[Partials], reading: Reading) -> Partials:
    """Merges the partial statistics of several splits of the same rows into one split.

    Each id is in one split, and `picked` is 0 in the others.
    """
    state = torch.cat([partials.state for partials in several], 1)
    state = torch.nn.functional.pad(state, (0, fields.PART - state.shape[2]))
    picked = None
    if several[0].picked is not None:
        picked = torch.stack([partials.picked for partials in several]).sum(0)
    m_split, s = state[..., fields.M], state[..., fields.S]
    m = m_split.amax(1, keepdim=True)
    # the max of a split minus the row's; 0 if equal (inf - inf is NaN) or if the split is empty
    moved = torch.where((s == 0) | (m_split == m), 0.0, m_split - m).clamp_min(-1e38)
    inv_t = inverse_temperature(reading, m)
    scale = (moved if inv_t is None else moved * inv_t).exp()
    # right for `Y_LABEL` and `N` only; the other fields are overwritten below
    merged = state.sum(1, keepdim=True)
    row = merged[:, 0]
    row[:, fields.M], row[:, fields.S] = m[:, 0], (s * scale).sum(1)
    # s · scale first: moved · s could overflow if `moved` is -1e38
    row[:, fields.W] = (state[..., fields.W] * scale + moved * (s * scale)).sum(1)
    row[:, fields.S1] = (state[..., fields.S1] * moved.exp()).sum(1)
    c, n, ref = (state[..., field] for field in (fields.C, fields.N, fields.REF))
    # C is Σ v (y - REF) and N is Σ v (v: class weights). REF becomes the largest of the splits with
    # N ≠ 0; the REF of the others is 0, which can be far from the logits.
    one = torch.where(n != 0, ref, -torch.inf).amax(1, keepdim=True)
    one = torch.where(one == -torch.inf, 0.0, one)
    row[:, fields.REF], row[:, fields.C] = one[:, 0], (c + n * (ref - one)).sum(1)
    columns = torch.where(m_split == m, of_bits(state[..., fields.ARG]), NOWHERE)
    row[:, fields.ARG] = as_bits(columns.amin(1), row.dtype)
    return Partials(merged, picked)


def finish(
    partials: Partials, reading: Reading, shape: tuple[int, ...] | None = None
) -> Statistics:
    """Merges the splits (dim 1 of partials.state) of each row, and returns its statistics.

    `shape` is that of a statistic with one number per row, by default that of the ids or the label.
    `tail` and `rank` would need the logits.
    """
    assert "tail" not in reading.wants
    assert "rank" not in reading.wants
    shape = _lead(reading, partials.state) if shape is None else shape
    whole, picked = merge([partials], reading)
    m, s, y_label, w, arg, s1, c, n, ref = whole[:, 0].split(1, 1)
    inv_t, shift = inverse_temperature(reading, m), torch.where(m.isinf(), 0.0, m)
    rate = 1.0 if inv_t is None else inv_t
    column = of_bits(arg)[:, 0].long()
    wants = reading.wants
    sums = _Sums(
        shift,
        s,
        s1=None if inv_t is None else s1,
        w=w * rate if "entropy" in wants else None,
        total=c + n * ref if "total" in wants else None,
        log_total=(c - n * (shift - ref)) * rate if "log_total" in wants else None,
        # NOWHERE if the row contains NaN
        argmax=torch.where(column == NOWHERE, 0, column) if "argmax" in wants else None,
        y_label=y_label,
        y_ids=picked,
    )
    return _finish(sums, reading, live_rows(reading), inv_t, shape)


def _lead(reading: Reading, state: Tensor) -> torch.Size:
    """Returns the shape of the rows: of the ids without K, of the label, or (N,)."""
    if reading.ids is not None:
        return reading.ids.shape[:-1]
    return state.shape[:1] if reading.label is None else reading.label.shape
