"""The protocol of a backend: functions that read logits and write gradients.

`eager` (plain PyTorch) and `kernels` (Triton) implement it. ColumnBackend (parallel/rank_merge.py),
BlockBackend (heads/blocks.py) and OnChipBackend (heads/on_chip.py) wrap one of the two, and merge
the partial statistics of several sets of columns. contract.py defines the structs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import Coefficients, Pair, Partials, Reading, Slots, Statistics
from ..eager.sampled import Sampling


class Backend(Protocol):
    """The functions of a backend. Logits x have shape (..., V), with N rows and K ids per row."""

    # --- statistics of rows, and the backward formula

    def read(self, x: Any, reading: Reading) -> Statistics:
        """Returns the statistics in `reading.wants`, and the state that backward needs."""
        ...

    def gradient(
        self,
        x: Any,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,  # () or (...)
        factor: Tensor | None = None,  # () or (N,), multiplies `upstream`
        into: Tensor | None = None,  # the output; None means a new tensor in the dtype of x
        start: int | None = None,  # the id of the first column of x; None if x has all columns
    ) -> Tensor:
        """Returns the gradient of the logits, of shape (..., V)."""
        ...

    def coefficients(
        self, reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
    ) -> Coefficients:
        """Coefficients from the gradients of statistics, by name; a missing gradient means 0."""
        ...

    @property
    def stats_gradient(self) -> Any:
        """The gradient of logits from gradients of statistics, in one launch. None: not offered.

        Called with (x, reading, state, gradients by name, factor, into). Returns None if one launch
        is not possible.
        """
        ...

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Returns the partial statistics over the columns of x. The first has the id `start`."""
        ...

    def merge(self, several: Sequence[Partials], reading: Reading) -> Partials:
        """Merges partial statistics of the same rows over different columns."""
        ...

    def finish(
        self, parts: Partials, reading: Reading, shape: tuple[int, ...] | None = None
    ) -> Statistics:
        """Computes statistics of whole rows; `tail` and `rank` would need the logits."""
        ...

    def above(self, x: Tensor, reading: Reading, y0: Tensor) -> Tensor:
        """Counts the softcapped logits above each row's y0 (N,), as int64. NaN counts as above."""
        ...

    def outside(self, x: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """The log of each row's mass outside `reading.ids`; `found` has the other statistics."""
        ...

    def with_repeats(self, state: Tensor, ids: Tensor) -> Tensor:
        """Sets the field REPEATS of the state, if the backend reads it."""
        ...

    # --- cross-entropy

    @property
    def one_pass(self) -> Any:
        """-log p of the label and the gradient in one pass over the logits. None: not offered.

        Called with (x, reading, coefficients, factor, into, mean=False). Writes the gradient to
        `into`, and returns -log p of each row's label, or the mean. Returns None if one pass over
        these logits is not possible.
        """
        ...

    @property
    def plan_mean(self) -> Any:
        """Prepares the launch of `one_pass` for a mean over a small head. None: not offered.

        Called with (rows, stride of the rows of logits, reading, coefficients, hidden (N, D),
        copies). Returns None if one pass is not possible, otherwise a launch(x, label, hidden,
        temperature=None). A launch overwrites the logits x with the gradient of the mean, and
        returns the mean and the hidden states, with zeros in ignored rows if `copies` is True.

        While its attribute `is_current` is True, it can be called again with x (rows, V) of the
        same stride and the dtype of `hidden`, on a 16-byte boundary, and with `hidden` of the same
        shape, strides, dtype and address modulo 16.
        """
        ...

    def cross_entropy(
        self, statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
    ) -> tuple[Tensor, Coefficients]:
        """Returns each row's cross-entropy, and the coefficients of the backward formula."""
        ...

    def label_coefficients(self, reading: Reading, dtype: torch.dtype) -> Coefficients:
        """Coefficients of the loss `weighted_nll`, which depend on no statistics."""
        ...

    def weighted_nll(self, nll: Tensor, reading: Reading) -> Tensor:
        """Multiplies `nll` (-log p of each row's label) by the class weight of the label."""
        ...

    def label_mass(self, reading: Reading, dtype: torch.dtype) -> Tensor:
        """The class weight of each row's label, (N,); 0 in ignored rows."""
        ...

    # --- reductions of rows to one number

    def share(self, reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """The factor that turns a sum over rows into a mean, as a scalar tensor.

        1 / Σ mass, where `mass` is `label_mass`; without it, 1 / (rows that are not ignored). 1 if
        the divisor is 0.
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
        """Returns the sum or mean of `value`, and a factor for each row's gradient (None: 1)."""
        ...

    def scale_(self, x: Tensor, g: Tensor) -> None:
        """Multiplies x in place by g, a scalar tensor or a tensor with one number per row."""
        ...

    def scale_two_(self, x: Tensor, y: Tensor, g: Tensor) -> None:
        """Scales two contiguous tensors of one dtype in place by the scalar tensor g."""
        ...

    def zero_ignored(self, x: Tensor, reading: Reading) -> Tensor:
        """Returns x (N, D) with zeros in the rows that `reading` ignores."""
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
        """Returns each row's loss against a sparse teacher, and its coefficients."""
        ...

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """Returns the logits at `reading.ids`, after the softcap and before the temperature."""
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
        """Returns the gradient of the logits, given `g`, the gradient of the gathered logits."""
        ...

    def pair_read(
        self, x: Tensor, reading: Reading, pair: Pair, norms: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns each row's loss against a dense teacher, and the state for `pair_gradient`."""
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
        """Returns the gradient of the student's logits for a loss against a dense teacher."""
        ...

    def topk(
        self,
        x: Tensor,
        k: int,
        temperature: float,
        softcap: float | None,
        invariant: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the top k ids of each row, their log p, and the log of the mass of all others."""
        ...

    def sampled(
        self,
        x: Tensor,
        uniforms: Tensor,
        how: Sampling,
        join: Callable[[Tensor], Tensor] | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws ids. Returns each row's distinct ids, their log-weights, and a mask.

        With columns that are sharded over ranks, `start` is the id of the first column of x, and
        `join` is an all-gather.
        """
        ...

    # --- dot products with rows of a weight

    def row_dots(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """hidden[i] · weight[ids[i, j]] (N, M), in fp32 or fp64; 0 for NO_ID, NaN out of range."""
        ...

    def row_dots_gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        g: Tensor,
        needs: tuple[bool, bool],
        sparse: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of `hidden` and `weight` from `g`; the weight's is sparse COO if `sparse`."""
        ...

    # --- GEMMs

    def row_gemm(
        self,
        a: Tensor,  # (M, K)
        b: Tensor,  # (K, N), or (N, K) if `transposed` is True
        out: Tensor,  # (M, N)
        bias: Tensor | None = None,  # (N,)
        transposed: bool = False,
    ) -> Tensor:
        """Writes `a @ b + bias` to `out`, which can be fp32 for 16-bit a and b.

        The bits of a row do not depend on the number of rows M.
        """
        ...

    def can_accumulate(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether the backend can sum this weight's gradient in block floating point, by chunks.

        See `accumulate` in kernels/blockfp_gemm.py.
        """
        ...

    # --- narrow heads

    def is_narrow(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether this head can be computed without logits in memory here (heads/on_chip.py)."""
        ...
