"""Forward pass of losses against a dense teacher: divergences and soft cross-entropy.

Kernels accumulate a sum c over the columns of a row, and compute its loss from it:

    forward KL       Σ p log(p/q) = c / (s_p T) + log(s_q / s_p)     c = Σ e_p (d_p - d_q)
    reverse KL       Σ q log(q/p) = c / (s_q T) + log(s_p / s_q)     c = Σ e_q (d_q - d_p)
    cross-entropy    -Σ v log q = c / T + Σ v log s_q                c = -Σ v d_q

v is the target of soft cross-entropy and T the temperature; pair_state.py defines the others. This
takes one pass: if a later block has a larger max, all earlier d change by one number, and c is
corrected. If student and teacher are equal, the divergence is exactly 0. JSD, a skewed KL and the
total variation need two passes (jsd_tvd_fwd.py).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import PAIR_STATE, PAIR_SUMS, Pair, Reading
from ..eager.pair import pair_finish as finish_in_torch
from . import config
from .jsd_tvd_fwd import fold_norms, read_jsd_tvd
from .launch import REMEMBERED, Launch
from .layout import Rows, row_offset, split_row
from .numerics import LOG2E, finite, inverse_temperature
from .pair_state import (
    Both,
    PairState,
    contiguous,
    elements_to,
    extend,
    fresh_state,
    rows_of_both,
    save_state,
    student,
    sum_lanes,
    target,
    teacher,
    temperature_of,
    walk_both,
)
from .profiling import profiled
from .state import pack_of
from .stats_split_fwd import aligned


@triton.jit
def _cross(c, s, moved, scale, e, h):
    """Returns the sum c = Σ e · h of a row after one more block.

    `scale` and `moved` correct the earlier sum for a new max. Columns where e is 0, and earlier
    blocks where `scale` is 0, add 0, even if h or c is infinite.
    """
    before = tl.where(scale == 0, 0.0, c * scale + s * (moved * scale))
    return before + tl.where(e != 0, e * h, 0.0)


@triton.jit
def _fold_forward(state, both, start, offs, mask):
    m_q, moved_q, d_q, e_q = extend(state.m_q, student(both, start + offs, mask), both.rate)
    m_p, moved_p, d_p, e_p = extend(state.m_p, teacher(both, start + offs, mask), both.rate)
    scale_q, scale_p = tl.exp2(moved_q * both.rate), tl.exp2(moved_p * both.rate)
    c = _cross(state.c, state.s_p, moved_p - moved_q, scale_p, e_p, d_p - d_q)
    return PairState(m_q, state.s_q * scale_q + e_q, m_p, state.s_p * scale_p + e_p, c)


@triton.jit
def _fold_reverse(state, both, start, offs, mask):
    m_q, moved_q, d_q, e_q = extend(state.m_q, student(both, start + offs, mask), both.rate)
    m_p, moved_p, d_p, e_p = extend(state.m_p, teacher(both, start + offs, mask), both.rate)
    scale_q, scale_p = tl.exp2(moved_q * both.rate), tl.exp2(moved_p * both.rate)
    c = _cross(state.c, state.s_q, moved_q - moved_p, scale_q, e_q, d_q - d_p)
    return PairState(m_q, state.s_q * scale_q + e_q, m_p, state.s_p * scale_p + e_p, c)


@triton.jit
def _fold_soft(state, both, start, offs, mask):
    m_q, moved_q, d_q, e_q = extend(state.m_q, student(both, start + offs, mask), both.rate)
    v = target(both, start + offs, mask)
    c = state.c - (moved_q * state.s_p + tl.where(v != 0, v * d_q, 0.0))
    s_q = state.s_q * tl.exp2(moved_q * both.rate) + e_q
    return PairState(m_q, s_q, state.m_p, state.s_p + v, c)


@triton.jit(
    **profiled("pair_fwd", shows=("KIND",)),
    do_not_specialize=["rows_t", "vocab"],
    do_not_specialize_on_alignment=["LABEL", "temperature"],
)
def _pair_fwd_kernel(
    X, T, W, LABEL,  # inputs
    VALUE, STATE,  # outputs
    temperature,  # a number, or a pointer to one number per row
    rows_t, stride_xb, stride_xt, stride_tb, stride_tt, V,  # sizes
    vocab, softcap, blend, ignore_index,  # options
    KIND: tl.constexpr, ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Each program reads one row of both; without VALUE, it saves a partial state."""
    row = tl.program_id(0)
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            if VALUE is not None:
                tl.store(VALUE + row, 0.0)
            save_state(STATE, row, 0.0, 0.0, 0.0, 0.0, 0.0)
            return

    fold: tl.constexpr = (
        _fold_forward if KIND == "forward" else _fold_reverse if KIND == "reverse"
        else _fold_soft if KIND == "soft" else fold_norms
    )  # fmt: skip
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    inv_t = inverse_temperature(temperature, row)
    PACK: tl.constexpr = pack_of(X)
    head, body = split_row(elements_to(Xrow), V, 0, PACK, ALIGNED)
    both = Both(Xrow, Trow, W, 0, V, inv_t * LOG2E, softcap, blend, vocab)
    state = sum_lanes(walk_both(
        fold, fresh_state(BLOCK_V), both, head, body, 0, V, ALIGNED, T_ALIGNED, BLOCK_V
    ))  # fmt: skip
    if VALUE is None:
        save_state(STATE, row, state.m_q, state.s_q, state.m_p, state.s_p, state.c * inv_t)
    else:
        mean = 0.0
        if KIND == "soft":
            value = state.c * inv_t + state.s_p * tl.log(state.s_q)
        else:
            if KIND == "forward":
                value = state.c / state.s_p * inv_t + tl.log(state.s_q / state.s_p)
            else:
                mean = state.c / state.s_q
                value = mean * inv_t + tl.log(state.s_p / state.s_q)
            # a divergence below 0 is a rounding error; NaN stays NaN
            value = tl.where(value < 0, 0.0, value)
        tl.store(VALUE + row, value)
        save_state(STATE, row, finite(state.m_q), state.s_q, finite(state.m_p), state.s_p, mean)


def pair_read(
    x: Tensor,  # (..., V)
    reading: Reading,
    pair: Pair,
    # (N, PAIR_STATE), see eager/pair.py
    norms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    value = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    state = torch.empty((value.numel(), PAIR_STATE), device=x.device, dtype=torch.float32)
    if value.numel() == 0:
        return value, state
    if pair.kind not in PAIR_SUMS:
        _read(x, reading, pair, value, state)
        return value, state
    if norms is not None:
        state.copy_(norms)
    label = None if reading.ignore_index is None else contiguous(reading.label)
    x, rows, teacher, t_rows = rows_of_both(x, pair.teacher)
    read_jsd_tvd(x, rows, teacher, t_rows, label, value, state, reading, pair, norms is not None)
    return value, state


def pair_partial(x: Tensor, reading: Reading, pair: Pair) -> Tensor:
    rows = x.shape[:-1].numel()
    state = torch.empty((rows, PAIR_STATE), device=x.device, dtype=torch.float32)
    if rows:
        _read(x, reading, pair, None, state)
    return state


def pair_finish(partial: Tensor, kind: str, inv_t: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like `pair_finish` in eager/, with the mean in the unit of y."""
    value, state = finish_in_torch(partial, kind, inv_t)
    if inv_t is not None:  # convert the mean from nats to the unit of y
        state[:, 4:] /= inv_t
    return value, state


def _read(x: Tensor, reading: Reading, pair: Pair, value: Tensor | None, state: Tensor) -> None:
    label = None if reading.ignore_index is None else contiguous(reading.label)
    x, rows, teacher, t_rows = rows_of_both(x, pair.teacher)
    tensor, number = temperature_of(reading)
    launch = _plan(
        rows, t_rows, number, reading.softcap, pair.blend, reading.vocab,
        reading.ignore_index, pair.kind, config.pair_fwd(rows.vocab),
    )  # fmt: skip
    launch(x, teacher, aligned(reading.class_weight), label, value, state, *tensor)


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, t_rows: Rows, number: tuple, softcap: float | None, blend: float, vocab: int,
    ignore_index: int | None, kind: str, cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _pair_fwd_kernel, (rows.count,),
        (
            *number, *rows.strides, t_rows.stride_b, t_rows.stride_t, rows.vocab,
            vocab, softcap, blend, ignore_index,
        ),
        num_warps=cut.num_warps, KIND=kind, ALIGNED=rows.aligned,
        T_ALIGNED=t_rows.aligned_like(rows), BLOCK_V=cut.block_v,
    )  # fmt: skip
