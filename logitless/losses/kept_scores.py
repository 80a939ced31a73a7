"""Scores of a softmax that is restricted to K kept ids per row.

A sampler with top-k, top-p or min-p keeps some ids of each row, and draws the token from the
softmax over the kept ids. `kept_scores` computes the log-probability of the token and the entropy
under this restricted softmax. `evaluate` computes the logits at the kept ids. If requested,
`evaluate` also computes the log-probabilities of the kept ids under the softmax over all ids. The
logits and the log-probabilities have shape (..., K). Ordinary PyTorch operations compute the scores
from these results, so that autograd can differentiate the scores.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..contract import NO_ID
from ..core import call, target_checks
from ..core.evaluate import evaluate
from ..core.loss import one
from ..core.source import ranks_of_call
from ..heads.operators import operator
from . import checks
from .statistics import SlotRead

EMPTY = -1  # the id of an empty slot in the argument `kept`


class KeptScores(NamedTuple):
    """The scores per token that `kept_scores` returns. Here, q is the softmax over the kept ids."""

    logprob: Tensor  # (...)  log q[target]; -inf if the target is not a kept id
    entropy: Tensor  # (...)  -Σ q log q, in nats
    log_mass: Tensor | None  # (...)  log Σ p over the kept ids; p is the softmax over all ids


@operator("kept_statistics", saved=1)
@dataclass(eq=False)
class KeptStatistics(SlotRead):
    """A `SlotRead` whose labels are checked as class ids. No statistic uses the labels."""

    labels_are_ids: ClassVar[bool] = True
    names: ClassVar[Any] = ("target", f"kept (except {EMPTY} for an empty slot)")


@operator("kept_logits", saved=1)
@dataclass(eq=False)
class KeptLogits(KeptStatistics):
    """Computes z - max z at the ids. Here, max z is the maximum of z over the ids of the row.

    No other logits are read. The maximum is subtracted before the division by the temperature. So
    the differences are exact even if all logits of a row are large. Backward treats the maximum as
    a constant, because subtracting a constant from all logits of a row does not change the scores.
    """

    def forward(self, backend, x):
        y = backend.gather(x, self.reading)
        top = torch.where(self.reading.ids == NO_ID, -torch.inf, y).amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        return (self._over_temperature(y - top),), (y,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        y = saved[0]
        g, gain = self._over_temperature(upstream[0]), one.beside(y, y.device, y.dtype)
        return backend.gather_gradient(x, self.reading, y, g, gain, factor, into)

    def shapes(self, x):
        return [self.reading.ids.shape, self.reading.ids.shape]

    def _over_temperature(self, t: Tensor) -> Tensor:
        """Returns `t` (..., K) divided by the temperature of each row, as a new tensor."""
        temperature = self.reading.any_temperature
        if temperature is None:
            return t.clone()
        if isinstance(temperature, Tensor):
            temperature = temperature.to(t.dtype).unsqueeze(-1)
        return t / temperature


@call.named()
def kept_scores(
    logits: Tensor,
    target: Tensor,
    kept: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    mass: bool = False,
) -> KeptScores:
    """Computes log q[target] and the entropy of q, the softmax over the kept ids of each row.

    The logits of the softmax are z = softcap · tanh(logits / softcap) / temperature, for logits of
    shape (..., V). `kept` holds K ids per row. The shape of `kept` is (..., K), and its dtype can
    be any integer dtype. The id -1 marks an empty slot. A repeated id counts once. To get the
    distribution of a top-k or top-p sampler, pass the ids that the sampler kept as `kept`, and pass
    the sampler's temperature.

    If the target is not a kept id, logprob is -inf, and the gradient of logprob is 0. The same
    holds if the logit of the target is -inf. If all slots are empty, or all kept logits are -inf,
    logprob is -inf and the entropy is 0. The gradient of all scores is then 0.

    With mass=True, log_mass is log Σ p over the kept ids, where p is the softmax over all V ids. So
    log p[target] is logprob + log_mass. Without `mass`, log_mass is None, and only the kept logits
    are read.

    A row is ignored if its target is ignore_index or its entry in `mask` is False. An ignored row
    is not read, and its scores and gradient are 0. The scores are fp32, or fp64 for fp64 logits. An
    id outside [0, V) raises an error on a CPU. On a GPU, an id outside [0, V) makes the scores of
    its row NaN. With LOGITLESS_CHECK=1, this id raises an error instead.

    >>> kept_scores(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([[0, 2, -1]])).logprob
    tensor([-0.6931])
    """
    call.check_once(
        checks.kept_scores, logits, target, kept, temperature, softcap, ignore_index, mask, mass
    )
    label = call.as_ids(target, ignore_index, mask)
    ids = call.as_ids(kept)
    if call.reads_values(ids) and not call.under_transform() and ranks_of_call(logits) is None:
        # `_distinct` replaces the id NO_ID, so the error of `evaluate` would name another number.
        wrong = (ids == NO_ID) & (label != ignore_index).unsqueeze(-1)
        target_checks.in_range(ids, logits.shape[-1], wrong, KeptStatistics.names[1], None)
    ids = _distinct(ids, label, logits.shape[-1])
    reading = call.reading_of(
        logits, temperature, softcap, label=label, ids=ids, ignore_index=ignore_index,
        wants=("picked", "logprob") if mass else ("picked",),
    )  # fmt: skip
    z, *logprobs = evaluate(logits, (KeptStatistics if mass else KeptLogits)(reading))
    scores = _scores(z, ids, label, *logprobs)
    ignored = label == ignore_index
    return KeptScores(*(None if t is None else torch.where(ignored, 0.0, t) for t in scores))


def _distinct(ids: Tensor, label: Tensor, vocab: int) -> Tensor:
    """Replaces ids by NO_ID in empty slots, and in slots that repeat an earlier id of the row.

    If the label of a row is outside [0, V), all ids of the row are replaced by an invalid id. So
    the scores of the row are NaN on a GPU, where no error is raised.
    """
    if ids.shape[-1] == 0:
        ids = ids.new_full((*ids.shape[:-1], 1), EMPTY)
    in_order, order = ids.sort(dim=-1, stable=True)
    again = torch.nn.functional.pad(in_order[..., 1:] == in_order[..., :-1], (1, 0))
    repeated = torch.zeros_like(again).scatter(-1, order, again)
    # If `kept` contains the number `NO_ID`, this number is an invalid id. It is replaced by another
    # invalid id, because the second line below marks empty slots with `NO_ID`.
    ids = torch.where(ids == NO_ID, EMPTY - 1, ids)
    ids = torch.where(repeated | (ids == EMPTY), NO_ID, ids)
    # `bad` can be True for ignored rows too, but ignored rows are not read.
    bad = (label < 0) | (label >= vocab)
    return torch.where(bad.unsqueeze(-1), vocab, ids)


def _scores(
    z: Tensor, ids: Tensor, label: Tensor, logprobs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns logprob, entropy and log_mass, from z and log p at the ids (..., K).

    Adding a constant to all z of a row does not change the scores. If z is -inf at all ids of a
    row, z and log p of this row are replaced by 0. The gradient of z and log p is then 0 instead of
    NaN.
    """
    real = ids != NO_ID
    some = (real & (z != -torch.inf)).any(-1)  # a NaN in z also makes `some` True

    def at_ids(t: Tensor) -> Tensor:
        return torch.where(some.unsqueeze(-1), torch.where(real, t, -torch.inf), 0.0)

    z = at_ids(z)
    if logprobs is not None:
        # Within a row, z and log p differ only by a constant. So the softmax of z and the softmax
        # of log p are both q. Large values have larger rounding errors. So q is computed from z if
        # the maximum of z is closer to 0 than the maximum of log p. Otherwise, q is computed from
        # log p.
        logprobs = at_ids(logprobs)
        top_z, top_p = (t.detach().amax(-1, keepdim=True).abs() for t in (z, logprobs))
        z = torch.where(top_p < top_z, logprobs, z)
    log_q = z.log_softmax(-1)
    is_target = ids == label.unsqueeze(-1)  # True in at most one slot per row
    logprob = torch.where(is_target | log_q.isnan(), log_q, 0.0).sum(-1)
    found = some & is_target.any(-1) & (logprob > -torch.inf) | logprob.isnan()
    logprob = torch.where(found, logprob, -torch.inf)
    # log q is replaced by 0 where q is 0, because 0 · -inf would be NaN.
    terms = log_q.exp() * torch.where(log_q == -torch.inf, 0.0, log_q)
    entropy = torch.where(some, 0.0 - terms.sum(-1), 0.0)  # `0.0 - sum` avoids an entropy of -0.0
    if logprobs is None:
        return logprob, entropy, None
    return logprob, entropy, torch.where(some, logprobs.logsumexp(-1), -torch.inf)
