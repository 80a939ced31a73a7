"""Draws ids from softmax(z)^proposal of each row, by the method of eager/columns.py.

The first kernel sums the masses of each span of SPAN columns: the programs of a row exchange their
maxima (program_exchange.py), and read their columns again, from the L1 cache. PyTorch finds the
span of each draw, of which the second kernel finds the column. The third counts equal ids.

A mass, of up to 41 bits, is held as two 32-bit integers, whose sums over the short span fit into 32
bits and have no rounding errors. So spans can begin anywhere, and do on 16-byte boundaries.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract
from ...contract import Reading
from ...eager.sampled import Parts, Sampling, distinct, draw
from .. import config
from ..at_ids.topk import read_block
from ..launch import launch
from ..layout import row_offset, rows_of
from ..numerics import INF, LOG2E
from ..profiling import nothing, profiled
from ..program_exchange import MAX_PROGRAMS, collect, may_wait, piece_of, publish, zeros
from ..statistics.forward import partial

SPAN = 512  # columns per sum
SPANS = 2  # spans per block; a program reads one block at a time
RESIDENT = 16  # number of programs that a multiprocessor runs at once
DRAWS = 4  # draws per program of the second kernel
UP, REST = tl.constexpr(0x4B000000), tl.constexpr(0x4B400000)  # the bits of 2^23 and of 1.5 · 2^23
RESTS = tl.constexpr(-(1 << 31))  # lowest 32 bits of SPAN · REST; for SPAN · UP, these bits are 0


@triton.jit
def _mass_bits(y, top, rate):
    """Returns two integers, UP + high and REST + low.

    The mass is high · 2^20 + low = round(2^40 · e^((y - top) · rate)). As all fp32 numbers from
    2^23 to 2^24 are integers, adding 2^23 rounds a smaller positive number into the lowest bits,
    faster than a conversion; `low` can be negative, so 1.5 · 2^23 is added. The results are
    arbitrary if y or `top` is NaN, or both are infinite.
    """
    x = tl.exp2((y - top) * (rate * LOG2E) + 20.0)
    up = x + 8388608.0
    rest = (x - (up - 8388608.0)) * 1048576.0 + 12582912.0
    return up.to(tl.int32, bitcast=True), rest.to(tl.int32, bitcast=True)


@triton.jit
def _max_of(Xrow, first, last, early, V, softcap, BLOCK_V: tl.constexpr):
    """Returns the max of y over the blocks [first, last), or NaN if one of these logits is NaN."""
    acc = tl.full((BLOCK_V,), -INF, tl.float32)
    for block in range(first, last):
        _, y = read_block(Xrow, block * BLOCK_V - early, V, softcap, BLOCK_V)
        acc = tl.maximum(acc, y, propagate_nan=tl.PropagateNan.ALL)
    nan = tl.max((acc != acc).to(tl.int32), axis=0) != 0
    return tl.where(nan, float("nan"), tl.max(tl.where(acc != acc, -INF, acc), axis=0))


@triton.jit(
    **profiled("sample_sums"),
    do_not_specialize=["rows_t", "lead", "spans", "per_program", "splits"],
)
def _sample_sums_kernel(
    X,  # input
    TOP,  # the max of each row: an input, or an output if EXCHANGE is not None
    SUMS,  # output (N, spans)
    EXCHANGE,  # (N, splits), initially 0, or None
    rows_t, stride_xb, stride_xt, lead, V, spans, per_program, splits,  # sizes
    rate, softcap,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Each program reads `per_program` blocks of one row. A row has `splits` programs."""
    BLOCK_V: tl.constexpr = SPANS * SPAN
    row, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    early = 0  # the first span begins `early` columns before the row
    if not ALIGNED:
        early = ((lead + offset) % PACK).to(tl.int32)
    first = split * per_program
    last = tl.minimum(first + per_program, tl.cdiv(spans, SPANS))
    if EXCHANGE is not None:
        own = _max_of(X + offset, first, last, early, V, softcap, BLOCK_V)
        at = EXCHANGE + row.to(tl.int64) * splits
        publish(at + split, tl.where(own != own, -INF, own), tl.where(own != own, own, 1.0))
        top, s = collect(at, splits, 0.0, BLOCK_P)
        top = tl.where(s != s, s, top)
        if split == 0:
            tl.store(TOP + row, top)
    else:
        top = tl.load(TOP + row)
    for block in range(first, last):
        _, y = read_block(X + offset, block * BLOCK_V - early, V, softcap, BLOCK_V)
        up, rest = _mass_bits(y, top, rate)
        # the sums overflow but keep their lowest 32 bits, enough for those of `high` and `low`
        high = tl.sum(tl.reshape(up, (SPANS, SPAN)), axis=1)
        low = tl.sum(tl.reshape(rest, (SPANS, SPAN)), axis=1) ^ RESTS
        span = block * SPANS + tl.arange(0, SPANS)
        mass = high.to(tl.int64) * 1048576 + low
        tl.store(SUMS + row.to(tl.int64) * spans + span, mass, mask=span < spans)


@triton.jit(
    **profiled("sample_columns", X=nothing),
    do_not_specialize=["rows_t", "lead", "spans", "n"],
)
def _sample_columns_kernel(
    X, TOP, ENDS, SPANS, TARGETS,  # inputs
    COLUMNS, RELATIVE,  # outputs; RELATIVE can be None
    rows_t, stride_xb, stride_xt, lead, V, spans, n,  # sizes
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
        span = tl.load(SPANS + at).to(tl.int32)
        begin = span * SPAN - early
        before = tl.load(ENDS + row.to(tl.int64) * spans + span - 1, mask=span > 0, other=0)
        rest = tl.load(TARGETS + at) - before
        _, y = read_block(X + offset, begin, V, softcap, SPAN)
        up, low = _mass_bits(y, top, rate)
        mass = (up - UP).to(tl.int64) * 1048576 + (low - REST)
        passed = tl.sum((tl.cumsum(mass, axis=0) <= rest).to(tl.int32), axis=0)
        # with NaN or +inf, masses are arbitrary, and `begin + passed` can be outside the row
        tl.store(COLUMNS + at, tl.minimum(tl.maximum(begin + passed, 0), V - 1).to(tl.int64))
        if RELATIVE is not None:
            tl.store(RELATIVE + at, tl.sum(tl.where(offs == passed, y - top, 0.0), axis=0))


@triton.jit(**profiled("sample_counts"), do_not_specialize=["n"])
def _sample_counts_kernel(
    DRAWN, TOP,  # inputs (N, n) and (N,)
    IDS, WEIGHTS, MASK,  # outputs (N, n)
    n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes a row's distinct ids, with log(count / n) as in `logprobs_of_counts`."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(TOP + row)
    offs = tl.arange(0, BLOCK)
    inside = offs < n
    ids = tl.load(DRAWN + row * n + offs, mask=inside, other=-1)
    left = tl.load(DRAWN + row * n + offs - 1, mask=inside & (offs > 0), other=-1)
    right = tl.load(DRAWN + row * n + offs + 1, mask=offs + 1 < n, other=-1)
    begins = inside & (ids != left)
    ends = inside & (ids != right)
    slot = tl.cumsum(begins.to(tl.int32), axis=0) - 1
    count = offs - tl.associative_scan(tl.where(begins, offs, 0), 0, _larger) + 1
    weight = tl.log(count.to(tl.float64) / n).to(tl.float32)
    found = tl.where(tl.abs(top) < INF, tl.sum(begins.to(tl.int32), axis=0), 0)
    written = ends & (slot < found)
    tl.store(IDS + row * n + slot, ids, mask=written)
    tl.store(WEIGHTS + row * n + slot, weight, mask=written)
    tl.store(MASK + row * n + slot, tl.full((BLOCK,), 1, tl.int8), mask=written)
    # the other slots are masked, but not the first of a row with NaN or +inf
    rest = inside & (offs >= found)
    nan = offs < tl.where((top != top) | (top == INF), 1, 0)
    tl.store(IDS + row * n + offs, tl.zeros((BLOCK,), tl.int64), mask=rest)
    tl.store(WEIGHTS + row * n + offs, tl.where(nan, float("nan"), -INF), mask=rest)
    tl.store(MASK + row * n + offs, nan.to(tl.int8), mask=rest)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


def sampled(
    x: Tensor,  # (..., V)
    uniforms: Tensor,  # (N, n), fp64 in [0, 1], in ascending order
    how: Sampling,
    join: Callable[[Tensor], Tensor] | None = None,
    start: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `sampled` in eager/, but invariant to the batch even without `how.invariant`."""
    return draw(Parts(_top, _ends, _columns, _distinct), x, uniforms, how, join, start)


def _top(x: Tensor, how: Sampling) -> Tensor:
    state = partial(x, Reading(x.shape[-1], softcap=how.softcap)).state
    top, s = state[..., contract.M].amax(1), state[..., contract.S].sum(1)
    return torch.where(s.isnan() & (top != torch.inf), torch.nan, top)


def _ends(x: Tensor, top: Tensor | None, how: Sampling) -> tuple[Tensor, Tensor]:
    flat, rows = rows_of(x)
    early = 0 if rows.aligned else rows.pack - 1
    spans = config.ceil_div(rows.vocab + early, SPAN)
    blocks = config.ceil_div(spans, SPANS)
    splits = 1 if x.device.type == "cpu" else min(blocks, MAX_PROGRAMS)
    exchange = None
    if top is None and may_wait(splits, x.device):
        top = torch.empty(rows.count, device=x.device, dtype=torch.float32)
        exchange = zeros(piece_of(rows.count * splits), x)
    else:
        top = _top(x, how) if top is None else top
        splits = min(config.ceil_div(RESIDENT * config.processors(x.device), rows.count), blocks)
    sums = torch.empty((rows.count, spans), device=x.device, dtype=torch.int64)
    launch(
        _sample_sums_kernel, (rows.count * splits,), (flat, top, sums, exchange),
        (
            *rows.strides, rows.lead, rows.vocab, spans, config.ceil_div(blocks, splits), splits,
            how.rate, how.softcap,
        ),
        num_warps=1, PACK=rows.pack, ALIGNED=rows.aligned, SPAN=SPAN, SPANS=SPANS,
        BLOCK_P=config.ceil_pow2(splits),
    )  # fmt: skip
    return sums.cumsum(1), top


def _columns(
    x: Tensor, top: Tensor, how: Sampling, ends: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    x, rows = rows_of(x)
    spans = torch.searchsorted(ends, targets, right=True).clamp_max_(ends.shape[1] - 1)
    at = torch.empty_like(targets)
    relative = None
    if how.proposal != 1:
        relative = torch.empty(targets.shape, device=x.device, dtype=torch.float32)
    n = targets.shape[1]
    launch(
        _sample_columns_kernel, (rows.count, config.ceil_div(n, DRAWS)),
        (x, top, ends, spans, targets, at, relative),
        (*rows.strides, rows.lead, rows.vocab, ends.shape[1], n, how.rate, how.softcap),
        num_warps=1, PACK=rows.pack, ALIGNED=rows.aligned, SPAN=SPAN, DRAWS=DRAWS,
    )  # fmt: skip
    return at, relative


def _distinct(
    drawn: Tensor, relative: Tensor | None, top: Tensor, how: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    N, n = drawn.shape
    if relative is not None or N == 0:
        return distinct(drawn, relative, top, how)
    found = (
        torch.empty_like(drawn),
        torch.empty(drawn.shape, device=drawn.device, dtype=torch.float32),
        torch.empty(drawn.shape, device=drawn.device, dtype=torch.bool),
    )
    ids, weights, mask = found
    launch(
        _sample_counts_kernel, (N,),
        (drawn.contiguous(), top, ids, weights, mask.view(torch.int8)), (n,),
        num_warps=1, BLOCK=config.ceil_pow2(n),
    )  # fmt: skip
    return found
