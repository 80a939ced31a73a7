"""Two inputs of the kernels in backward.py: terms per row, and pairs of row and column.

The terms are what the formula in statistics/gradient_tile.py needs of a row. A pair is a label or
an id that adds a number g to the gradient of one logit. Pairs are sorted in the order in which a
kernel visits the tiles of logits, so one comparison per tile finds the tile of the next pair. They
are added before the gradient is rounded to 16 bits, because p - 1 at a label is small if p is near
1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import COEFFICIENTS, Coefficients, Reading
from .. import config
from ..launch import field, launch
from ..layout import is_live, load_label, numbers, temperature_of
from ..numerics import INF, LOG2E, NO_ID, inverse_temperature, load, only_if
from ..profiling import profiled
from ..statistics.backward import at_label, is_bad, row_gradient
from ..statistics.gradient_tile import load_coefs, row_gain
from ..statistics.state import STATE_WIDTH

# fields of a tensor (TERMS, N)
TERM_SHIFT = tl.constexpr(0)
TERM_C0 = tl.constexpr(1)
TERM_RATE = tl.constexpr(2)
TERM_C1 = tl.constexpr(3)
TERM_LOGPROB_T1 = tl.constexpr(4)
TERM_G_C = tl.constexpr(5)
TERMS = 6
# the place, above that of every tile, of a pair that is in none: an invalid id or an ignored row
NO_TILE = tl.constexpr(2**62)


class Order(NamedTuple):
    """The order in which the programs of a kernel visit tiles of logits, `count` tiles each.

    The place of a tile in this order is i · step + j. With `by_rows`, i counts tiles along the rows
    and j along the columns; otherwise i is along the columns, and j along the rows.
    """

    block_n: int  # rows of a tile
    block_v: int  # columns of a tile
    by_rows: bool
    step: int
    count: int
    programs: int


def order_by_rows(N: int, V: int, cut: config.Config) -> Order:
    """One tile of rows and one split per program."""
    tiles = tiles_per_split(V, cut)
    programs = config.ceil_div(N, cut.block_n) * cut.splits
    return Order(cut.block_n, cut.block_v, True, cut.splits * tiles, tiles, programs)


def order_by_columns(N: int, V: int, cut: config.Config) -> Order:
    """One tile of columns and all rows per program."""
    tiles, programs = config.ceil_div(N, cut.block_n), config.ceil_div(V, cut.block_v)
    return Order(cut.block_n, cut.block_v, False, tiles, tiles, programs)


def tiles_per_split(V: int, cut: config.Config) -> int:
    return config.ceil_div(config.ceil_div(V, cut.block_v), cut.splits)


class Visits(NamedTuple):
    """P pairs of row and column, in the order in which one kernel visits the tiles."""

    first: Tensor  # (programs,), the index of the first pair of each program
    places: Tensor  # (P,), the places of the tiles that contain the pairs, in ascending order
    ends: Tensor  # (P,), for each pair: 1 + the index of the last pair in its tile
    index: Tensor  # (P,), the index of each pair before the sort


class Pairs(NamedTuple):
    """Pairs of row and column with their numbers g."""

    columns: Tensor  # (N, slots)
    g: Tensor  # (N, slots)
    visits: list[Visits]  # the same pairs, sorted for each `Order`


@dataclass(frozen=True)
class _Constants:
    has: tuple[str, ...]  # names of the coefficients in use, and "second" if needed (see `uses`)
    step_c: int  # row stride of COEF; 0 if COEF has a single row
    step_u: int  # row stride of UPSTREAM; 0 if all rows share one number
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    block_k: int
    orders: tuple[tuple[int, int, bool], ...]  # (block_n, block_v, by_rows) of each `Order`


@triton.constexpr_function
def order_of(constants, index):
    """Returns (block_n, block_v, by_rows) of orders[index], or None if `index` is too large."""
    return constants.orders[index] if index < len(constants.orders) else None


@triton.jit
def next_place(PLACES, pair, count):
    """Returns the place of a pair's tile (see `Order`), or -1 after the last pair."""
    if PLACES is not None:
        return tl.load(PLACES + pair, mask=pair < count, other=-1)
    else:
        return tl.full((), -1, tl.int64)


@triton.jit
def _store_places(PLACES, at, row, ids, inside, mask, step, ORDER: tl.constexpr):
    if ORDER is not None:
        i, j = row // ORDER[0], ids.to(tl.int64) // ORDER[1]
        if ORDER[2]:
            place = i * step + j
        else:
            place = j * step + i
        tl.store(PLACES + at, tl.where(inside, place, NO_TILE), mask=mask)


@triton.jit
def _store_pairs(
    COLUMNS, G, PLACES, pairs, at, row, ids, g, inside, mask, step_0, step_1,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Stores pairs of one row, and the place of each pair's tile in every `Order`."""
    ids = tl.where(inside, ids, 0)
    tl.store(COLUMNS + at, ids.to(tl.int32), mask=mask)
    tl.store(G + at, tl.where(inside, g, 0.0), mask=mask)
    _store_places(PLACES, at, row, ids, inside, mask, step_0, order_of(CONSTANTS, 0))
    _store_places(PLACES, pairs + at, row, ids, inside, mask, step_1, order_of(CONSTANTS, 1))


@triton.jit(
    **profiled("narrow_terms", shows=("K",)),
    do_not_specialize=["N", "slots", "step_0", "step_1"],
    do_not_specialize_on_alignment=[
        "LABEL", "IDS", "STATE", "COEF", "G_IDS", "UPSTREAM", "FACTOR", "temperature",
    ],
)  # fmt: skip
def _narrow_terms_kernel(
    STATE, LABEL, IDS, COEF, G_IDS, UPSTREAM, FACTOR,  # inputs
    OUT, COLUMNS, G, PLACES,  # outputs
    temperature, N, V, K, slots, step_0, step_1, ignore_index,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes the terms and the pairs of one row.

    OUT is (TERMS, N), PLACES (orders, N, slots), COLUMNS and G (N, slots). The terms make the
    gradient of an ignored row 0, and that of a row with an invalid label or id NaN.
    """
    HAS: tl.constexpr = field(CONSTANTS, "has")
    row = tl.program_id(0).to(tl.int64)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    inv_t = inverse_temperature(temperature, row)
    gain = row_gain(UPSTREAM, FACTOR, row, field(CONSTANTS, "step_u"), field(CONSTANTS, "step_f"))
    coefs = load_coefs(COEF + row * field(CONSTANTS, "step_c"), gain, HAS)
    d_row = row_gradient(STATE + row * STATE_WIDTH, coefs, coefs.a, inv_t, HAS)
    c0, pairs = d_row.c0, tl.cast(N, tl.int64) * slots
    if at_label(HAS):
        labels = tl.zeros((1,), tl.int64) + label
        is_pair = only_if(live, (labels >= 0) & (labels < V))
        last = tl.zeros((1,), tl.int64) + (row * slots + slots - 1)
        _store_pairs(
            COLUMNS, G, PLACES, pairs, last, row, labels, d_row.g_label, is_pair, None,
            step_0, step_1, CONSTANTS,
        )  # fmt: skip
        c0 = tl.where((label >= 0) & (label < V), c0, float("nan"))
    if G_IDS is not None:
        BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
        bad = tl.zeros((BLOCK_K,), tl.int32)
        for start in range(0, K, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask = offs_k < K
            ids = tl.load(IDS + row * K + offs_k, mask=mask, other=NO_ID)
            g = load(G_IDS + row * K, offs_k, mask).to(tl.float32) * (gain * inv_t)
            g = tl.where(d_row.shift == INF, 0.0, g)  # g is 0 if all logits are -inf
            bad |= is_bad(ids, V)
            inside = only_if(live, (ids >= 0) & (ids < V))
            at = row * slots + offs_k
            _store_pairs(
                COLUMNS, G, PLACES, pairs, at, row, ids, g, inside, mask, step_0, step_1, CONSTANTS
            )
        c0 = tl.where(tl.max(bad, axis=0) > 0, float("nan"), c0)
    OUT += row
    # a shift of +inf makes every exponential of an ignored row 0
    tl.store(OUT + TERM_SHIFT * N, tl.where(live, d_row.shift, INF))
    tl.store(OUT + TERM_C0 * N, tl.where(live, c0, 0.0))
    tl.store(OUT + TERM_RATE * N, inv_t * LOG2E)
    tl.store(OUT + TERM_C1 * N, tl.where(live, d_row.c1, 0.0))
    tl.store(OUT + TERM_LOGPROB_T1 * N, tl.where(live, d_row.c_logprob_t1, 0.0))
    tl.store(OUT + TERM_G_C * N, tl.where(live, d_row.g_c, 0.0))


def terms_of(
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None,  # one number, or one number per row
    vocab: int,
    orders: tuple[Order, ...],
) -> tuple[Tensor, Pairs | None, tuple[str, ...]]:
    """Returns the terms (TERMS, N), the pairs or None, and the names of coefficients in use."""
    N, device = len(state), state.device
    has, g_ids = coefficients.has, coefficients.ids
    K = 0 if g_ids is None else g_ids.shape[-1]
    upstream, step_u = numbers(upstream)
    factor, step_f = numbers(factor)
    steps = (COEFFICIENTS * (coefficients.rows.shape[0] > 1), step_u, step_f)
    if "logprob_t1" in has and reading.temperature != 1:
        has = (*has, "second")
    slots = K + ("label" in has or "logprob_t1" in has)
    terms = torch.empty((TERMS, N), device=device, dtype=torch.float32)
    columns = g = places = None
    if slots:
        columns = torch.empty((N, slots), device=device, dtype=torch.int32)
        g = torch.empty((N, slots), device=device, dtype=torch.float32)
    if slots and orders:
        places = torch.empty((len(orders), N * slots), device=device, dtype=torch.int64)
    label = reading.label
    tensor, number = temperature_of(reading)
    block_k = min(max(config.ceil_pow2(K), 2), 128)
    launch(
        _narrow_terms_kernel, (N,),
        (
            state, None if label is None else label.contiguous(),
            reading.ids.contiguous() if K else None, coefficients.rows,
            g_ids.contiguous() if K else None, upstream, factor, terms, columns, g, places, *tensor,
        ),
        (*number, N, vocab, K, slots, *steps_of(orders), reading.ignore_index),
        num_warps=1,
        CONSTANTS=_Constants(has, *steps, block_k, tuple(order[:3] for order in orders)),
    )  # fmt: skip
    if columns is None or g is None:
        return terms, None, has
    found = [] if places is None else [visited(*each) for each in zip(orders, places, strict=True)]
    return terms, Pairs(columns, g, found), has


def visited(order: Order, places: Tensor) -> Visits:  # places (P,)
    """Sorts pairs by the places of their tiles. The sort is stable, so sums have a fixed order."""
    places, index = places.sort(stable=True)
    begins = torch.arange(order.programs, device=places.device) * order.count
    first, ends = (
        torch.searchsorted(places, begins),
        torch.searchsorted(places, places, right=True),
    )
    return Visits(first, places, ends, index)


def steps_of(orders: tuple[Order, ...]) -> tuple[int, int]:
    return (orders[0].step, orders[-1].step) if orders else (0, 0)
