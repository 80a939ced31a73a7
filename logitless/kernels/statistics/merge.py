"""Merges the splits of each row into one split (`merge`) or into statistics (`finish`).

A split holds the partial statistics of a row (fields in contract.py) over the columns of one
program, one block or one rank.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ... import contract as _contract
from ...contract import Partials, Reading, Statistics, Sums
from .. import config
from ..launch import REMEMBERED, Launch, field
from ..layout import is_live, load_label
from ..numerics import INF, LOG2E, inverse_temperature, move
from ..profiling import profiled
from .outputs import (
    OUTPUTS,
    WHOLE_NUMBERS,
    Outputs,
    write_ids,
    write_label,
    write_row,
)
from .state import NOWHERE, State, with_above

split_width = triton.constexpr_function(_contract.part_width)
SPLIT_M = tl.constexpr(_contract.M)
SPLIT_S = tl.constexpr(_contract.S)
SPLIT_W = tl.constexpr(_contract.W)
SPLIT_C = tl.constexpr(_contract.C)
SPLIT_N = tl.constexpr(_contract.N)
SPLIT_REF = tl.constexpr(_contract.REF)
SPLIT_ARG = tl.constexpr(_contract.ARG)
SPLIT_S1 = tl.constexpr(_contract.S1)
SPLIT_Y_LABEL = tl.constexpr(_contract.Y_LABEL)


@triton.jit
def _merge(
    at, step, mask, rate,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Merges all splits of a row, and returns the row's state, argmax and `ref` (see state.py).

    `at` points to the first field of each split; the next ones are `step` elements apart.
    """
    # all loads before the first reduction, so that they overlap
    m_p = tl.load(at + SPLIT_M * step, mask=mask, other=-INF)
    s_p = tl.load(at + SPLIT_S * step, mask=mask, other=0.0)
    if ENTROPY:
        w_p = tl.load(at + SPLIT_W * step, mask=mask, other=0.0)
    if SECOND:
        s1_p = tl.load(at + SPLIT_S1 * step, mask=mask, other=0.0)
    if TOTAL:
        c_p = tl.load(at + SPLIT_C * step, mask=mask, other=0.0)
        n_p = tl.load(at + SPLIT_N * step, mask=mask, other=0.0)
        ref_p = tl.load(at + SPLIT_REF * step, mask=mask, other=0.0)
    if ARGMAX:
        args = tl.load(at + SPLIT_ARG * step, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    m = tl.max(m_p, axis=0)
    moved = move(m_p, m, s_p)
    scale = tl.exp2(moved * rate)
    s = tl.sum(s_p * scale, axis=0)
    w, c, n, s1, arg, ref = m, m, m, m, 0, 0.0  # placeholders for fields that are not needed
    if ENTROPY:
        w = tl.sum(w_p * scale + moved * (s_p * scale), axis=0)
    if SECOND:
        s1 = tl.sum(s1_p * tl.exp2(move(m_p, m, s1_p) * LOG2E), axis=0)
    if TOTAL:
        # `ref` (see state.py) becomes the largest of the splits that are not empty. Those of one
        # launch are equal, and then the merge adds no rounding error.
        ref = tl.max(tl.where(mask & (n_p != 0), ref_p, -INF), axis=0)
        ref = tl.where(ref == -INF, 0.0, ref)
        c = tl.sum(c_p + n_p * (ref_p - ref), axis=0)
        n = tl.sum(n_p, axis=0)
    if ARGMAX:
        arg = tl.min(tl.where(mask & (m_p == m), args, NOWHERE), axis=0)
    return State(m, s, w, c, n, 0, s1, 0), arg, ref


@triton.jit
def store_split(
    at, step, state, ref, arg,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Stores the needed fields of a split, `step` elements apart; the argmax as a float's bits."""
    tl.store(at + SPLIT_M * step, state.m)
    tl.store(at + SPLIT_S * step, state.s)
    if ENTROPY:
        tl.store(at + SPLIT_W * step, state.w)
    if TOTAL:
        tl.store(at + SPLIT_C * step, state.c)
        tl.store(at + SPLIT_N * step, state.n)
        tl.store(at + SPLIT_REF * step, ref)
    if ARGMAX:
        tl.store(at + SPLIT_ARG * step, arg.to(tl.float32, bitcast=True))
    if SECOND:
        tl.store(at + SPLIT_S1 * step, state.s1)


@triton.jit(
    **profiled("stats_merge"),
    do_not_specialize=["splits", "step_row", "step_field"],
    do_not_specialize_on_alignment=["SPLITS", "temperature"],
)
def _stats_merge_kernel(
    SPLITS, OUT,  # input (N, splits, fields) in any layout, and output (N, fields)
    temperature, splits, step_row, step_split, step_field,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
    HAS_LABEL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < splits
    at = SPLITS + row * step_row + offs_p.to(tl.int64) * step_split
    rate = inverse_temperature(temperature, row) * LOG2E
    state, arg, ref = _merge(at, step_field, mask_p, rate, ENTROPY, ARGMAX, SECOND, TOTAL)
    OUT += row * split_width(ENTROPY, ARGMAX, SECOND, TOTAL)
    store_split(OUT, 1, state, ref, arg, ENTROPY, ARGMAX, SECOND, TOTAL)
    if HAS_LABEL:
        y = tl.sum(tl.load(at + SPLIT_Y_LABEL * step_field, mask=mask_p, other=0.0), axis=0)
        tl.store(OUT + SPLIT_Y_LABEL, y)


def merge(several: Sequence[Partials], reading: Reading) -> Partials:
    splits = several[0].state
    if len(several) > 1:
        splits = torch.cat([partials.state for partials in several], 1)
    state = torch.empty((len(splits), 1, splits.shape[2]), device=splits.device, dtype=splits.dtype)
    picked = None
    if several[0].picked is not None:
        picked = torch.stack([partials.picked for partials in several]).sum(0)
    temperature = reading.row_temperature
    if len(splits):
        launch = _merge_launch(
            splits.shape, splits.stride(), reading.temperature,
            reading.sums, reading.label is not None,
        )  # fmt: skip
        launch(splits, state, *(() if temperature is None else (temperature.contiguous(),)))
    return Partials(state, picked)


@functools.lru_cache(REMEMBERED)
def _merge_launch(
    shape: tuple, strides: tuple, temperature: float | None, sums: Sums, has_label: bool
) -> Launch:
    number = () if temperature is None else (temperature,)
    count, splits, _ = shape
    return Launch(
        _stats_merge_kernel, (count,), (*number, splits, *strides), num_warps=1,
        HAS_LABEL=has_label, BLOCK_P=max(config.ceil_pow2(splits), 2), **constants_of(sums),
    )  # fmt: skip


def constants_of(sums: Sums) -> dict[str, bool]:
    return {name.upper(): wanted for name, wanted in sums._asdict().items()}


@dataclass(frozen=True)
class _Constants:
    second: bool  # whether to compute s1, the normaliser at temperature 1
    block_k: int
    block_p: int


@triton.jit(
    **profiled("stats_finish", shows=("K",)),
    do_not_specialize=["splits", "step_row", "step_field"],
    do_not_specialize_on_alignment=["SPLITS", "Y", "LABEL", "IDS", "ABOVE", "temperature"],
)
def _stats_finish_kernel(
    # inputs: SPLITS (N, splits, fields) in any layout, y at the ids (N, K), and ABOVE (N, splits)
    # of state.py or None
    SPLITS, Y, LABEL, IDS, ABOVE,
    # outputs
    STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, RANK, LOGPROB_T1,
    temperature, V, K, splits, step_row, step_split, step_field, ignore_index,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    SECOND: tl.constexpr = field(CONSTANTS, "second")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    row = tl.program_id(0)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    inv_t = inverse_temperature(temperature, row)
    offs_p = tl.arange(0, field(CONSTANTS, "block_p"))
    mask_p = offs_p < splits
    at = SPLITS + row.to(tl.int64) * step_row + offs_p.to(tl.int64) * step_split
    if LABEL is not None:
        y_p = tl.load(at + SPLIT_Y_LABEL * step_field, mask=mask_p, other=0.0)
    state, arg, ref = _merge(
        at, step_field, mask_p, inv_t * LOG2E, ENTROPY is not None, ARGMAX is not None, SECOND,
        (TOTAL is not None) | (LOG_TOTAL is not None),
    )  # fmt: skip
    if RANK is not None:
        above = tl.load(ABOVE + row.to(tl.int64) * splits + offs_p, mask=mask_p, other=0)
        state = with_above(state, tl.sum(above, axis=0))
    out = Outputs(
        STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, RANK, LOGPROB_T1
    )
    shift, log_s = write_row(out, state, arg, ref, row, V, live, inv_t)
    if LABEL is not None:
        y = tl.sum(y_p, axis=0)
        write_label(out, y, label, row, V, live, shift, log_s, state.s1, inv_t, SECOND, K is None)
    if IDS is not None:
        write_ids(out, None, Y, IDS, row, V, K, live, shift, log_s, inv_t, None, BLOCK_K)


def finish(
    partials: Partials, reading: Reading, shape: tuple[int, ...] | None = None
) -> Statistics:
    """Merges the splits of each row (dim 1), and returns its statistics.

    `shape` is that of a statistic with one number per row, by default that of label,
    row_temperature or ids.
    """
    wants, label, ids = reading.wants, reading.label, reading.ids
    temperature = reading.row_temperature
    assert "tail" not in wants
    assert "rank" not in wants
    splits = partials.state
    count = len(splits)
    shape = _shape_of(reading, count) if shape is None else shape
    K = None if ids is None else ids.shape[-1]
    state = torch.empty((count, _contract.STATE), device=splits.device, dtype=torch.float32)
    outputs = [
        None if name not in wants
        else torch.empty(ids.shape if ids is not None and name in ("picked", "logprob") else shape,
                         device=splits.device,
                         dtype=torch.int64 if name in WHOLE_NUMBERS else torch.float32)
        for name in OUTPUTS
    ]  # fmt: skip
    if count:
        launch = stats_finish_launch(
            splits.shape, splits.stride(), reading.vocab, K,
            reading.temperature, reading.ignore_index,
            reading.sums.second,
        )  # fmt: skip
        by_row = () if temperature is None else (temperature.contiguous(),)
        launch(
            splits, partials.picked.contiguous() if K else None,
            None if label is None else label.contiguous(), ids.contiguous() if K else None,
            None, state, *outputs, *by_row,
        )  # fmt: skip
    return Statistics(state, *outputs[:-1], None, outputs[-1])


def _shape_of(reading: Reading, count: int) -> tuple[int, ...]:
    for t in (reading.label, reading.row_temperature):
        if t is not None:
            return t.shape
    return (count,) if reading.ids is None else reading.ids.shape[:-1]


@functools.lru_cache(REMEMBERED)
def stats_finish_launch(
    shape: tuple, strides: tuple,  # shape (N, splits, fields) and strides of the splits
    vocab: int, K: int | None, temperature: float | None, ignore_index: int | None, second: bool,
) -> Launch:  # fmt: skip
    count, splits, _ = shape
    block_p = max(config.MAX_SPLITS, config.ceil_pow2(splits))
    number = () if temperature is None else (temperature,)
    return Launch(
        _stats_finish_kernel, (count,), (*number, vocab, K, splits, *strides, ignore_index),
        num_warps=block_p // config.MAX_SPLITS,
        CONSTANTS=_Constants(second, min(128, config.ceil_pow2(K or 0)), block_p),
    )  # fmt: skip
