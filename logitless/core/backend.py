"""The protocol of a backend: functions that read logits and write gradients.

`eager` (plain PyTorch) and `kernels` (Triton) are modules with these functions. ColumnBackend
(parallel/rank_merge.py) and BlockBackend (heads/blocks.py) use one of these modules, and merge the
partial statistics of several sets of columns. OnChipBackend (heads/on_chip.py) uses `kernels`. The
structs are defined in contract.py. call.py chooses the backend of a tensor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import Coefficients, Pair, Partials, Reading, Slots, Statistics


class Backend(Protocol):
    """The functions of a backend. Logits x have shape (..., V), with N rows and K ids per row."""

    # --- statistics of rows, and the backward formula

    def read(self, x: Any, reading: Reading) -> Statistics:
        """Returns the statistics in reading.wants, and the state that the backward needs."""
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
        start: int | None = None,  # first column of x in the vocabulary; None if x has all columns
    ) -> Tensor:
        """Returns the gradient of the logits, (..., V).

        The gradient is written to `into`, or to a new tensor in the dtype of x if `into` is None.
        """
        ...

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Partial statistics of the columns [start, start + width) of each row."""
        ...

    def merge(self, several: Sequence[Partials], reading: Reading) -> Partials:
        """Merges the partial statistics of several sets of columns of the same rows."""
        ...

    def finish(
        self, parts: Partials, reading: Reading, shape: tuple[int, ...] | None = None
    ) -> Statistics:
        """Returns statistics of whole rows, without the tail, from partials of all columns."""
        ...

    def outside(self, x: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """The log of the mass outside reading.ids, (...), for rows with known statistics."""
        ...

    def with_repeats(self, state: Tensor, ids: Tensor) -> Tensor:
        """Returns the state with the field REPEATS set: 1 if ids of the row repeat, otherwise 0."""
        ...

    # --- cross-entropy

    @property
    def one_pass(self) -> Any:
        """A function that computes -log p of the label and writes the gradient, or None.

        The signature is (x, reading, coefficients, factor, into, mean=False). The function returns
        -log p, (...), or None if -log p cannot be computed in one pass over these logits. The
        property is None if the backend does not have the function.
        """
        ...

    def cross_entropy(
        self, statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
    ) -> tuple[Tensor, Coefficients]:
        """Returns the cross-entropy of each row, (...), and the coefficients of its gradient."""
        ...

    def label_coefficients(self, reading: Reading, dtype: torch.dtype) -> Coefficients:
        """Coefficients of v[label] · nll, computed without any statistics."""
        ...

    def weighted_nll(self, nll: Tensor, reading: Reading) -> Tensor:
        """The loss v[label] · nll of each row, (...)."""
        ...

    def label_mass(self, reading: Reading, dtype: torch.dtype) -> Tensor:
        """The class weight v[label] of each row, (N,); 0 for ignored rows."""
        ...

    # --- reductions of rows to one number

    def share(self, reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """The factor () that turns a sum over rows into a mean.

        The factor is 1 / Σ mass. If `mass` is None, the factor is 1 divided by the number of rows
        that count. If the divisor is 0, the factor is 1.
        """
        ...

    def reduce(
        self,
        value: Tensor,
        reading: Reading,
        row_weight: Tensor | None = None,
        mass: Tensor | None = None,
        mean: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the sum or mean of the rows, and the factor of each row's gradient (or None)."""
        ...

    def scale_(self, x: Tensor, g: Tensor) -> None:
        """Multiplies x (..., V) in place by g, whose shape is () or (...)."""
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
        """Returns the divergence of each row over its K slots, (...), and the coefficients."""
        ...

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """Returns the logits y at reading.ids, (..., K)."""
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
        """The gradient of the logits, from the gradient g of the result of `gather`."""
        ...

    def pair_read(
        self, x: Tensor, reading: Reading, pair: Pair, norms: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss against a dense teacher, (...), and the state, (N, PAIR_STATE)."""
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
        """Whether `accumulate` supports the gradient of this weight on this device."""
        ...

    # --- narrow heads

    def is_narrow(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether narrow_partial and narrow_gradients support this head on this device.

        The two functions compute a head without writing logits to memory (heads/on_chip.py).
        """
        ...
