"""The running state of a row: what each block of columns folds into, and where it is stored.

    m = max y    s = Σ e^(d/T)    w = Σ d e^(d/T)    c = Σ v (y - ref)    n = Σ v        d = y - m

with v the class weights (1 without), ref near the row's mean so that c stays small and exact,
`block` the first block to reach m, and s1 = Σ e^d, a second normaliser at temperature 1.
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
NOWHERE = tl.constexpr(_contract.NOWHERE)  # a column that is none


class State(NamedTuple):
    """Of the columns so far; fields that nobody asks for stay 0 and cost nothing."""

    m: tl.tensor
    s: tl.tensor
    w: tl.tensor
    c: tl.tensor
    n: tl.tensor
    block: tl.tensor
    s1: tl.tensor


class Columns(NamedTuple):
    """Columns in memory, and what is wanted of them."""

    X: tl.tensor
    W: tl.tensor  # class weights of the whole row, or None
    first: tl.tensor  # the column that X points to
    ref: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    softcap: tl.tensor  # or None
    ENTROPY: tl.constexpr  # w
    TOTAL: tl.constexpr  # c, and n where there are class weights
    SECOND: tl.constexpr  # s1


@triton.constexpr_function
def field(struct, name):
    """A field of a dataclass that a kernel takes as one constant."""
    return getattr(struct, name)


@triton.constexpr_function
def pack_of(P):
    """Elements in 16 bytes."""
    return 128 // P.dtype.element_ty.primitive_bitwidth


@triton.jit
def is_live(label, ignore_index):
    """Whether a row counts. An ignored row is read by no one."""
    if ignore_index is not None:
        return label != ignore_index
    else:
        return True


@triton.jit
def fold(state, columns, start, offs, mask):
    """The state after one more block, the columns start + offs."""
    at = start + offs
    y, _ = capped(load(columns.X, at, mask), columns.softcap)
    if mask is not None:
        # After the softcap: a padded column must not come back as -softcap.
        y = tl.where(mask, y, -INF)
    top = tl.max(y, axis=0)
    block = tl.where(top > state.m, start, state.block)
    m = tl.maximum(state.m, top)
    moved = move(state.m, m, state.s)
    scale = tl.exp2(moved * columns.rate)
    d = y - finite(m)
    e = tl.exp2(d * columns.rate)
    s, w, c, n, s1 = state.s, state.w, state.c, state.n, state.s1
    if columns.ENTROPY:
        # -inf · 0 is 0 here: any finite d will do where e is 0.
        w = w * scale + moved * (s * scale) + tl.sum(tl.maximum(d, -1e38) * e, axis=0)
    s = s * scale + tl.sum(e, axis=0)
    if columns.SECOND:
        s1 = s1 * tl.exp2(moved * LOG2E) + tl.sum(tl.exp2(d * LOG2E), axis=0)
    if columns.TOTAL:
        u = y - columns.ref
        if columns.W is not None:
            v = load(columns.W, columns.first + at, mask).to(tl.float32)
            c += tl.sum(tl.where(v != 0, v * u, 0.0), axis=0)
            n += tl.sum(v, axis=0)
        elif mask is not None:
            c += tl.sum(tl.where(mask, u, 0.0), axis=0)
        else:
            c += tl.sum(u, axis=0)
    return State(m, s, w, c, n, block, s1)


@triton.jit
def fold_span(
    Xrow, W, head, body, V, lo, hi, ref, rate, softcap,
    ENTROPY: tl.constexpr, TOTAL: tl.constexpr, SECOND: tl.constexpr,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, X_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """State of the packs [lo, hi) of a row's body, and of its ragged ends where lo = 0.

    The body starts on a 16-byte boundary where X_ALIGNED.
    """
    zero = tl.full((), 0.0, tl.float32)
    block = tl.full((), 0, tl.int32) + lo
    state = State(tl.full((), -INF, tl.float32), zero, zero, zero, zero, block, zero)
    Xbody = Xrow + head
    if X_ALIGNED:
        Xbody = tl.multiple_of(Xbody, 16)
    return walk(
        fold, state, Columns(Xbody, W, head, ref, rate, softcap, ENTROPY, TOTAL, SECOND),
        Columns(Xrow, W, 0, ref, rate, softcap, ENTROPY, TOTAL, SECOND),
        head, body, V, lo, hi, PACK, ALIGNED, False, BLOCK_V, 2 * PACK,
    )  # fmt: skip


@triton.jit
def reference(Xrow, V, softcap, TOTAL: tl.constexpr):
    """Mean of the row's first columns: a number near which Σ (y - ref) does not cancel."""
    ref = 0.0
    if TOTAL:
        cols = tl.arange(0, 512)
        mask = cols < V
        y, _ = capped(load(Xrow, cols, mask), softcap)
        mean = tl.sum(tl.where(mask, y, 0.0), axis=0) / tl.maximum(tl.minimum(512, V), 1)
        ref = tl.where(tl.abs(mean) < INF, mean, 0.0)
    return ref


@triton.jit
def _leftmost(X, at, mask, first, m, softcap):
    """Lowest column whose y is m, or NOWHERE."""
    y, _ = capped(load(X, at, mask), softcap)
    return tl.min(tl.where(mask & (y == m), first + at, NOWHERE), axis=0)


@triton.jit
def column_of_max(
    Xrow, state, head, body, V, softcap,
    PACK: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One more look at the first block that reached the max, not at every block."""
    at = state.block + tl.arange(0, BLOCK_V)
    arg = _leftmost(tl.multiple_of(Xrow + head, 16), at, at < body, head, state.m, softcap)
    if not ALIGNED:
        ends, mask_ends = fringe_tile(head, body, V, PACK, 2 * PACK)
        arg = tl.minimum(arg, _leftmost(Xrow, ends, mask_ends, 0, state.m, softcap))
    return arg


@triton.jit
def with_count(state, n):
    """The state of columns that weigh 1 each, n of them."""
    return State(state.m, state.s, state.w, state.c, n, state.block, state.s1)


@triton.jit
def load_label(LABEL, row):
    """A row's label; anything where it has none."""
    if LABEL is not None:
        return tl.load(LABEL + row)
    else:
        return 0
