"""The coefficients of the backward formula (contract.py) from gradients of statistics.

These functions apply the RULES of eager/coefficients.py. PyTorch's operations would take
eight launches for `ll.score`, most of the host time of a small backward.

Without ids, and with at most MOST_IN_ROW gradients, the kernel of backward.py calls `coefs_of_row`
and needs no launch for them. Otherwise, as with ids or a head computed in blocks, the kernel here
writes those of all rows; what it does not support is left to eager/. `g_total` is g_c.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import COEFFICIENTS, Coefficients, Reading
from ...eager import stats_coefficients as by_torch
from ...eager.stats_coefficients import AT_IDS, RULES, fields_given, fields_of
from .. import config
from ..cross_entropy.smoothing_z_loss import COEF_WIDTH
from ..launch import REMEMBERED, Launch, field
from ..numerics import load
from ..profiling import profiled
from .gradient_tile import COEF_A, COEF_B, COEF_G_LABEL, COEF_G_TOTAL, Coefs, uses
from .outputs import STATE_ENTROPY
from .state import STATE_WIDTH

# `row_stats` and `row_loss` have at most lse, picked, logprob, entropy and total
MOST = 5
MOST_IN_ROW = 3  # the largest number of gradients that `coefs_of_row` supports


@dataclass(frozen=True)
class Given:
    """The statistics whose gradients a kernel gets as D0, D1, ..."""

    names: tuple[str, ...]
    steps: tuple[int, ...]  # row strides of D0, D1, ...; 0 if all rows share one number
    at_ids: bool = False  # whether the statistics in AT_IDS have K gradients per row


@dataclass(frozen=True)
class _Constants:
    given: Given
    block_n: int
    block_k: int


class _Sums(NamedTuple):
    a: tl.tensor
    b: tl.tensor
    g_label: tl.tensor
    g_total: tl.tensor


@triton.constexpr_function
def sign_of(given, index, coefficient, times):
    """Returns the sign of the term that a statistic adds to a coefficient, or 0 without one."""
    if index >= len(given.names):
        return 0
    terms = RULES[given.names[index]]
    return sum(t.sign for t in terms if t.coefficient == coefficient and t.times == times)


@triton.constexpr_function
def is_at_ids(given, index):
    return given.at_ids and given.names[index] in AT_IDS


@triton.constexpr_function
def step_of(given, index):
    return given.steps[index]


@triton.jit
def _plus(total, d, SIGN: tl.constexpr):
    """Returns total + SIGN · d, without d if SIGN is 0: 0 times an infinite d would be NaN."""
    if SIGN == 0:
        return total
    else:
        return total + d * SIGN


@triton.jit
def _sum_over_ids(D, row, mask, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        d = load(D, row[:, None] * K + k[None, :], mask[:, None] & (k < K)[None, :])
        total += tl.sum(d.to(tl.float32), axis=1)
    return total


@triton.jit
def _add(
    sums, D, entropy, row, mask, K, INDEX: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns `sums` plus the terms of one statistic, of which D is the gradient or None."""
    if D is None:
        return sums
    else:
        BY_ID: tl.constexpr = is_at_ids(GIVEN, INDEX)
        if BY_ID:
            d = _sum_over_ids(D, row, mask, K, BLOCK_N, BLOCK_K)
        else:
            d = load(D, row * step_of(GIVEN, INDEX), mask).to(tl.float32)
        a = _plus(sums.a, d, sign_of(GIVEN, INDEX, "a", ""))
        a = _plus(a, d * entropy, sign_of(GIVEN, INDEX, "a", "entropy"))
        b = _plus(sums.b, d, sign_of(GIVEN, INDEX, "b", ""))
        g_label = sums.g_label
        if not BY_ID:
            g_label = _plus(g_label, d, sign_of(GIVEN, INDEX, "label", ""))
        g_total = _plus(sums.g_total, d, sign_of(GIVEN, INDEX, "total", ""))
        return _Sums(a, b, g_label, g_total)


@triton.constexpr_function
def reads_entropy(given):
    return any(t.times == "entropy" for name in given.names for t in RULES[name])


@triton.jit
def _times(coefficient, gain, USED: tl.constexpr):
    if USED:
        return coefficient * gain
    else:
        return 0.0


@triton.jit
def coefs_of_row(D0, D1, D2, STATE, row, gain, GIVEN: tl.constexpr, HAS: tl.constexpr):
    """Returns the coefficients of one row, times `gain`, from the gradients in GIVEN (or None)."""
    entropy = 0.0
    if reads_entropy(GIVEN):
        entropy = tl.load(STATE + row.to(tl.int64) * STATE_WIDTH + STATE_ENTROPY)
    sums = _Sums(0.0, 0.0, 0.0, 0.0)
    sums = _add(sums, D0, entropy, row, None, 0, 0, GIVEN, 1, 1)
    sums = _add(sums, D1, entropy, row, None, 0, 1, GIVEN, 1, 1)
    sums = _add(sums, D2, entropy, row, None, 0, 2, GIVEN, 1, 1)
    return Coefs(
        _times(sums.a, gain, uses(HAS, "a")),
        _times(sums.b, gain, uses(HAS, "b")),
        _times(sums.g_label, gain, uses(HAS, "label")),
        _times(sums.g_total, gain, uses(HAS, "total")),
        0.0,
        0.0,
    )


@triton.jit(
    **profiled("stats_coefficients"),
    do_not_specialize=["N", "K"],
    do_not_specialize_on_alignment=["STATE", "D0", "D1", "D2", "D3", "D4"],
)
def _stats_coefficients_kernel(
    STATE, D0, D1, D2, D3, D4,  # inputs; D0, D1, ... are the gradients of statistics
    COEF,  # output, (N, COEFFICIENTS)
    N, K,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    GIVEN: tl.constexpr = field(CONSTANTS, "given")
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < N
    zero = tl.zeros((BLOCK_N,), tl.float32)
    entropy = zero
    if reads_entropy(GIVEN):
        entropy = load(STATE, row * STATE_WIDTH + STATE_ENTROPY, mask)
    sums = _Sums(zero, zero, zero, zero)
    sums = _add(sums, D0, entropy, row, mask, K, 0, GIVEN, BLOCK_N, BLOCK_K)
    sums = _add(sums, D1, entropy, row, mask, K, 1, GIVEN, BLOCK_N, BLOCK_K)
    sums = _add(sums, D2, entropy, row, mask, K, 2, GIVEN, BLOCK_N, BLOCK_K)
    sums = _add(sums, D3, entropy, row, mask, K, 3, GIVEN, BLOCK_N, BLOCK_K)
    sums = _add(sums, D4, entropy, row, mask, K, 4, GIVEN, BLOCK_N, BLOCK_K)
    j = tl.arange(0, 8)[None, :]
    fields = tl.where(j == COEF_A, sums.a[:, None], 0.0)
    fields = tl.where(j == COEF_B, sums.b[:, None], fields)
    fields = tl.where(j == COEF_G_LABEL, sums.g_label[:, None], fields)
    fields = tl.where(j == COEF_G_TOTAL, sums.g_total[:, None], fields)
    tl.store(COEF + row[:, None] * COEF_WIDTH + j, fields, mask=mask[:, None] & (j < COEF_WIDTH))


def coefficients(
    reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
) -> Coefficients:
    has_ids = reading.ids is not None
    N, K = state.shape[0], reading.ids.shape[-1] if has_ids else 0
    names, tensors, steps = [], [], []
    for name, d in gradients.items():
        if d is None:
            continue
        by_id = has_ids and name in AT_IDS
        same = not by_id and not any(d.stride())  # all rows share one number
        names.append(name)
        tensors.append(d if same else d.contiguous())
        steps.append(0 if same else 1)
    plan = _plan(N, K, tuple(names), tuple(steps), reading.wants, has_ids)
    if plan is None:
        return by_torch.coefficients(reading, state, gradients)
    ids = None
    if plan.at_ids:
        at_ids = [d for d, name in zip(tensors, names, strict=True) if name in AT_IDS]
        ids = sum(at_ids[1:], at_ids[0]).view(N, K) if at_ids else state.new_zeros((N, K))
    rows = torch.empty((N, COEFFICIENTS), device=state.device, dtype=torch.float32)
    if N:
        plan.launch(state, *tensors, *plan.missing, rows)
    return Coefficients(rows, plan.has, ids)


class _Plan(NamedTuple):
    at_ids: bool  # whether each id has its own coefficient
    has: tuple[str, ...]  # names of the coefficients in use
    missing: tuple[None, ...]  # None for each parameter D0, D1, ... that gets no gradient
    launch: Launch


@functools.lru_cache(REMEMBERED)
def _plan(
    N: int, K: int, names: tuple[str, ...], steps: tuple[int, ...], wants: tuple[str, ...],
    has_ids: bool,
) -> _Plan | None:  # fmt: skip
    """Returns the launch plan, or None if one launch is not possible."""
    if len(names) > MOST or "tail" in wants or _reads_classes(names):
        return None
    block_n, block_k = 32 if has_ids else 256, min(max(config.ceil_pow2(K), 1), 64)
    launch = Launch(
        _stats_coefficients_kernel, (config.ceil_div(N, block_n),), (N, K), num_warps=4,
        CONSTANTS=_Constants(Given(names, steps, has_ids), block_n, block_k),
    )  # fmt: skip
    at_ids = has_ids and any(name in wants for name in AT_IDS)
    return _Plan(at_ids, fields_of(wants, has_ids), (None,) * (MOST - len(names)), launch)


@functools.cache
def fields_in_row(names: tuple[str, ...], wants: tuple[str, ...]) -> tuple[str, ...] | None:
    """Returns the coefficients that `coefs_of_row` computes from `names`, or None if it cannot."""
    if not 0 < len(names) <= MOST_IN_ROW or not {*names} <= {*RULES} or _reads_classes(names):
        return None
    return fields_given(names, wants)


def _reads_classes(names: tuple[str, ...]) -> bool:
    return any(term.times == "classes" for name in names for term in RULES[name])
