"""What a backend is: the functions that read logits and write gradients.

`eager` (plain PyTorch) and `kernels` (Triton) are modules with these functions. ColumnBackend
(parallel/columns.py) and BlockBackend (heads/blocks.py) are built on one of the two and merge the
statistics of some columns with those of others. The structs are those of contract.py; call.py
chooses the backend of a tensor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import Coefficients, Pair, Partials, Reading, Slots, Statistics


class Backend(Protocol):
    """All shapes are those of contract.py: x (..., V), N rows, K ids per row."""

    # --- statistics of rows, and the one backward

    def read(self, x: Any, reading: Reading) -> Statistics:
        """The statistics that reading.wants, and the state that the gradient reads again."""
        ...

    def gradient(
        self,
        x: Any,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,  # () or (...)
        factor: Tensor | None = None,  # () or N numbers
        into: Tensor | None = None,
        start: int | None = None,  # the first column of x in the vocabulary; None if x has all
    ) -> Tensor:
        """The gradient of the logits, (..., V) in the dtype of x, or of `into`."""
        ...

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Statistics of the columns [start, start + width) of each row, before merging."""
        ...

    def merge(self, several: Sequence[Partials], reading: Reading) -> Partials:
        """Parts of the same rows as one part."""
        ...

    def finish(
        self, parts: Partials, reading: Reading, shape: tuple[int, ...] | None = None
    ) -> Statistics:
        """Statistics of whole rows from their parts; every statistic except the tail."""
        ...

    def outside(self, x: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """log of the mass outside reading.ids, (...), of rows whose state is known."""
        ...

    def with_repeats(self, state: Tensor, ids: Tensor) -> Tensor:
        """The state with its field REPEATS set, where a row's ids may repeat."""
        ...

    # --- cross-entropy

    @property
    def one_pass(self) -> Any:
        """-log p of the label while the gradient is written, or None if the backend has no such
        function: (x, reading, coefficients, factor, into, mean=False) -> (...) or None if these
        logits cannot be read in one pass."""
        ...

    def cross_entropy(
        self, statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
    ) -> tuple[Tensor, Coefficients]:
        """The cross-entropy of each row, (...), and its coefficients."""
        ...

    def label_coefficients(self, reading: Reading, dtype: torch.dtype) -> Coefficients:
        """Coefficients of v[label] nll, which need no statistics."""
        ...

    def weighted_nll(self, nll: Tensor, reading: Reading) -> Tensor:
        """v[label] nll of each row, (...)."""
        ...

    def label_mass(self, reading: Reading, dtype: torch.dtype) -> Tensor:
        """v[label] of each row, (N,); 0 for ignored rows."""
        ...

    # --- rows to one number

    def share(self, reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """1 / the number of rows that count, or 1 / the sum of their mass; 1 where that is 0."""
        ...

    def reduce(
        self,
        value: Tensor,
        reading: Reading,
        row_weight: Tensor | None = None,
        mass: Tensor | None = None,
        mean: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The sum or mean of the rows, and the factor of each row's gradient; None for 1."""
        ...

    def scale_(self, x: Tensor, g: Tensor) -> None:
        """x (..., V) times g, () or (...), in place."""
        ...

    # --- teachers

    def slots(
        self,
        student: Tensor,
        reading: Reading,
        given: Slots,
        tail: Tensor | None = None,
        logprob_t1: Tensor | None = None,
        temperature: float | Tensor | None = None,
    ) -> tuple[Tensor, Coefficients]:
        """The divergence of each row on its K slots, (...), and its coefficients."""
        ...

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """y at reading.ids, (..., K)."""
        ...

    def gather_gradient(
        self,
        x: Tensor,
        reading: Reading,
        picked: Tensor,
        g: Tensor,
        upstream: Tensor,
        factor: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the logits from that of `gather`."""
        ...

    def pair_read(
        self, x: Tensor, reading: Reading, pair: Pair, norms: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each row against a dense teacher, (...), and its state (N, PAIR_STATE)."""
        ...

    def pair_gradient(
        self,
        x: Tensor,
        reading: Reading,
        pair: Pair,
        state: Tensor,
        upstream: Tensor,
        factor: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the student's logits."""
        ...

    def topk(
        self, x: Tensor, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        ...

    # --- sums of GEMMs

    def can_accumulate(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether `accumulate` can sum products for this weight in 16 bits per number."""
        ...
