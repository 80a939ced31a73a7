"""Computes -log p of each row's label, and the gradient of the logits, in one pass.

Each logit is read from memory once. Several programs share a long row: each computes the max m and
the normaliser s of its split, waits for those of the others (program_exchange.py), then reads its
split again, from the L1 cache, and writes its gradient.

For a small tensor or head, a launch takes longer than its work. So the same launch can compute the
mean over rows (the program that writes the last loss adds them up), and copy the hidden states of a
head, with 0 in ignored rows (zero_ignored.py).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..contract import COEFFICIENTS
from . import config, program_exchange
from .bwd_tile import (
    Span,
    Terms,
    fill_span,
    in_span,
    load_coefs,
    row_gain,
    row_terms,
    write_label,
    write_span,
)
from .launch import REMEMBERED, Launch
from .layout import Place, describe, row_offset, split_row
from .numerics import INF, LOG2E, capped, finite, inverse_temperature
from .profiling import in_place, profiled
from .program_exchange import MAX_PROGRAMS, collect, publish
from .reduce import row_block
from .state import field, fold_span, is_live, pack_of
from .zero_ignored import columns_per_block, copy_block

HAS = tl.constexpr(("a", "label"))
# for a mean, every program counts the live rows; up to here the labels are in the cache
MAX_COUNTED = 4096


@dataclass(frozen=True)
class _Constants:
    aligned: bool  # every row of DX starts and ends on a 16-byte boundary
    x_aligned: bool  # for each row, X and DX have the same address modulo 16
    step_c: int  # row stride of COEF; 0 if COEF has a single row
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    mean: bool
    span: int
    block_v: int
    block_p: int  # at least the number of splits of a row; 0 if rows are not split
    block_d: int  # columns per block of the copied hidden states; 0 if nothing is copied


@triton.jit
def _share(LABEL, N, ignore_index):
    """Returns 1 / n for n rows that are not ignored, or 1 if all rows are ignored."""
    count = tl.zeros((1024,), tl.int32)
    for start in range(0, N, 1024):
        _, _, live = row_block(LABEL, start, N, ignore_index, 1024)
        count += live.to(tl.int32)
    return 1.0 / tl.maximum(tl.sum(count, axis=0), 1).to(tl.float32)


@triton.jit
def _write_nll(NLL, LABEL, EXCHANGE, row, nll, mask, N, ignore_index, MEAN: tl.constexpr):
    """Writes -log p of a row's label. `mask` is True in exactly one program per row.

    For a mean, the last of these N programs writes it. The order of the sum is fixed, so which one
    is last does not matter.
    """
    if not MEAN:
        tl.store(NLL + row, nll, mask=mask)
    elif mask:
        FINISHED = EXCHANGE + tl.num_programs(0)
        VALUES = (FINISHED + 1).to(tl.pointer_type(tl.float32))
        tl.store(VALUES + row, nll)
        if tl.atomic_add(FINISHED, 1, sem="acq_rel") == N - 1:
            total = tl.zeros((1024,), tl.float32)
            for start in range(0, N, 1024):
                rows = start + tl.arange(0, 1024)
                total += tl.load(VALUES + rows, mask=rows < N, other=0.0, volatile=True)
            tl.store(NLL, tl.sum(total, axis=0) * _share(LABEL, N, ignore_index))


@triton.jit(
    **profiled("nll_fwd_bwd", X=in_place),
    do_not_specialize=["rows_t", "lead", "splits"],
    do_not_specialize_on_alignment=["LABEL", "COEF", "FACTOR", "temperature"],
)
def _nll_fwd_bwd_kernel(
    X, LABEL, COEF, FACTOR, HIDDEN,  # inputs; HIDDEN is copied to COPY
    # without DX the gradient overwrites X; NLL is one number per row, or the mean
    DX, NLL, COPY,
    # int64, initially 0, or None for whole rows without a mean: one word per program
    # (program_exchange.py), and for a mean FINISHED, which counts the losses written, and VALUES,
    # one fp32 loss per row.
    EXCHANGE,
    temperature,
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, splits, stride_h, D,  # sizes
    softcap, ignore_index,  # options
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes a split: SPAN columns of a row's body, the first also its fringe."""
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    X_ALIGNED: tl.constexpr = field(CONSTANTS, "x_aligned")
    SPAN: tl.constexpr = field(CONSTANTS, "span")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    MEAN: tl.constexpr = field(CONSTANTS, "mean")
    BLOCK_P: tl.constexpr = field(CONSTANTS, "block_p")
    BLOCK_D: tl.constexpr = field(CONSTANTS, "block_d")
    PACK: tl.constexpr = pack_of(X)
    pid = tl.program_id(0)
    N = tl.num_programs(0) // splits
    row = pid // splits
    split = pid % splits
    lo = split * SPAN
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    Xrow = X + offset
    DXrow = Xrow
    if DX is not None:
        offset = row_offset(row, rows_t, stride_db, stride_dt)
        DXrow = DX + offset
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    hi = tl.multiple_of(tl.minimum(lo + SPAN, body), PACK)
    span = Span(head, body, V, lo, hi)
    label = tl.load(LABEL + row)
    if HIDDEN is not None:
        live = is_live(label, ignore_index)
        for start in range(split * BLOCK_D, D, splits * BLOCK_D):
            copy_block(HIDDEN, COPY, row, start, live, stride_h, D, BLOCK_D)
    if ignore_index is not None:
        if label == ignore_index:
            fill_span(DXrow, 0.0, span, PACK, ALIGNED, False, BLOCK_V)
            _write_nll(NLL, LABEL, EXCHANGE, row, 0.0, lo == 0, N, ignore_index, MEAN)
            return

    inv_t = inverse_temperature(temperature, row)
    rate = inv_t * LOG2E
    state = fold_span(
        Xrow, None, head, body, V, lo, hi, 0.0, rate, softcap, None,
        False, False, False, PACK, ALIGNED, X_ALIGNED, BLOCK_V,
    )  # fmt: skip
    # loaded by the program whose split it is in, before the gradient overwrites it
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)
    has_label = in_span(label, span, ALIGNED)
    x_label = tl.load(Xrow + label, mask=has_label, other=0.0)
    y_label, _ = capped(x_label, softcap)

    share = 1.0
    if MEAN:
        share = _share(LABEL, N, ignore_index)
    gain = row_gain(None, FACTOR, row, 0, field(CONSTANTS, "step_f")) * share
    coefs = load_coefs(COEF + row.to(tl.int64) * field(CONSTANTS, "step_c"), gain, HAS)
    m, s = state.m, state.s
    if BLOCK_P > 0:
        at = EXCHANGE + row.to(tl.int64) * splits
        publish(at + split, m, s)
        m, s = collect(at, splits, rate, BLOCK_P)

    shift = finite(m)
    log_s = tl.log(s)
    valid = label >= 0
    nll = tl.where(valid, log_s - (y_label - shift) * inv_t, float("nan"))
    mask = has_label | ((lo == 0) & (not valid))
    _write_nll(NLL, LABEL, EXCHANGE, row, nll, mask, N, ignore_index, MEAN)
    a = tl.where(valid, coefs.a, float("nan"))  # an invalid label makes the whole row NaN
    shift, c0, c1, g_c = row_terms(coefs, a, shift, log_s, inv_t, HAS)
    terms = Terms(shift, c0, c1, 0.0, g_c, rate, 0.0, softcap)
    write_span(Xrow, None, DXrow, terms, span, HAS, ALIGNED, X_ALIGNED, False, BLOCK_V)
    if has_label:
        g_label = tl.where(log_s == -INF, 0.0, coefs.g_label * inv_t)
        write_label(x_label, None, DXrow, label, g_label, terms, HAS)


class _Plan(NamedTuple):
    exchange_words: int  # the number of integers in EXCHANGE; 0 if EXCHANGE is None
    launch: Launch | None  # None if there are no rows


@functools.lru_cache(REMEMBERED)
def nll_fwd_bwd_plan(
    shape: tuple, strides: tuple, offset: int, itemsize: int, device: torch.device,
    place: Place | None,  # None if the gradient overwrites the logits
    options: tuple, coefs_per_row: bool, factor_per_row: bool, mean: bool,
    copied: tuple | None,  # shape, strides and address modulo 16 of HIDDEN
    waiting: bool, revision: int,
) -> _Plan | None:  # fmt: skip
    temperature, softcap, ignore_index = options
    rows = describe(shape, strides, offset, itemsize)
    if rows is None or rows.vocab == 0 or (mean and not 0 < rows.count <= MAX_COUNTED):
        return None
    if rows.count == 0:
        return _Plan(0, None)
    cut = config.nll_fwd_bwd(rows.vocab, itemsize, place is not None and softcap is not None)
    splits = config.ceil_div(rows.vocab, cut.span)
    if not program_exchange.may_wait(splits, device):
        return None
    d_rows = rows if place is None else rows.written_to(place)
    number = () if temperature is None else (temperature,)
    stride_h = D = None
    if copied is not None:
        (_, D), (stride_h, stride_d), _ = copied
        stride_h = stride_h if stride_d == 1 else D  # `MeanLaunch` makes the rows contiguous
    block_p = 0 if splits == 1 else 32 if splits <= 32 else MAX_PROGRAMS
    launch = Launch(
        _nll_fwd_bwd_kernel, (rows.count * splits,),
        (
            *number, *rows.strides, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab,
            splits, stride_h, D, softcap, ignore_index,
        ),
        num_warps=cut.num_warps,
        CONSTANTS=_Constants(
            d_rows.aligned, rows.aligned_like(d_rows), COEFFICIENTS * coefs_per_row,
            int(factor_per_row), mean, cut.span, cut.block_v, block_p,
            0 if D is None else columns_per_block(D),
        ),
    )  # fmt: skip
    words = rows.count * splits if splits > 1 or mean else 0
    if mean:  # one integer for FINISHED, and one integer for every two numbers of VALUES
        words += 1 + config.ceil_div(rows.count, 2)
    return _Plan(program_exchange.piece_of(words) if words else 0, launch)
