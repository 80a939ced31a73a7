"""Forward pass of losses against a dense teacher, for any loss of losses.py.

A loss takes one pass over student and teacher, or two if its terms need the normalisers of both
rows. Then several programs share a long row, each with a split short enough to stay in the cache
between the passes. Between them, they wait for the others' normalisers (program_exchange.py). A
second kernel adds the sums of the splits, and finishes the rows.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import PAIR_STATE, Pair, Reading
from ...contract import PAIR_SUMS as PAIR_SUMS_
from ...eager.pair import with_shifts
from ...eager.pair_losses import LOSSES as KINDS
from .. import config
from ..launch import REMEMBERED, Launch, field
from ..layout import Rows, aligned, contiguous, pack_of, row_offset, split_row, temperature_of
from ..numerics import LOG2E, finite, inverse_temperature, load
from ..profiling import profiled
from ..program_exchange import MAX_PROGRAMS, collect, may_wait, piece_of, publish, zeros
from .losses import LOSSES, safe_blend
from .state import (
    Both,
    PairState,
    Second,
    Side,
    Sums,
    bits,
    elements_to,
    first_pass,
    fresh_state,
    load_state,
    rows_of_both,
    save_mean,
    save_state,
    second_pass,
    sum_lanes,
    target,
    walk_both,
)

PAIR_SUMS = tl.constexpr(PAIR_SUMS_)


@dataclass(frozen=True)
class _Constants:
    twice: bool  # as in `PairLoss` of eager/losses.py
    probs: bool
    known: bool  # STATE holds the normalisers of whole rows, and only SUMS is written
    aligned: bool  # every row of X starts and ends on a 16-byte boundary
    t_aligned: bool  # for each row, T and X have the same address modulo 16
    block_v: int
    span: int  # columns of a split; 0 if each program reads a whole row
    block_p: int


@triton.jit
def _finish(c, state, both, FINISH: tl.constexpr, TWICE: tl.constexpr):
    """Returns the loss of a row and its `mean`; c is the sum, or the Sums of a second pass."""
    log_q, log_p = None, None
    if TWICE:
        log_q, log_p = bits(state.s_q), bits(state.s_p)
    q = Side(None, None, None, state.s_q, log_q, None, None)
    p = Side(None, None, None, state.s_p, log_p, None, None)
    value, mean = FINISH(c, q, p, both)
    if TWICE:
        # `bits` is inf for a row that is all -inf, and 0 · inf makes the loss NaN
        value += 0.0 * (log_q + log_p)
    return value, mean


@triton.jit(
    **profiled("pair_fwd", shows=("KIND",)),
    do_not_specialize=["rows_t", "vocab"],
    do_not_specialize_on_alignment=["LABEL", "temperature"],
)
def _pair_fwd_kernel(
    X, T, W, LABEL,  # inputs
    VALUE, STATE,  # outputs; VALUE is None for a partial state
    # outputs of a split or, with `known`, of some columns; EXCHANGE (rows, 2, splits) starts as 0
    SUMS, EXCHANGE,
    temperature,  # a number, or a pointer to one number per row
    rows_t, stride_xb, stride_xt, stride_tb, stride_tt, V,  # sizes
    vocab, softcap, blend, ignore_index,  # options
    KIND: tl.constexpr, FOLD: tl.constexpr, FINISH: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program reads one row of both, or a split of it, the first also the row's fringe."""
    TWICE: tl.constexpr = field(CONSTANTS, "twice")
    KNOWN: tl.constexpr = field(CONSTANTS, "known")
    probs: tl.constexpr = target if field(CONSTANTS, "probs") else None
    SPAN: tl.constexpr = field(CONSTANTS, "span")
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    T_ALIGNED: tl.constexpr = field(CONSTANTS, "t_aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    row, part, lo, hi = tl.program_id(0), 0, 0, V
    if SPAN:
        splits = tl.cdiv(V, SPAN)
        part = row % splits
        row = row // splits
        lo = part * SPAN
        hi = lo + SPAN
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            if SUMS is None:  # otherwise the kernel that adds the sums writes these
                if VALUE is not None:
                    tl.store(VALUE + row, 0.0)
                save_state(STATE, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    inv_t = inverse_temperature(temperature, row)
    rate = inv_t * LOG2E
    head, body = split_row(elements_to(Xrow), V, 0, pack_of(X), ALIGNED)
    both = Both(Xrow, Trow, W, 0, V, rate, softcap, blend, vocab, inv_t)
    if KNOWN:
        state = load_state(STATE, row)
    else:
        once: tl.constexpr = None if TWICE else FOLD
        state = sum_lanes(walk_both(
            first_pass, fresh_state(BLOCK_V), both, head, body, lo, hi, once, probs,
            ALIGNED, T_ALIGNED, BLOCK_V,
        ))  # fmt: skip
    m_q, s_q, m_p, s_p, c = state
    if SPAN:
        at = EXCHANGE + row.to(tl.int64) * 2 * splits
        publish(at + part, m_q, s_q)
        publish(at + splits + part, m_p, s_p)
        BLOCK_P: tl.constexpr = field(CONSTANTS, "block_p")
        m_q, s_q = collect(at, splits, rate, BLOCK_P)
        m_p, s_p = collect(at + splits, splits, rate, BLOCK_P)
    if VALUE is None and SUMS is None:
        save_state(STATE, row, m_q, s_q, m_p, s_p, c * inv_t)
    else:
        whole = PairState(finite(m_q), s_q, finite(m_p), s_p, c)
        if TWICE:
            zero = tl.zeros((BLOCK_V,), tl.float32)
            second = Second(
                (whole.m_q, s_q, whole.m_p, s_p, bits(s_q), bits(s_p)), Sums(zero, zero, zero)
            )
            lanes = walk_both(
                second_pass, second, both, head, body, lo, hi, FOLD, None,
                ALIGNED, T_ALIGNED, BLOCK_V,
            ).sums  # fmt: skip
            sums = Sums(tl.sum(lanes.a, axis=0), tl.sum(lanes.b, axis=0), tl.sum(lanes.c, axis=0))
        else:
            sums = c
        if SUMS is None:
            value, mean = _finish(sums, whole, both, FINISH, TWICE)
            tl.store(VALUE + row, value)
            save_state(STATE, row, whole.m_q, s_q, whole.m_p, s_p, mean)
        else:
            at_sums = SUMS + (row.to(tl.int64) * (splits if SPAN else 1) + part) * PAIR_SUMS
            tl.store(at_sums, sums.a)
            tl.store(at_sums + 1, sums.b)
            tl.store(at_sums + 2, sums.c)
            if not KNOWN:
                if part == 0:
                    save_state(STATE, row, whole.m_q, s_q, whole.m_p, s_p, 0.0)


@triton.jit(
    **profiled("pair_finish", shows=("KIND",)),
    do_not_specialize=["parts"],
    do_not_specialize_on_alignment=["LABEL", "temperature"],
)
def _pair_finish_kernel(
    VALUE, STATE,  # outputs; STATE holds all but the mean
    SUMS, LABEL,  # inputs; without SUMS, STATE holds the sum c of one pass
    temperature,  # a number, or a pointer to one number per row
    parts, blend, ignore_index,
    KIND: tl.constexpr, FINISH: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Each program adds the sums of all parts of one row, and writes its loss and its state."""
    row = tl.program_id(0)
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            tl.store(VALUE + row, 0.0)
            save_state(STATE, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    state = load_state(STATE, row)
    inv_t = inverse_temperature(temperature, row)
    both = Both(None, None, None, 0, None, None, None, blend, None, inv_t)
    if SUMS is not None:
        offs_p = tl.arange(0, BLOCK_P)
        at = SUMS + (row.to(tl.int64) * parts + offs_p) * PAIR_SUMS
        mask = offs_p < parts
        sums = Sums(
            tl.sum(load(at, 0, mask), axis=0), tl.sum(load(at, 1, mask), axis=0),
            tl.sum(load(at, 2, mask), axis=0),
        )  # fmt: skip
        value, mean = _finish(sums, state, both, FINISH, True)
    else:
        value, mean = _finish(state.c / inv_t, state, both, FINISH, False)
    tl.store(VALUE + row, value)
    save_mean(STATE, row, mean)


def pair_read(x: Tensor, reading: Reading, pair: Pair) -> tuple[Tensor, Tensor]:  # x (..., V)
    value = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    state = _states(value.numel(), x)
    if value.numel() == 0:
        return value, state
    splits = splits_of(x) if KINDS[pair.kind].twice else 1
    if splits == 1:
        _read(x, reading, pair, value, state)
    else:
        sums = state.new_empty((len(state), splits, PAIR_SUMS_))
        _read(x, reading, pair, value, state, sums)
        _finish_rows(value, state, sums, reading, pair)
    return value, state


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    """Returns the partial state (N, PAIR_STATE) of each row over the columns of x."""
    state = _states(x.shape[:-1].numel(), x)
    if len(state):
        _read(x, reading, pair, None, state)
    return state


def pair_sums(x: Tensor, reading: Reading, pair: Pair, whole: Tensor) -> Tensor:
    """Returns the sums (N, PAIR_SUMS) of the second pass over the columns of x."""
    sums = whole.new_zeros((len(whole), PAIR_SUMS_))
    if len(whole):
        _read(x, reading, pair, None, whole, sums)
    return sums


def pair_finish(
    whole: Tensor,  # (N, PAIR_STATE), the partial state of whole rows
    sums: Tensor | None,  # (N, PAIR_SUMS), for losses of two passes
    reading: Reading,
    pair: Pair,
) -> tuple[Tensor, Tensor]:
    """Returns the loss (N,) and the state (N, PAIR_STATE)."""
    state, value = with_shifts(whole), whole.new_empty(len(whole))
    if len(whole):
        _finish_rows(value, state, None if sums is None else sums[:, None], reading, pair)
    return value, state


def _states(rows: int, like: Tensor) -> Tensor:
    return torch.empty((rows, PAIR_STATE), device=like.device, dtype=torch.float32)


def _read(
    x: Tensor, reading: Reading, pair: Pair, value: Tensor | None, state: Tensor,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    """With `value`, `sums` (N, splits, PAIR_SUMS) are those of splits, which share a row."""
    label = _label_of(reading)
    x, rows, teacher, t_rows = rows_of_both(x, pair.teacher)
    tensor, number = temperature_of(reading)
    known, splits, exchange = value is None and sums is not None, 1, None
    cut = config.pair_fwd(rows.vocab)
    if sums is not None and not known:
        splits, cut = sums.shape[1], config.pair_split_fwd(rows.vocab, rows.itemsize)
        exchange = zeros(piece_of(rows.count * 2 * splits), x)
    launch = _plan(
        rows, t_rows, splits, number, reading.vocab, reading.softcap, pair.blend,
        reading.ignore_index, pair.kind, known, cut,
    )  # fmt: skip
    weight = aligned(reading.class_weight)
    launch(x, teacher, weight, label, value, state, sums, exchange, *tensor)


def splits_of(x: Tensor) -> int:
    """Returns the number of programs per row, or 1 if programs must not wait for each other."""
    splits = config.ceil_div(x.shape[-1], config.pair_split_fwd(x.shape[-1], x.element_size()).span)
    return splits if may_wait(splits, x.device) else 1


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, t_rows: Rows, splits: int, number: tuple, vocab: int, softcap: float | None,
    blend: float, ignore_index: int | None, kind: str, known: bool, cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _pair_fwd_kernel, (rows.count * splits,),
        (
            *number, *rows.strides, t_rows.stride_b, t_rows.stride_t, rows.vocab, vocab, softcap,
            safe_blend(blend, kind), ignore_index,
        ),
        num_warps=cut.num_warps, KIND=kind, FOLD=LOSSES[kind].fold, FINISH=LOSSES[kind].finish,
        CONSTANTS=_Constants(
            KINDS[kind].twice, KINDS[kind].probs, known, rows.aligned, t_rows.aligned_like(rows),
            cut.block_v, cut.span if splits > 1 else 0, _block_of(splits),
        ),
    )  # fmt: skip


def _finish_rows(
    value: Tensor, state: Tensor, sums: Tensor | None, reading: Reading, pair: Pair
) -> None:
    tensor, number = temperature_of(reading)
    parts = 1 if sums is None else sums.shape[1]
    launch = _finish_plan(len(state), parts, number, pair.blend, reading.ignore_index, pair.kind)
    launch(value, state, sums, _label_of(reading), *tensor)


@functools.lru_cache(REMEMBERED)
def _finish_plan(
    rows: int, parts: int, number: tuple, blend: float, ignore_index: int | None, kind: str
) -> Launch:
    return Launch(
        _pair_finish_kernel, (rows,),
        (*number, parts, safe_blend(blend, kind), ignore_index),
        num_warps=1, KIND=kind, FINISH=LOSSES[kind].finish, BLOCK_P=_block_of(parts),
    )  # fmt: skip


def _block_of(parts: int) -> int:
    return 32 if parts <= 32 else MAX_PROGRAMS


def _label_of(reading: Reading) -> Tensor | None:
    return None if reading.ignore_index is None else contiguous(reading.label)
