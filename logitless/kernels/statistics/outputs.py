"""Writes the results of the forward pass: the state of each row, and the requested statistics."""

from typing import NamedTuple

import triton
import triton.language as tl

from ... import contract as _contract
from ..numerics import capped, finite, load, only_if
from .state import LOG_S, LOG_S1, SHIFT, STATE_WIDTH

OUTPUTS = (
    "lse", "picked", "logprob", "nll", "entropy", "total", "log_total", "argmax", "rank",
    "logprob_t1",
)  # fmt: skip

WHOLE_NUMBERS = ("argmax", "rank")  # the statistics of dtype int64

STATE_ENTROPY = tl.constexpr(_contract.ENTROPY)


class Outputs(NamedTuple):
    """Pointers to the statistics of all rows; None for statistics that are not requested."""

    STATE: tl.tensor
    LSE: tl.tensor
    PICKED: tl.tensor
    LOGPROB: tl.tensor
    NLL: tl.tensor
    ENTROPY: tl.tensor
    TOTAL: tl.tensor
    LOG_TOTAL: tl.tensor
    ARGMAX: tl.tensor
    RANK: tl.tensor
    LOGPROB_T1: tl.tensor


@triton.jit
def write_row(out, state, arg, ref, row, V, live, inv_t):
    """Writes what needs neither label nor ids, and returns shift and log normaliser of the row.

    In ignored rows, argmax and rank are -1, and all other numbers are 0.
    """
    shift = finite(state.m)
    log_s = tl.log(state.s)
    at = out.STATE + row.to(tl.int64) * STATE_WIDTH
    # one store for all fields, 0 if unused, except for LOG_S1 and ENTROPY if requested
    j = tl.arange(0, 8)
    mask = j < STATE_WIDTH
    if out.LOGPROB_T1 is not None:
        mask = mask & (j != LOG_S1)
    if out.ENTROPY is not None:
        mask = mask & (j != STATE_ENTROPY)
    fields = tl.where(j == SHIFT, shift, tl.where(j == LOG_S, log_s, 0.0))
    tl.store(at + j, tl.where(live, fields, 0.0), mask=mask)
    if out.LSE is not None:
        tl.store(out.LSE + row, tl.where(live, shift * inv_t + log_s, 0.0))
    if out.ENTROPY is not None:
        entropy = tl.where(live & (state.s != 0), log_s - state.w * inv_t / state.s, 0.0)
        tl.store(out.ENTROPY + row, entropy)
        tl.store(at + STATE_ENTROPY, entropy)
    if out.TOTAL is not None:
        total = (state.c + state.n * ref) * inv_t
        tl.store(out.TOTAL + row, tl.where(live, total, 0.0))
    if out.LOG_TOTAL is not None:
        total = (state.c - state.n * (shift - ref)) * inv_t - state.n * log_s
        tl.store(out.LOG_TOTAL + row, tl.where(live, total, 0.0))
    if out.ARGMAX is not None:
        arg = tl.where(arg < V, arg, 0)  # `arg` is NOWHERE if the row contains NaN
        tl.store(out.ARGMAX + row, tl.where(live, arg, -1).to(tl.int64))
    if out.RANK is not None:
        tl.store(out.RANK + row, tl.where(live, state.above, -1).to(tl.int64))
    return shift, log_s


@triton.jit
def write_label(
    out, y, label, row, V, live, shift, log_s, s1, inv_t,
    SECOND: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Writes the statistics of a row's label; `picked` and `logprob` too if ONLY, without ids."""
    inside = (label >= 0) & (label < V) & live
    none = tl.where(live, float("nan"), 0.0)
    log_p = tl.where(inside, (y - shift) * inv_t - log_s, none)  # z - lse would lose precision
    if out.NLL is not None:
        tl.store(out.NLL + row, tl.where(live, -log_p, 0.0))
    if out.LOGPROB_T1 is not None:
        log_s1 = log_s
        if SECOND:
            log_s1 = tl.log(s1)
        tl.store(out.LOGPROB_T1 + row, tl.where(inside, (y - shift) - log_s1, none))
        log_s1 = tl.where(live, log_s1, 0.0)
        tl.store(out.STATE + row.to(tl.int64) * STATE_WIDTH + LOG_S1, log_s1)
    if ONLY:
        if out.PICKED is not None:
            tl.store(out.PICKED + row, tl.where(inside, y * inv_t, none))
        if out.LOGPROB is not None:
            tl.store(out.LOGPROB + row, log_p)


@triton.jit
def write_ids(
    out, Xrow, Y, IDS, row, V, K, live, shift, log_s, inv_t, softcap, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Writes the statistics of a row's ids, with y from Xrow, or from Y (N, K) if Xrow is None."""
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        at = row.to(tl.int64) * K + offs_k
        ids = tl.load(IDS + at, mask=mask_k, other=0)
        inside = only_if(live, mask_k & (ids >= 0) & (ids < V))
        if Xrow is not None:
            y, _ = capped(load(Xrow, ids, inside), softcap)
        else:
            y = load(Y, at, inside)
        none = tl.where(live, float("nan"), 0.0)
        if out.PICKED is not None:
            tl.store(out.PICKED + at, tl.where(inside, y * inv_t, none), mask_k)
        # z - lse would lose precision
        if out.LOGPROB is not None:
            log_p = (y - shift) * inv_t - log_s
            tl.store(out.LOGPROB + at, tl.where(inside, log_p, none), mask_k)
