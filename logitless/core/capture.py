"""Captures from a teacher's logits: the most probable ids of each row, or randomly drawn ids.

A `Capture` computes its results from the logits of some rows. The method `capture` of a Source
(source.py) calls the `Capture` for one chunk of rows at a time, and joins the results of all rows.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..eager.sampled import Sampling

Captured = tuple[Tensor, ...]  # results of a `Capture`, each in the leading shape of the logits


class Capture(Protocol):
    """Computes some results for each row of logits x (..., V)."""

    name: str  # the name of the public function

    @property
    def options(self) -> tuple:
        """The options of the capture. These options must be equal on all ranks."""
        ...

    def of(
        self, backend: Any, x: Tensor, temperature: float, softcap: float | None, invariant: bool
    ) -> Captured:
        """Returns the results for the logits x. Every result has the leading shape of x.

        If `invariant` is True, the results of a row have the same bits in every batch.
        """
        ...

    def rows(self, rows: slice | Tensor) -> "Capture":
        """Returns the same capture for only these rows."""
        ...


class TopK(NamedTuple):
    """Captures the top k ids of each row, their log-probabilities, and the log of the tail mass.

    The ids and their log-probabilities have shape (..., k). The tail mass (...) is the probability
    of all other ids.
    """

    k: int
    name = "capture_topk"

    @property
    def options(self) -> tuple:
        return (self.k,)

    def of(self, backend, x, temperature, softcap, invariant):
        return backend.topk(x, self.k, temperature, softcap, invariant)

    def rows(self, rows):
        return self


class Sampled(NamedTuple):
    """Draws n ids per row, and captures the distinct ids, their log-weights and a mask.

    Each result has shape (..., n). The sum of the weights of a row is 1.
    """

    uniforms: Tensor  # (N, n), sorted uniform numbers in fp64; each number selects one id
    proposal: float
    name = "capture_sampled"

    @property
    def options(self) -> tuple:
        return (self.uniforms.shape[1], self.proposal)

    def of(self, backend, x, temperature, softcap, invariant):
        how = Sampling(self.proposal, temperature, softcap, invariant)
        return backend.sampled(x, self.uniforms, how)

    def rows(self, rows):
        return self._replace(uniforms=self.uniforms[rows])


def uniforms_of(logits: Any, n: int, generator: torch.Generator | None) -> Tensor:
    """Returns n uniform numbers per row of the logits, in ascending order, as an fp64 tensor (N,
    n).

    Sorting would be slow. Instead, the function draws n + 1 exponential random numbers per row, and
    computes their cumulative sums. The first n sums, divided by the last sum, have the distribution
    of n sorted uniform numbers. The exponential random numbers are scaled and truncated to
    integers, so that their sums have no rounding errors.
    """
    size = (logits.shape[:-1].numel(), n + 1)
    random = torch.rand(size, generator=generator, device=logits.device, dtype=torch.float64)
    sums = random.neg_().log1p_().mul_(-(2.0**40)).long().cumsum(1)
    return sums[:, :n] / sums[:, n:].clamp_min_(1).double()
