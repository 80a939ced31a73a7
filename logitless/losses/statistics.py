"""Row statistics. Most losses are computed from some of these five numbers per row:

    m = max z,    s = Σ e^(z-m),    w = Σ (z-m) e^(z-m),    t = z[ids],    c = Σ z

Those of disjoint sets of columns can be merged, as `merge` shows for (m, s, w). All losses over row
statistics share the backward formula of contract.py, whose coefficients the backend computes from
the gradients of the statistics (RULES in eager/stats_coefficients.py). row_loss.py turns any
formula over the statistics into a loss.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import contract
from ..contract import NO_ID, PRECISION, Reading, RowStats
from ..core import call, target_checks
from ..core.evaluate import evaluate
from ..core.loss import RowLoss, one, rows_in
from ..eager.stats_coefficients import fields_given, of_one
from ..heads.operators import operator


class Partial(NamedTuple):
    """The statistics m, s and w of each row, over some columns. `merge` merges two Partials."""

    m: Tensor  # (...)  max z; -inf if there are no columns
    s: Tensor  # (...)  Σ e^(z-m)
    w: Tensor  # (...)  Σ (z-m) e^(z-m)

    @property
    def lse(self) -> Tensor:
        """The logsumexp of the columns, log Σ e^z; -inf if there are no columns."""
        return self.m + torch.where(self.s == 0, 0.0, self.s.log())

    @property
    def entropy(self) -> Tensor:
        """The entropy of the softmax over the columns, in nats."""
        return torch.where(self.s == 0, 0.0, self.s.log() - self.w / self.s)


def partial(z: Tensor) -> Partial:
    """Computes m, s and w of each row of some columns of z (..., columns), each of shape (...).

    The results are fp32, or fp64 if z is fp64. Of softcapped or scaled logits, pass z itself.

    >>> partial(torch.zeros(1, 4)).lse
    tensor([1.3863])
    """
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
    """Merges the `Partial`s of two disjoint sets of columns.

    `merge` is associative and commutative, with the empty `Partial` (-inf, 0, 0) as its identity.
    The merged m is detached; gradients flow through s and w, also if `left.m` equals `right.m`.

    >>> z = torch.zeros(1, 4)
    >>> merge(partial(z[:, :1]), partial(z[:, 1:])).lse
    tensor([1.3863])
    """
    m = torch.maximum(left.m, right.m).detach()
    s, w = torch.zeros_like(m), torch.zeros_like(m)
    for part in (left, right):
        # 0 for an empty `Partial`, and where both are the same infinity: inf - inf would be NaN
        stays = (part.s == 0) | (m.isinf() & (part.m == m))
        d = torch.where(stays, 0.0, part.m - m).clamp_min(-1e38)
        s = s + part.s * d.exp()
        w = w + part.w * d.exp() + d * (part.s * d.exp())
    return Partial(m, s, w)


@operator("statistics", saved=1)
@dataclass(eq=False)
class Read(RowLoss):
    """A RowLoss whose outputs are the statistics listed in `reading.wants`."""

    multiple_outputs: ClassVar[bool] = True

    label_name: str = "ids"  # the name of the label in error messages

    # The statistics that get a gradient; None: all. Not annotated: no argument of the operator.
    gradient = None

    def has_gradient(self, name: str) -> bool:
        return name not in ("argmax", "rank") and (self.gradient is None or name in self.gradient)

    @property
    def only_scales(self):
        return self.reading.ids is None and sum(map(self.has_gradient, self.reading.wants)) == 1

    def without_gradient(self, outputs):
        named = zip(self.reading.wants, outputs, strict=True)
        return [t for name, t in named if not self.has_gradient(name)]

    def upstream_of_one(self, outputs):
        named = zip(self.reading.wants, outputs, strict=True)
        return tuple(torch.ones_like(t) if self.has_gradient(name) else None for name, t in named)

    @property
    def names(self):
        return self.label_name, "ids"

    def value(self, backend, statistics):
        outputs = tuple(getattr(statistics, name) for name in self.reading.wants)
        return outputs, (statistics.state,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        state, reading, found = saved[0], self.reading, None
        gradients = {n: d for n, d in zip(reading.wants, upstream, strict=True) if d is not None}
        if backend.stats_gradient is not None:
            d_x = backend.stats_gradient(x, reading, state, gradients, factor, into)
            if d_x is not None:
                return d_x
        if len(gradients) == 1 and reading.ids is None:
            # the constant coefficients of one statistic, which the backend multiplies by `gain`
            ((name, gain),) = gradients.items()
            found = of_one.beside(state, name, state.device, state.dtype)
            if found is not None:
                found = found._replace(has=fields_given((name,), reading.wants))
        if found is None:
            found = backend.coefficients(reading, state, gradients)
            gain = one.beside(state, state.device, state.dtype)
        return backend.gradient(x, reading, state, found, gain, factor, into)

    def shapes(self, x):
        lead, ids = x.shape[:-1], self.reading.ids
        at_ids = () if ids is None else ("picked", "logprob")
        outputs = [(*lead, ids.shape[-1]) if n in at_ids else lead for n in self.reading.wants]
        return [*outputs, (rows_in(lead), contract.STATE)]


@operator("slot_statistics", saved=1)
@dataclass(eq=False)
class SlotRead(Read):
    @property
    def real_ids(self):
        return self.reading.ids != NO_ID


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
    rank: bool = False,
    ignore_index: int | None = -100,
    mask: Tensor | None = None,
) -> RowStats:
    """Computes the row statistics of logits (..., V) in one pass over the logits.

    The logits of the softmax are z = softcap · tanh(logits / softcap) / temperature, with one
    temperature, or one per row. The statistic lse = log Σ e^z is always computed, and with `ids`,
    one (...) or K (..., K) per row, `picked` = z[ids] and `logprob` = log softmax(z)[ids]. The
    flags request the `entropy` in nats, the `total` Σ z, the `argmax`, and the `rank` of the id.
    Logits are fp16, bf16, fp32 or fp64. Statistics are fp32 (fp64 for fp64 logits), argmax and rank
    int64, and gradients have the dtype of the logits.

    The rank is the number of logits of the row strictly above that of the id (the first of K), so
    the rank of an argmax is 0. Logits are compared after the softcap and before the temperature,
    and NaN counts as above; it is V if the id's logit is NaN or, on a GPU, if the id is outside
    [0, V). A 16-bit head can round a slightly greater logit to that of the id, which makes the rank
    too small: for metrics, pass logits_dtype=torch.float32 to LinearLogits.

    A row is ignored if its entry in `mask` is False, or if its id (the first of K) is ignore_index.
    It is not read: its statistics and gradient are 0, and its argmax and rank are -1. An id outside
    [0, V) raises an IndexError on a CPU, and on a GPU with LOGITLESS_CHECK=1; without it, its
    `picked` and `logprob` are NaN.

    >>> stats = row_stats(logits, entropy=True)
    >>> (1e-4 * stats.lse.square() - 0.01 * stats.entropy).mean().backward()
    """
    call.checked(
        row_stats, logits=logits, ids=ids, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, mask=mask, rank=rank,
    )  # fmt: skip
    reading = stats_reading(
        logits, ids, temperature, softcap, ignore_index, mask, entropy, total, argmax, rank
    )
    statistics = evaluate(logits, Read(reading))
    return RowStats(**dict(zip(reading.wants, statistics, strict=True)))


def stats_reading(
    logits, ids, temperature, softcap, ignore_index, mask, entropy, total, argmax, rank
) -> Reading:
    if rank:
        target_checks.has_first_id(ids, logits)
    optional = {"entropy": entropy, "total": total, "argmax": argmax, "rank": rank}
    wants = ["lse", *(name for name, wanted in optional.items() if wanted)]
    wants += [] if ids is None else ["picked", "logprob"]
    fields = _label_and_ids(logits, ids, ignore_index, mask)
    return call.reading_of(logits, temperature, softcap, wants=tuple(wants), **fields)


NO_CLASS = -(2**31)  # used as ignore_index if only a mask is given; never a valid id


def _label_and_ids(logits, ids, ignore_index, mask) -> dict:
    """The fields `label`, `ids` and `ignore_index` of a `Reading`.

    One id per row is stored as the label. Otherwise, labels only mark ignored rows.
    """
    if ids is not None and ids.dim() < len(logits.shape):
        if ignore_index is None and mask is not None:
            ignore_index = NO_CLASS
        label = call.as_ids(ids, ignore_index, mask)
        return {"label": label, "ignore_index": ignore_index}
    if ids is not None:
        ids = call.as_ids(ids, ignore_index)
        if ignore_index is not None and ids.shape[-1]:
            counts = ids[..., 0] != ignore_index
            mask = counts if mask is None else counts & call.as_bool(mask)
    label = call.as_label(mask)
    return {"label": label, "ids": ids, "ignore_index": None if label is None else 0}


class Scores(NamedTuple):
    """The scores per token that `score` computes, for RL, DPO and evaluation.

    Here, z are the logits after softcap and temperature, and p = softmax(z).
    """

    logprob: Tensor  # (...)  log p[target]
    entropy: Tensor  # (...)  -Σ p log p, in nats
    lse: Tensor  # (...)      log Σ e^z
    argmax: Tensor  # (...)   int64; -1 for ignored rows
    rank: Tensor | None = None  # (...)  int64, logits above the target's; -1 for ignored rows


SCORES = ("logprob", "entropy", "lse", "argmax")  # the scores that are always computed
DIFFERENTIABLE = ("entropy", "logprob", "lse")


@call.named()
def logsumexp(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns log Σ e^z over the last dimension of logits (..., V), in fp32 or fp64.

    Here, z = softcap · tanh(logits / softcap) / temperature. A row whose logits are all -inf has
    the result -inf and gradient 0; a logit +inf gives +inf. A row whose entry in `mask` is False is
    not read, and its result and gradient are 0.

    >>> logsumexp(torch.tensor([[0.0, 0.0]]))
    tensor([0.6931])
    """
    return row_stats(logits, temperature=temperature, softcap=softcap, mask=mask).lse


@call.named()
def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = -100,
    mask: Tensor | None = None,
) -> Tensor:
    """Returns log softmax(z)[ids] for one or K ids per row, in the shape of `ids`.

    Here, z = softcap · tanh(logits / softcap) / temperature, for logits (..., V). The result is
    fp32 (fp64 for fp64 logits). The K ids of a row can repeat, and one outside [0, V) has the same
    effect as in `row_stats`. A row is ignored if its entry in `mask` is False, or if its id (the
    first of K) is ignore_index: its results and gradient are 0.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([2]))
    tensor([-1.3863])
    """
    call.checked(
        token_logprobs, logits=logits, ids=ids, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, mask=mask,
    )  # fmt: skip
    fields = _label_and_ids(logits, ids, ignore_index, mask)
    reading = call.reading_of(logits, temperature, softcap, wants=("logprob",), **fields)
    return evaluate(logits, Read(reading))[0]


@call.named()
def entropy(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Computes the entropy of softmax(z) in nats, for logits of shape (..., V).

    Here, z = softcap · tanh(logits / softcap) / temperature. The result (...) is fp32 (fp64 for
    fp64 logits), and stays exact if a large constant is added to all logits of a row. A row whose
    entry in `mask` is False is not read, and its entropy and gradient are 0.

    >>> entropy(torch.zeros(1, 4))
    tensor([1.3863])
    """
    call.checked(entropy, logits=logits, temperature=temperature, softcap=softcap, mask=mask)
    reading = stats_reading(
        logits, None, temperature, softcap, None, mask, True, False, False, False
    )
    (found,) = evaluate(logits, Read(reading._replace(wants=("entropy",))))
    return found


@call.named()
def score(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    rank: bool = False,
    gradient: tuple[str, ...] | None = None,
) -> Scores:
    """Computes log p[target], entropy, logsumexp and argmax of logits (..., V) in one pass.

    Let p = softmax(z), with z = softcap · tanh(logits / softcap) / temperature. With rank=True, the
    scores include the rank of the target, as in `row_stats`. `gradient` names the scores that get a
    gradient, by default logprob, entropy and lse; the others are detached. A LinearLogits whose
    weight needs no gradient takes two GEMMs for one such score, and three for several.

    Each score has the shape (...) of `target`, in fp32 (fp64 for fp64 logits); argmax and rank are
    int64. A row is ignored if its target is ignore_index or its entry in `mask` is False: it is not
    read, its argmax and rank are -1, and its other scores 0. A target outside [0, V) raises an
    IndexError on a CPU, and on a GPU with LOGITLESS_CHECK=1; without it, its logprob is NaN.

    >>> new = score(logits, target).logprob
    >>> ratio = (new - old).exp()  # PPO, GRPO
    """
    call.checked(
        score, logits=logits, target=target, temperature=temperature, softcap=softcap,
        ignore_index=ignore_index, mask=mask, rank=rank,
    )  # fmt: skip
    if gradient is not None:
        _check_gradient(gradient)
    reading = call.reading_of(
        logits, temperature, softcap, label=call.as_ids(target, ignore_index, mask),
        ignore_index=ignore_index, wants=Scores._fields if rank else SCORES,
    )  # fmt: skip
    read = Read(reading, "target")
    if gradient is None:
        return Scores(*evaluate(logits, read))
    read.gradient = gradient
    scores = zip(reading.wants, evaluate(logits, read), strict=True)
    return Scores(*(t if read.has_gradient(name) else t.detach() for name, t in scores))


def _check_gradient(gradient) -> None:
    if not isinstance(gradient, (tuple, list)) or any(n not in DIFFERENTIABLE for n in gradient):
        names = ", ".join(map(repr, DIFFERENTIABLE))
        raise ValueError(f"gradient must be a tuple of names out of {names}, got {gradient!r}.")
