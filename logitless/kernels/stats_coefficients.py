"""Computes the coefficients of the backward formula from gradients of statistics, in one launch.

The file contract.py defines the backward formula and its coefficients `a`, `b`, `g_label` and
`g_c`. In this file, `g_c` is called `g_total`. The kernel applies the RULES of
eager/stats_coefficients.py. With PyTorch's own operations, the coefficients for `ll.score` would
take eight launches. These eight launches would take most of the host time of a small backward.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import COEFFICIENTS, Coefficients, Reading
from ..eager import stats_coefficients as by_torch
from ..eager.stats_coefficients import AT_IDS, RULES, fields_of
from . import config
from .bwd_tile import COEF_A, COEF_B, COEF_G_LABEL, COEF_G_TOTAL
from .launch import REMEMBERED, Launch
from .numerics import load
from .profiling import profiled
from .smoothing_z_loss import COEF_WIDTH
from .state import STATE_WIDTH, field
from .stats_outputs import STATE_ENTROPY

# The largest number of gradients in one launch. The functions `row_stats` and `row_loss` have at
# most five statistics with a gradient: lse, picked, logprob, entropy and total.
MOST = 5


@dataclass(frozen=True)
class _Constants:
    """The constants that the kernel is compiled for."""

    names: tuple[str, ...]  # the statistics whose gradients are D0, D1, ...
    steps: tuple[int, ...]  # row strides of D0, D1, ...; 0 if all rows share one number
    at_ids: bool  # whether the statistics in AT_IDS have K gradients per row
    block_n: int
    block_k: int


class _Sums(NamedTuple):
    """The coefficients of a block of rows."""

    a: tl.tensor
    b: tl.tensor
    g_label: tl.tensor
    g_total: tl.tensor


@triton.constexpr_function
def sign_of(constants, index, coefficient, times):
    """Returns the sign of the term that a statistic adds to a coefficient. If the statistic adds no
    term, the result is 0.
    """
    if index >= len(constants.names):
        return 0
    terms = RULES[constants.names[index]]
    return sum(t.sign for t in terms if t.coefficient == coefficient and t.times == times)


@triton.constexpr_function
def is_at_ids(constants, index):
    return constants.at_ids and constants.names[index] in AT_IDS


@triton.constexpr_function
def step_of(constants, index):
    return constants.steps[index]


@triton.jit
def _plus(total, d, SIGN: tl.constexpr):
    """Returns total + SIGN · d.

    If SIGN is 0, d is not used, because 0 times an infinite d would be NaN.
    """
    if SIGN == 0:
        return total
    else:
        return total + d * SIGN


@triton.jit
def _sum_over_ids(D, row, mask, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Returns the sum of each row of D (N, K)."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        d = load(D, row[:, None] * K + k[None, :], mask[:, None] & (k < K)[None, :])
        total += tl.sum(d.to(tl.float32), axis=1)
    return total


@triton.jit
def _add(sums, D, entropy, row, mask, K, INDEX: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns `sums` plus the terms of one statistic. D is the statistic's gradient, or None."""
    if D is None:
        return sums
    else:
        BY_ID: tl.constexpr = is_at_ids(CONSTANTS, INDEX)
        if BY_ID:
            BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
            d = _sum_over_ids(D, row, mask, K, BLOCK_N, field(CONSTANTS, "block_k"))
        else:
            d = load(D, row * step_of(CONSTANTS, INDEX), mask).to(tl.float32)
        a = _plus(sums.a, d, sign_of(CONSTANTS, INDEX, "a", ""))
        a = _plus(a, d * entropy, sign_of(CONSTANTS, INDEX, "a", "entropy"))
        b = _plus(sums.b, d, sign_of(CONSTANTS, INDEX, "b", ""))
        g_label = sums.g_label
        if not BY_ID:
            g_label = _plus(g_label, d, sign_of(CONSTANTS, INDEX, "label", ""))
        g_total = _plus(sums.g_total, d, sign_of(CONSTANTS, INDEX, "total", ""))
        return _Sums(a, b, g_label, g_total)


@triton.constexpr_function
def reads_entropy(constants):
    return any(t.times == "entropy" for name in constants.names for t in RULES[name])


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
    """Each program computes the coefficients of one block of rows."""
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < N
    zero = tl.zeros((BLOCK_N,), tl.float32)
    entropy = zero
    if reads_entropy(CONSTANTS):
        entropy = load(STATE, row * STATE_WIDTH + STATE_ENTROPY, mask)
    sums = _Sums(zero, zero, zero, zero)
    sums = _add(sums, D0, entropy, row, mask, K, 0, CONSTANTS)
    sums = _add(sums, D1, entropy, row, mask, K, 1, CONSTANTS)
    sums = _add(sums, D2, entropy, row, mask, K, 2, CONSTANTS)
    sums = _add(sums, D3, entropy, row, mask, K, 3, CONSTANTS)
    sums = _add(sums, D4, entropy, row, mask, K, 4, CONSTANTS)
    j = tl.arange(0, 8)[None, :]
    fields = tl.where(j == COEF_A, sums.a[:, None], 0.0)
    fields = tl.where(j == COEF_B, sums.b[:, None], fields)
    fields = tl.where(j == COEF_G_LABEL, sums.g_label[:, None], fields)
    fields = tl.where(j == COEF_G_TOTAL, sums.g_total[:, None], fields)
    tl.store(COEF + row[:, None] * COEF_WIDTH + j, fields, mask=mask[:, None] & (j < COEF_WIDTH))


def coefficients(
    reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
) -> Coefficients:
    """Returns the coefficients of the backward formula.

    `gradients` maps the name of each statistic to its gradient. A missing gradient is 0.
    """
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
    if len(names) > MOST or "tail" in wants:
        return None
    if any(term.times == "classes" for name in names for term in RULES[name]):
        return None
    block_n, block_k = 32 if has_ids else 256, min(max(config.ceil_pow2(K), 1), 64)
    launch = Launch(
        _stats_coefficients_kernel, (config.ceil_div(N, block_n),), (N, K), num_warps=4,
        CONSTANTS=_Constants(names, steps, has_ids, block_n, block_k),
    )  # fmt: skip
    at_ids = has_ids and any(name in wants for name in AT_IDS)
    return _Plan(at_ids, fields_of(wants, has_ids), (None,) * (MOST - len(names)), launch)
