"""The gradient of a narrow head's hidden states, from sums of the forward.

The gradient of a row's logsumexp is Σ_i p_i w_i / T, a sum as in attention: hidden states are the
queries, the weight is both keys and values. So the forward (forward.py) also computes, per split
of the vocabulary, Σ_i e^(d_i/T) w_i with d = y - max y (statistics/state.py). The kernel here
merges the splits and needs no logits.

The sums leave out the label's column: with p of the label near 1, the gradient would be the
difference of two nearly equal vectors. Instead, the label's coefficient (p - 1 for cross-entropy)
is computed in fp32, and multiplies the label's row of the weight.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...contract import Reading
from .. import config
from ..launch import field, launch
from ..numerics import INF
from ..profiling import Arguments, profiled
from ..statistics.merge import SPLIT_M, SPLIT_Y_LABEL
from .terms import TERM_C0, TERM_RATE, TERM_SHIFT, Pairs

MOST_BYTES = config.NARROW_SUMS


class Expected(NamedTuple):
    """The sums Σ_i e^(d_i/T) w_i of each split, without the label's column (see above)."""

    sums: Tensor  # (splits, N, D), fp32
    # (padded N, fields, splits), N padded to whole tiles: the max of each split, y at the label
    state: Tensor


def is_expected(reading: Reading) -> bool:
    """Whether the gradient of the hidden states can be computed from `Expected`.

    Not with ids: their p would come from the sums, and its difference to a teacher's p could lose
    digits. Not if labels only mark ignored rows, and not with a softcap or any flag of `Sums`
    (contract.py).
    """
    at_label = reading.ids is None and not {"nll", "logprob", "picked"}.isdisjoint(reading.wants)
    return at_label and reading.softcap is None and not any(reading.sums)


@dataclass(frozen=True)
class _Constants:
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
        # a split without finite logits counts as 0
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
    N, D = d_hidden.shape
    splits, fields = len(expected.sums), expected.state.shape[1]
    block_d = max(config.ceil_pow2(D), 2)
    launch(
        _narrow_expected_bwd_kernel, (N,),
        (expected.sums, expected.state, weight, terms, pairs.columns, pairs.g, d_hidden),
        (N, splits),
        num_warps=1, CONSTANTS=_Constants(D, weight.stride(0), fields, block_d),
    )  # fmt: skip
