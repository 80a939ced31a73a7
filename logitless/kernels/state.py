"""The running state of a row. Kernels update the state once per block of columns.

    m = max y,  s = Σ e^(d/T),  w = Σ d e^(d/T),  c = Σ v (y - ref),  n = Σ v,  where d = y - m

In these formulas, y are the logits after the softcap, and T is the temperature. The numbers v are
the class weights. Without class weights, every v is 1. The number `ref` is close to the mean of the
row's logits, so that the sum of the differences y - ref stays small and exact. The field `block` is
the first column of the first block that contains the row's max. The field `s1` is Σ e^(y - max y),
the normaliser at temperature 1. The field `above` is the number of logits y that are greater than
y0, where y0 is the logit of the row's first id or label. If y or y0 is NaN, y counts as greater
than y0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .. import contract as _contract
from .layout import fringe_tile, walk
from .numerics import INF, LOG2E, capped, finite, load, move

STATE_WIDTH = tl.constexpr(_contract.STATE)
SHIFT = tl.constexpr(_contract.SHIFT)
LOG_S = tl.constexpr(_contract.LOG_S)
LOG_S1 = tl.constexpr(_contract.LOG_S1)
NOWHERE = tl.constexpr(_contract.NOWHERE)  # stands for "no column"


class State(NamedTuple):
    """The state of a row over the columns read so far.

    If no requested statistic needs a field, the field stays 0, and the compiler removes its
    computation.
    """

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


@triton.constexpr_function
def field(struct, name):
    """Returns one field of the dataclass that a kernel gets as CONSTANTS (see launch.py)."""
    return getattr(struct, name)


@triton.constexpr_function
def pack_of(P):
    """Returns the number of elements of P that fit into 16 bytes."""
    return 128 // P.dtype.element_ty.primitive_bitwidth


@triton.jit
def is_live(label, ignore_index):
    """Returns True for a row that is not ignored. The logits of an ignored row are not read."""
    if ignore_index is not None:
        return label != ignore_index
    else:
        return True


@triton.jit
def across(t, y):
    """Reshapes t, which has one number per row, so that t broadcasts with y.

    The shape of y is (columns,) for a block of one row, or (rows, columns) for a tile of several
    rows.
    """
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
    """Returns the state after the columns `first + at` are added. The argument y holds the logits
    of these columns.

    The shape of y is (columns,) for a block of one row, or (rows, columns) for a tile of several
    rows. `top` is the max of y per row. In rows where `top` is larger than the previous max, the
    field `block` is set to the argument `place`.
    """
    AXIS: tl.constexpr = len(y.shape) - 1
    block = tl.where(top > state.m, place, state.block)
    m = tl.maximum(state.m, top)
    moved = move(state.m, m, state.s)
    scale = tl.exp2(moved * rate)
    e, d = exponentials(y, m, rate)
    s, w, c, n, s1, above = state.s, state.w, state.c, state.n, state.s1, state.above
    if ENTROPY:
        # d is clamped, because d can be -inf where e is 0, and -inf · 0 would be NaN.
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
    """Returns the state after the columns `start + offs` are added."""
    at = start + offs
    y, _ = capped(load(window.X, at, mask), window.softcap)
    if mask is not None:
        # The mask is applied after the softcap, because tanh would turn -inf into -softcap.
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
    """Returns the state over the columns [lo, hi) of a row's body.

    If lo is 0, the state also covers the fringe. If X_ALIGNED is True, the body starts on a 16-byte
    boundary. Body and fringe are defined in layout.py.
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

    Kernels subtract this mean to avoid cancellation in Σ y. STARTS_ALIGNED means that the row
    starts on a 16-byte boundary. The order of the additions in the mean depends on the width of the
    loads. If STARTS_ALIGNED is True, this width does not depend on the row stride, so the mean has
    the same bits for every row stride.
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
    """Returns the lowest column whose logit is the row's max.

    The kernel searches only the fringe (see layout.py) and the first block that contains the max.
    """
    at = state.block + tl.arange(0, BLOCK_V)
    arg = _leftmost(tl.multiple_of(Xrow + head, 16), at, at < body, head, state.m, softcap)
    if not ALIGNED:
        ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
        arg = tl.minimum(arg, _leftmost(Xrow, ends, mask_ends, 0, state.m, softcap))
    return arg


@triton.jit
def with_count(state, n):
    """Returns a copy of `state` with the given n. Without class weights, n counts the columns."""
    return State(state.m, state.s, state.w, state.c, n, state.block, state.s1, state.above)


@triton.jit
def with_above(state, above):
    """Returns a copy of `state` with the given `above`."""
    return State(
        state.m, state.s, state.w, state.c, state.n, state.block, state.s1, above
    )  # fmt: skip


@triton.jit
def load_label(LABEL, row):
    """Returns the label of a row, or 0 if there are no labels."""
    if LABEL is not None:
        return tl.load(LABEL + row)
    else:
        return 0


@triton.jit
def load_first(LABEL, IDS, row, K):
    """Returns the first of a row's K ids, or the row's label if there are no ids."""
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
