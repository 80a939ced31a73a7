"""The gradient of row statistics (its formula is in contract.py), one chunk of rows at a time."""

import torch
from torch import Tensor

from .. import contract as fields
from ..contract import Coefficients, Reading
from .rows import (
    Index,
    by_row,
    capped,
    centred,
    chunks,
    fill_ignored,
    inverse_temperature,
    is_bad,
    lift_of,
    live_rows,
    locate,
    needs_no_centring,
    real_columns,
    written_back,
    written_to,
)


class _Terms:
    """The coefficients of each row, times the upstream gradient and `factor`.

    All except `d_logprob_t1` are also divided by the temperature.
    """

    def __init__(
        self, x: Tensor, reading: Reading, state, coefficients: Coefficients, upstream, factor,
        start: int,
    ):  # fmt: skip
        rows, V = state.shape[0], x.shape[-1]
        has = coefficients.has
        column = state[:, :1]
        # a row that is all -inf has no distribution: its p and its gradient are 0
        self.dead = state[:, fields.LOG_S : fields.LOG_S + 1] == -torch.inf
        self.shift = torch.where(self.dead, torch.inf, column)
        self.log_s = torch.where(self.dead, 0.0, state[:, fields.LOG_S : fields.LOG_S + 1])
        self.log_s1 = state[:, fields.LOG_S1 : fields.LOG_S1 + 1]
        self.inv_t = inverse_temperature(reading, column)
        gain = by_row(upstream, rows) * by_row(factor, rows)
        bad = self._locate(reading, coefficients, rows, V, start)
        values = (coefficients.rows.expand(rows, fields.COEFFICIENTS) * gain).to(state.dtype)
        values = torch.where(self.dead, 0.0, values)
        if bad is not None:  # an id outside the vocabulary makes its whole row NaN
            values = torch.where(bad, torch.nan, values)

        def field(name: str) -> Tensor | None:
            # Inductor computes a tensor that is viewed by strides once, not again in every column
            at = fields.FIELDS.index(name)
            at = values.storage_offset() + at * values.stride(1)
            return values.as_strided((rows, 1), values.stride(), at) if name in has else None

        self.a, self.b, self.g_total = field("a"), field("b"), field("total")
        self.a_ids, self.g_label = field("a_ids"), field("label")
        self.d_logprob_t1 = field("logprob_t1")
        if self.a is None:
            self.a = torch.zeros_like(self.shift)
            self.a = self.a if bad is None else torch.where(bad, torch.nan, self.a)
        self.g_ids = None
        if coefficients.ids is not None:
            g = coefficients.ids.reshape(rows, coefficients.ids.shape[-1]) * gain
            self.g_ids = torch.where(self.dead | ~self.inside, 0.0, g.to(state.dtype))
        self.logprob_t1_apart = self.d_logprob_t1 is not None and self.inv_t is not None
        self.lift = None if self.a_ids is None else lift_of(state[:, fields.TAIL : fields.TAIL + 1])
        if self.d_logprob_t1 is not None and not self.logprob_t1_apart:
            # at temperature 1, d of `logprob_t1` adds -d · p, so `a` becomes a - d
            # (kernels/statistics/backward.py)
            d = self.d_logprob_t1
            self.a = self.a - (d if self.lift is None else d * self.lift.exp())
            self.a_ids = None if self.a_ids is None else self.a_ids - d
        if self.inv_t is not None:
            for name in ("a", "b", "g_total", "a_ids", "g_label", "g_ids"):
                t = getattr(self, name)
                setattr(self, name, None if t is None else t * self.inv_t)

    def _locate(
        self, reading: Reading, coefficients: Coefficients, rows: int, V: int, start: int
    ) -> Tensor | None:
        """Finds the columns of labels and ids in x. Returns a mask (N, 1) of the rows with one
        outside the vocabulary.
        """
        bad, has = None, coefficients.has
        if "label" in has or "logprob_t1" in has:
            bad = ~locate(reading.label, rows, reading.vocab)[1]
            self.label, self.has_label = locate(reading.label - start, rows, V)
        if coefficients.ids is not None or "a_ids" in has:
            bad_ids = is_bad(reading.ids, locate(reading.ids, rows, reading.vocab)[1])
            self.ids, self.inside = locate(reading.ids.clamp_min(-1) - start, rows, V)
            bad = bad_ids if bad is None else bad | bad_ids
        return bad

    @property
    def only_a(self) -> bool:
        """Whether dy, without the terms of `label`, `ids` and `total`, is `a` · softmax(z)."""
        return self.b is None and self.a_ids is None and not self.logprob_t1_apart


def gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,  # (..., V), output, can be x; None means a new tensor
    start: int | None = None,  # the id of the first column of x; None if x has all columns
) -> Tensor:
    """Returns the gradient of the logits by the formula of contract.py."""
    flat = x.reshape(-1, x.shape[-1])
    dx, into = written_to(x, into)
    live = live_rows(reading)
    terms = _Terms(x, reading, state, coefficients, upstream, factor, start or 0)
    fill_ignored(dx, live, before=True)
    for rows in chunks(flat, live):
        y, slope = capped(flat[rows], reading.softcap)
        direct = dx[rows] if isinstance(rows, slice) and dx.dtype == y.dtype else None
        y_is_copy = y.dtype != flat.dtype or reading.softcap is not None
        dy = _dy(terms, y, rows, direct, y_is_copy)
        if terms.g_total is not None:
            weight = reading.class_weight
            v = 1.0 if weight is None else weight[start or 0 : (start or 0) + x.shape[-1]]
            dy += terms.g_total[rows] * v
        if terms.g_label is not None:
            g_label = torch.where(terms.has_label[rows], terms.g_label[rows], 0.0)
            dy.scatter_add_(1, terms.label[rows], g_label)
        if terms.g_ids is not None:
            dy.scatter_add_(1, terms.ids[rows], terms.g_ids[rows])
        if slope is not None:
            dy *= slope
        if dy is not direct:
            dx[rows] = dy.to(dx.dtype)
    fill_ignored(dx, live, before=False)
    return written_back(dx, into)


def _dy(terms: _Terms, y: Tensor, rows: Index, direct: Tensor | None, y_is_copy: bool) -> Tensor:
    """Returns dy of a chunk of rows, without the terms of `label`, `ids` and `total`.

    To save memory, it can be written to `direct`, or to y if y is a copy of the logits.
    """
    shift, inv_t = terms.shift[rows], None if terms.inv_t is None else terms.inv_t[rows]
    inv_s, a = (-terms.log_s[rows]).exp(), terms.a[rows]
    if terms.only_a and needs_no_centring(shift, inv_t):
        dy = torch.exp(y, out=y if y_is_copy else direct).mul_(a * inv_s * (-shift).exp())
    elif terms.only_a:
        dy = centred(y, shift, inv_t, out=direct).exp_().mul_(a * inv_s)
    else:
        d = centred(y, shift, inv_t)
        p = d.exp() * inv_s
        if terms.a_ids is None:
            dy = p * a
        else:
            # dy as if all columns were outside the ids; the scatter overwrites it at the ids
            dy = (d - terms.lift[rows]).exp_().mul_(a * inv_s)
            columns = real_columns(terms.ids[rows], terms.inside[rows])
            # without valid ids, `columns` is column 0, and the scatter writes what dy already holds
            has_ids = terms.inside[rows].any(1, keepdim=True)
            inside = torch.where(has_ids, p * terms.a_ids[rows], dy)
            dy.scatter_(1, columns, inside.gather(1, columns))
        if terms.b is not None:
            dy += torch.where(p > 0, p * (d - terms.log_s[rows]), 0.0) * terms.b[rows]
        if terms.logprob_t1_apart:
            p1 = (y - shift - terms.log_s1[rows]).exp_()
            dy -= torch.where(terms.dead[rows], 0.0, p1 * terms.d_logprob_t1[rows])
    if terms.d_logprob_t1 is not None:
        d_logprob_t1 = torch.where(terms.has_label[rows], terms.d_logprob_t1[rows], 0.0)
        dy.scatter_add_(1, terms.label[rows], d_logprob_t1)
    return dy


def fusible_gradient(
    x: Tensor,
    reading: Reading,
    state: Tensor,
    coefficients: Coefficients,
    upstream: Tensor,
    factor: Tensor | None = None,
    into: Tensor | None = None,  # must be None
) -> Tensor:
    """`gradient` of a loss without ids, as operations that a compiler fuses into one kernel.

    The kernel reads and writes one element at a time, so it can overwrite logits that nothing else
    reads. Inductor cuts an expression of more than 30 operations in two, which must not both read
    the logits: so there are few operations, and the slope of the softcap is the last.
    """
    flat, live = x.reshape(-1, x.shape[-1]), live_rows(reading)
    terms = _Terms(x, reading, state, coefficients, upstream, factor, 0)
    y, slope = capped(flat, reading.softcap)
    logp = centred(y, terms.shift, terms.inv_t) - terms.log_s
    p, by_p = logp.exp(), terms.a
    if terms.b is not None:
        by_p = by_p + torch.where(p > 0, logp, 0.0) * terms.b
    dy = p * by_p
    if terms.g_total is not None:
        weight = reading.class_weight
        dy = dy + (terms.g_total if weight is None else terms.g_total * weight)
    if reading.label is not None and terms.g_label is not None:
        columns = torch.arange(flat.shape[1], device=x.device)
        dy = dy + torch.where(columns == reading.label.reshape(-1, 1), terms.g_label, 0.0)
    if slope is not None:
        dy = dy * slope
    if live is not None:
        dy = torch.where(live.unsqueeze(1), dy, 0.0)
    return dy.to(x.dtype).view(x.shape)
