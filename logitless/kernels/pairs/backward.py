"""Backward pass of losses against a dense teacher, in one pass over student and teacher.

Besides the logits, it reads only the five numbers per row that the forward saved (state.py).
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Pair, Reading
from ...eager.pair_losses import LOSSES as KINDS
from .. import config
from ..launch import REMEMBERED, Launch, field
from ..layout import (
    Rows,
    aligned,
    contiguous,
    fringe_tile,
    numbers,
    pack_of,
    row_offset,
    rows_of,
    split_row,
    temperature_of,
)
from ..numerics import LOG2E, capped, inverse_temperature, load
from ..profiling import profiled
from ..statistics.gradient_tile import row_gain
from .losses import LOSSES, safe_blend
from .state import (
    Both,
    Side,
    bits,
    elements_to,
    from_shift,
    load_state,
    rows_of_both,
    target,
    with_one_rows_t,
)


@triton.jit
def _write_tile(
    DX, both, state, g, cols, mask, DZ: tl.constexpr, TWICE: tl.constexpr, PROBS: tl.constexpr
):  # fmt: skip
    log_q, log_p = bits(state.s_q), bits(state.s_p)
    g = tl.where(state.s_q == 0, 0.0, g * both.inv_t)
    y, slope = capped(load(both.X, cols, mask), both.softcap)
    q = from_shift(y, state.m_q, state.s_q, log_q, both.rate)
    if PROBS:
        p = Side(None, target(both, cols, mask), None, state.s_p, log_p, 0.0, 1.0)
    else:
        t = load(both.T, cols, mask).to(tl.float32)
        p = from_shift(t, state.m_p, state.s_p, log_p, both.rate)
    dz, gain = DZ(q, p, state.c, g, both)
    if TWICE:
        gain += 0.0 * (log_q + log_p)
    # a row that is all -inf has no distribution, and the gradient 0
    gain = tl.where(state.s_q == 0, 0.0, gain)
    # .cs: as in statistics/gradient_tile.py
    dx = (dz * gain * slope).to(DX.dtype.element_ty)
    tl.store(DX + cols, dx, mask=mask, cache_modifier=".cs")


@triton.jit
def _zero_tile(DX, cols, mask):
    tl.store(DX + cols, tl.zeros(cols.shape, DX.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class _Constants:
    aligned: bool  # every row of DX starts and ends on a 16-byte boundary
    x_aligned: bool  # for each row, X and DX have the same address modulo 16
    t_aligned: bool  # for each row, T and DX have the same address modulo 16
    step_u: int  # row stride of UPSTREAM; 0 if all rows share one number
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    block_v: int
    twice: bool  # as in `PairLoss` of eager/losses.py
    probs: bool


@triton.jit(
    **profiled("pair_bwd", shows=("KIND",)),
    do_not_specialize=["rows_t", "vocab"],
    do_not_specialize_on_alignment=["LABEL", "STATE", "UPSTREAM", "FACTOR", "temperature"],
)
def _pair_bwd_kernel(
    X, T, W, LABEL, STATE, UPSTREAM, FACTOR,  # inputs
    DX,  # output
    temperature,  # a number, or a pointer to one number per row
    rows_t, stride_xb, stride_xt, stride_tb, stride_tt, stride_db, stride_dt, V,  # sizes
    vocab, softcap, blend, ignore_index,  # options
    KIND: tl.constexpr, DZ: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of a row, the first also the row's fringe (see layout.py)."""
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    blocks = tl.cdiv(V, BLOCK_V)
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    PACK: tl.constexpr = pack_of(DX)
    DXrow = DX + row_offset(row, rows_t, stride_db, stride_dt)
    head, body = split_row(elements_to(DXrow), V, 0, PACK, ALIGNED)
    DXbody = tl.multiple_of(DXrow + head, 16)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    if ignore_index is not None:
        if tl.load(LABEL + row) == ignore_index:
            _zero_tile(DXbody, cols, cols < body)
            if block == 0:
                ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
                _zero_tile(DXrow, ends, mask_ends)
            return

    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    Trow = T + row_offset(row, rows_t, stride_tb, stride_tt)
    Xbody, Tbody = Xrow + head, Trow + head
    if field(CONSTANTS, "x_aligned"):
        Xbody = tl.multiple_of(Xbody, 16)
    if field(CONSTANTS, "t_aligned"):
        Tbody = tl.multiple_of(Tbody, 16)
    inv_t = inverse_temperature(temperature, row)
    rate = inv_t * LOG2E
    g = row_gain(UPSTREAM, FACTOR, row, field(CONSTANTS, "step_u"), field(CONSTANTS, "step_f"))
    state = load_state(STATE, row)
    TWICE: tl.constexpr = field(CONSTANTS, "twice")
    PROBS: tl.constexpr = field(CONSTANTS, "probs")
    both = Both(Xbody, Tbody, W, head, V, rate, softcap, blend, vocab, inv_t)
    _write_tile(DXbody, both, state, g, cols, cols < body, DZ, TWICE, PROBS)
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
            both = Both(Xrow, Trow, W, 0, V, rate, softcap, blend, vocab, inv_t)
            _write_tile(DXrow, both, state, g, ends, mask_ends, DZ, TWICE, PROBS)


def pair_gradient(
    x: Tensor,  # (..., V), the student
    reading: Reading,
    pair: Pair,
    state: Tensor,  # (N, PAIR_STATE), from pair_read
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,  # output, in the shape of x; can be x itself
) -> Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if into is None else into
    if dx.numel() == 0:
        return dx
    label = None if reading.ignore_index is None else contiguous(reading.label)
    source, rows, teacher, t_rows = rows_of_both(x, pair.teacher)
    if into is None:
        output, d_rows = dx, rows.dense()
    elif into is x:
        output, d_rows = source, rows
    else:
        output, d_rows = rows_of(into)
        all_rows = with_one_rows_t(rows, t_rows, d_rows)
        if all_rows is None:
            output = torch.empty_like(into, memory_format=torch.contiguous_format)
            all_rows = rows, t_rows, rows.dense()
        rows, t_rows, d_rows = all_rows
    upstream, step_u = numbers(upstream)
    factor, step_f = numbers(factor)
    tensor, number = temperature_of(reading)
    heavy = reading.softcap is not None and LOSSES[pair.kind].heavy
    launch = _plan(
        rows, t_rows, d_rows, (step_u, step_f), number, reading.softcap, pair.blend,
        reading.vocab, reading.ignore_index, pair.kind,
        config.pair_bwd(rows.vocab, rows.itemsize, heavy),
    )  # fmt: skip
    weight = aligned(reading.class_weight)
    launch(source, teacher, weight, label, contiguous(state), upstream, factor, output, *tensor)
    # a new tensor, if dx has no (B, T, V) view with contiguous rows, or no `rows_t` fits all
    if output.data_ptr() != dx.data_ptr():
        dx.copy_(output)
    return dx


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, t_rows: Rows, d_rows: Rows, steps: tuple, number: tuple,
    softcap: float | None, blend: float, vocab: int, ignore_index: int | None, kind: str,
    cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _pair_bwd_kernel, (rows.count * config.ceil_div(rows.vocab, cut.block_v),),
        (
            *number, *rows.strides, t_rows.stride_b, t_rows.stride_t,
            d_rows.stride_b, d_rows.stride_t, rows.vocab,
            vocab, softcap, safe_blend(blend, kind), ignore_index,
        ),
        num_warps=cut.num_warps, KIND=kind, DZ=LOSSES[kind].dz,
        CONSTANTS=_Constants(
            d_rows.aligned, rows.aligned_like(d_rows), t_rows.aligned_like(d_rows), *steps,
            cut.block_v, KINDS[kind].twice, KINDS[kind].probs,
        ),
    )  # fmt: skip
