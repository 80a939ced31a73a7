"""The gradients of a narrow head (see tile.py), computed without logits in memory.

In the kernel for the hidden states, each program keeps a tile of rows and loops over tiles of
columns; in that for weight and bias it is the other way round. For every tile, a program computes
the logits again and their gradient (statistics/gradient_tile.py), adds the terms of the label and
the ids (terms.py), rounds to the dtype of the hidden states, and multiplies by the weight or by the
hidden states, with fp32 sums. The bias sums the gradient before the rounding.
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
from .tile import HeadLayout, dot, layout, layout_of, load_hidden, load_weight, with_bias


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


class _Hidden(NamedTuple):
    """What a program for the hidden states of a tile of rows reads."""

    h: tl.tensor  # (rows, D)
    rows: tl.tensor  # (rows, 1)
    terms: Terms
    pairs: _Pairs
    WEIGHT: tl.tensor
    BIAS: tl.tensor  # a pointer or None
    CLASS_WEIGHT: tl.tensor  # a pointer or None
    V: tl.tensor
    softcap: tl.tensor  # a number or None
    begin: tl.tensor  # the place of the tile at column 0 (see `Order` in terms.py)


@triton.jit
def _add_columns(
    acc, pair, place, window, start, WHOLE: tl.constexpr, CONSTANTS: tl.constexpr
):  # fmt: skip
    """Adds one tile of columns, all < V if WHOLE, to `acc`, the gradient of the hidden states."""
    HAS: tl.constexpr = field(CONSTANTS, "has")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    w = load_weight(window.WEIGHT, start, window.V, BLOCK_V, WHOLE, CONSTANTS)
    cols = (start + tl.arange(0, BLOCK_V))[None, :]
    here = window.begin + start // BLOCK_V
    x = dot(window.h, tl.trans(w), None)
    if WHOLE:
        mask = None
    else:
        mask = cols < window.V
    dz, pair, place = _gradient(
        with_bias(x, window.BIAS, cols, mask), window.CLASS_WEIGHT, window.rows, cols, mask,
        window.terms, window.softcap, window.pairs, pair, place, here, HAS,
    )  # fmt: skip
    if not WHOLE:
        dz = tl.where(mask, dz, 0.0)
    return dot(dz.to(w.dtype), w, acc), pair, place


@triton.jit(
    **profiled("narrow_hidden_bwd", COLUMNS=nothing, G=nothing),
    do_not_specialize=["N", "tiles", "pairs", "slots"],
    do_not_specialize_on_alignment=["HIDDEN", "WEIGHT", "BIAS", "CLASS_WEIGHT", "OUT"],
)  # fmt: skip
def _narrow_hidden_bwd_kernel(
    HIDDEN, WEIGHT, BIAS, CLASS_WEIGHT, TERMS, FIRST, PLACES, ENDS, INDEX, COLUMNS, G,  # inputs
    OUT,  # (splits, N, D)
    N, V, tiles, pairs, slots,  # sizes
    rate, softcap,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program sums the gradient of a tile of hidden states over one split of `tiles` tiles."""
    HAS: tl.constexpr = field(CONSTANTS, "has")
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    BLOCK_D: tl.constexpr = layout(CONSTANTS, "block_d")
    D: tl.constexpr = layout(CONSTANTS, "width")
    split, splits = tl.program_id(1), tl.num_programs(1)
    program = tl.program_id(0) * splits + split
    first = tl.program_id(0) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    h = load_hidden(HIDDEN, first, N, False, CONSTANTS)
    terms = _load_terms(TERMS, N, rows, rows < N, rate, 1, HAS)
    pair = tl.full((), 0, tl.int64)
    if PLACES is not None:
        pair = tl.load(FIRST + program)
    known = _Pairs(PLACES, ENDS, INDEX, COLUMNS, G, pairs, slots)
    window = _Hidden(
        h, rows[:, None], terms, known, WEIGHT, BIAS, CLASS_WEIGHT, V, softcap,
        tl.program_id(0).to(tl.int64) * splits * tiles,
    )  # fmt: skip
    place = next_place(known.PLACES, pair, known.count)
    acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    lo = tl.multiple_of(split * tiles * BLOCK_V, BLOCK_V)
    hi = tl.minimum(lo + tiles * BLOCK_V, V)
    whole = lo + tl.maximum(hi - lo, 0) // BLOCK_V * BLOCK_V
    for start in range(lo, whole, BLOCK_V):
        acc, pair, place = _add_columns(acc, pair, place, window, start, True, CONSTANTS)
    if whole < hi:
        acc, pair, place = _add_columns(acc, pair, place, window, whole, False, CONSTANTS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (rows < N)[:, None] & (offs_d < D)[None, :]
    at = (split * tl.cast(N, tl.int64) + rows)[:, None] * D + offs_d[None, :]
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=mask)


class _Weight(NamedTuple):
    """What a program for the weight and bias of a tile of columns reads."""

    w: tl.tensor  # (columns, D)
    cols: tl.tensor  # (columns, 1)
    mask: tl.tensor  # (columns, 1)
    bias: tl.tensor  # (columns, 1), 0 if the head has no bias
    pairs: _Pairs
    HIDDEN: tl.tensor
    CLASS_WEIGHT: tl.tensor  # a pointer or None
    TERMS: tl.tensor
    N: tl.tensor
    rate: tl.tensor  # a number or None
    softcap: tl.tensor  # a number or None
    begin: tl.tensor  # the place of the tile at row 0 (see `Order` in terms.py)


@triton.jit
def _add_rows(
    acc, total, pair, place, window, start, WHOLE: tl.constexpr, WEIGHTS: tl.constexpr,
    BIASES: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Adds one tile of rows, all < N if WHOLE, to `acc` and `total`, for weight and bias."""
    HAS: tl.constexpr = field(CONSTANTS, "has")
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    h = load_hidden(window.HIDDEN, start, window.N, WHOLE, CONSTANTS)
    rows = start + tl.arange(0, BLOCK_N)
    if WHOLE:
        terms = _load_terms(window.TERMS, window.N, rows, None, window.rate, 0, HAS)
    else:
        mask = rows < window.N
        terms = _load_terms(window.TERMS, window.N, rows, mask, window.rate, 0, HAS)
    here = window.begin + start // BLOCK_N
    x = dot(window.w, tl.trans(h), None) + window.bias
    dz, pair, place = _gradient(
        x, window.CLASS_WEIGHT, rows[None, :], window.cols, window.mask, terms, window.softcap,
        window.pairs, pair, place, here, HAS,
    )  # fmt: skip
    if BIASES:
        total += tl.sum(dz, axis=1)
    if WEIGHTS:
        acc = dot(dz.to(h.dtype), h, acc)
    return acc, total, pair, place


@triton.jit(
    **profiled("narrow_weight_bwd", COLUMNS=nothing, G=nothing),
    do_not_specialize=["N", "pairs", "slots"],
    do_not_specialize_on_alignment=[
        "HIDDEN", "WEIGHT", "BIAS", "CLASS_WEIGHT", "OUT", "OUT_BIAS",
    ],
)  # fmt: skip
def _narrow_weight_bwd_kernel(
    HIDDEN, WEIGHT, BIAS, CLASS_WEIGHT, TERMS, FIRST, PLACES, ENDS, INDEX, COLUMNS, G,  # inputs
    OUT, OUT_BIAS,  # outputs, (V, D) and (V,); None if not needed
    N, V, stride_o, pairs, slots,  # sizes
    rate, softcap,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradients of weight and bias for one tile of columns."""
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    BLOCK_D: tl.constexpr = layout(CONSTANTS, "block_d")
    D: tl.constexpr = layout(CONSTANTS, "width")
    WEIGHTS: tl.constexpr = OUT is not None
    BIASES: tl.constexpr = OUT_BIAS is not None
    program = tl.program_id(0)
    first = program * BLOCK_V
    cols = first + tl.arange(0, BLOCK_V)
    mask = (cols < V)[:, None]
    w = load_weight(WEIGHT, first, V, BLOCK_V, False, CONSTANTS)
    bias = with_bias(tl.zeros((BLOCK_V, 1), tl.float32), BIAS, cols[:, None], mask)
    pair = tl.full((), 0, tl.int64)
    if PLACES is not None:
        pair = tl.load(FIRST + program)
    known = _Pairs(PLACES, ENDS, INDEX, COLUMNS, G, pairs, slots)
    window = _Weight(
        w, cols[:, None], mask, bias, known, HIDDEN, CLASS_WEIGHT, TERMS, N, rate, softcap,
        program.to(tl.int64) * tl.cdiv(N, BLOCK_N),
    )  # fmt: skip
    place = next_place(known.PLACES, pair, known.count)
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    whole = N // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        acc, total, pair, place = _add_rows(
            acc, total, pair, place, window, start, True, WEIGHTS, BIASES, CONSTANTS
        )
    if whole < N:
        acc, total, pair, place = _add_rows(
            acc, total, pair, place, window, whole, False, WEIGHTS, BIASES, CONSTANTS
        )
    if BIASES:
        tl.store(OUT_BIAS + cols, total, mask=cols < V)
    if WEIGHTS:
        offs_d = tl.arange(0, BLOCK_D)
        at = OUT + cols.to(tl.int64)[:, None] * stride_o + offs_d[None, :]
        mask = mask & (offs_d < D)[None, :]
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
            _narrow_hidden_bwd_kernel, (config.ceil_div(N, by_rows.block_n), by_rows.splits),
            (*inputs, *visits[0], out), (N, V, tiles_per_split(V, by_rows), *known),
            num_warps=by_rows.num_warps, num_stages=by_rows.stages, registers=by_rows.registers,
            CONSTANTS=_Constants(has, where, by_rows.block_n, by_rows.block_v),
        )  # fmt: skip
        if by_rows.splits > 1:
            d_hidden.copy_(out.sum(0))
    if d_weight is not None or d_bias is not None:
        step = 0 if d_weight is None else d_weight.stride(0)
        launch(
            _narrow_weight_bwd_kernel, (config.ceil_div(V, by_columns.block_v),),
            (*inputs, *visits[-1], d_weight, d_bias), (N, V, step, *known),
            num_warps=by_columns.num_warps, num_stages=by_columns.stages,
            registers=by_columns.registers,
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
