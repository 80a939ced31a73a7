"""Ids drawn at random from softmax(z)^proposal of each row.

eager/sampled.py describes the draws, and has the part of the algorithm that both backends share.
Two kernels read logits. The first kernel writes the sum of the masses of each span of SPAN columns.
PyTorch finds the span of each draw in the cumulative sums of a row. The second kernel reads only
the spans of the draws, and finds the column of each draw.

A mass is an integer of up to 41 bits. Kernels hold a mass as two 32-bit integers, and one span is
so short that the sums of these integers fit into 32 bits. The sums have no rounding errors, so a
span can begin at any column. Spans begin on 16-byte boundaries.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import contract
from ..contract import Reading
from ..eager.sampled import Parts, Sampling, draw
from . import config
from .launch import REMEMBERED, Launch
from .layout import Rows, row_offset, rows_of
from .numerics import LOG2E
from .profiling import nothing, profiled
from .stats_split_fwd import partial
from .topk_stream import read_block

SPAN = 512  # columns per sum
RESIDENT = 32  # number of programs that a multiprocessor runs at once
DRAWS = 8  # draws per program


@triton.jit
def _mass(y, top, rate):
    """Returns (high, low), where high · 2^20 + low is round(2^40 · e^((y - top) · rate)).

    fp32 numbers from 2^23 to 2^24 are integers. Adding 2^23 to a smaller number therefore rounds
    the number to an integer, and the lowest bits of the sum hold this integer. This rounding takes
    less time than a conversion. `low` can be negative, so 1.5 · 2^23 is added instead of 2^23. If y
    or `top` is NaN, the result is 2^40, so that sums stay in range.
    """
    below = y - top
    x = tl.where(below < 0, tl.exp2(below * (rate * LOG2E)), 1.0) * 1048576.0
    up = x + 8388608.0
    rest = (x - (up - 8388608.0)) * 1048576.0 + 12582912.0
    high = up.to(tl.int32, bitcast=True) - 0x4B000000
    low = rest.to(tl.int32, bitcast=True) - 0x4B400000
    return high, low


@triton.jit(
    **profiled("sample_sums"),
    do_not_specialize=["rows_t", "lead", "spans", "per_program"],
)
def _sample_sums_kernel(
    X, TOP,  # inputs
    SUMS,  # output (N, spans)
    rows_t, stride_xb, stride_xt, lead, V, spans, per_program,  # sizes
    rate, softcap,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Each program writes `per_program` sums of one row."""
    row = tl.program_id(0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    early = 0  # the number of columns by which the first span begins before the row
    if not ALIGNED:
        early = ((lead + offset) % PACK).to(tl.int32)
    top = tl.load(TOP + row)
    first = tl.program_id(1) * per_program
    for span in range(first, tl.minimum(first + per_program, spans)):
        _, y = read_block(X + offset, span * SPAN - early, V, softcap, SPAN)
        high, low = _mass(y, top, rate)
        mass = tl.sum(high, axis=0).to(tl.int64) * 1048576 + tl.sum(low, axis=0)
        tl.store(SUMS + row.to(tl.int64) * spans + span, mass)


@triton.jit(
    **profiled("sample_columns", X=nothing),
    do_not_specialize=["rows_t", "lead", "n"],
)
def _sample_columns_kernel(
    X, TOP, SPANS, RESTS,  # inputs
    COLUMNS, RELATIVE,  # outputs
    rows_t, stride_xb, stride_xt, lead, V, n,  # sizes
    rate, softcap,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Each program finds the columns of DRAWS draws of one row."""
    row = tl.program_id(0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    early = 0
    if not ALIGNED:
        early = ((lead + offset) % PACK).to(tl.int32)
    top = tl.load(TOP + row)
    offs = tl.arange(0, SPAN)
    first = tl.program_id(1) * DRAWS
    for number in range(first, tl.minimum(first + DRAWS, n)):
        at = row.to(tl.int64) * n + number
        begin = tl.load(SPANS + at).to(tl.int32) * SPAN - early
        rest = tl.load(RESTS + at)
        _, y = read_block(X + offset, begin, V, softcap, SPAN)
        high, low = _mass(y, top, rate)
        mass = high.to(tl.int64) * 1048576 + low
        passed = tl.sum((tl.cumsum(mass, axis=0) <= rest).to(tl.int32), axis=0)
        # The minimum is needed only for rows with NaN or +inf, whose sums are not masses.
        chosen = tl.minimum(passed, tl.max(tl.where(mass > 0, offs, 0), axis=0))
        tl.store(COLUMNS + at, tl.minimum(tl.maximum(begin + chosen, 0), V - 1).to(tl.int64))
        tl.store(RELATIVE + at, tl.sum(tl.where(offs == chosen, y - top, 0.0), axis=0))


def sampled(
    x: Tensor,  # (..., V)
    uniforms: Tensor,  # (N, n), fp64 in [0, 1), in ascending order
    how: Sampling,
    join: Callable[[Tensor], Tensor] | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, log-weights and a mask of the distinct ids that are drawn.

    The results of a row have the same bits in every batch, even if `how.invariant` is False.
    """
    return draw(Parts(_top, _sums, _columns), x, uniforms, how, join, start)


def _top(x: Tensor, how: Sampling) -> Tensor:
    """Returns the max of y of each row. The max is NaN if a logit of the row is NaN."""
    state = partial(x, Reading(x.shape[-1], softcap=how.softcap)).state
    top, s = state[..., contract.M].amax(1), state[..., contract.S].sum(1)
    return torch.where(s.isnan() & (top != torch.inf), torch.nan, top)


def _sums(x: Tensor, top: Tensor, how: Sampling) -> Tensor:
    x, rows = rows_of(x)
    launch, spans = _sums_plan(rows, how.rate, how.softcap, config.processors(x.device))
    sums = torch.empty((rows.count, spans), device=x.device, dtype=torch.int64)
    launch(x, top, sums)
    return sums


def _columns(
    x: Tensor, top: Tensor, how: Sampling, sums: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    x, rows = rows_of(x)
    ends = sums.cumsum(1)
    spans = torch.searchsorted(ends, targets, right=True).clamp_max(sums.shape[1] - 1)
    rests = targets - (ends - sums).gather(1, spans)
    at = torch.empty_like(targets)
    relative = torch.empty(targets.shape, device=x.device, dtype=torch.float32)
    launch = _columns_plan(rows, how.rate, how.softcap, targets.shape[1])
    launch(x, top, spans, rests, at, relative)
    return at, relative


@functools.lru_cache(REMEMBERED)
def _sums_plan(
    rows: Rows, rate: float, softcap: float | None, processors: int
) -> tuple[Launch, int]:
    """Returns the launch of _sample_sums_kernel, and the number of spans per row."""
    early = 0 if rows.aligned else rows.pack - 1
    spans = config.ceil_div(rows.vocab + early, SPAN)
    splits = min(config.ceil_div(RESIDENT * processors, rows.count), spans)
    per_program = config.ceil_div(spans, splits)
    return Launch(
        _sample_sums_kernel, (rows.count, config.ceil_div(spans, per_program)),
        (*rows.strides, rows.lead, rows.vocab, spans, per_program, rate, softcap),
        num_warps=1, PACK=rows.pack, ALIGNED=rows.aligned, SPAN=SPAN,
    ), spans  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _columns_plan(rows: Rows, rate: float, softcap: float | None, n: int) -> Launch:
    return Launch(
        _sample_columns_kernel, (rows.count, config.ceil_div(n, DRAWS)),
        (*rows.strides, rows.lead, rows.vocab, n, rate, softcap),
        num_warps=1, PACK=rows.pack, ALIGNED=rows.aligned, SPAN=SPAN, DRAWS=DRAWS,
    )  # fmt: skip
