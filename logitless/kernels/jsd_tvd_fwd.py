"""Computes the Jensen-Shannon divergence (JSD), a skewed KL, or the total variation (TVD).

    JSD = β Σ p log(p/M) + (1-β) Σ q log(q/M), with teacher p, student q and M = βp + (1-β)q
    skewed KL = Σ p log(p/(αp + (1-α)q)), or Σ q log(q/(αq + (1-α)p))
    TVD = ½ Σ |p - q|

Each term needs the normalisers of both rows, so a first pass computes these, and a second the sums.
Several programs share a long row, each with a split short enough to stay in the cache between the
passes. Between them, they wait for the others' normalisers (program_exchange.py). A second kernel
adds the sums of the splits.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import Pair, Reading
from . import config
from .jsd_math import bits, mixture, safe_beta, skewed
from .launch import REMEMBERED, Launch
from .layout import Rows, row_offset, split_row
from .numerics import LN2, LOG2E, finite, inverse_temperature, load
from .pair_state import (
    PAIR_STATE,
    Both,
    PairState,
    elements_to,
    extend,
    fresh_state,
    load_state,
    save_state,
    student,
    sum_lanes,
    teacher,
    temperature_of,
    walk_both,
)
from .profiling import profiled
from .program_exchange import MAX_PROGRAMS, collect, may_wait, piece_of, publish, zeros
from .state import pack_of
from .tvd_math import apart, ratio_of, to_student

SUMS_OF_SPLIT = tl.constexpr(3)  # sums per split of a row


class Norms(NamedTuple):
    """Shift and log2 of the normaliser of the student's row (q) and the teacher's (p).

    log2 q is (y - shift_q) · rate - log_q, with rate = log2 e / temperature.
    """

    shift_q: tl.tensor
    log_q: tl.tensor
    shift_p: tl.tensor
    log_p: tl.tensor


class Second(NamedTuple):
    """The second pass: normalisers, and three sums with one element per column of a block.

    The first two are in bits for JSD, in nats for a skewed KL.
    """

    norms: tl.tensor
    of_q: tl.tensor  # Σ q log2(q / M) for JSD; Σ q g for a skewed KL (see jsd_math.py)
    of_p: tl.tensor  # Σ p log2(p / M) for JSD; the divergence for a skewed KL
    mass: tl.tensor  # Σ q for a skewed KL of fp32 logits; otherwise 0


class Apart(NamedTuple):
    """The second pass of TVD: the shifts, and three sums per column of a block, times s_q."""

    shift_q: tl.tensor
    shift_p: tl.tensor
    scale: tl.tensor  # s_q divided by the teacher's normaliser
    gaps: tl.tensor  # Σ |p - q|
    above: tl.tensor  # the sums `above` and `below` of tvd_math.py, times s_q
    below: tl.tensor


@triton.jit
def fold_norms(state, both, start, offs, mask):
    m_q, moved_q, _, e_q = extend(state.m_q, student(both, start + offs, mask), both.rate)
    m_p, moved_p, _, e_p = extend(state.m_p, teacher(both, start + offs, mask), both.rate)
    s_q = state.s_q * tl.exp2(moved_q * both.rate) + e_q
    s_p = state.s_p * tl.exp2(moved_p * both.rate) + e_p
    return PairState(m_q, s_q, m_p, s_p, state.c)


@triton.jit
def _fold_second(state, both, start, offs, mask):
    norms = state.norms
    log_q = (student(both, start + offs, mask) - norms.shift_q) * both.rate - norms.log_q
    log_p = (teacher(both, start + offs, mask) - norms.shift_p) * both.rate - norms.log_p
    q, log_q_m, p, log_p_m = mixture(log_q, log_p, None, both.blend, both.X.dtype.element_ty)
    return Second(norms, state.of_q + q * log_q_m, state.of_p + p * log_p_m, state.mass)


@triton.jit
def _fold_skewed(state, both, start, offs, mask, FORWARD: tl.constexpr):
    norms = state.norms
    d_q = student(both, start + offs, mask) - norms.shift_q
    d_p = teacher(both, start + offs, mask) - norms.shift_p
    log_q, log_p = d_q * both.rate - norms.log_q, d_p * both.rate - norms.log_p
    gap = (d_q - d_p) * both.rate - (norms.log_q - norms.log_p)
    IN: tl.constexpr = both.X.dtype.element_ty
    q, g, term = skewed(log_q, log_p, gap, both.blend, IN, FORWARD)
    mass = state.mass + q if IN == tl.float32 else state.mass
    return Second(norms, state.of_q + q * g, state.of_p + term, mass)


@triton.jit
def _fold_skewed_forward(state, both, start, offs, mask):
    return _fold_skewed(state, both, start, offs, mask, True)


@triton.jit
def _fold_skewed_reverse(state, both, start, offs, mask):
    return _fold_skewed(state, both, start, offs, mask, False)


@triton.jit
def _fold_apart(state, both, start, offs, mask):
    shift_q, shift_p, scale = state.shift_q, state.shift_p, state.scale
    e_q = tl.exp2((student(both, start + offs, mask) - shift_q) * both.rate)
    e_p = tl.exp2((teacher(both, start + offs, mask) - shift_p) * both.rate)
    gap, above, below = apart(e_q, e_p, scale)
    gaps, above, below = state.gaps + gap, state.above + above, state.below + below
    return Apart(shift_q, shift_p, scale, gaps, above, below)


@triton.jit
def _second_sweep(
    m_q, s_q, m_p, s_p, both, head, body, lo, hi,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Returns three sums over the columns [lo, hi):

    jsd      Σ q log2(q / M), Σ p log2(p / M), 0
    skewed   Σ q g, the divergence, Σ q (0 for 16-bit logits)
    tvd      Σ |p - q|, `above`, `below` (tvd_math.py), all times s_q
    """
    zero = tl.zeros((BLOCK_V,), tl.float32)
    if KIND != "tvd":
        fold: tl.constexpr = (
            _fold_second if KIND == "jsd"
            else _fold_skewed_forward if KIND == "skewed_forward" else _fold_skewed_reverse
        )  # fmt: skip
        sums = Second(Norms(m_q, bits(s_q), m_p, bits(s_p)), zero, zero, zero)
        sums = walk_both(fold, sums, both, head, body, lo, hi, ALIGNED, T_ALIGNED, BLOCK_V)
        SUMS_MASS: tl.constexpr = KIND != "jsd" and both.X.dtype.element_ty == tl.float32
        mass = tl.sum(sums.mass, axis=0) if SUMS_MASS else tl.full((), 0.0, tl.float32)
        return tl.sum(sums.of_q, axis=0), tl.sum(sums.of_p, axis=0), mass
    else:
        sums = Apart(m_q, m_p, to_student(s_q, s_p), zero, zero, zero)
        sums = walk_both(_fold_apart, sums, both, head, body, lo, hi, ALIGNED, T_ALIGNED, BLOCK_V)
        return tl.sum(sums.gaps, axis=0), tl.sum(sums.above, axis=0), tl.sum(sums.below, axis=0)


@triton.jit
def _divergence(first, second, third, s_q, s_p, blend, KIND: tl.constexpr):
    """Returns the divergence of a row in nats, and the mean or `ratio` for its state."""
    # `bits` is inf for a row that is all -inf, and 0 · inf makes the divergence NaN
    no_row = 0.0 * (bits(s_q) + bits(s_p))
    # a divergence below 0 or a TVD above 1 is a rounding error and is clamped; NaN stays
    if KIND == "jsd":
        value = ((1.0 - blend) * first + blend * second) * LN2 + no_row
        return tl.where(value < 0, 0.0, value), first
    elif KIND != "tvd":
        value = second + no_row
        # All q share the rounding error of one normaliser, so Σ q is not exactly 1. For fp32
        # logits, dividing by it removes this error from q (g - mean).
        return tl.where(value < 0, 0.0, value), first / tl.where(third == 0, 1.0, third)
    else:
        value = 0.5 * first / s_q + no_row
        return tl.where(value > 1, 1.0, value), ratio_of(second, third)


@triton.jit(
    **profiled("jsd_tvd_fwd", shows=("KIND",)),
    do_not_specialize=["rows_t"],
    do_not_specialize_on_alignment=["LABEL", "temperature"],
)
def _jsd_tvd_fwd_kernel(
    X, T, LABEL,  # inputs
    VALUE, STATE,  # outputs; if KNOWN is True, STATE already holds the normalisers
    temperature,  # a number, or a pointer to one number per row
    rows_t, stride_xb, stride_xt, stride_tb, stride_tt, V,  # sizes
    softcap, blend, ignore_index,  # options
    KIND: tl.constexpr, KNOWN: tl.constexpr,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program computes one whole row.

    This is for short rows, for known normalisers, and where programs must not wait for each other.
    """
    row = tl.program_id(0)
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            tl.store(VALUE + row, 0.0)
            save_state(STATE, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    rate = inverse_temperature(temperature, row) * LOG2E
    PACK: tl.constexpr = pack_of(X)
    head, body = split_row(elements_to(Xrow), V, 0, PACK, ALIGNED)
    both = Both(Xrow, Trow, None, 0, V, rate, softcap, blend, V)
    if KNOWN:
        norms = load_state(STATE, row)
    else:
        norms = sum_lanes(walk_both(
            fold_norms, fresh_state(BLOCK_V), both, head, body, 0, V, ALIGNED, T_ALIGNED, BLOCK_V
        ))  # fmt: skip
    shift_q, s_q, shift_p, s_p = finite(norms.m_q), norms.s_q, finite(norms.m_p), norms.s_p
    first, second, third = _second_sweep(
        shift_q, s_q, shift_p, s_p, both, head, body, 0, V, KIND, ALIGNED, T_ALIGNED, BLOCK_V
    )
    value, mean = _divergence(first, second, third, s_q, s_p, blend, KIND)
    tl.store(VALUE + row, value)
    if KNOWN and KIND == "tvd":
        save_state(STATE, row, shift_q, s_q, shift_p, second, third)
    else:  # if KNOWN is True, the caller adds the sums of all parts of a row
        save_state(STATE, row, shift_q, s_q, shift_p, s_p, first if KNOWN else mean)


@triton.jit(
    **profiled("jsd_tvd_split_fwd", shows=("KIND",)),
    do_not_specialize=["rows_t"],
    do_not_specialize_on_alignment=["LABEL", "temperature"],
)
def _jsd_tvd_split_fwd_kernel(
    X, T, LABEL,  # inputs
    STATE, SUMS, EXCHANGE,  # outputs; EXCHANGE (rows, 2, splits) is initially zero
    temperature,  # a number, or a pointer to one number per row
    rows_t, stride_xb, stride_xt, stride_tb, stride_tt, V,  # sizes
    softcap, blend, ignore_index,  # options
    KIND: tl.constexpr, ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Each program computes a split: SPAN columns of a row's body, the first also the fringe."""
    splits = tl.cdiv(V, SPAN)
    row = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            return

    lo = split * SPAN
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    rate = inverse_temperature(temperature, row) * LOG2E
    PACK: tl.constexpr = pack_of(X)
    head, body = split_row(elements_to(Xrow), V, 0, PACK, ALIGNED)
    both = Both(Xrow, Trow, None, 0, V, rate, softcap, blend, V)
    norms = sum_lanes(walk_both(
        fold_norms, fresh_state(BLOCK_V), both, head, body, lo, lo + SPAN,
        ALIGNED, T_ALIGNED, BLOCK_V,
    ))  # fmt: skip
    at = EXCHANGE + row.to(tl.int64) * 2 * splits
    publish(at + split, norms.m_q, norms.s_q)
    publish(at + splits + split, norms.m_p, norms.s_p)
    m_q, s_q = collect(at, splits, rate, BLOCK_P)
    m_p, s_p = collect(at + splits, splits, rate, BLOCK_P)
    shift_q, shift_p = finite(m_q), finite(m_p)
    first, second, third = _second_sweep(
        shift_q, s_q, shift_p, s_p, both, head, body, lo, lo + SPAN,
        KIND, ALIGNED, T_ALIGNED, BLOCK_V,
    )  # fmt: skip
    at_sums = SUMS + (row.to(tl.int64) * splits + split) * SUMS_OF_SPLIT
    tl.store(at_sums, first)
    tl.store(at_sums + 1, second)
    tl.store(at_sums + 2, third)
    if split == 0:
        save_state(STATE, row, shift_q, s_q, shift_p, s_p, 0.0)


@triton.jit(
    **profiled("jsd_tvd_merge", shows=("KIND",)),
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["LABEL"],
)
def _jsd_tvd_merge_kernel(
    SUMS, LABEL,  # inputs
    # outputs; of STATE only `mean`, except in ignored rows
    VALUE, STATE,
    splits, blend, ignore_index,
    KIND: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Each program adds the sums of all splits of one row, and writes the row's divergence."""
    row = tl.program_id(0)
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            tl.store(VALUE + row, 0.0)
            save_state(STATE, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    offs_p = tl.arange(0, BLOCK_P)
    at_sums = SUMS + (row.to(tl.int64) * splits + offs_p) * SUMS_OF_SPLIT
    first = tl.sum(load(at_sums, 0, offs_p < splits), axis=0)
    second = tl.sum(load(at_sums, 1, offs_p < splits), axis=0)
    third = tl.sum(load(at_sums, 2, offs_p < splits), axis=0)
    at = STATE + row.to(tl.int64) * PAIR_STATE
    s_q, s_p = tl.load(at + 1), tl.load(at + 3)
    value, mean = _divergence(first, second, third, s_q, s_p, blend, KIND)
    tl.store(VALUE + row, value)
    tl.store(at + 4, mean)


def read_jsd_tvd(
    x: Tensor, rows: Rows, teacher: Tensor, t_rows: Rows, label: Tensor | None,
    value: Tensor, state: Tensor, reading: Reading, pair: Pair, known: bool = False,
) -> None:  # fmt: skip
    """Writes the divergence of each row to `value`, and its state to `state`.

    If `known` is True, `state` already holds shifts and normalisers, and the kernel computes only
    sums over the columns of x (see eager/pair.py).
    """
    kind = pair.kind
    tensor, number = temperature_of(reading)
    ignore_index = None if label is None else reading.ignore_index
    options = reading.softcap, safe_beta(pair.blend), ignore_index
    splits = splits_of(x)
    if splits > 1 and not known:
        cut = config.jsd_tvd_split_fwd(rows.vocab, rows.itemsize)
        exchange = zeros(piece_of(rows.count * 2 * splits), x)
        sums = state.new_empty((rows.count, splits, SUMS_OF_SPLIT.value))
        first, second = _shared_plan(rows, t_rows, splits, number, options, kind, cut)
        first(x, teacher, label, state, sums, exchange, *tensor)
        second(sums, label, value, state)
    else:
        launch = _plan(rows, t_rows, number, options, kind, known, config.pair_fwd(rows.vocab))
        launch(x, teacher, label, value, state, *tensor)


def splits_of(x: Tensor) -> int:
    """Returns the number of programs per row, or 1 if programs must not wait for each other."""
    splits = config.ceil_div(
        x.shape[-1], config.jsd_tvd_split_fwd(x.shape[-1], x.element_size()).span
    )
    return splits if may_wait(splits, x.device) else 1


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, t_rows: Rows, number: tuple, options: tuple, kind: str, known: bool,
    cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _jsd_tvd_fwd_kernel, (rows.count,),
        (*number, *rows.strides, t_rows.stride_b, t_rows.stride_t, rows.vocab, *options),
        num_warps=cut.num_warps, KIND=kind, KNOWN=known, ALIGNED=rows.aligned,
        T_ALIGNED=t_rows.aligned_like(rows), BLOCK_V=cut.block_v,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _shared_plan(
    rows: Rows, t_rows: Rows, splits: int, number: tuple, options: tuple, kind: str,
    cut: config.Config,
) -> tuple[Launch, Launch]:  # fmt: skip
    _, beta, ignore_index = options
    block_p = 32 if splits <= 32 else MAX_PROGRAMS
    return Launch(
        _jsd_tvd_split_fwd_kernel, (rows.count * splits,),
        (*number, *rows.strides, t_rows.stride_b, t_rows.stride_t, rows.vocab, *options),
        num_warps=cut.num_warps, KIND=kind, ALIGNED=rows.aligned,
        T_ALIGNED=t_rows.aligned_like(rows), SPAN=cut.span, BLOCK_V=cut.block_v, BLOCK_P=block_p,
    ), Launch(
        _jsd_tvd_merge_kernel, (rows.count,), (splits, beta, ignore_index),
        num_warps=1, KIND=kind, BLOCK_P=block_p,
    )  # fmt: skip
