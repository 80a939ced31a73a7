"""What a source of logits must answer, so that every public function takes it.

A plain tensor of logits is evaluated by core/loss.py. Anything else that stands for logits (...,
V), a head that is never materialised or a slice of the vocabulary, has these attributes and
methods, and nothing else of the library needs to know it: the public functions check their
arguments by shape, dtype and device, make a RowLoss of them, and hand it over.

A source calls the loss's own `forward` and `backward` on the logits it makes, for as many rows at a
time as it likes (`loss.take(rows, lead)` is the same loss of some rows), and reduces the rows'
values by the backend's `reduce`. One that has only some columns of each row gets their `Partials`
from the backend's `partial`, joins them with those of the other columns, and calls `finish`.
"""

from typing import Protocol

import torch
from torch import Tensor

from .loss import RowLoss


class Source(Protocol):
    @property
    def shape(self) -> torch.Size:
        """(..., V)"""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def requires_grad(self) -> bool: ...

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, weighted and reduced: "none" (...), "sum" or "mean" ().

        For a RowLoss of several outputs, their tuple. Differentiable.
        """
        ...

    def capture_topk(
        self, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        ...

    def materialize(self, rows: slice | Tensor | None = None) -> Tensor:
        """The logits themselves, (..., V); or of some rows, (n, V), as constants."""
        ...

    def as_teacher(self) -> "Source | Tensor":
        """The same logits as constants."""
        ...
