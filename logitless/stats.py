"""The one idea: a vocabulary loss needs five numbers of a row, and parts of a row merge.

    m = max z      s = Σ e^(z-m)      w = Σ (z-m) e^(z-m)      t = z[ids]      c = Σ z

`Partial` holds (m, s, w) of some columns, `merge` joins two of them. `row_stats` computes the numbers
of whole rows in one pass over the logits, and is differentiable with one backward for every loss:

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c        p_i = e^(z_i - lse)

where a, b, g_k, g_c are the upstream gradients of the statistics, found by autograd from the plain
formulas of losses.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend


class Partial(NamedTuple):
    """Statistics of some columns of each row; the rest of the row merges in."""

    m: Tensor  # (...)  max z, -inf for no columns
    s: Tensor  # (...)  Σ e^(z-m)
    w: Tensor  # (...)  Σ (z-m) e^(z-m)

    @property
    def lse(self) -> Tensor:
        """log Σ e^z; -inf for no columns."""
        return self.m + torch.where(self.s == 0, 0.0, self.s.log())

    @property
    def entropy(self) -> Tensor:
        """Entropy of the softmax over these columns, in nats."""
        return torch.where(self.s == 0, 0.0, self.s.log() - self.w / self.s)


def partial(z: Tensor) -> Partial:
    """The Partial of a block of logits (..., V)."""
    if z.shape[-1] == 0:
        empty = z.new_zeros(z.shape[:-1])
        return Partial(empty - torch.inf, empty, empty)
    m = z.amax(-1)
    d = z - torch.where(m == -torch.inf, 0.0, m).unsqueeze(-1)
    e = d.exp()
    return Partial(m, e.sum(-1), torch.where(e > 0, d * e, 0.0).sum(-1))


def merge(left: Partial, right: Partial) -> Partial:
    """The Partial of two disjoint sets of columns.

    Associative and commutative, with the empty part (-inf, 0, 0) as identity.
    """
    m = torch.maximum(left.m, right.m)
    s, w = torch.zeros_like(m), torch.zeros_like(m)
    for part in (left, right):
        # An empty part, or one whose max stays, moves by 0: -inf minus -inf is never taken.
        d = torch.where((part.s == 0) | (part.m == m), 0.0, part.m - m)
        s = s + part.s * d.exp()
        w = w + (part.w + d * part.s) * d.exp()
    return Partial(m, s, w)


class RowStats(NamedTuple):
    """What a loss may know about a row. fp32 (fp64 for fp64 logits), differentiable but for argmax."""

    lse: Tensor  # (...)              log Σ e^z
    picked: Tensor | None  # like ids  z[ids]
    entropy: Tensor | None  # (...)    -Σ p log p, in nats
    total: Tensor | None  # (...)      Σ z
    argmax: Tensor | None  # (...)     int64, the lowest of equals


class Measured(NamedTuple):
    """Statistics as the kernels leave them: centred on `shift`, so that a common offset costs no digits.

    In units of y, the logits before division by the temperature; log_s and entropy are of z = y / T.
    """

    shift: Tensor  # (...)             max y, a constant to autograd
    log_s: Tensor  # (...)             log Σ e^((y - shift) / T)
    picked: Tensor | None  # like ids   y[ids]
    entropy: Tensor | None  # (...)
    total: Tensor | None  # (2, ...)    Σ v y, and Σ v (shift - y), over class weights v
    argmax: Tensor | None  # (...)
    temperature: float | Tensor  # a number, or (...)

    def _over_temperature(self, y: Tensor) -> Tensor:
        t = self.temperature
        if isinstance(t, Tensor):
            return y / (t.unsqueeze(-1) if y.dim() > t.dim() else t).to(y.dtype)
        return y if t == 1 else y / t

    @property
    def lse(self) -> Tensor:
        """log Σ e^z, (...)"""
        return self._over_temperature(self.shift) + self.log_s

    @property
    def logprob(self) -> Tensor:
        """log p[ids] as (t - m) - log s, never as t - lse; like ids."""
        shift, log_s = self.shift, self.log_s
        if self.picked.dim() > shift.dim():
            shift, log_s = shift.unsqueeze(-1), log_s.unsqueeze(-1)
        return self._over_temperature(self.picked - shift) - log_s

    @property
    def deficit(self) -> Tensor:
        """Σ v (m - z), (...): how far the row lies below its max."""
        return self._over_temperature(self.total[1])

    def public(self) -> RowStats:
        return RowStats(
            self.lse,
            None if self.picked is None else self._over_temperature(self.picked),
            self.entropy,
            None if self.total is None else self._over_temperature(self.total[0]),
            self.argmax,
        )


def row_stats(
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
) -> RowStats:
    """The numbers every loss is made of, in one pass over the logits.

    z = softcap · tanh(logits / softcap) / temperature; lse = log Σ e^z is always there, the rest on
    request: `picked` = z[ids] for ids (...) or (..., K), `entropy` in nats, `total` = Σ z, `argmax`.

    logits (..., V) in fp16, bf16, fp32 or fp64; temperature a number or (...). Statistics are fp32
    (fp64 for fp64), gradients in the dtype of the logits.

    >>> stats = row_stats(logits, ids, entropy=True)
    >>> (stats.lse - stats.picked).mean().backward()
    """
    _checks.logits(logits)
    if ids is not None:
        _checks.ids(ids, logits)
    stats = measure(
        logits, ids, temperature=temperature, softcap=softcap,
        entropy=entropy, total=total, argmax=argmax,
    )  # fmt: skip
    return stats.public()


def measure(
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
) -> Measured:
    """row_stats for formulas: centred, with class weights for the total and rows that are ignored."""
    reading = Reading.of(logits, ids, weight, temperature, softcap, ignore_index)
    shift, log_s, picked, h, c, best = torch.ops.logitless.stats_fwd(
        logits, *reading, entropy, total, argmax
    )
    return Measured(
        shift.detach(),
        log_s,
        picked if ids is not None else None,
        h if entropy else None,
        c if total else None,
        best if argmax else None,
        temperature if reading.row_temperature is None else reading.row_temperature,
    )


class Reading(NamedTuple):
    """How logits are read: the arguments that forward and backward share, as operators take them."""

    ids: Tensor | None  # (...) or (..., K), int32 or int64
    weight: Tensor | None  # (V,), of the total
    row_temperature: Tensor | None  # (...)
    temperature: float
    softcap: float | None
    ignore_index: int | None

    @classmethod
    def of(cls, logits, ids, weight, temperature, softcap, ignore_index) -> "Reading":
        _checks.temperature(temperature, logits)
        _checks.softcap(softcap)
        if ids is not None and ids.dtype not in (torch.int64, torch.int32):
            ids = ids.long()
        softcap = None if softcap is None else float(softcap)
        if isinstance(temperature, Tensor):
            rows = temperature.expand(logits.shape[:-1])
            return cls(ids, weight, rows, 1.0, softcap, ignore_index)
        return cls(ids, weight, None, float(temperature), softcap, ignore_index)


class Upstream(NamedTuple):
    """Coefficients of the one backward."""

    a: Tensor | None  # (...)
    b: Tensor | None  # (...)
    g_id: Tensor | None  # like ids
    g_c: Tensor | None  # (...)

    @classmethod
    def of(cls, d_log_s, d_picked, d_entropy, d_total, entropy) -> "Upstream":
        """From the gradients of the statistics. dH/dz_i = -p_i (log p_i + H)."""
        a, b = d_log_s, None
        if d_entropy is not None:
            b = -d_entropy
            a = b * entropy if a is None else a + b * entropy
        g_c = None if d_total is None else d_total[0] - d_total[1]
        return cls(a, b, d_picked, g_c)


# The two operators, registered so that torch.compile, CUDA graphs and opcheck see through them. What
# was not asked for comes back as an empty tensor: an operator's outputs cannot be None.

_READING = (
    "Tensor? ids, Tensor? weight, Tensor? row_temperature,"
    " float temperature, float? softcap, int? ignore_index"
)
_library = torch.library.Library("logitless", "DEF")
_library.define(
    f"stats_fwd(Tensor x, {_READING}, bool entropy, bool total, bool argmax)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"stats_bwd(Tensor x, {_READING}, Tensor shift, Tensor log_s, Tensor? picked,"
    " Tensor? a, Tensor? b, Tensor? g_id, Tensor? g_c) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _stats_fwd(x, ids, *args):
    if ids is not None:
        _checks.ids_in_range(ids, x.shape[-1], ignore_index=args[4])
    outputs = backend(x).stats_fwd(x, ids, *args)
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


def _stats_bwd(x, *args):
    return backend(x).stats_bwd(x, *args)


def _stats_fwd_fake(x, ids, weight, row_temperature, t, cap, ignore, entropy, total, argmax):
    rows = x.shape[:-1]
    like = {"dtype": torch.float64 if x.dtype == torch.float64 else torch.float32}
    none = x.new_empty(0)
    return (
        x.new_empty(rows, **like),
        x.new_empty(rows, **like),
        none if ids is None else x.new_empty(ids.shape, **like),
        x.new_empty(rows, **like) if entropy else none.clone(),
        x.new_empty((2, *rows), **like) if total else none.clone(),
        x.new_empty(rows, dtype=torch.int64) if argmax else none.clone(),
    )


def _stats_bwd_fake(x, *args):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    x, *reading = inputs[:7]
    shift, log_s, picked, entropy, _, argmax = output
    ctx.reading = Reading(None, None, None, *reading[3:])
    several = reading[0] is not None and reading[0].dim() == x.dim()
    ctx.save_for_backward(
        x, *reading[:3], shift, log_s, picked if several else None, entropy
    )
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)


def _backward(ctx, _, d_log_s, d_picked, d_entropy, d_total, __):
    x, ids, weight, row_temperature, shift, log_s, picked, entropy = ctx.saved_tensors
    reading = ctx.reading._replace(ids=ids, weight=weight, row_temperature=row_temperature)
    upstream = Upstream.of(d_log_s, d_picked, d_entropy, d_total, entropy)
    d_x = None
    if any(g is not None for g in upstream):
        d_x = torch.ops.logitless.stats_bwd(x, *reading, shift, log_s, picked, *upstream)
    return d_x, *(None,) * 9


_library.impl("stats_fwd", _stats_fwd, "CompositeExplicitAutograd")
_library.impl("stats_bwd", _stats_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::stats_fwd", _stats_fwd_fake, lib=_library)
torch.library.register_fake("logitless::stats_bwd", _stats_bwd_fake, lib=_library)
torch.library.register_autograd(
    "logitless::stats_fwd", _backward, setup_context=_save, lib=_library
)
