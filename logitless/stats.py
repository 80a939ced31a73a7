"""The one idea: a vocabulary loss needs five numbers of a row, and parts of a row merge.

    m = max z      s = Σ e^(z-m)      w = Σ (z-m) e^(z-m)      t = z[ids]      c = Σ z

`Partial` holds (m, s, w) of some columns, `merge` joins two of them. `row_stats` computes the
numbers of whole rows in one pass over the logits, and is differentiable with one backward for every
loss:

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c        p_i = e^(z_i - lse)

where a, b, g_k, g_c are the upstream gradients of the statistics, found by autograd from the plain
formulas of losses.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from ._dispatch import backend
from ._node import is_lent, is_watched, node, refuse_twice
from .linear import over_rows


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
    """The Partial of a block of logits (..., V), in fp32 (fp64 for fp64)."""
    z = z.to(torch.float64 if z.dtype == torch.float64 else torch.float32)
    if z.shape[-1] == 0:
        empty = z.new_zeros(z.shape[:-1])
        return Partial(empty - torch.inf, empty, empty)
    m = z.amax(-1)
    gone, top = z == -torch.inf, m.unsqueeze(-1)
    d = torch.where(gone | (z == top), 0.0, z - top).clamp_min(-1e38)
    e = torch.where(gone, 0.0, d.exp())
    return Partial(m, e.sum(-1), (d * e).sum(-1))


def merge(left: Partial, right: Partial) -> Partial:
    """The Partial of two disjoint sets of columns.

    Associative and commutative, with the empty part (-inf, 0, 0) as identity.
    """
    m = torch.maximum(left.m, right.m)
    s, w = torch.zeros_like(m), torch.zeros_like(m)
    for part in (left, right):
        # An empty part, or one whose max stays, moves by 0: -inf minus -inf is never taken.
        d = torch.where((part.s == 0) | (part.m == m), 0.0, part.m - m).clamp_min(-1e38)
        s = s + part.s * d.exp()
        w = w + part.w * d.exp() + d * (part.s * d.exp())
    return Partial(m, s, w)


class RowStats(NamedTuple):
    """What a loss may know about a row. fp32 (fp64 for fp64), differentiable but for argmax."""

    lse: Tensor  # (...)              log Σ e^z
    picked: Tensor | None  # like ids  z[ids]
    entropy: Tensor | None  # (...)    -Σ p log p, in nats
    total: Tensor | None  # (...)      Σ z
    argmax: Tensor | None  # (...)     int64, the lowest of equals


@over_rows()
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
    request: `picked` = z[ids] for ids (...) or (..., K), `entropy` in nats, `total` = Σ z,
    `argmax`.

    logits (..., V) in fp16, bf16, fp32 or fp64; temperature a number or (...). Statistics are fp32
    (fp64 for fp64), gradients in the dtype of the logits.

    >>> stats = row_stats(logits, entropy=True)
    >>> (1e-4 * stats.lse.square() - 0.01 * stats.entropy).mean().backward()
    """
    _checks.logits(logits)
    if ids is not None:
        _checks.ids(ids, logits)
        if not is_watched():
            _checks.ids_in_range(ids, logits.shape[-1], None)
    return measure(
        logits, ids, temperature=temperature, softcap=softcap,
        entropy=entropy, total=total, argmax=argmax,
    )  # fmt: skip


def measure(
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    normalised: bool = False,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
) -> RowStats:
    """row_stats for formulas: with rows that are ignored, and class weights v in the total, Σ v z.

    A row whose first id is ignore_index is ignored.

    Where `normalised`, picked and total are of log p = z - lse instead of z. The kernels take log p
    as (z - max) - log s, so that a common offset in the logits costs no digits; a formula cannot.
    """
    if ids is not None:
        ids = as_ids(ids, ignore_index)
    reading = Reading.of(logits, ids, weight, temperature, softcap, ignore_index, normalised)
    _, _, lse, picked, h, c, best, *_ = statistics(logits, *reading, entropy, total, argmax)
    return RowStats(
        lse,
        None if ids is None else picked,
        h if entropy else None,
        c if total else None,
        best if argmax else None,
    )


def as_ids(ids: Tensor, ignore_index: int | None = None) -> Tensor:
    """Integers wide enough that none is taken for another."""
    fits = ignore_index is None or -(2**31) <= ignore_index < 2**31
    wide = ids.dtype == torch.int64 or (ids.dtype == torch.int32 and fits)
    return ids if wide else ids.long()


class Reading(NamedTuple):
    """How logits are read: what forward and backward share, as operators take it."""

    ids: Tensor | None  # (...) or (..., K), int32 or int64
    weight: Tensor | None  # (V,), of the total
    row_temperature: Tensor | None  # (...)
    temperature: float
    softcap: float | None
    ignore_index: int | None
    normalised: bool
    outside: int | None = None  # ids from here on leave a tail
    plain: bool = False  # whether the first id is a label, at temperature 1

    @classmethod
    def of(
        cls, logits, ids, weight, temperature, softcap, ignore_index, normalised,
        outside=None, plain=False,
    ) -> "Reading":  # fmt: skip
        _checks.temperature(temperature, logits)
        _checks.softcap(softcap)
        softcap = None if softcap is None else float(softcap)
        rows = None
        if isinstance(temperature, Tensor):
            rows, temperature = temperature.expand(logits.shape[:-1]), 1.0
        return cls(
            ids, weight, rows, float(temperature), softcap, ignore_index, normalised, outside, plain
        )

    def one_id(self, x: Tensor) -> bool:
        """Whether a row has one id, and nothing but that is asked of it."""
        one = self.ids is not None and (self.ids.dim() < x.dim() or self.ids.shape[-1] == 1)
        return one and self.outside is None and not self.plain


class Upstream(NamedTuple):
    """Coefficients of the one backward."""

    a: Tensor | None  # (...)
    b: Tensor | None  # (...)
    g_id: Tensor | None  # like ids, or the last of them
    g_c: Tensor | None  # (...)
    a_ids: Tensor | None = None  # (...)  a of the ids that leave a tail
    d_label: Tensor | None = None  # (...) or a number

    @classmethod
    def of(
        cls, x, reading, entropy, tail, d_lse, d_picked, d_entropy, d_total,
        d_tail=None, d_label=None,
    ) -> "Upstream":  # fmt: skip
        """From the gradients of the statistics of x: what is p_i's, an id's, or everyone's.

        What one id a row takes from `a` where `normalised` is left to the backward, which sees it.
        """
        a, b = d_lse, None
        if reading.normalised:  # log p = z - lse
            if d_picked is not None and not reading.one_id(x):
                a = _minus(a, d_picked.sum(-1))
            if d_total is not None:
                v = reading.weight
                a = _minus(a, d_total * (x.shape[-1] if v is None else v.to(d_total.dtype).sum()))
        if d_entropy is not None:  # dH/dz_i = -p_i (log p_i + H)
            a, b = _minus(a, d_entropy * entropy), -d_entropy
        a_ids = None
        if d_tail is not None:  # d tail/dz_i = p_i / e^tail - p_i outside, -p_i inside
            a_ids = _minus(a, d_tail)
            # Of a tail too small to divide by, the gradient outside is lost.
            least = -700 if tail.dtype == torch.float64 else -87
            a = a_ids + d_tail * (-tail.clamp(min=least)).exp()
        return cls(a, b, d_picked, d_total, a_ids, d_label)


def _minus(a: Tensor | None, b: Tensor) -> Tensor:
    return -b if a is None else a - b


def _stats_fwd(x, ids, *args):
    if ids is not None:
        several = ids.dim() == x.dim()
        _checks.ids_in_range(ids, x.shape[-1], ignore_index=args[4], several=several)
    return backend(x).stats_fwd(x, ids, *args)[:10]


def _stats_fwd_op(x, *args):
    outputs = _stats_fwd(x, *args)
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


def _stats_bwd(x, *args, **how):
    return backend(x).stats_bwd(x, *args, **how)


def _save(ctx, inputs, output):
    x, reading = inputs[0], Reading(*inputs[1:10])
    shift, log_s, _, _, entropy, _, argmax, tail, _, log_s1 = output
    ctx.reading = reading._replace(ids=None, weight=None, row_temperature=None)
    ctx.wants = inputs[10:12]
    ctx.save_for_backward(x, *reading[:3], shift, log_s, log_s1, entropy, tail)
    ctx.mark_non_differentiable(*(t for t in (shift, log_s, argmax, log_s1) if t is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx, saved, _, __, d_lse, d_picked, d_entropy, d_total, ___, d_tail, d_label, ____):
    x, ids, weight, row_temperature, shift, log_s, log_s1, entropy, tail = saved
    reading = ctx.reading._replace(ids=ids, weight=weight, row_temperature=row_temperature)
    # An output that was not asked for is empty to an operator, and so is its gradient.
    asked = (ids is not None, *ctx.wants, reading.outside is not None, reading.plain)
    d_picked, d_entropy, d_total, d_tail, d_label = (
        d if wanted else None
        for d, wanted in zip((d_picked, d_entropy, d_total, d_tail, d_label), asked, strict=True)
    )
    upstream = Upstream.of(
        x, reading, entropy, tail, d_lse, d_picked, d_entropy, d_total, d_tail, d_label
    )
    d_x = None
    if any(g is not None for g in upstream):
        found = (*reading, shift, log_s, log_s1 if reading.plain else None, *upstream)
        if is_watched():
            d_x = torch.ops.logitless.stats_bwd(x, *found)
        else:
            d_x = _stats_bwd(x, *found, inplace=is_lent(x))
    return d_x, *(None,) * 12


# The same as operators, so that torch.compile and opcheck see through them. What was not asked for
# comes back as an empty tensor: an operator's outputs cannot be None.

_READING = (
    "Tensor? ids, Tensor? weight, Tensor? row_temperature,"
    " float temperature, float? softcap, int? ignore_index, bool normalised,"
    " int? outside, bool plain"
)
_library = torch.library.Library("logitless", "DEF")
_library.define(
    f"stats_fwd(Tensor x, {_READING}, bool entropy, bool total, bool argmax)"
    f" -> ({', '.join(['Tensor'] * 10)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"stats_bwd(Tensor x, {_READING}, Tensor shift, Tensor log_s, Tensor? log_s1,"
    " Tensor? a, Tensor? b, Tensor? g_id, Tensor? g_c, Tensor? a_ids, Tensor? d_label) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _stats_fwd_fake(x, *args):
    reading, (entropy, total, argmax) = Reading(*args[:9]), args[9:]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32

    def rows(wanted=True, dtype=dtype, shape=x.shape[:-1]):
        return x.new_empty(shape, dtype=dtype) if wanted else x.new_empty(0)

    ids = reading.ids
    return (
        *(rows() for _ in range(3)),
        rows(ids is not None, shape=None if ids is None else ids.shape),
        rows(entropy),
        rows(total),
        rows(argmax, torch.int64),
        rows(reading.outside is not None),
        *(rows(reading.plain) for _ in range(2)),
    )


def _stats_bwd_fake(x, *args):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_library.impl("stats_fwd", _stats_fwd_op, "CompositeExplicitAutograd")
_library.impl("stats_bwd", _stats_bwd, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::stats_fwd", _stats_fwd_fake, lib=_library)
torch.library.register_fake("logitless::stats_bwd", _stats_bwd_fake, lib=_library)
statistics = node("stats_fwd", _library, _stats_fwd, _save, _backward)
refuse_twice("stats_bwd", _library)
