"""The protocol of a backend: functions that read logits and write gradients.

The modules `eager` (plain PyTorch) and `kernels` (Triton) implement the protocol. ColumnBackend
(parallel/rank_merge.py) and BlockBackend (heads/blocks.py) call `eager` or `kernels`, and merge the
partial statistics of several sets of columns. OnChipBackend (heads/on_chip.py) calls `kernels`. The
structs in the signatures are defined in contract.py. choose_backend.py chooses the backend.
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
        """Returns the statistics listed in `reading.wants`, and the state that backward needs."""
        ...

    def gradient(
        self,
        x: Any,
        reading: Reading,
        state: Tensor,
        coefficients: Coefficients,
        upstream: Tensor,  # () or (...)
        factor: Tensor | None = None,  # () or (N,), multiplies `upstream`
        into: Tensor | None = None,
        start: int | None = None,  # the id of the first column of x; None if x has all columns
    ) -> Tensor:
        """Returns the gradient of the logits, of shape (..., V).

        The gradient is written to `into`, or to a new tensor in the dtype of x if `into` is None.
        """
        ...

    def coefficients(
        self, reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
    ) -> Coefficients:
        """Computes the coefficients of the backward formula from the gradients of the statistics.

        `gradients` maps the name of each statistic to its gradient. A missing gradient means 0.
        """
        ...

    @property
    def stats_gradient(self) -> Any:
        """A function that computes the gradient of logits from gradients of statistics, or None.

        The signature of the function is (x, reading, state, gradients, factor, into). `gradients`
        maps each statistic that has a gradient to this gradient. The function launches one kernel.
        If one launch is not possible, the function returns None. The property is None for a backend
        without such a function.
        """
        ...

    def partial(self, x: Tensor, reading: Reading, start: int = 0) -> Partials:
        """Returns the partial statistics of each row over the columns of x.

        The first column of x is the column `start` of the logits.
        """
        ...

    def merge(self, several: Sequence[Partials], reading: Reading) -> Partials:
        """Merges partial statistics of the same rows over different columns."""
        ...

    def finish(
        self, parts: Partials, reading: Reading, shape: tuple[int, ...] | None = None
    ) -> Statistics:
        """Computes the statistics of whole rows from the `Partials` of all columns.

        The statistics `tail` and `rank` cannot be computed from Partials.
        """
        ...

    def above(self, x: Tensor, reading: Reading, y0: Tensor) -> Tensor:
        """For each row, counts the logits of x that are greater than the row's number in y0.

        y0 and the result have shape (N,). The result is int64. The softcap of `reading` is applied
        to x. A NaN in x, or in y0, counts as greater.
        """
        ...

    def outside(self, x: Tensor, reading: Reading, found: Statistics) -> Tensor:
        """For each row, returns the log of the total probability of all ids outside `reading.ids`.

        `found` holds the other statistics of the rows.
        """
        ...

    def with_repeats(self, state: Tensor, ids: Tensor) -> Tensor:
        """Returns the state with the field REPEATS set.

        REPEATS is 1 if two ids of the row are equal, and 0 otherwise. A backend that does not read
        REPEATS returns the state unchanged.
        """
        ...

    # --- cross-entropy

    @property
    def one_pass(self) -> Any:
        """A function that computes -log p of the label and the gradient in one pass, or None.

        The signature of the function is (x, reading, coefficients, factor, into, mean=False). The
        function writes the gradient to `into`, and returns -log p of each row's label, or the mean
        over rows if `mean` is True. If one pass over these logits is not possible, the function
        returns None. The property is None for a backend without such a function.
        """
        ...

    @property
    def plan_mean(self) -> Any:
        """A function that prepares the kernel launch for a mean over a small head.

        Only a backend with a function `one_pass` has this property. The signature of the function
        is (rows, stride, reading, coefficients, hidden, copies). `stride` is the number of elements
        between two rows of logits. `hidden` (N, D) are the hidden states. The function returns None
        if one pass is not possible.

        Otherwise, the function returns a launch with the signature (x, label, hidden,
        temperature=None). The launch overwrites the logits x with the gradient of the mean. The
        launch returns the mean and the hidden states. If `copies` is True, these hidden states are
        0 in ignored rows. The launch can be called several times, as long as its attribute
        `is_current` is True. In every call, x must be (rows, V) with the given stride and the dtype
        of `hidden`, and must start on a 16-byte boundary. `hidden` must have the same shape,
        strides, dtype and address modulo 16.
        """
        ...

    def cross_entropy(
        self, statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
    ) -> tuple[Tensor, Coefficients]:
        """Returns each row's cross-entropy, and the coefficients of the backward formula."""
        ...

    def label_coefficients(self, reading: Reading, dtype: torch.dtype) -> Coefficients:
        """Returns the coefficients of the backward formula for the loss `weighted_nll`.

        The coefficients do not depend on statistics.
        """
        ...

    def weighted_nll(self, nll: Tensor, reading: Reading) -> Tensor:
        """Returns `nll` (-log p of each row's label) times the class weight of the label."""
        ...

    def label_mass(self, reading: Reading, dtype: torch.dtype) -> Tensor:
        """Returns the class weight of each row's label as a tensor (N,).

        In ignored rows, the result is 0.
        """
        ...

    # --- reductions of rows to one number

    def share(self, reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """Returns the factor that turns a sum over rows into a mean, as a scalar tensor.

        The factor is 1 / Σ mass, where `mass` holds the class weight of each row's label. If `mass`
        is None, the factor is 1 divided by the number of rows that are not ignored. If the divisor
        is 0, the factor is 1.
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
        """Returns the sum or mean of `value`, and a factor for the gradient of each row.

        Backward multiplies the gradient of each row by this factor. The factor is one number for
        all rows, or one number per row. None means a factor of 1.
        """
        ...

    def scale_(self, x: Tensor, g: Tensor) -> None:
        """Multiplies x in place by g, a scalar tensor or a tensor with one number per row."""
        ...

    def scale_two_(self, x: Tensor, y: Tensor, g: Tensor) -> None:
        """Multiplies two contiguous tensors of the same dtype in place by the scalar tensor g."""
        ...

    def zero_ignored(self, x: Tensor, reading: Reading) -> Tensor:
        """Returns x, of shape (N, D), with zeros in the rows that `reading` ignores."""
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
        """Returns the loss of each row against a sparse teacher.

        The second result holds the coefficients of the backward formula.
        """
        ...

    def gather(self, x: Tensor, reading: Reading) -> Tensor:
        """Returns the logits at `reading.ids`.

        The softcap is applied, but the temperature is not.
        """
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
        """Returns the gradient of the logits. `g` is the gradient of the gathered logits."""
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
        """Returns the top k ids of each row, their log-probabilities, and the log of the tail mass.

        The tail mass is the probability of all other ids.

        If `invariant` is True, the results of a row have the same bits in every batch.
        """
        ...

    def sampled(
        self,
        x: Tensor,
        uniforms: Tensor,
        how: Sampling,
        join: Callable[[Tensor], Tensor] | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws ids at random. Returns the distinct ids of each row, their log-weights, and a mask.

        If the columns are sharded over ranks, `start` is the id of the first column of x, and
        `join` is an all-gather.
        """
        ...

    # --- dot products with rows of a weight

    def row_dots(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Returns hidden[i] · weight[ids[i, j]] as a tensor (N, M), in fp32 or fp64.

        The result is 0 for the id NO_ID, and NaN for all other ids outside [0, V).
        """
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
        """Returns the gradients of `hidden` and `weight`. `g` is the gradient of the dot products.

        If `sparse` is True, the gradient of the weight is a sparse COO tensor.
        """
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
        """Writes `a @ b + bias` to `out`. The bits of a row do not depend on the number of rows M.

        If `transposed` is True, the function writes `a @ b.T + bias`. If a and b are 16-bit
        tensors, `out` can be fp32.
        """
        ...

    def can_accumulate(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether the backend can sum this weight's gradient in block floating point.

        The function `accumulate` (kernels/blockfp_gemm.py) computes the sum, one chunk of rows per
        call.
        """
        ...

    # --- narrow heads

    def is_narrow(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether `narrow_partial` and `narrow_gradients` support this head on this device.

        `narrow_partial` and `narrow_gradients` compute a loss over a head without writing logits to
        memory (heads/on_chip.py).
        """
        ...
