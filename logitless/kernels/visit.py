"""Statistics and gradient in one visit: each logit read from memory once, and written over once.

A row is shared out to several programs. Each folds its part into (m, s), leaves that where the
row's other programs can see it, waits for theirs, and then rewrites its part with the gradient: the
second look at the part is served by the cache next to the processor, which still holds it.

Waiting is safe because programs start in order, and the programs of one row fit on the GPU together
many times over: the row that started first always has all of its programs running.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .rows import (
    LOG2E,
    capped,
    finite,
    fringe_tile,
    inverse_temperature,
    move,
    row_offset,
    split_row,
)
from .stats_bwd import dx_id, dx_tile, row_terms, zero_tile
from .stats_fwd import fold_span
from .view import Rows, rows_of

EMPTY = tl.constexpr(-(0x00800000 << 32))  # (-inf, 0): what a program that isn't there leaves
MAX_PARTS = 64


@triton.jit
def leave(at, m, s):
    """Leave a state as one word, written whole; never 0, for s = 0 only where m = -inf."""
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def meet(at, parts, rate, BLOCK_P: tl.constexpr):
    """(m, s) of the whole row, when every part has left its own."""
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < parts
    # The last part started last: watching it alone keeps the watching out of the cache's way.
    last = tl.load(at + parts - 1, volatile=True)
    while last == 0:
        last = tl.load(at + parts - 1, volatile=True)
    word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    while tl.min((word != 0).to(tl.int32), axis=0) == 0:
        word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    m_p = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    s_p = word.to(tl.int32).to(tl.float32, bitcast=True)
    m = tl.max(m_p, axis=0)
    return m, tl.sum(s_p * tl.exp2(move(m_p, m, s_p) * rate), axis=0)


@triton.jit(do_not_specialize=["rows_t", "lead", "parts"])
def _visit_kernel(
    X, IDS, TEMP, G_ID,  # inputs; X is the output too
    LSE, PICKED, MEETING,  # outputs; MEETING (rows, parts) starts as zeros
    rows_t, stride_xb, stride_xt, lead, V, parts, step_g,  # sizes
    temperature, softcap, ignore_index,  # options
    PACK: tl.constexpr, ALIGNED: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One program a part of a row: SPAN columns of its body; the fringe goes with the first."""
    pid = tl.program_id(0)
    row = pid // parts
    lo = pid % parts * SPAN
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    Xrow = X + offset
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xbody = tl.multiple_of(Xrow + head, 16)
    hi = tl.multiple_of(tl.minimum(lo + SPAN, body), PACK)
    offs = tl.arange(0, BLOCK_V)
    id = tl.load(IDS + row)
    if ignore_index is not None:
        if id == ignore_index:
            for start in range(lo, hi, BLOCK_V):
                zero_tile(Xbody, start + offs, start + offs < hi)
            if lo == 0:
                ends, mask_ends = fringe_tile(head, body, V, PACK)
                zero_tile(Xrow, ends, mask_ends)
                tl.store(PICKED + row, 0.0)
                tl.store(LSE + row, 0.0)
            return

    inv_t = inverse_temperature(TEMP, temperature, row)
    rate = inv_t * LOG2E
    m, s, _, _, _, _, _ = fold_span(
        Xrow, None, offset, V, lead, lo, hi, 0.0, rate, softcap,
        False, False, False, PACK, ALIGNED, BLOCK_V,
    )  # fmt: skip
    # Whose part holds the target reads it now, before it is overwritten.
    column = id - head
    mine = (column >= lo) & (column < hi)
    if lo == 0:
        mine = mine | (column < 0) | (column >= body)
    inside = (id >= 0) & (id < V)
    x_id = tl.load(Xrow + id, mask=mine & inside, other=0.0)
    y_id, _ = capped(x_id, softcap)

    g_id = tl.load(G_ID + row * step_g)
    at = MEETING + row.to(tl.int64) * parts
    leave(at + pid % parts, m, s)
    m, s = meet(at, parts, rate, BLOCK_P)

    shift = finite(m)
    log_s = tl.log(s)
    log_p = tl.where(inside, (y_id - shift) * inv_t - log_s, float("nan"))
    tl.store(PICKED + row, log_p, mask=mine)
    tl.store(LSE + row, shift * inv_t + log_s, mask=lo == 0)
    shift, c0, _, g_id, _, id = row_terms(
        shift, log_s, 0.0, 0.0, g_id, 0.0, inv_t, id, V, True, True
    )
    for start in range(lo, hi, BLOCK_V):
        dx_tile(
            Xbody, None, Xbody, start + offs, start + offs < hi,
            shift, c0, 0.0, 0.0, 0.0, rate, softcap, False, False, False,
        )  # fmt: skip
    if not ALIGNED:
        if lo == 0:
            ends, mask_ends = fringe_tile(head, body, V, PACK)
            dx_tile(
                Xrow, None, Xrow, ends, mask_ends,
                shift, c0, 0.0, 0.0, 0.0, rate, softcap, False, False, False,
            )  # fmt: skip
    if mine & inside:
        dx_id(x_id, None, Xrow, id, shift, c0, 0.0, g_id, 0.0, rate, softcap, False)


def can_visit(x: Tensor) -> bool:
    """Whether a row's programs are few enough to wait for each other, and run at the same time.

    The interpreter's do not: it runs one after another.
    """
    span = config.visit(x.shape[-1], x.element_size()).span
    parts = config.ceil_div(x.shape[-1], span)
    return parts == 1 or (parts <= MAX_PARTS and x.device.type != "cpu")


def visit(
    x: Tensor,  # (..., V), overwritten with its gradient
    ids: Tensor,  # (...)
    weight: None,
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,
    outside: None,
    plain: bool,
    g_id: Tensor,  # (...), or one number for all
) -> tuple[Tensor, Tensor]:
    """lse and log p[ids], (...), while x becomes dz_i = g_id ([i = id] - p_i), times dz/dx."""
    assert normalised
    assert weight is None
    assert outside is None
    assert not plain
    lse = torch.empty(ids.shape, device=x.device, dtype=torch.float32)
    picked = torch.empty_like(lse)
    if x.numel() == 0:
        return lse, picked
    ids, row_temperature, g_id = (
        None if t is None else t.contiguous() for t in (ids, row_temperature, g_id)
    )
    into, rows = rows_of(x)
    cut = config.visit(rows.vocab, rows.itemsize)
    parts = config.ceil_div(rows.vocab, cut.span)
    meeting = torch.zeros((rows.count, parts), device=x.device, dtype=torch.int64)
    alike = g_id.dim() == 0
    _plan(rows, parts, alike, temperature, softcap, ignore_index, cut)(
        into, ids, row_temperature, g_id, lse, picked, meeting
    )
    if into.data_ptr() != x.data_ptr():  # a copy, for want of strides
        x.copy_(into)
    return lse, picked


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, parts: int, alike: bool, temperature: float, softcap: float | None,
    ignore_index: int | None, cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        _visit_kernel, (rows.count * parts,),
        (
            *rows.where, rows.lead, rows.vocab, parts, 0 if alike else 1,
            temperature, softcap, ignore_index,
        ),
        num_warps=cut.num_warps, PACK=rows.pack, ALIGNED=rows.aligned,
        SPAN=cut.span, BLOCK_V=cut.block_v, BLOCK_P=32 if parts <= 32 else MAX_PARTS,
    )  # fmt: skip
