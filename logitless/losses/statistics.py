"""The one idea: a vocabulary loss needs five numbers of a row, and parts of a row merge.

    m = max z      s = Σ e^(z-m)      w = Σ (z-m) e^(z-m)      t = z[ids]      c = Σ z

`Partial` holds (m, s, w) of some columns, `merge` joins two of them. `row_stats` computes the
numbers of whole rows in one pass over the logits, and is differentiable with one backward for every
loss:

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c        p_i = e^(z_i - lse)

where a, b, g_k, g_c come from the upstream gradients of the statistics. losses/row_loss.py
makes a loss of any formula over them.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import contract
from ..contract import PRECISION, Coefficients, Reading, RowStats
from ..core import call as _call
from ..core.loss import RowLoss, evaluate, one, rows_in
from ..core.operators import operator


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
    z = z.to(PRECISION[z.dtype])
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

    Associative and commutative, with the empty part (-inf, 0, 0) as identity. Its m is a constant:
    what changes with the parts' own, s and w tell, also where both have the same.
    """
    m = torch.maximum(left.m, right.m).detach()
    s, w = torch.zeros_like(m), torch.zeros_like(m)
    for part in (left, right):
        # An empty part, or an infinite max that stays, moves by 0: inf minus inf is never taken.
        stays = (part.s == 0) | (m.isinf() & (part.m == m))
        d = torch.where(stays, 0.0, part.m - m).clamp_min(-1e38)
        s = s + part.s * d.exp()
        w = w + part.w * d.exp() + d * (part.s * d.exp())
    return Partial(m, s, w)


@operator("read", saved=1)
@dataclass(eq=False)
class Read(RowLoss):
    """The statistics themselves, in the order of reading.wants."""

    several: ClassVar[bool] = True

    label_name: str = "ids"  # what users call the label

    @property
    def names(self):
        return self.label_name, "ids"

    def settle(self, run, found):
        return tuple(getattr(found, name) for name in self.reading.wants), (found.state,)

    def coefficients(self, saved, upstream):
        state = saved[0]
        given = dict(zip(self.reading.wants, upstream, strict=True))
        found = coefficients_of(self.reading, state, given)
        return found, one[state.device, state.dtype]

    def shapes(self, x):
        lead, ids = x.shape[:-1], self.reading.ids
        several = () if ids is None else ("picked", "logprob")
        outputs = [(*lead, ids.shape[-1]) if n in several else lead for n in self.reading.wants]
        return [*outputs, (rows_in(lead), contract.STATE)]


# Which coefficients the gradient of a statistic needs.
_FIELDS_OF = {
    "lse": ("a",),
    "picked": ("label",),
    "logprob": ("a", "label"),
    "nll": ("a", "label"),
    "entropy": ("a", "b"),
    "total": ("total",),
    "log_total": ("a", "total"),
}


def fields_of(reading: Reading) -> tuple[str, ...]:
    """Which coefficients the statistics that are read need between them."""
    used = {field for name in reading.wants for field in _FIELDS_OF.get(name, ())}
    if reading.ids is not None:
        used.discard("label")
    return tuple(field for field in contract.FIELDS if field in used)


def coefficients_of(
    reading: Reading, state: Tensor, upstream: dict[str, Tensor | None]
) -> Coefficients:
    """Of the one backward, from the gradients of the statistics."""
    zero = torch.zeros_like(state[:, 0])
    rows, ids = [zero] * contract.COEFFICIENTS, None
    several = reading.ids is not None and {"picked", "logprob"} & set(reading.wants)
    if several:
        ids = torch.zeros(reading.ids.shape, dtype=state.dtype, device=state.device)
        ids = ids.view(len(state), reading.ids.shape[-1])
    for name, d in upstream.items():
        if d is None or name not in _FIELDS_OF:
            continue
        if several and name in ("picked", "logprob"):
            d = d.reshape(ids.shape)
            ids = ids + d
            if name == "logprob":  # log p = z - lse
                rows[contract.A] = rows[contract.A] - d.sum(1)
            continue
        d = d.reshape(-1)
        d = -d if name == "nll" else d
        if name == "lse":
            rows[contract.A] = rows[contract.A] + d
        elif name in ("picked", "logprob", "nll"):
            rows[contract.G_LABEL] = rows[contract.G_LABEL] + d
        elif name == "entropy":  # dH/dz_i = -p_i (log p_i + H)
            rows[contract.B] = -d
            rows[contract.A] = rows[contract.A] - d * state[:, contract.ENTROPY]
        else:
            rows[contract.G_TOTAL] = rows[contract.G_TOTAL] + d
        if name in ("logprob", "nll"):
            rows[contract.A] = rows[contract.A] - d
        elif name == "log_total":
            v = reading.class_weight
            n = reading.vocab if v is None else v.to(d.dtype).sum()
            rows[contract.A] = rows[contract.A] - d * n
    return Coefficients(torch.stack(rows, 1), fields_of(reading), ids)


@_call.named()
def row_stats(
    logits: Tensor,
    ids: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    total: bool = False,
    argmax: bool = False,
    ignore_index: int | None = None,
) -> RowStats:
    """The numbers every loss is made of, in one pass over the logits.

    z = softcap · tanh(logits / softcap) / temperature; lse = log Σ e^z is always there, the rest on
    request: `picked` = z[ids] and `logprob` = log softmax(z)[ids] for ids (...) or (..., K),
    `entropy` in nats, `total` = Σ z, `argmax`.

    logits (..., V) in fp16, bf16, fp32 or fp64; temperature a number or (...). Statistics are fp32
    (fp64 for fp64), gradients in the dtype of the logits. A row whose id, or the first of its K
    ids, is ignore_index is not read: its numbers and its gradient are 0, its argmax -1.

    >>> stats = row_stats(logits, entropy=True)
    >>> (1e-4 * stats.lse.square() - 0.01 * stats.entropy).mean().backward()
    """
    _call.once(_call.stats, logits, ids, temperature, softcap, ignore_index)
    reading = stats_reading(logits, ids, temperature, softcap, ignore_index, entropy, total, argmax)
    found = evaluate(logits, Read(reading))
    return RowStats(**dict(zip(reading.wants, found, strict=True)))


def stats_reading(
    logits, ids, temperature, softcap, ignore_index, entropy, total, argmax
) -> Reading:
    """One id a row is its label; of several, the first labels the rows to ignore."""
    asked = {"entropy": entropy, "total": total, "argmax": argmax}
    wants = ["lse", *(name for name, wanted in asked.items() if wanted)]
    label = None
    if ids is not None:
        wants += ["picked", "logprob"]
        ids = _call.as_ids(ids, ignore_index)
        if ids.dim() < len(logits.shape):
            label, ids = ids, None
        elif ignore_index is not None:
            label = ids[..., 0].contiguous()
    return _call.reading_of(
        logits, temperature, softcap, label=label, ids=ids,
        ignore_index=ignore_index if label is not None else None, wants=tuple(wants),
    )  # fmt: skip
