"""The one idea: a vocabulary loss needs five numbers per row, and parts of a row merge.

    m = max z      s = Σ e^(z-m)      w = Σ (z-m) e^(z-m)      t = z[ids]      c = Σ z

`Partial` holds (m, s, w) of some columns, `merge` joins two of them. `row_stats` computes the
numbers of whole rows in one pass over the logits. It is differentiable, with one backward formula
for every loss:

    dz_i = p_i (a + b log p_i) + Σ_k g_k [i = id_k] + g_c        p_i = e^(z_i - lse)

where a, b, g_k, g_c come from the upstream gradients of the statistics: see RULES. row_loss.py
turns any formula over the statistics into a loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import contract
from ..contract import PRECISION, Coefficients, Reading, RowStats
from ..core import call
from ..core.evaluate import evaluate
from ..core.loss import RowLoss, one, rows_in
from ..heads.operators import operator
from . import checks


class Partial(NamedTuple):
    """Statistics of some columns of each row, to be merged with those of the other columns."""

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

    Associative and commutative, with the empty part (-inf, 0, 0) as identity. m is detached, and
    gradients flow only through s and w. This is also correct where the maxima tie.
    """
    m = torch.maximum(left.m, right.m).detach()
    s, w = torch.zeros_like(m), torch.zeros_like(m)
    for part in (left, right):
        # d is 0 for an empty part, and where both maxima are infinite: inf - inf is NaN.
        stays = (part.s == 0) | (m.isinf() & (part.m == m))
        d = torch.where(stays, 0.0, part.m - m).clamp_min(-1e38)
        s = s + part.s * d.exp()
        w = w + part.w * d.exp() + d * (part.s * d.exp())
    return Partial(m, s, w)


@operator("statistics", saved=1)
@dataclass(eq=False)
class Read(RowLoss):
    """The statistics themselves, in the order of reading.wants."""

    multiple_outputs: ClassVar[bool] = True

    label_name: str = "ids"  # the name of the label in error messages

    @property
    def names(self):
        return self.label_name, "ids"

    def value(self, backend, statistics):
        outputs = tuple(getattr(statistics, name) for name in self.reading.wants)
        return outputs, (statistics.state,)

    def coefficients(self, saved, upstream):
        state = saved[0]
        gradients = dict(zip(self.reading.wants, upstream, strict=True))
        return coefficients_of(self.reading, state, gradients), one[state.device, state.dtype]

    def shapes(self, x):
        lead, ids = x.shape[:-1], self.reading.ids
        at_ids = () if ids is None else ("picked", "logprob")
        outputs = [(*lead, ids.shape[-1]) if n in at_ids else lead for n in self.reading.wants]
        return [*outputs, (rows_in(lead), contract.STATE)]


class _Sums:
    """Coefficients of the one backward formula, summed over the statistics of N rows."""

    def __init__(self, reading: Reading, state: Tensor):
        self.reading, self.state = reading, state
        self.rows = [torch.zeros_like(state[:, 0])] * contract.COEFFICIENTS
        self.ids = None  # g_k, (N, K), if the statistics are read at K ids per row
        if reading.ids is not None and {"picked", "logprob"} & set(reading.wants):
            self.ids = state.new_zeros((len(state), reading.ids.shape[-1]))

    def add(self, field: int, d: Tensor) -> None:
        self.rows[field] = self.rows[field] + d

    def add_at(self, d: Tensor) -> Tensor:
        """Adds the gradient d of z at the ids, or at the label; returns its sum per row, (N,)."""
        if self.ids is None:
            self.add(contract.G_LABEL, d)
            return d
        self.ids = self.ids + d
        return d.sum(1)


class Rule(NamedTuple):
    """The gradient of one statistic."""

    fields: tuple[str, ...]  # the coefficients that it uses
    add: Callable[[_Sums, Tensor], None]  # adds them, from the gradient d of the statistic


def _lse(sums: _Sums, d: Tensor) -> None:  # d lse / dz_i = p_i
    sums.add(contract.A, d)


def _picked(sums: _Sums, d: Tensor) -> None:  # d z[id] / dz_i = [i = id]
    sums.add_at(d)


def _logprob(sums: _Sums, d: Tensor) -> None:  # log p = z - lse
    sums.add(contract.A, -sums.add_at(d))


def _nll(sums: _Sums, d: Tensor) -> None:  # -log p of the label
    sums.add(contract.G_LABEL, -d)
    sums.add(contract.A, d)


def _entropy(sums: _Sums, d: Tensor) -> None:  # dH / dz_i = -p_i (log p_i + H)
    sums.add(contract.B, -d)
    sums.add(contract.A, -d * sums.state[:, contract.ENTROPY])


def _total(sums: _Sums, d: Tensor) -> None:  # d Σ v z / dz_i = v_i
    sums.add(contract.G_TOTAL, d)


def _log_total(sums: _Sums, d: Tensor) -> None:  # Σ v log p = Σ v z - lse Σ v
    v = sums.reading.class_weight
    n = sums.reading.vocab if v is None else v.to(d.dtype).sum()
    sums.add(contract.G_TOTAL, d)
    sums.add(contract.A, -d * n)


# Each differentiable statistic of row_stats, score and row_loss. A new statistic is one line here.
RULES = {
    "lse": Rule(("a",), _lse),
    "picked": Rule(("label",), _picked),
    "logprob": Rule(("a", "label"), _logprob),
    "nll": Rule(("a", "label"), _nll),
    "entropy": Rule(("a", "b"), _entropy),
    "total": Rule(("total",), _total),
    "log_total": Rule(("a", "total"), _log_total),
}


def fields_of(reading: Reading) -> tuple[str, ...]:
    """The coefficients that the gradients of reading.wants use."""
    used = {field for name in reading.wants if name in RULES for field in RULES[name].fields}
    if reading.ids is not None:
        used.discard("label")
    return tuple(field for field in contract.FIELDS if field in used)


def coefficients_of(
    reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
) -> Coefficients:
    """The coefficients of the one backward formula, from the gradient of each statistic."""
    sums = _Sums(reading, state)
    for name, d in gradients.items():
        if d is not None and name in RULES:
            at_ids = sums.ids is not None and name in ("picked", "logprob")
            RULES[name].add(sums, d.reshape(sums.ids.shape if at_ids else -1))
    return Coefficients(torch.stack(sums.rows, 1), fields_of(reading), sums.ids)


@call.named()
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
    """The statistics that every loss is computed from, in one pass over the logits.

    z = softcap · tanh(logits / softcap) / temperature; lse = log Σ e^z is always computed, the
    others on request: `picked` = z[ids] and `logprob` = log softmax(z)[ids] for ids (...) or (...,
    K), `entropy` in nats, `total` = Σ z, `argmax`.

    logits (..., V) in fp16, bf16, fp32 or fp64; temperature a number or (...). Statistics are fp32
    (fp64 for fp64), gradients in the dtype of the logits. A row whose id, or the first of its K
    ids, is ignore_index is not read: its numbers and its gradient are 0, its argmax -1.

    >>> stats = row_stats(logits, entropy=True)
    >>> (1e-4 * stats.lse.square() - 0.01 * stats.entropy).mean().backward()
    """
    call.check_once(checks.statistics, logits, ids, temperature, softcap, ignore_index)
    reading = stats_reading(logits, ids, temperature, softcap, ignore_index, entropy, total, argmax)
    statistics = evaluate(logits, Read(reading))
    return RowStats(**dict(zip(reading.wants, statistics, strict=True)))


def stats_reading(
    logits, ids, temperature, softcap, ignore_index, entropy, total, argmax
) -> Reading:
    """The Reading of row_stats. One id per row is its label; of K ids, the first may ignore it."""
    optional = {"entropy": entropy, "total": total, "argmax": argmax}
    wants = ["lse", *(name for name, wanted in optional.items() if wanted)]
    label = None
    if ids is not None:
        wants += ["picked", "logprob"]
        ids = call.as_ids(ids, ignore_index)
        if ids.dim() < len(logits.shape):
            label, ids = ids, None
        elif ignore_index is not None:
            label = ids[..., 0].contiguous()
    return call.reading_of(
        logits, temperature, softcap, label=label, ids=ids,
        ignore_index=ignore_index if label is not None else None, wants=tuple(wants),
    )  # fmt: skip


class Scores(NamedTuple):
    """The numbers per token that RL, DPO and evaluation need, from one pass over the logits."""

    logprob: Tensor  # (...)  log p[target]
    entropy: Tensor  # (...)  -Σ p log p, in nats
    lse: Tensor  # (...)      log Σ e^z
    argmax: Tensor  # (...)   int64; -1 where ignored


@call.named()
def logsumexp(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log Σ e^z over the last dimension: (..., V) to (...), in fp32 (fp64 for fp64).

    -inf for a row of -inf, with zero gradient; +inf where a logit is +inf.

    >>> logsumexp(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap).lse


@call.named()
def token_logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """log softmax(z)[ids]: ids (...) to (...), or (..., K) to (..., K). Ids may repeat.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    tensor([-1.3863])
    """
    call.check_once(checks.statistics, logits, ids, temperature, softcap, None, True)
    ids = call.as_ids(ids)
    one = ids.dim() < len(logits.shape)
    reading = call.reading_of(
        logits, temperature, softcap, label=ids if one else None, ids=None if one else ids,
        wants=("logprob",),
    )  # fmt: skip
    return evaluate(logits, Read(reading))[0]


@call.named()
def entropy(
    logits: Tensor, *, temperature: float | Tensor = 1.0, softcap: float | None = None
) -> Tensor:
    """Entropy of softmax(z) in nats, (..., V) to (...): log s - w / s, exact under any offset.

    >>> entropy(torch.zeros(1, 4))
    tensor([1.3863])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap, entropy=True).entropy


@call.named()
def score(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Scores:
    """log p[target], entropy, logsumexp and argmax of each row (..., V), in one pass.

    A row whose target is ignore_index is not read: its numbers are 0 and its argmax -1.

    >>> new = score(logits, target).logprob
    >>> ratio = (new - old).exp()  # PPO, GRPO
    """
    call.check_once(checks.score, logits, target, temperature, softcap, ignore_index)
    reading = call.reading_of(
        logits, temperature, softcap, label=call.as_ids(target, ignore_index),
        ignore_index=ignore_index, wants=Scores._fields,
    )  # fmt: skip
    return Scores(*evaluate(logits, Read(reading, "target")))
