"""Scores of a softmax over K kept ids per row, as samplers with top-k, top-p or min-p draw from.

`evaluate` computes the kept logits (..., K), and on request their log-probabilities under the
softmax over all ids. Ordinary PyTorch operations compute the scores from these.
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
    """A `SlotRead` whose labels are only checked, as class ids."""

    labels_are_ids: ClassVar[bool] = True
    names: ClassVar[Any] = ("target", f"kept (except {EMPTY} for an empty slot)")


@operator("kept_logits", saved=1)
@dataclass(eq=False)
class KeptLogits(KeptStatistics):
    """z - max z over the ids of each row; no other logits are read.

    The max is subtracted before the division by the temperature, so that the differences are exact
    for large logits. Backward treats it as a constant, which changes no score.
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

    The softmax is over z = softcap · tanh(logits / softcap) / temperature, for logits (..., V).
    `kept` (..., K) holds integer ids; -1 marks an empty slot, and a repeated id counts once. For
    the distribution of a top-k or top-p sampler, pass the ids that it kept, and its temperature.

    With mass=True, log_mass is log Σ p over the kept ids, where p is the softmax over all V ids, so
    log p[target] is logprob + log_mass. Otherwise, log_mass is None, and only the kept logits are
    read. The scores are fp32, or fp64 for fp64 logits.

    If the target is not a kept id, or its logit is -inf, logprob is -inf, without a gradient. If
    all slots are empty, or all kept logits are -inf, logprob is -inf, the entropy is 0, and no
    score has a gradient. A row is ignored if its target is ignore_index or its entry in `mask` is
    False: it is not read, and its scores and gradient are 0. An id outside [0, V) raises an
    IndexError on a CPU, and on a GPU with LOGITLESS_CHECK=1; without it, the scores of its row are
    NaN.

    >>> kept_scores(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([[0, 2, -1]])).logprob
    tensor([-0.6931])
    """
    call.checked(
        kept_scores, logits=logits, target=target, kept=kept, temperature=temperature,
        softcap=softcap, ignore_index=ignore_index, mask=mask, mass=mass,
    )  # fmt: skip
    label = call.as_ids(target, ignore_index, mask)
    ids = call.as_ids(kept)
    if call.reads_values(ids) and not call.under_transform() and ranks_of_call(logits) is None:
        # `_distinct` replaces NO_ID, so the error of `evaluate` would name another number
        wrong = (ids == NO_ID) & (label != ignore_index).unsqueeze(-1)
        target_checks.in_range(ids, logits.shape[-1], wrong, KeptStatistics.names[1], None)  # type: ignore
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
    """Writes NO_ID to empty slots, and to those that repeat an earlier id of the row.

    A label outside [0, V) makes all ids of its row invalid, so that its scores are NaN on a GPU.
    """
    if ids.shape[-1] == 0:
        ids = ids.new_full((*ids.shape[:-1], 1), EMPTY)
    in_order, order = ids.sort(dim=-1, stable=True)
    again = torch.nn.functional.pad(in_order[..., 1:] == in_order[..., :-1], (1, 0))
    repeated = torch.zeros_like(again).scatter(-1, order, again)
    # The user's own NO_ID stays invalid, though the next line marks empty slots with this number.
    ids = torch.where(ids == NO_ID, EMPTY - 1, ids)
    ids = torch.where(repeated | (ids == EMPTY), NO_ID, ids)
    # also True for some ignored rows, which are not read
    bad = (label < 0) | (label >= vocab)
    return torch.where(bad.unsqueeze(-1), vocab, ids)


def _scores(
    z: Tensor, ids: Tensor, label: Tensor, logprobs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns logprob, entropy and log_mass, from z and log p at the ids (..., K).

    A constant added to the z of a row changes no score. If all z of a row are -inf, z and log p are
    replaced by 0, so that their gradient is 0 instead of NaN.
    """
    real = ids != NO_ID
    some = (real & (z != -torch.inf)).any(-1)  # a NaN in z also makes `some` True

    def at_ids(t: Tensor) -> Tensor:
        return torch.where(some.unsqueeze(-1), torch.where(real, t, -torch.inf), 0.0)

    z = at_ids(z)
    if logprobs is not None:
        # z and log p differ by a constant, so both have the softmax q. The one whose maximum is
        # closer to 0 has smaller rounding errors.
        logprobs = at_ids(logprobs)
        top_z, top_p = (t.detach().amax(-1, keepdim=True).abs() for t in (z, logprobs))
        z = torch.where(top_p < top_z, logprobs, z)
    log_q = z.log_softmax(-1)
    is_target = ids == label.unsqueeze(-1)  # True in at most one slot per row
    logprob = torch.where(is_target | log_q.isnan(), log_q, 0.0).sum(-1)
    found = some & is_target.any(-1) & (logprob > -torch.inf) | logprob.isnan()
    logprob = torch.where(found, logprob, -torch.inf)
    # 0 · -inf would be NaN where q is 0
    terms = log_q.exp() * torch.where(log_q == -torch.inf, 0.0, log_q)
    entropy = torch.where(some, 0.0 - terms.sum(-1), 0.0)  # `0.0 - sum` avoids an entropy of -0.0
    if logprobs is None:
        return logprob, entropy, None
    return logprob, entropy, torch.where(some, logprobs.logsumexp(-1), -torch.inf)
