"""Computes the gradient of a narrow head's hidden states from sums that the forward computed.

The gradient of the logsumexp with respect to a row's hidden states is Σ_i p_i w_i / T. Here p_i are
the probabilities, w_i are the rows of the weight, and T is the temperature. Attention computes a
sum of the same form: the hidden states are the queries, and the weight is both the keys and the
values. So the forward kernel (narrow_fwd.py) computes the sum Σ_i e^(d_i/T) w_i together with the
logsumexp. Here d = y - max y, and y are the logits before the division by T (state.py). Each split
of the vocabulary has its own max and its own sum. The kernel of this file merges the sums of all
splits, and computes the gradient of the hidden states without computing the logits again.

The column of the label is left out of the sums. If the sums included this column, and p of the
label were near 1, the gradient would be the difference of two nearly equal vectors. To avoid this
difference, the kernel handles the label separately. The kernel computes the label's coefficient in
fp32 (for cross-entropy, the coefficient is p - 1). The kernel then multiplies the label's row of
the weight by this coefficient.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import Reading
from . import config
from .launch import REMEMBERED, Launch
from .narrow_terms import TERM_C0, TERM_RATE, TERM_SHIFT, Pairs
from .numerics import INF
from .profiling import Arguments, profiled
from .state import field
from .stats_merge import SPLIT_M, SPLIT_Y_LABEL

# The largest number of bytes for the sums of all splits.
MOST_BYTES = config.NARROW_SUMS


class Expected(NamedTuple):
    """The sums Σ_i e^(d_i/T) w_i of each split, without the label's column (see above)."""

    sums: Tensor  # (splits, N, D), fp32
    # (padded N, fields, splits), where N is padded to whole tiles. `state` holds the max of each
    # split, and y at the label.
    state: Tensor


def is_expected(reading: Reading) -> bool:
    """Whether the gradient of the hidden states can be computed from the sums in `Expected`.

    The result is False for a loss with ids. The gradient at an id contains the difference between p
    and a teacher's probability. The sums leave out only the label's column, so p of an id would be
    computed from the sums. If p and the teacher's probability are nearly equal, the difference
    would lose digits. The result is also False if the loss reads no statistic at the label. In such
    a loss, labels only mark ignored rows. The result is also False if the loss has a softcap, or if
    any flag of `Sums` (contract.py) is set.
    """
    at_label = reading.ids is None and not {"nll", "logprob", "picked"}.isdisjoint(reading.wants)
    return at_label and reading.softcap is None and not any(reading.sums)


@dataclass(frozen=True)
class _Constants:
    """The constants that the kernel is compiled for."""

    width: int
    stride_w: int
    fields: int
    block_d: int


def _rows_of_weight(args: Arguments) -> int:
    """The number of elements of the weight that the kernel reads."""
    return args["OUT"].numel()


@triton.jit(
    **profiled("narrow_expected_bwd", WEIGHT=_rows_of_weight),
    do_not_specialize=["N", "splits"],
    do_not_specialize_on_alignment=["WEIGHT", "OUT"],
)
def _narrow_expected_bwd_kernel(
    SUMS, SPLITS, WEIGHT, TERMS, COLUMNS, G,  # inputs
    OUT,  # (N, D)
    N, splits,  # sizes
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradient of the hidden states of one row."""
    D: tl.constexpr = field(CONSTANTS, "width")
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, field(CONSTANTS, "block_d"))
    mask = offs_d < D
    shift = tl.load(TERMS + TERM_SHIFT * N + row)
    c0 = tl.load(TERMS + TERM_C0 * N + row)
    rate = tl.load(TERMS + TERM_RATE * N + row)
    SPLITS += row * (splits * field(CONSTANTS, "fields"))
    total = tl.zeros((field(CONSTANTS, "block_d"),), tl.float32)
    for split in range(splits):
        m = tl.load(SPLITS + SPLIT_M * splits + split)
        # If a split has no finite logits, its sum counts as 0.
        scale = tl.where(tl.abs(m) == INF, 0.0, tl.exp2((m - shift) * rate))
        at = (split * tl.cast(N, tl.int64) + row) * D + offs_d
        total += scale * tl.load(SUMS + at, mask=mask, other=0.0)
    label = tl.load(COLUMNS + row).to(tl.int64)
    w = tl.load(WEIGHT + label * field(CONSTANTS, "stride_w") + offs_d, mask=mask, other=0.0)
    y_label = tl.load(SPLITS + SPLIT_Y_LABEL * splits)
    d_label = tl.load(G + row) + c0 * tl.exp2((y_label - shift) * rate)
    d_hidden = c0 * total + d_label * w.to(tl.float32)
    tl.store(OUT + row * D + offs_d, d_hidden.to(OUT.dtype.element_ty), mask=mask)


def hidden_from_expected(
    expected: Expected,
    weight: Tensor,  # (V, D)
    terms: Tensor,  # (TERMS, N)
    pairs: Pairs,  # one pair (row, column of the label) per row, with its gradient g
    d_hidden: Tensor,  # (N, D), contiguous
) -> None:
    """Writes the gradient of the hidden states to d_hidden."""
    N, D = d_hidden.shape
    splits, fields = len(expected.sums), expected.state.shape[1]
    _launch(N, D, weight.stride(0), fields, splits)(
        expected.sums, expected.state, weight, terms, pairs.columns, pairs.g, d_hidden
    )


@functools.lru_cache(REMEMBERED)
def _launch(N: int, D: int, stride_w: int, fields: int, splits: int) -> Launch:
    block_d = max(config.ceil_pow2(D), 2)
    return Launch(
        _narrow_expected_bwd_kernel, (N,), (N, splits),
        num_warps=1, CONSTANTS=_Constants(D, stride_w, fields, block_d),
    )  # fmt: skip
