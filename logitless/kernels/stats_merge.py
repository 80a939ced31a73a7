"""The end of a forward: parts of a row merged into its state, and its statistics written."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .. import contract as _contract
from ..contract import Partials, Reading, Statistics, Sums
from . import config
from .launch import REMEMBERED, Launch
from .numerics import INF, LOG2E, inverse_temperature, move
from .profiling import profiled
from .state import NOWHERE, State, field, is_live, load_label
from .stats_outputs import OUTPUTS, Outputs, write_ids, write_label, write_row

part_width = triton.constexpr_function(_contract.part_width)
PART_M = tl.constexpr(_contract.M)
PART_S = tl.constexpr(_contract.S)
PART_W = tl.constexpr(_contract.W)
PART_C = tl.constexpr(_contract.C)
PART_N = tl.constexpr(_contract.N)
PART_REF = tl.constexpr(_contract.REF)
PART_ARG = tl.constexpr(_contract.ARG)
PART_S1 = tl.constexpr(_contract.S1)
PART_Y_LABEL = tl.constexpr(_contract.Y_LABEL)


@triton.jit
def _merge(
    at, step, mask, rate,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """The state of a row from the states of its parts, all at once; its column of the max; ref.

    `at` points to the parts' first fields; a part's fields are `step` numbers apart.
    """
    # All loads before the first reduction, which waits for what it reduces.
    m_p = tl.load(at + PART_M * step, mask=mask, other=-INF)
    s_p = tl.load(at + PART_S * step, mask=mask, other=0.0)
    if ENTROPY:
        w_p = tl.load(at + PART_W * step, mask=mask, other=0.0)
    if SECOND:
        s1_p = tl.load(at + PART_S1 * step, mask=mask, other=0.0)
    if TOTAL:
        c_p = tl.load(at + PART_C * step, mask=mask, other=0.0)
        n_p = tl.load(at + PART_N * step, mask=mask, other=0.0)
        ref_p = tl.load(at + PART_REF * step, mask=mask, other=0.0)
    if ARGMAX:
        args = tl.load(at + PART_ARG * step, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    m = tl.max(m_p, axis=0)
    moved = move(m_p, m, s_p)
    scale = tl.exp2(moved * rate)
    s = tl.sum(s_p * scale, axis=0)
    w, c, n, s1, arg, ref = m, m, m, m, 0, 0.0  # stay unread unless asked for
    if ENTROPY:
        w = tl.sum(w_p * scale + moved * (s_p * scale), axis=0)
    if SECOND:
        s1 = tl.sum(s1_p * tl.exp2(move(m_p, m, s1_p) * LOG2E), axis=0)
    if TOTAL:
        # One reference for all, within what theirs are: parts of one row have the same, exactly.
        ref = tl.max(tl.where(mask & (n_p != 0), ref_p, -INF), axis=0)
        ref = tl.where(ref == -INF, 0.0, ref)
        c = tl.sum(c_p + n_p * (ref_p - ref), axis=0)
        n = tl.sum(n_p, axis=0)
    if ARGMAX:
        arg = tl.min(tl.where(mask & (m_p == m), args, NOWHERE), axis=0)
    return State(m, s, w, c, n, 0, s1), arg, ref


@triton.jit
def store_part(
    at, step, state, ref, arg,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """One part's fields, `step` numbers apart: those that are read. A column as its bits."""
    tl.store(at + PART_M * step, state.m)
    tl.store(at + PART_S * step, state.s)
    if ENTROPY:
        tl.store(at + PART_W * step, state.w)
    if TOTAL:
        tl.store(at + PART_C * step, state.c)
        tl.store(at + PART_N * step, state.n)
        tl.store(at + PART_REF * step, ref)
    if ARGMAX:
        tl.store(at + PART_ARG * step, arg.to(tl.float32, bitcast=True))
    if SECOND:
        tl.store(at + PART_S1 * step, state.s1)


@triton.jit(
    **profiled("stats_merge"),
    do_not_specialize=["parts", "step_row", "step_field"],
    do_not_specialize_on_alignment=["PARTS", "temperature"],
)
def _stats_merge_kernel(
    PARTS, OUT,  # (N, parts, fields), in any layout, and (N, fields)
    temperature, parts, step_row, step_part, step_field,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
    HAS_LABEL: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < parts
    at = PARTS + row * step_row + offs_p.to(tl.int64) * step_part
    rate = inverse_temperature(temperature, row) * LOG2E
    state, arg, ref = _merge(at, step_field, mask_p, rate, ENTROPY, ARGMAX, SECOND, TOTAL)
    OUT += row * part_width(ENTROPY, ARGMAX, SECOND, TOTAL)
    store_part(OUT, 1, state, ref, arg, ENTROPY, ARGMAX, SECOND, TOTAL)
    if HAS_LABEL:
        y = tl.sum(tl.load(at + PART_Y_LABEL * step_field, mask=mask_p, other=0.0), axis=0)
        tl.store(OUT + PART_Y_LABEL, y)


def merge(several: Sequence[Partials], reading: Reading) -> Partials:
    """Parts of the same rows as one part; what they hold of the ids adds up."""
    parts = several[0].state
    if len(several) > 1:
        parts = torch.cat([part.state for part in several], 1)
    state = torch.empty((len(parts), 1, parts.shape[2]), device=parts.device, dtype=parts.dtype)
    picked = None
    if several[0].picked is not None:
        picked = torch.stack([part.picked for part in several]).sum(0)
    temperature = reading.row_temperature
    if len(parts):
        launch = _merge_launch(
            parts.shape, parts.stride(), reading.temperature if temperature is None else None,
            reading.sums, reading.label is not None,
        )  # fmt: skip
        launch(parts, state, *(() if temperature is None else (temperature.contiguous(),)))
    return Partials(state, picked)


@functools.lru_cache(REMEMBERED)
def _merge_launch(
    shape: tuple, strides: tuple, temperature: float | None, sums: Sums, has_label: bool
) -> Launch:
    number = () if temperature is None else (temperature,)
    count, parts, _ = shape
    return Launch(
        _stats_merge_kernel, (count,), (*number, parts, *strides), num_warps=1, HAS_LABEL=has_label,
        BLOCK_P=max(config.ceil_pow2(parts), 2), **constants_of(sums),
    )  # fmt: skip


def constants_of(sums: Sums) -> dict[str, bool]:
    """As kernels take them."""
    return {name.upper(): wanted for name, wanted in sums._asdict().items()}


@dataclass(frozen=True)
class _Constants:
    """What the kernel is compiled for."""

    second: bool  # a second normaliser, at temperature 1
    block_k: int
    block_p: int


@triton.jit(
    **profiled("stats_finish", shows=("K",)),
    do_not_specialize=["parts", "step_row", "step_field"],
    do_not_specialize_on_alignment=["PARTS", "Y", "LABEL", "IDS", "temperature"],
)
def _stats_finish_kernel(
    PARTS, Y, LABEL, IDS,  # inputs; PARTS (N, parts, fields), in any layout; Y (N, K), y of the ids
    STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, LOGPROB_T1,  # outputs
    temperature, V, K, parts, step_row, step_part, step_field, ignore_index,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    SECOND: tl.constexpr = field(CONSTANTS, "second")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    row = tl.program_id(0)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    inv_t = inverse_temperature(temperature, row)
    offs_p = tl.arange(0, field(CONSTANTS, "block_p"))
    mask_p = offs_p < parts
    at = PARTS + row.to(tl.int64) * step_row + offs_p.to(tl.int64) * step_part
    if LABEL is not None:
        y_p = tl.load(at + PART_Y_LABEL * step_field, mask=mask_p, other=0.0)
    state, arg, ref = _merge(
        at, step_field, mask_p, inv_t * LOG2E, ENTROPY is not None, ARGMAX is not None, SECOND,
        (TOTAL is not None) | (LOG_TOTAL is not None),
    )  # fmt: skip
    out = Outputs(STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, LOGPROB_T1)
    shift, log_s = write_row(out, state, arg, ref, row, V, live, inv_t)
    if LABEL is not None:
        y = tl.sum(y_p, axis=0)
        write_label(out, y, label, row, V, live, shift, log_s, state.s1, inv_t, SECOND, K is None)
    if IDS is not None:
        write_ids(out, None, Y, IDS, row, V, K, live, shift, log_s, inv_t, None, BLOCK_K)


def finish(
    partials: Partials, reading: Reading, shape: tuple[int, ...] | None = None
) -> Statistics:
    """Statistics of rows whose parts, splits or ranks, are along dim 1 of partials.state.

    shape is (...), the rows'; where it is None, that of the reading's tensors, or (N,).
    """
    wants, label, ids = reading.wants, reading.label, reading.ids
    temperature = reading.row_temperature
    assert "tail" not in wants
    parts = partials.state
    count = len(parts)
    shape = _shape_of(reading, count) if shape is None else shape
    K = None if ids is None else ids.shape[-1]
    state = torch.empty((count, _contract.STATE), device=parts.device, dtype=torch.float32)
    outputs = [
        None if name not in wants
        else torch.empty(ids.shape if ids is not None and name in ("picked", "logprob") else shape,
                         device=parts.device,
                         dtype=torch.int64 if name == "argmax" else torch.float32)
        for name in OUTPUTS
    ]  # fmt: skip
    if count:
        launch = stats_finish_launch(
            parts.shape, parts.stride(), reading.vocab, K,
            reading.temperature if temperature is None else None, reading.ignore_index,
            reading.sums.second,
        )  # fmt: skip
        by_row = () if temperature is None else (temperature.contiguous(),)
        launch(
            parts, partials.picked.contiguous() if K else None,
            None if label is None else label.contiguous(), ids.contiguous() if K else None,
            state, *outputs, *by_row,
        )  # fmt: skip
    return Statistics(state, *outputs[:-1], None, outputs[-1])


def _shape_of(reading: Reading, count: int) -> tuple[int, ...]:
    for t in (reading.label, reading.row_temperature):
        if t is not None:
            return t.shape
    return (count,) if reading.ids is None else reading.ids.shape[:-1]


@functools.lru_cache(REMEMBERED)
def stats_finish_launch(
    shape: tuple, strides: tuple,  # of the parts, (N, parts, fields)
    vocab: int, K: int | None, temperature: float | None, ignore_index: int | None, second: bool,
) -> Launch:  # fmt: skip
    count, parts, _ = shape
    block_p = max(config.MAX_SPLITS, config.ceil_pow2(parts))
    number = () if temperature is None else (temperature,)
    return Launch(
        _stats_finish_kernel, (count,), (*number, vocab, K, parts, *strides, ignore_index),
        num_warps=block_p // config.MAX_SPLITS,
        CONSTANTS=_Constants(second, min(128, config.ceil_pow2(K or 0)), block_p),
    )  # fmt: skip
