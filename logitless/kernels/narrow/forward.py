"""Partial statistics of the logits of a narrow head (tile.py), without logits in memory.

Each program has a tile of rows and a split of the vocabulary, and adds one tile of logits at a time
to the running state of the rows (statistics/state.py), and to the sums of expected.py if the
gradient of the hidden states is needed. A second kernel computes the logits at labels and ids, and
statistics/merge.py merges the splits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from ...contract import Partials, Reading
from .. import config
from ..launch import field, launch
from ..layout import aligned, is_live, load_label, temperature_of
from ..numerics import INF, LOG2E, capped, inverse_temperature, move, only_if
from ..profiling import Arguments, profiled
from ..statistics.merge import SPLIT_M, SPLIT_Y_LABEL, constants_of, split_width, store_split
from ..statistics.state import NOWHERE, State, exponentials, fold_values, with_count
from .expected import MOST_BYTES, Expected, is_expected
from .terms import NO_TILE, Visits, next_place, order_by_rows, visited
from .tile import (
    HeadLayout,
    dot,
    layout,
    layout_of,
    load_hidden,
    load_weight,
    with_bias,
)


@dataclass(frozen=True)
class _Constants:
    layout: HeadLayout
    block_n: int
    block_v: int


class _Labels(NamedTuple):
    """The labels of all rows as pairs of row and column, sorted by tile (see terms.py).

    PLACES, ENDS and INDEX are None if `Expected` is not computed.
    """

    LABEL: tl.tensor
    PLACES: tl.tensor
    ENDS: tl.tensor
    INDEX: tl.tensor
    count: tl.tensor


class _Sums(NamedTuple):
    """The sums over all columns before the current tile, and the place of the next label."""

    state: State
    expected: tl.tensor  # (rows, D), the sums of expected.py, or 0 if not needed
    pair: tl.tensor  # the index of the next label
    place: tl.tensor  # the place of the next label's tile (see `Order` in terms.py)


class _Window(NamedTuple):
    """What a program reads for a tile of rows, and flags of the sums to compute."""

    h: tl.tensor  # (rows, D)
    rows: tl.tensor  # (rows, 1)
    labels: _Labels
    begin: tl.tensor  # the place of the tile at column 0 (see `Order` in terms.py)
    WEIGHT: tl.tensor
    BIAS: tl.tensor  # a pointer or None
    CLASS_WEIGHT: tl.tensor  # a pointer or None
    V: tl.tensor
    rate: tl.tensor  # (rows,)
    softcap: tl.tensor  # a number or None
    ENTROPY: tl.constexpr
    ARGMAX: tl.constexpr
    SECOND: tl.constexpr
    TOTAL: tl.constexpr


@triton.jit
def _logits(window, start, cols, mask, BLOCK: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns the logits y of the columns `cols` (1, BLOCK), and these rows of the weight."""
    w = load_weight(window.WEIGHT, start, window.V, BLOCK, mask is None, CONSTANTS)
    x = with_bias(dot(window.h, tl.trans(w), None), window.BIAS, cols, mask)
    y, _ = capped(x, window.softcap)
    return y, w


@triton.jit
def _fold(sums, window, ref, start, WHOLE: tl.constexpr, CONSTANTS: tl.constexpr):
    """Returns the sums after one more tile. If WHOLE is True, all columns of the tile are < V."""
    state = sums.state
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    cols = (start + tl.arange(0, BLOCK_V))[None, :]
    if WHOLE:
        mask = None
        y, w = _logits(window, start, cols, mask, BLOCK_V, CONSTANTS)
    else:
        mask = cols < window.V
        y, w = _logits(window, start, cols, mask, BLOCK_V, CONSTANTS)
        # after the softcap, as in `state.fold`
        y = tl.where(mask, y, -INF)
    top = tl.max(y, axis=1)
    place = state.block
    if window.ARGMAX:
        place = tl.min(tl.where(y == top[:, None], cols, NOWHERE), axis=1)
    new = fold_values(
        state, y, top, place, window.CLASS_WEIGHT, 0, cols, mask, ref, window.rate, None,
        window.ENTROPY, window.TOTAL, window.SECOND,
    )  # fmt: skip
    expected, pair, at = sums.expected, sums.pair, sums.place
    if window.labels.PLACES is not None:
        # the same as in `fold_values`; the compiled kernel computes them once
        e, _ = exponentials(y, new.m, window.rate)
        labels = window.labels
        if at == window.begin + start // BLOCK_V:
            end = tl.load(labels.ENDS + pair)
            for i in range(pair, end):
                row = tl.load(labels.INDEX + i)
                is_row = window.rows == row.to(tl.int32)
                e = tl.where(is_row & (cols == tl.load(labels.LABEL + row)), 0.0, e)
            pair = end
            at = next_place(labels.PLACES, pair, labels.count)
        scale = tl.exp2(move(state.m, new.m, state.s) * window.rate)
        expected = dot(e.to(w.dtype), w, expected * scale[:, None])
    return _Sums(new, expected, pair, at)


@triton.jit
def _reference(window, CONSTANTS: tl.constexpr):
    """Like `reference` in statistics/state.py, over the first 16 columns."""
    cols = tl.arange(0, 16)[None, :]
    mask = cols < window.V
    y, _ = _logits(window, 0, cols, mask, 16, CONSTANTS)
    mean = tl.sum(tl.where(mask, y, 0.0), axis=1) / tl.minimum(window.V, 16)
    return tl.where(tl.abs(mean) < INF, mean, 0.0)


@triton.jit(
    **profiled("narrow_fwd"),
    do_not_specialize=["N", "span"],
    do_not_specialize_on_alignment=[
        "HIDDEN", "WEIGHT", "BIAS", "CLASS_WEIGHT", "LABEL", "temperature",
    ],
)  # fmt: skip
def _narrow_fwd_kernel(
    HIDDEN, WEIGHT, BIAS, CLASS_WEIGHT, LABEL, FIRST, PLACES, ENDS, INDEX,  # inputs
    SPLITS,  # output, (N rounded up to whole tiles, fields, splits)
    EXPECTED,  # output, (splits, N, D), or None
    temperature,
    N, V, span,  # sizes
    softcap,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of rows in one split of `span` columns."""
    BLOCK_N: tl.constexpr = field(CONSTANTS, "block_n")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    BLOCK_D: tl.constexpr = layout(CONSTANTS, "block_d")
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    rows = first + tl.arange(0, BLOCK_N)
    h = load_hidden(HIDDEN, first, N, False, CONSTANTS)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    rate = zero + inverse_temperature(temperature, tl.minimum(rows, N - 1)) * LOG2E
    splits = tl.num_programs(1)
    program = tl.program_id(0) * splits + split
    labels = _Labels(LABEL, PLACES, ENDS, INDEX, N)
    pair = tl.full((), 0, tl.int64)
    if PLACES is not None:
        pair = tl.load(FIRST + program)
    begin = tl.program_id(0).to(tl.int64) * splits * (span // BLOCK_V)
    window = _Window(
        h, rows[:, None], labels, begin, WEIGHT, BIAS, CLASS_WEIGHT, V, rate, softcap,
        ENTROPY, ARGMAX, SECOND, TOTAL,
    )  # fmt: skip
    ref = zero
    if TOTAL:
        ref = _reference(window, CONSTANTS)
    lo = tl.multiple_of(split * span, BLOCK_V)
    hi = tl.minimum(lo + span, V)
    # argmax of a split that is all -inf is its first column; an empty split has none
    place = tl.zeros((BLOCK_N,), tl.int32) + tl.where(lo < V, lo, NOWHERE)
    state = State(zero - INF, zero, zero, zero, zero, place, zero, zero)
    expected = zero
    if EXPECTED is not None:
        expected = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    sums = _Sums(state, expected, pair, next_place(PLACES, pair, N))
    whole = lo + tl.maximum(hi - lo, 0) // BLOCK_V * BLOCK_V
    for start in range(lo, whole, BLOCK_V):
        sums = _fold(sums, window, ref, start, True, CONSTANTS)
    if whole < hi:
        sums = _fold(sums, window, ref, whole, False, CONSTANTS)
    state = sums.state
    if CLASS_WEIGHT is None:
        state = with_count(state, zero + tl.maximum(hi - lo, 0).to(tl.float32))
    FIELDS: tl.constexpr = split_width(ENTROPY, ARGMAX, SECOND, TOTAL)
    at = SPLITS + rows.to(tl.int64) * (splits * FIELDS) + split
    store_split(at, splits, state, ref, state.block, ENTROPY, ARGMAX, SECOND, TOTAL)
    tl.store(at + SPLIT_Y_LABEL * splits, zero)
    if EXPECTED is not None:
        D: tl.constexpr = layout(CONSTANTS, "width")
        offs_d = tl.arange(0, BLOCK_D)
        to = EXPECTED + (split * tl.cast(N, tl.int64) + rows)[:, None] * D + offs_d[None, :]
        tl.store(to, sums.expected, mask=(rows < N)[:, None] & (offs_d < D)[None, :])


@dataclass(frozen=True)
class _PickConstants:
    layout: HeadLayout
    fields: int
    block_k: int
    block_p: int


@triton.jit
def _pick(WEIGHT, BIAS, h, ids, inside, softcap, top, CONSTANTS: tl.constexpr):
    """Returns min(y, top) at the ids, where y are the logits, and `top` is the max of the row.

    The kernel that computed `top` may round sums over D differently; a y above it would make log
    p > 0.
    """
    offs_d = tl.arange(0, layout(CONSTANTS, "block_d"))
    first = WEIGHT + ids.to(tl.int64) * layout(CONSTANTS, "stride_w")
    if layout(CONSTANTS, "w_aligned"):
        first = tl.multiple_of(first, 16)
    at = first[:, None] + offs_d[None, :]
    mask = inside[:, None] & (offs_d < layout(CONSTANTS, "width"))[None, :]
    w = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x = with_bias(tl.sum(w * h[None, :], axis=1), BIAS, ids, inside)
    y, _ = capped(x, softcap)
    return tl.where(y > top, top, y)


def _picks(args: Arguments) -> int:
    """The number of logits at labels and ids."""
    return len(args["HIDDEN"]) * (args["K"] + 1)


@triton.jit(
    **profiled(
        "narrow_pick", shows=("K",), BIAS=_picks,
        WEIGHT=lambda args: _picks(args) * args["HIDDEN"].shape[1],
    ),
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["HIDDEN", "WEIGHT", "BIAS", "LABEL", "IDS"],
)  # fmt: skip
def _narrow_pick_kernel(
    HIDDEN, WEIGHT, BIAS, LABEL, IDS,  # inputs
    SPLITS, PICKED,  # outputs, (N, fields, splits) and (N, K)
    V, K, splits,  # sizes
    softcap, ignore_index,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes the logits y of one row at the label and at the ids.

    The label's goes to the row's first split. PICKED is 0 for ids outside the vocabulary, and for
    all ids of an ignored row.
    """
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, layout(CONSTANTS, "block_d"))
    mask_d = offs_d < layout(CONSTANTS, "width")
    first = HIDDEN + row * layout(CONSTANTS, "stride_h")
    if layout(CONSTANTS, "h_aligned"):
        first = tl.multiple_of(first, 16)
    h = tl.load(first + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    SPLITS += row * (splits * field(CONSTANTS, "fields"))
    offs_p = tl.arange(0, field(CONSTANTS, "block_p"))
    top = tl.max(
        tl.load(SPLITS + SPLIT_M * splits + offs_p, mask=offs_p < splits, other=-INF), axis=0
    )
    if LABEL is not None:
        labels = tl.zeros((1,), tl.int64) + label
        is_class = only_if(live, (labels >= 0) & (labels < V))
        y_label = _pick(WEIGHT, BIAS, h, labels, is_class, softcap, top, CONSTANTS)
        at = SPLIT_Y_LABEL * splits + tl.zeros((1,), tl.int32)
        tl.store(SPLITS + at, tl.where(is_class, y_label, 0.0))
    if IDS is not None:
        for start in range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < K
            ids = tl.load(IDS + row * K + offs_k, mask=mask_k, other=-1)
            inside = only_if(live, mask_k & (ids >= 0) & (ids < V))
            y = _pick(WEIGHT, BIAS, h, ids, inside, softcap, top, CONSTANTS)
            tl.store(PICKED + row * K + offs_k, tl.where(inside, y, 0.0), mask=mask_k)


def narrow_partial(
    hidden: Tensor,  # (N, D); the numbers in ignored rows must be finite
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    reading: Reading,
    expects: bool = False,  # whether the gradient of the hidden states is needed too
) -> tuple[Partials, Expected | None]:
    """Returns the partial statistics of each split of hidden @ weight.T + bias, and `Expected`.

    The latter is None without `expects` or `is_expected`, or if the sums would take too much
    memory.
    """
    (N, D), V, device = hidden.shape, len(weight), hidden.device
    sums, label, ids = reading.sums, reading.label, reading.ids
    where = layout_of(hidden, weight)
    heavy = int(reading.softcap is not None or any(sums)) + (not where.aligned)
    size, memory = hidden.element_size(), config.memory(device)
    expects = expects and is_expected(reading) and 4 * N * D <= MOST_BYTES
    kernel, limit = ("fwd_expected", MOST_BYTES) if expects else ("fwd", None)
    cut = config.narrow(kernel, where.block_d, size, memory, heavy)
    cut = config.narrow_splits(cut, N, V, D, config.processors(device), limit)
    tiles, fields = config.ceil_div(N, cut.block_n), _contract.part_width(*sums)
    # whole tiles, so the last one can end after row N
    shape = (tiles * cut.block_n, fields, cut.splits)
    state = torch.empty(shape, device=device, dtype=torch.float32)
    K = reading.ids_per_row
    picked = None if ids is None else torch.empty((N, K), device=device, dtype=torch.float32)
    expected, visits = None, (None,) * len(Visits._fields)
    if expects:
        expected = torch.empty((cut.splits, N, D), device=device, dtype=torch.float32)
        visits = _visits_of_labels(label.reshape(-1), V, cut)
    if N:
        tensor, number = temperature_of(reading)
        bias = None if bias is None else bias.contiguous()
        class_weight = aligned(reading.class_weight) if sums.total else None
        labels = None if label is None else label.contiguous()
        span = config.ceil_div(config.ceil_div(V, cut.splits), cut.block_v) * cut.block_v
        launch(
            _narrow_fwd_kernel, (tiles, cut.splits),
            (hidden, weight, bias, class_weight, labels, *visits, state, expected, *tensor),
            (*number, N, V, span, reading.softcap),
            num_warps=cut.num_warps, num_stages=cut.stages, registers=cut.registers,
            CONSTANTS=_Constants(where, cut.block_n, cut.block_v), **constants_of(sums),
        )  # fmt: skip
        if label is not None or K:
            _pick_logits(hidden, weight, bias, labels, reading, state, picked, where)
    found = None if expected is None else Expected(expected, state)
    return Partials(state.mT[:N], picked), found


def _pick_logits(hidden, weight, bias, labels, reading, state, picked, where: HeadLayout) -> None:
    """Writes the logits y at labels and ids to the states of the splits, and to `picked`."""
    (_, fields, splits), K = state.shape, reading.ids_per_row
    block_k = max(min(config.ceil_pow2(K), 2048 // where.block_d), 2)
    block_p = max(config.ceil_pow2(splits), 2)
    launch(
        _narrow_pick_kernel, (len(hidden),),
        (
            hidden, weight, bias, labels, reading.ids.contiguous() if K else None, state,
            picked if K else None,
        ),
        (len(weight), K, splits, reading.softcap, reading.ignore_index),
        num_warps=1, CONSTANTS=_PickConstants(where, fields, block_k, block_p),
    )  # fmt: skip


def _visits_of_labels(label: Tensor, V: int, cut: config.Config) -> Visits:
    order = order_by_rows(len(label), V, cut)
    tiles = torch.arange(len(label), device=label.device) // cut.block_n
    places = tiles * order.step + label // cut.block_v
    return visited(order, torch.where((label >= 0) & (label < V), places, NO_TILE.value))
