"""Backward pass of losses against a dense teacher, in one pass over student and teacher.

Besides the logits, it reads only the five numbers per row that the forward saved (pair_state.py).
The gradient of the student's logits z is, with v the target of soft cross-entropy:

    forward KL       q - p
    cross-entropy    q Σ v - v
    reverse KL       q (log(q/p) - Σ q log(q/p))
    JSD              (1-β) q (log(q/M) - Σ q log(q/M))
    skewed KL        q (g - Σ q g), with the g of jsd_math.py; forward: times 1-α
    TVD              ½ q (sign(q-p) - Σ q sign(q-p)), computed without cancellation (tvd_math.py)

The kernel also divides by the temperature. If student and teacher are equal, the gradient is
exactly 0, except that of the skewed forward KL of fp32 logits in several parts, a rounding error.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contract import Pair, Reading
from . import config
from .bwd_tile import row_gain
from .jsd_math import bits, mixture, safe_beta, skewed
from .launch import REMEMBERED, Launch
from .layout import Rows, fringe_tile, numbers, row_offset, rows_of, split_row
from .numerics import INF, LN2, LOG2E, capped, inverse_temperature, load
from .pair_state import (
    Both,
    contiguous,
    elements_to,
    load_state,
    rows_of_both,
    target,
    temperature_of,
    with_one_rows_t,
)
from .profiling import profiled
from .state import field, pack_of
from .stats_split_fwd import aligned
from .tvd_math import gradient_of, to_student


class Terms(NamedTuple):
    shift_q: tl.tensor
    shift_p: tl.tensor
    norm_q: tl.tensor  # log2 of the student's normaliser, for JSD and a skewed KL
    norm_p: tl.tensor  # log2 of the teacher's normaliser; for TVD, s_q / s_p
    mean: tl.tensor  # s_p / s_q for "forward" and "soft"; for other losses, the saved mean
    gain: tl.tensor  # multiplies the gradient of the whole row


@triton.jit
def _row_terms(STATE, row, g, inv_t, blend, KIND: tl.constexpr):
    saved = load_state(STATE, row)
    s_q, s_p, mean = saved.s_q, saved.s_p, saved.c
    norm_q, norm_p = 0.0, 0.0
    alive = tl.where(s_q == 0, INF, s_q)
    gain = g * inv_t
    if KIND == "reverse":
        gain = gain * inv_t / alive
    elif KIND == "jsd":
        norm_q, norm_p = bits(s_q), bits(s_p)
        gain = gain * (1.0 - blend) * LN2 + 0.0 * (norm_q + norm_p)
    elif KIND == "skewed_forward" or KIND == "skewed_reverse":
        norm_q, norm_p = bits(s_q), bits(s_p)
        factor = 1.0 - blend if KIND == "skewed_forward" else 1.0
        gain = gain * factor + 0.0 * (norm_q + norm_p)
    elif KIND == "tvd":
        norm_p = to_student(s_q, s_p)
        gain = gain / alive + 0.0 * (bits(s_q) + bits(s_p))
    else:
        mean = s_p / alive
        if KIND == "forward":
            gain = gain / s_p
    # a row that is all -inf has no distribution, and the gradient 0
    return Terms(saved.m_q, saved.m_p, norm_q, norm_p, mean, tl.where(s_q == 0, 0.0, gain))


@triton.jit
def _write_tile(DX, both, terms, cols, mask, KIND: tl.constexpr):
    y, slope = capped(load(both.X, cols, mask), both.softcap)
    d_q = y - terms.shift_q
    if KIND == "soft":
        dz = tl.exp2(d_q * both.rate) * terms.mean - target(both, cols, mask)
    else:
        d_p = load(both.T, cols, mask).to(tl.float32) - terms.shift_p
        if KIND == "forward":
            dz = tl.exp2(d_q * both.rate) * terms.mean - tl.exp2(d_p * both.rate)
        elif KIND == "reverse":
            e_q = tl.exp2(d_q * both.rate)
            dz = tl.where(e_q != 0, e_q * (d_q - d_p - terms.mean), 0.0)
        elif KIND == "tvd":
            e_q, e_p = tl.exp2(d_q * both.rate), tl.exp2(d_p * both.rate)
            dz = gradient_of(e_q, e_p, terms.norm_p, terms.mean)
        else:
            IN: tl.constexpr = both.X.dtype.element_ty
            log_q, log_p = d_q * both.rate - terms.norm_q, d_p * both.rate - terms.norm_p
            if KIND == "jsd":
                q, g, _, _ = mixture(log_q, log_p, None, both.blend, IN)
            else:
                gap = (d_q - d_p) * both.rate - (terms.norm_q - terms.norm_p)
                q, g, _ = skewed(log_q, log_p, gap, both.blend, IN, KIND == "skewed_forward")
            dz = q * (g - terms.mean)
    # .cs: as in bwd_tile.py
    dx = (dz * terms.gain * slope).to(DX.dtype.element_ty)
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
    KIND: tl.constexpr, CONSTANTS: tl.constexpr,
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
    terms = _row_terms(STATE, row, g, inv_t, blend, KIND)
    both = Both(Xbody, Tbody, W, head, V, rate, softcap, blend, vocab)
    _write_tile(DXbody, both, terms, cols, cols < body, KIND)
    if not ALIGNED:
        if block == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
            both = Both(Xrow, Trow, W, 0, V, rate, softcap, blend, vocab)
            _write_tile(DXrow, both, terms, ends, mask_ends, KIND)


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
    launch = _plan(
        rows, t_rows, d_rows, (step_u, step_f), number, reading.softcap, pair.blend,
        reading.vocab, reading.ignore_index, pair.kind,
        config.pair_bwd(rows.vocab, rows.itemsize),
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
            vocab, softcap, blend if kind == "soft" else safe_beta(blend), ignore_index,
        ),
        num_warps=cut.num_warps, KIND=kind,
        CONSTANTS=_Constants(
            d_rows.aligned, rows.aligned_like(d_rows), t_rows.aligned_like(d_rows), *steps,
            cut.block_v,
        ),
    )  # fmt: skip
