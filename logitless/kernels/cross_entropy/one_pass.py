"""Computes -log p of each row's label, and the gradient of the logits, in one pass.

Each logit is read from memory once. Several programs share a long row: each computes the max m and
the normaliser s of its split, waits for those of the others (program_exchange.py), then reads its
split again, from the L1 cache, and writes its gradient.

For a small tensor or head, a launch takes longer than its work. So the same launch can compute the
mean or sum over rows (the program that writes the last loss adds them up), also of a loss with
label smoothing and z-loss (`Total` in contract.py), and copy the hidden states of a head, with 0 in
ignored rows (zero_ignored.py). Of a smoothed loss, each program adds the part of its own columns.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import (
    COEFFICIENTS,
    Coefficients,
    Reading,
    Total,
    made_once,
)
from .. import config, program_exchange
from ..launch import REMEMBERED, Launch, field
from ..layout import Place, describe, is_live, options_of, pack_of, place_of, row_offset, split_row
from ..numerics import INF, LOG2E, capped, finite, inverse_temperature
from ..profiling import in_place, profiled
from ..program_exchange import MAX_PROGRAMS, collect, publish
from ..reduce import row_block
from ..statistics.gradient_tile import (
    Coefs,
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
from ..statistics.state import fold_span, reference
from ..zero_ignored import columns_per_block, copy_block, with_memory_of_copy

HAS_LABEL = tl.constexpr(("a", "label"))
# for a mean, every program counts the live rows; up to here the labels are in the cache
MAX_COUNTED = 4096
MAX_PARTS = 1 << 14  # most losses, or parts of losses, that one program adds up


@dataclass(frozen=True)
class _Constants:
    aligned: bool  # every row of DX starts and ends on a 16-byte boundary
    x_aligned: bool  # for each row, X and DX have the same address modulo 16
    step_c: int  # row stride of COEF; 0 if COEF has a single row
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    starts_aligned: bool
    has: tuple[str, ...]  # the coefficients in use: "a", "label", and "total" of a smoothed loss
    total: bool  # whether NLL is one number, a mean or a sum
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
def _write_loss(
    NLL, LABEL, EXCHANGE, at, loss, mask, count, N, ignore_index, CONSTANTS: tl.constexpr
):
    """Writes the loss of a row, or a part of it, as number `at` of `count`.

    `mask` is True in exactly `count` programs. For a mean or sum, the last of them writes it. The
    order of the sum is fixed, so which one is last does not matter.
    """
    if not field(CONSTANTS, "total"):
        tl.store(NLL + at, loss, mask=mask)
    elif mask:
        FINISHED = EXCHANGE + tl.num_programs(0)
        VALUES = (FINISHED + 1).to(tl.pointer_type(tl.float32))
        tl.store(VALUES + at, loss)
        if tl.atomic_add(FINISHED, 1, sem="acq_rel") == count - 1:
            total = tl.zeros((1024,), tl.float32)
            for start in range(0, count, 1024):
                places = start + tl.arange(0, 1024)
                total += tl.load(VALUES + places, mask=places < count, other=0.0, volatile=True)
            share = 1.0
            if field(CONSTANTS, "mean"):
                share = _share(LABEL, N, ignore_index)
            tl.store(NLL, tl.sum(total, axis=0) * share)


@triton.jit
def _smoothed(state, span, ref, shift, log_s, inv_t):
    """Returns Σ log p over the columns of a span."""
    n = tl.maximum(span.hi - span.lo, 0) + tl.where(span.lo == 0, span.V - span.body, 0)
    n = n.to(tl.float32)
    log_total = (state.c - n * (shift - ref)) * inv_t - n * log_s
    return tl.where(n > 0, log_total, 0.0)


@triton.jit(
    **profiled("nll_fwd_bwd", X=in_place),
    do_not_specialize=["rows_t", "lead", "splits"],
    do_not_specialize_on_alignment=["LABEL", "COEF", "FACTOR", "temperature"],
)
def _nll_fwd_bwd_kernel(
    X, LABEL, COEF, FACTOR, HIDDEN,  # inputs; HIDDEN is copied to COPY
    # without DX the gradient overwrites X; NLL is one number per row, or the mean or sum
    DX, NLL, COPY,
    # int64, initially 0, or None for one number per row and whole rows: one word per program
    # (program_exchange.py), and for one number FINISHED, which counts the losses written, and
    # VALUES, one fp32 loss per row, or per program of a smoothed loss.
    EXCHANGE,
    temperature,
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, splits, stride_h, D,  # sizes
    softcap, ignore_index,  # options
    # 1 - ε, ε / V and z_loss, or None; the loss is keep · nll - spread Σ log p + z_loss lse²
    keep, spread, z_loss,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes a split: SPAN columns of a row's body, the first also its fringe."""
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    X_ALIGNED: tl.constexpr = field(CONSTANTS, "x_aligned")
    SPAN: tl.constexpr = field(CONSTANTS, "span")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    HAS: tl.constexpr = field(CONSTANTS, "has")
    SMOOTH: tl.constexpr = spread is not None
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
    at = row
    count = N
    if SMOOTH:
        at = pid
        count = tl.num_programs(0)
    label = tl.load(LABEL + row)
    if HIDDEN is not None:
        live = is_live(label, ignore_index)
        for start in range(split * BLOCK_D, D, splits * BLOCK_D):
            copy_block(HIDDEN, COPY, row, start, live, stride_h, D, BLOCK_D)
    if ignore_index is not None:
        if label == ignore_index:
            fill_span(DXrow, 0.0, span, PACK, ALIGNED, False, BLOCK_V)
            if SMOOTH:
                _write_loss(
                    NLL, LABEL, EXCHANGE, at, 0.0, lo >= 0, count, N, ignore_index, CONSTANTS
                )
            else:
                _write_loss(
                    NLL, LABEL, EXCHANGE, at, 0.0, lo == 0, count, N, ignore_index, CONSTANTS
                )
            return

    inv_t = inverse_temperature(temperature, row)
    rate = inv_t * LOG2E
    ref = reference(Xrow, V, softcap, SMOOTH, field(CONSTANTS, "starts_aligned"))
    state = fold_span(
        Xrow, None, head, body, V, lo, hi, ref, rate, softcap, None,
        False, SMOOTH, False, PACK, ALIGNED, X_ALIGNED, BLOCK_V,
    )  # fmt: skip
    # loaded by the program whose split it is in, before the gradient overwrites it
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)
    has_label = in_span(label, span, ALIGNED)
    x_label = tl.load(Xrow + label, mask=has_label, other=0.0)
    y_label, _ = capped(x_label, softcap)

    share = 1.0
    if field(CONSTANTS, "mean"):
        share = _share(LABEL, N, ignore_index)
    gain = row_gain(None, FACTOR, row, 0, field(CONSTANTS, "step_f")) * share
    coefs = load_coefs(COEF + row.to(tl.int64) * field(CONSTANTS, "step_c"), gain, HAS_LABEL)
    m, s = state.m, state.s
    if BLOCK_P > 0:
        words = EXCHANGE + row.to(tl.int64) * splits
        publish(words + split, m, s)
        m, s = collect(words, splits, rate, BLOCK_P)

    shift = finite(m)
    log_s = tl.log(s)
    valid = label >= 0
    loss = tl.where(valid, log_s - (y_label - shift) * inv_t, float("nan"))
    mask = has_label | ((lo == 0) & (not valid))
    a = coefs.a
    g = coefs.g_label
    g_total = 0.0
    if SMOOTH:
        loss *= keep
        g *= keep
        g_total = -spread * gain
    if z_loss is not None:
        lse = shift * inv_t + log_s
        loss += z_loss * (lse * lse)
        a += 2.0 * z_loss * lse * gain
    if SMOOTH:
        part = -spread * _smoothed(state, span, ref, shift, log_s, inv_t)
        loss = tl.where(mask, loss, 0.0) + part
        mask = lo >= 0
    _write_loss(NLL, LABEL, EXCHANGE, at, loss, mask, count, N, ignore_index, CONSTANTS)
    a = tl.where(valid, a, float("nan"))  # an invalid label makes the whole row NaN
    coefs = Coefs(a, 0.0, g, g_total, 0.0, 0.0)
    shift, c0, c1, g_c = row_terms(coefs, a, shift, log_s, inv_t, HAS)
    terms = Terms(shift, c0, c1, 0.0, g_c, rate, 0.0, softcap)
    write_span(Xrow, None, DXrow, terms, span, HAS, ALIGNED, X_ALIGNED, False, BLOCK_V)
    if has_label:
        g_label = tl.where(log_s == -INF, 0.0, g * inv_t)
        write_label(x_label, None, DXrow, label, g_label, terms, HAS)


class _Plan(NamedTuple):
    exchange_words: int  # the number of integers in EXCHANGE; 0 if EXCHANGE is None
    launch: Launch | None  # None if there are no rows


@functools.lru_cache(REMEMBERED)
def nll_fwd_bwd_plan(
    shape: tuple, strides: tuple, offset: int, itemsize: int, device: torch.device,
    place: Place | None,  # None if the gradient overwrites the logits
    options: tuple, coefs_per_row: bool, factor_per_row: bool, total: Total | None,
    copied: tuple | None,  # shape, strides and address modulo 16 of HIDDEN
    waiting: bool, revision: int,
) -> _Plan | None:  # fmt: skip
    temperature, softcap, ignore_index = options
    rows = describe(shape, strides, offset, itemsize)
    if rows is None or rows.vocab == 0 or (total and not 0 < rows.count <= MAX_COUNTED):
        return None
    if rows.count == 0:
        return _Plan(0, None)
    cut = config.nll_fwd_bwd(rows.vocab, itemsize, place is not None and softcap is not None)
    splits = config.ceil_div(rows.vocab, cut.span)
    keep = spread = z_loss = None
    if total is not None:
        smoothing, z_loss = total.label_smoothing, total.z_loss or None
        if smoothing:
            keep, spread = 1.0 - smoothing, smoothing / rows.vocab
    values = rows.count * (splits if spread is not None else 1)
    if not program_exchange.may_wait(splits, device) or (total and values > MAX_PARTS):
        return None
    d_rows = rows if place is None else rows.written_to(place)
    number = () if temperature is None else (temperature,)
    stride_h = D = None
    if copied is not None:
        (_, D), (stride_h, stride_d), _ = copied
        stride_h = stride_h if stride_d == 1 else D  # `TotalLaunch` makes the rows contiguous
    block_p = 0 if splits == 1 else 32 if splits <= 32 else MAX_PROGRAMS
    launch = Launch(
        _nll_fwd_bwd_kernel, (rows.count * splits,),
        (
            *number, *rows.strides, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab,
            splits, stride_h, D, softcap, ignore_index, keep, spread, z_loss,
        ),
        num_warps=cut.num_warps,
        CONSTANTS=_Constants(
            d_rows.aligned, rows.aligned_like(d_rows), COEFFICIENTS * coefs_per_row,
            int(factor_per_row), rows.starts_aligned,
            ("a", "label") if spread is None else ("a", "label", "total"), total is not None,
            total is not None and total.mean, cut.span, cut.block_v, block_p,
            0 if D is None else columns_per_block(D),
        ),
    )  # fmt: skip
    words = rows.count * splits if splits > 1 or total else 0
    if total:  # one integer for FINISHED, and one integer for every two numbers of VALUES
        words += 1 + config.ceil_div(values, 2)
    return _Plan(program_exchange.piece_of(words) if words else 0, launch)


@made_once
def a_number(device: torch.device) -> Tensor:
    return torch.empty((), device=device, dtype=torch.float32)


def one_pass(
    x: Tensor,  # (..., V)
    reading: Reading,
    coefficients: Coefficients,  # "a" and "label"
    factor: Tensor | None,  # one number, or one number per row
    into: Tensor,  # output: x, or a tensor in other memory (see `Place` in layout.py)
    total: Total | None = None,
) -> Tensor | None:
    """Returns -log p of each row's label, and writes the gradient times `factor` to `into`.

    With `total`, it is that number, and its gradient. The result is None, and nothing is written,
    if one pass is not possible: x has no (B, T, V) view with contiguous rows (layout.py), the
    programs of a row may not wait for each other (program_exchange.py), or a total has no rows or
    too many (MAX_COUNTED and MAX_PARTS).
    """
    temperature, device = reading.row_temperature, x.device
    over_logits = into is x or into.data_ptr() == x.data_ptr()
    factor_per_row = factor is not None and any(factor.stride())
    plan = nll_fwd_bwd_plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), device,
        None if over_logits else place_of(into), options_of(reading),
        coefficients.rows.shape[0] > 1, factor_per_row, total, None,
        program_exchange.WAITING, config.revision,
    )  # fmt: skip
    if plan is None:
        return None
    label = reading.label.contiguous()
    # torch.empty_like takes half the time of torch.empty
    if total is not None:
        nll = torch.empty_like(a_number[device])
    else:
        nll = torch.empty_like(label, dtype=torch.float32)
    if plan.launch is None:  # no rows
        return nll
    exchange = None
    if plan.exchange_words:
        exchange = program_exchange.zeros(plan.exchange_words, x)
    plan.launch(
        x, label, coefficients.rows, factor.contiguous() if factor_per_row else factor, None,
        None if over_logits else into, nll, None, exchange,
        *(() if temperature is None else (temperature.contiguous(),)),
    )  # fmt: skip
    return nll


def plan_total(
    total: Total,
    rows: int,
    stride: int,  # the number of elements between two rows of logits
    reading: Reading,
    coefficients: Coefficients,  # "a" and "label", the same numbers for all rows
    hidden: Tensor,  # (N, D), the hidden states of a head
    copies: bool,
) -> "TotalLaunch | None":
    """Returns a launch of `one_pass` with `total` for a small head, or None if not possible.

    The gradient overwrites the logits, which have the dtype of `hidden`. With `copies`, the launch
    also copies the hidden states. While its attribute `is_current` is True, it can be called again
    with x (rows, V) of the same stride and the dtype of `hidden`, on a 16-byte boundary, and with
    `hidden` of the same shape, strides, dtype and address modulo 16.
    """
    # without ignored rows, the copy would equal `hidden`
    copied = None
    if copies and reading.ignore_index is not None:
        copied = (hidden.shape, hidden.stride(), hidden.data_ptr() % 16)
    plan = nll_fwd_bwd_plan(
        (rows, reading.vocab), (stride, 1), 0, hidden.element_size(), hidden.device, None,
        options_of(reading), False, False, total, copied, program_exchange.WAITING, config.revision,
    )  # fmt: skip
    return None if plan is None else TotalLaunch(plan, coefficients.rows, copied is not None)


class TotalLaunch:
    """The mean or sum over the rows of a small head's logits, and its gradient, in one launch."""

    def __init__(self, plan: Any, coefficients: Tensor, copies: bool):
        self.launch, self.words, self.copies = plan.launch, plan.exchange_words, copies
        self.coefficients, self.revision = coefficients, config.revision
        self.number = a_number[coefficients.device]

    @property
    def is_current(self) -> bool:
        """Whether the Configs are unchanged since the launch was planned (see `revision`)."""
        return self.revision == config.revision

    def __call__(
        self, x: Tensor, hidden: Tensor, label: Tensor, temperature: Tensor | None = None
    ) -> tuple[tuple[Tensor], Tensor, Tensor]:
        """Returns (number,), its gradient, which overwrites x, and `hidden` or its copy.

        The copy is 0 in ignored rows. `temperature` is the reading's `row_temperature`.
        """
        value = torch.empty_like(self.number)
        source = copy = None
        if self.copies:
            source, copy = with_memory_of_copy(hidden)
        self.launch(
            x, label.contiguous(), self.coefficients, None, source, None, value, copy,
            program_exchange.zeros(self.words, x),
            *(() if temperature is None else (temperature.contiguous(),)),
        )  # fmt: skip
        return (value,), x, hidden if copy is None else copy
