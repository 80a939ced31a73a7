"""The running state of a row. Kernels update the state once per block of columns.

    m = max y,  s = Σ e^(d/T),  w = Σ d e^(d/T),  c = Σ v (y - ref),  n = Σ v,  where d = y - m

y are the logits after the softcap, T the temperature, v the class weights (or 1), and `ref` is
close to the mean of y, so that the differences stay small and exact. `block` is the first column of
the first block with the max, `s1` = Σ e^(y - max y) the normaliser at temperature 1, and `above`
counts the logits greater than y0, the logit of the row's first id or label; a NaN in y or y0 counts
as greater.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ... import contract as _contract
from ..layout import fringe_tile, walk
from ..numerics import INF, LOG2E, capped, finite, load, move

STATE_WIDTH = tl.constexpr(_contract.STATE)
SHIFT = tl.constexpr(_contract.SHIFT)
LOG_S = tl.constexpr(_contract.LOG_S)
LOG_S1 = tl.constexpr(_contract.LOG_S1)
NOWHERE = tl.constexpr(_contract.NOWHERE)  # stands for "no column"


class State(NamedTuple):
    """The state over the columns read so far. The compiler removes fields that stay 0."""

    m: tl.tensor
    s: tl.tensor
    w: tl.tensor
    c: tl.tensor
    n: tl.tensor
    block: tl.tensor
    s1: tl.tensor
    above: tl.tensor


class RowWindow(NamedTuple):
    """A pointer to columns of a row, and flags that select the sums over these columns."""

    X: tl.tensor
    W: tl.tensor  # class weights of the whole row, or None
    first: tl.tensor  # the column that X points to
    ref: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    softcap: tl.tensor  # a number or None
    y0: tl.tensor  # the logit that all logits are compared with; None if `above` is not needed
    ENTROPY: tl.constexpr  # whether to compute w
    TOTAL: tl.constexpr  # whether to compute c; with class weights, also n
    SECOND: tl.constexpr  # whether to compute s1


@triton.jit
def across(t, y):
    """Makes t, one number per row, broadcast with y: (columns,) of one row, or (rows, columns)."""
    if len(y.shape) == 2:
        return tl.expand_dims(t, 1)
    else:
        return t


@triton.jit
def exponentials(y, m, rate):
    """Returns e^(d/T) and d = y - m, where the max m and `rate` have one number per row."""
    d = y - across(finite(m), y)
    return tl.exp2(d * across(rate, y)), d


@triton.jit
def fold_values(
    state, y, top, place, W, first, at, mask, ref, rate, y0,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Returns the state after the columns `first + at`, whose logits are y.

    `top` is the max of y per row. Where it exceeds the previous max, `place` becomes `block`.
    """
    AXIS: tl.constexpr = len(y.shape) - 1
    block = tl.where(top > state.m, place, state.block)
    m = tl.maximum(state.m, top)
    moved = move(state.m, m, state.s)
    scale = tl.exp2(moved * rate)
    e, d = exponentials(y, m, rate)
    s, w, c, n, s1, above = state.s, state.w, state.c, state.n, state.s1, state.above
    if ENTROPY:
        # d can be -inf where e is 0, and -inf · 0 would be NaN
        w = w * scale + moved * (s * scale) + tl.sum(tl.maximum(d, -1e38) * e, axis=AXIS)
    s = s * scale + tl.sum(e, axis=AXIS)
    if SECOND:
        s1 = s1 * tl.exp2(moved * LOG2E) + tl.sum(tl.exp2(d * LOG2E), axis=AXIS)
    if TOTAL:
        u = y - across(ref, y)
        if W is not None:
            v = load(W, first + at, mask).to(tl.float32)
            c += tl.sum(tl.where(v != 0, v * u, 0.0), axis=AXIS)
            n += tl.sum(v, axis=AXIS)
        elif mask is not None:
            c += tl.sum(tl.where(mask, u, 0.0), axis=AXIS)
        else:
            c += tl.sum(u, axis=AXIS)
    if y0 is not None:
        greater = tl.where(y <= y0, 0, 1)  # 1 if y or y0 is NaN
        if mask is not None:
            greater = tl.where(mask, greater, 0)
        above += tl.sum(greater, axis=AXIS)
    return State(m, s, w, c, n, block, s1, above)


@triton.jit
def fold(state, window, start, offs, mask):
    at = start + offs
    y, _ = capped(load(window.X, at, mask), window.softcap)
    if mask is not None:
        # after the softcap, because tanh would turn -inf into -softcap
        y = tl.where(mask, y, -INF)
    return fold_values(
        state, y, tl.max(y, axis=0), start, window.W, window.first, at, mask, window.ref,
        window.rate, window.y0, window.ENTROPY, window.TOTAL, window.SECOND,
    )  # fmt: skip


@triton.jit
def fold_span(
    Xrow, W, head, body, V, lo, hi, ref, rate, softcap, y0,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, SECOND: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, X_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Returns the state over the columns [lo, hi) of a row's body, and over the fringe if lo = 0.

    X_ALIGNED: the body starts on a 16-byte boundary (see layout.py).
    """
    zero = tl.full((), 0.0, tl.float32)
    block = tl.full((), 0, tl.int32) + lo
    above = tl.full((), 0, tl.int32)
    state = State(tl.full((), -INF, tl.float32), zero, zero, zero, zero, block, zero, above)
    Xbody = Xrow + head
    if X_ALIGNED:
        Xbody = tl.multiple_of(Xbody, 16)
    return walk(
        fold, state, RowWindow(Xbody, W, head, ref, rate, softcap, y0, ENTROPY, TOTAL, SECOND),
        RowWindow(Xrow, W, 0, ref, rate, softcap, y0, ENTROPY, TOTAL, SECOND),
        head, body, V, lo, hi, PACK, ALIGNED, False, BLOCK_V, 2 * PACK,
    )  # fmt: skip


@triton.jit
def reference(Xrow, V, softcap, TOTAL: tl.constexpr, STARTS_ALIGNED: tl.constexpr):
    """Returns the mean of y over the row's first 512 columns, or 0 if the mean is not finite.

    Subtracting it avoids cancellation in Σ y. The order of its sum depends on the width of the
    loads; STARTS_ALIGNED (rows start on 16-byte boundaries) fixes it for every row stride.
    """
    ref = 0.0
    if TOTAL:
        if STARTS_ALIGNED:
            Xrow = tl.multiple_of(Xrow, 16)
        cols = tl.arange(0, 512)
        mask = cols < V
        y, _ = capped(load(Xrow, cols, mask), softcap)
        mean = tl.sum(tl.where(mask, y, 0.0), axis=0) / tl.maximum(tl.minimum(512, V), 1)
        ref = tl.where(tl.abs(mean) < INF, mean, 0.0)
    return ref


@triton.jit
def _leftmost(X, at, mask, first, m, softcap):
    """Returns the lowest column whose logit y equals the max m, or NOWHERE if no y equals m."""
    y, _ = capped(load(X, at, mask), softcap)
    return tl.min(tl.where(mask & (y == m), first + at, NOWHERE), axis=0)


@triton.jit
def column_of_max(
    Xrow, state, head, body, V, softcap,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Returns the lowest column of the max, in the fringe or in the first block that has it."""
    at = state.block + tl.arange(0, BLOCK_V)
    arg = _leftmost(tl.multiple_of(Xrow + head, 16), at, at < body, head, state.m, softcap)
    if not ALIGNED:
        ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
        arg = tl.minimum(arg, _leftmost(Xrow, ends, mask_ends, 0, state.m, softcap))
    return arg


@triton.jit
def with_count(state, n):
    """Sets n, which counts the columns if there are no class weights."""
    return State(state.m, state.s, state.w, state.c, n, state.block, state.s1, state.above)


@triton.jit
def with_above(state, above):
    return State(
        state.m, state.s, state.w, state.c, state.n, state.block, state.s1, above
    )  # fmt: skip


@triton.jit
def load_first(LABEL, IDS, row, K):
    if IDS is not None:
        return tl.load(IDS + row.to(tl.int64) * K)
    else:
        return tl.load(LABEL + row)


@triton.jit
def logit_at(Xrow, column, columns, softcap):
    """Returns the logit y of one column, or NaN if the column is outside [0, columns)."""
    inside = (column >= 0) & (column < columns)
    y, _ = capped(tl.load(Xrow + column, mask=inside, other=0.0), softcap)
    return tl.where(inside, y, float("nan"))
