"""Captures from a teacher's logits: the most probable ids of each row, or randomly drawn ids.

Source.capture (source.py) computes a `Capture` on chunks of rows, and joins the results.
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
        """What must be equal on all ranks."""
        ...

    def of(
        self, backend: Any, x: Tensor, temperature: float, softcap: float | None, invariant: bool
    ) -> Captured:
        """Returns the results for logits x (..., V), each in the leading shape of x."""
        ...

    def rows(self, rows: slice | Tensor) -> "Capture":
        """The same capture for only these rows."""
        ...


class TopK(NamedTuple):
    """The top k ids and their log-probabilities (..., k), and the log of the tail mass (...)."""

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
    """The distinct ids out of n draws, their log-weights, and a mask, each (..., n)."""

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
    """Returns n sorted uniform numbers per row of the logits, as an fp64 tensor (N, n).

    Cumulative sums of n + 1 exponential numbers, divided by the last sum, have the distribution of
    n sorted uniform numbers, and need no sort. Truncated to integers, they add without rounding.
    """
    size = (logits.shape[:-1].numel(), n + 1)
    random = torch.rand(size, generator=generator, device=logits.device, dtype=torch.float64)
    sums = random.neg_().log1p_().mul_(-(2.0**40)).long().cumsum(1)
    return sums[:, :n] / sums[:, n:].clamp_min_(1).double()
