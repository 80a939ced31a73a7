"""The gradients of a narrow head (see tile.py), computed without logits in memory.

For the hidden states, each program keeps a tile of rows and loops over tiles of columns; for weight
and bias, the same kernel keeps a tile of columns and loops over tiles of rows. For every tile, it
computes the logits again and their gradient (statistics/gradient_tile.py), adds the terms of the
label and the ids (terms.py), rounds to the dtype of the hidden states, and multiplies by the weight
or by the hidden states, with fp32 sums. The bias sums the gradient before the rounding.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import Coefficients, Reading
from .. import config
from ..launch import field, launch
from ..layout import aligned
from ..numerics import INF, LOG2E, capped
from ..profiling import nothing, profiled
from ..statistics.gradient_tile import Terms, dz_of, uses
from .expected import Expected, hidden_from_expected
from .terms import (
    TERM_C0,
    TERM_C1,
    TERM_G_C,
    TERM_LOGPROB_T1,
    TERM_RATE,
    TERM_SHIFT,
    Pairs,
    Visits,
    next_place,
    order_by_columns,
    order_by_rows,
    terms_of,
    tiles_per_split,
)
from .tile import HeadLayout, dot, layout, layout_of, load_hidden, load_weight


@dataclass(frozen=True)
class _Constants:
    has: tuple[str, ...]  # names of the coefficients in use, and "second" if needed (see `uses`)
    layout: HeadLayout
    block_n: int
    block_v: int
    adds: bool = False  # whether the gradient is added to OUT; if not, OUT is overwritten


class _Pairs(NamedTuple):
    """Pointers to the tensors of `Pairs` and `Visits` (terms.py), None without pairs.

    A pair is the row and column of a label or an id. `count` is that of all pairs, `slots` per row.
    """

    PLACES: tl.tensor
    ENDS: tl.tensor
    INDEX: tl.tensor
    COLUMNS: tl.tensor
    G: tl.tensor
    count: tl.tensor
    slots: tl.tensor


@triton.jit
def _term(TERMS, N, rows, mask, FIELD: tl.constexpr, fill, AXIS: tl.constexpr, USED: tl.constexpr):
    """Loads a field of TERMS for some rows, with a new dimension AXIS; 0 if not USED."""
    if USED:
        if mask is None:
            t = tl.load(TERMS + FIELD * N + rows)
        else:
            t = tl.load(TERMS + FIELD * N + rows, mask=mask, other=fill)
        return tl.expand_dims(t, AXIS)
    else:
        return 0.0


@triton.jit
def _load_terms(TERMS, N, rows, mask, rate, AXIS: tl.constexpr, HAS: tl.constexpr):
    """Returns the Terms of some rows; where masked, they give a gradient of 0.

    `rate` is log2(e) / temperature, or None to load that of each row. `softcap` is an unused 0,
    because a function of Triton 3.6 cannot return None; `_gradient` takes it as an argument.
    """
    if rate is None:
        rate = _term(TERMS, N, rows, mask, TERM_RATE, 1.0, AXIS, True)
    return Terms(
        _term(TERMS, N, rows, mask, TERM_SHIFT, INF, AXIS, True),
        _term(TERMS, N, rows, mask, TERM_C0, 0.0, AXIS, True),
        _term(TERMS, N, rows, mask, TERM_C1, 0.0, AXIS, uses(HAS, "b")),
        _term(TERMS, N, rows, mask, TERM_LOGPROB_T1, 0.0, AXIS, uses(HAS, "second")),
        _term(TERMS, N, rows, mask, TERM_G_C, 0.0, AXIS, uses(HAS, "total")),
        rate,
        0.0,
        0.0,
    )


@triton.jit
def _gradient(
    x, CLASS_WEIGHT, rows, cols, mask, terms, softcap, pairs, pair, place, here,
    HAS: tl.constexpr,
):  # fmt: skip
    """Returns the gradient of a tile of logits x, and the new values of `pair` and `place`.

    `rows` and `cols` broadcast with x. `pair` is the index of the next pair to add, `place` the
    place of its tile, and `here` that of x (see `Order` in terms.py).
    """
    y, slope = capped(x, softcap)
    dz = dz_of(y, CLASS_WEIGHT, cols, mask, terms.c0, 0.0, terms, HAS)
    if pairs.PLACES is not None:
        if place == here:
            end = tl.load(pairs.ENDS + pair)
            for i in range(pair, end):
                at = tl.load(pairs.INDEX + i)
                is_row, g = rows == (at // pairs.slots).to(tl.int32), tl.load(pairs.G + at)
                is_column = cols == tl.load(pairs.COLUMNS + at)
                dz += tl.where(is_row & is_column, g, 0.0)
            pair = end
            place = next_place(pairs.PLACES, pair, pairs.count)
    return dz * slope, pair, place


class _Head(NamedTuple):
    """What the tiles of rows and of columns are read from, and the gradients that are needed."""

    HIDDEN: tl.tensor
    WEIGHT: tl.tensor
    BIAS: tl.tensor  # a pointer or None
    CLASS_WEIGHT: tl.tensor  # a pointer or None
    TERMS: tl.tensor
    OUT: tl.tensor  # a pointer or None
    OUT_BIAS: tl.tensor  # a pointer or None
    pairs: _Pairs
    N: tl.tensor
    V: tl.tensor
    rate: tl.tensor  # a number or None
    softcap: tl.tensor  # a number or None
    begin: tl.tensor  # the place of the program's first tile of logits (see `Order` in terms.py)


@triton.jit
def _rows_at(head, start, AXIS: tl.constexpr, WHOLE: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns a tile of hidden states, and its rows and Terms with a new dimension AXIS."""
    h = load_hidden(head.HIDDEN, start, head.N, WHOLE, CONSTANTS)
    rows = start + tl.arange(0, field(CONSTANTS, "block_n"))
    HAS: tl.constexpr = field(CONSTANTS, "has")
    if WHOLE:
        terms = _load_terms(head.TERMS, head.N, rows, None, head.rate, AXIS, HAS)
    else:
        terms = _load_terms(head.TERMS, head.N, rows, rows < head.N, head.rate, AXIS, HAS)
    return h, tl.expand_dims(rows, AXIS), terms


@triton.jit
def _columns_at(head, start, AXIS: tl.constexpr, WHOLE: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns a tile of the weight, and its columns and biases with a new dimension AXIS."""
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    w = load_weight(head.WEIGHT, start, head.V, BLOCK_V, WHOLE, CONSTANTS)
    cols = tl.expand_dims(start + tl.arange(0, BLOCK_V), AXIS)
    bias = 0.0
    if head.BIAS is not None:
        if WHOLE:
            bias = tl.load(head.BIAS + cols).to(tl.float32)
        else:
            bias = tl.load(head.BIAS + cols, mask=cols < head.V, other=0.0).to(tl.float32)
    return w, cols, bias


@triton.jit
def _add_tile(
    acc, total, pair, place, held, head, start,
    WHOLE: tl.constexpr, HOLDS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of the held tile that of its logits with the tile at `start`.

    WHOLE: all of that tile is inside its matrix.
    """
    if HOLDS == "rows":
        h, rows, terms = held
        w, cols, bias = _columns_at(head, start, 0, WHOLE, CONSTANTS)
        here = head.begin + start // field(CONSTANTS, "block_v")
        x, other = dot(h, tl.trans(w), None), w
    else:
        w, cols, bias = held
        h, rows, terms = _rows_at(head, start, 0, WHOLE, CONSTANTS)
        here = head.begin + start // field(CONSTANTS, "block_n")
        x, other = dot(w, tl.trans(h), None), h
    if head.BIAS is not None:
        x += bias
    if HOLDS == "rows" and WHOLE:
        mask = None
    else:
        mask = cols < head.V
    dz, pair, place = _gradient(
        x, head.CLASS_WEIGHT, rows, cols, mask, terms, head.softcap, head.pairs, pair, place, here,
        field(CONSTANTS, "has"),
    )  # fmt: skip
    if HOLDS == "rows" and not WHOLE:
        dz = tl.where(mask, dz, 0.0)
    if head.OUT_BIAS is not None:
        total += tl.sum(dz, axis=1)
    if head.OUT is not None:
        acc = dot(dz.to(other.dtype), other, acc)
    return acc, total, pair, place


@triton.jit(
    **profiled("narrow_bwd", shows=("HOLDS",), COLUMNS=nothing, G=nothing),
    do_not_specialize=["N", "tiles", "pairs", "slots"],
    do_not_specialize_on_alignment=[
        "HIDDEN", "WEIGHT", "BIAS", "CLASS_WEIGHT", "OUT", "OUT_BIAS",
    ],
)  # fmt: skip
def _narrow_bwd_kernel(
    HIDDEN, WEIGHT, BIAS, CLASS_WEIGHT, TERMS, FIRST, PLACES, ENDS, INDEX, COLUMNS, G,  # inputs
    OUT, OUT_BIAS,  # outputs, (splits, N, D) or (V, D), and (V,); None if not needed
    N, V, tiles, stride_o, pairs, slots,  # sizes
    rate, softcap,
    HOLDS: tl.constexpr,  # "rows" or "columns"
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program holds a tile of rows or of columns, and adds up its gradient.

    Of rows, that of the hidden states over one split of `tiles` tiles of columns; of columns, that
    of weight and bias over all `tiles` tiles of rows.
    """
    ROWS: tl.constexpr = HOLDS == "rows"
    HELD: tl.constexpr = field(CONSTANTS, "block_n" if ROWS else "block_v")
    READ: tl.constexpr = field(CONSTANTS, "block_v" if ROWS else "block_n")
    BLOCK_D: tl.constexpr = layout(CONSTANTS, "block_d")
    D: tl.constexpr = layout(CONSTANTS, "width")
    split, splits, lo, hi, count = 0, 1, 0, N, V
    if ROWS:
        split, splits, count = tl.program_id(1), tl.num_programs(1), N
        lo = tl.multiple_of(split * tiles * READ, READ)
        hi = tl.minimum(lo + tiles * READ, V)
    pair = tl.full((), 0, tl.int64)
    if PLACES is not None:
        pair = tl.load(FIRST + tl.program_id(0) * splits + split)
    head = _Head(
        HIDDEN, WEIGHT, BIAS, CLASS_WEIGHT, TERMS, OUT, OUT_BIAS,
        _Pairs(PLACES, ENDS, INDEX, COLUMNS, G, pairs, slots), N, V, rate, softcap,
        tl.program_id(0).to(tl.int64) * splits * tiles,
    )  # fmt: skip
    first = tl.program_id(0) * HELD
    if ROWS:
        held = _rows_at(head, first, 1, False, CONSTANTS)
    else:
        held = _columns_at(head, first, 1, False, CONSTANTS)
    place = next_place(PLACES, pair, pairs)
    acc = tl.zeros((HELD, BLOCK_D), tl.float32)
    total = tl.zeros((HELD,), tl.float32)
    whole = lo + tl.maximum(hi - lo, 0) // READ * READ
    for start in range(lo, whole, READ):
        acc, total, pair, place = _add_tile(
            acc, total, pair, place, held, head, start, True, HOLDS, CONSTANTS
        )
    if whole < hi:
        acc, total, pair, place = _add_tile(
            acc, total, pair, place, held, head, whole, False, HOLDS, CONSTANTS
        )
    offs, offs_d = first + tl.arange(0, HELD), tl.arange(0, BLOCK_D)
    if OUT_BIAS is not None:
        tl.store(OUT_BIAS + offs, total, mask=offs < count)
    if OUT is not None:
        if ROWS:
            OUT += split * tl.cast(N, tl.int64) * stride_o
        at = OUT + offs.to(tl.int64)[:, None] * stride_o + offs_d[None, :]
        mask = (offs < count)[:, None] & (offs_d < D)[None, :]
        if field(CONSTANTS, "adds"):
            acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(OUT.dtype.element_ty), mask=mask)


def narrow_gradients(
    hidden: Tensor,  # (N, D); the numbers in ignored rows must be finite
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None,  # one number, or one number per row
    d_hidden: Tensor | None,  # (N, D), contiguous
    d_weight: Tensor | None,  # (V, D), with contiguous rows
    d_bias: Tensor | None,  # (V,), fp32
    adds: bool = False,  # whether to add to d_weight; if not, d_weight is overwritten
    expected: Expected | None = None,  # sums that the forward kernel computed for d_hidden
) -> None:
    """Writes the gradients of a head to d_hidden, d_weight and d_bias, if not None."""
    (N, D), V, where = hidden.shape, len(weight), layout_of(hidden, weight)
    by_rows, by_columns = _cuts(hidden, V, where, reading, coefficients.has)
    orders = []
    if d_hidden is not None and expected is None:
        orders.append(order_by_rows(N, V, by_rows))
    if d_weight is not None or d_bias is not None:
        orders.append(order_by_columns(N, V, by_columns))
    terms, pairs, has = terms_of(reading, state, coefficients, upstream, factor, V, tuple(orders))
    visits = [_NONE] * len(orders)
    if pairs is not None:
        visits = [(*each, pairs.columns, pairs.g) for each in pairs.visits]
    class_weight = aligned(reading.class_weight) if "total" in has else None
    inputs = (hidden, weight, None if bias is None else bias.contiguous(), class_weight, terms)
    rate = None if reading.temperature is None else LOG2E.value / reading.temperature
    known = (*_sizes_of(pairs), rate, reading.softcap)
    if d_hidden is not None and expected is not None:
        assert pairs is not None  # see is_expected
        hidden_from_expected(expected, weight, terms, pairs, d_hidden)
    elif d_hidden is not None:
        out = d_hidden
        if by_rows.splits > 1:
            out = torch.empty((by_rows.splits, N, D), device=hidden.device, dtype=torch.float32)
        launch(
            _narrow_bwd_kernel, (config.ceil_div(N, by_rows.block_n), by_rows.splits),
            (*inputs, *visits[0], out, None), (N, V, tiles_per_split(V, by_rows), D, *known),
            num_warps=by_rows.num_warps, num_stages=by_rows.stages, registers=by_rows.registers,
            HOLDS="rows", CONSTANTS=_Constants(has, where, by_rows.block_n, by_rows.block_v),
        )  # fmt: skip
        if by_rows.splits > 1:
            d_hidden.copy_(out.sum(0))
    if d_weight is not None or d_bias is not None:
        step = 0 if d_weight is None else d_weight.stride(0)
        tiles = config.ceil_div(N, by_columns.block_n)
        launch(
            _narrow_bwd_kernel, (config.ceil_div(V, by_columns.block_v),),
            (*inputs, *visits[-1], d_weight, d_bias), (N, V, tiles, step, *known),
            num_warps=by_columns.num_warps, num_stages=by_columns.stages,
            registers=by_columns.registers, HOLDS="columns",
            CONSTANTS=_Constants(has, where, by_columns.block_n, by_columns.block_v, adds),
        )  # fmt: skip


def _cuts(
    hidden: Tensor, V: int, where: HeadLayout, reading: Reading, has: tuple[str, ...]
) -> tuple[config.Config, config.Config]:
    """Returns the Configs of the kernel for d_hidden, and of the kernel for d_weight and d_bias."""
    (N, D), device = hidden.shape, hidden.device
    heavy = int(reading.softcap is not None or bool({"b", "total", "logprob_t1"} & {*has}))
    heavy += not where.aligned
    size = (where.block_d, hidden.element_size(), config.memory(device), heavy)
    by_rows = config.narrow("d_hidden", *size)
    by_rows = config.narrow_splits(by_rows, N, V, D, config.processors(device), config.NARROW_SUMS)
    return by_rows, config.narrow("d_weight", *size)


_NONE = (None,) * (len(Visits._fields) + 2)


def _sizes_of(pairs: Pairs | None) -> tuple[int, int]:
    return (0, 0) if pairs is None else (pairs.g.numel(), pairs.g.shape[1])
