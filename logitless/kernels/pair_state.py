"""Two rows side by side, a student's and a teacher's: what is read of them, saved and loaded.

With d = y - max y of each row, e = 2^(d·rate) and s = Σ e, the student is q = e_q / s_q and the
teacher p = e_p / s_p. Only differences to a max are taken, so that no common offset costs a digit.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..contract import PAIR_STATE as PAIR_STATE_
from ..contract import Reading
from .launch import REMEMBERED
from .layout import Rows, rows_of, walk
from .numerics import INF, capped, finite, load
from .state import pack_of

PAIR_STATE = tl.constexpr(PAIR_STATE_)


class PairState(NamedTuple):
    """Of the columns so far. While a row is walked, sums are apart for each lane."""

    m_q: tl.tensor  # max y of the student
    s_q: tl.tensor  # Σ e_q
    m_p: tl.tensor  # max of the teacher; unused by "soft"
    s_p: tl.tensor  # Σ e_p, or the target's mass
    c: tl.tensor  # the sum that the kind is about


class Both(NamedTuple):
    """Two rows, and how they are read."""

    X: tl.tensor
    T: tl.tensor
    W: tl.tensor  # class weights of the whole row, or None
    first: tl.tensor  # the column that X and T point to
    V: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    softcap: tl.tensor  # the student's alone, or None
    blend: tl.tensor  # β of "jsd", the label smoothing ε of "soft"
    vocab: tl.tensor  # V, also where the rows hold fewer columns


@triton.jit
def elements_to(P):
    """Elements from address 0 to P: what tells how far P is from a 16-byte boundary."""
    return P.to(tl.int64) // (P.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def student(both, at, mask):
    """y; -inf past the row."""
    y, _ = capped(load(both.X, at, mask), both.softcap)
    if mask is not None:
        # After the softcap: a padded column must not come back as -softcap.
        y = tl.where(mask, y, -INF)
    return y


@triton.jit
def teacher(both, at, mask):
    """Logits of the teacher; -inf past the row."""
    t = load(both.T, at, mask).to(tl.float32)
    if mask is not None:
        t = tl.where(mask, t, -INF)
    return t


@triton.jit
def target(both, at, mask):
    """Mass of each class in soft cross-entropy: smoothed, times the class weight."""
    v = load(both.T, at, mask).to(tl.float32) * (1.0 - both.blend) + both.blend / both.vocab
    if both.W is not None:
        v *= load(both.W, both.first + at, mask).to(tl.float32)
    if mask is not None:
        v = tl.where(mask, v, 0.0)
    return v


@triton.jit
def extend(m, y, rate):
    """The max after one more block, how far it moved (from -inf: 0), and d and e of the block."""
    m_new = tl.maximum(m, tl.max(y, axis=0))
    moved = tl.where((m == m_new) | (m == -INF), 0.0, tl.maximum(m - m_new, -1e38))
    d = y - finite(m_new)
    return m_new, moved, d, tl.exp2(d * rate)


@triton.jit
def walk_both(
    f: tl.constexpr, state, row, head, body, lo, hi,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """layout.walk over both rows. The fringe is as wide as a block: lanes keep their sums."""
    PACK: tl.constexpr = pack_of(row.X)
    X = tl.multiple_of(row.X + head, 16)
    T = row.T + head
    if T_ALIGNED:
        T = tl.multiple_of(T, 16)
    from_body = Both(X, T, row.W, head, row.V, row.rate, row.softcap, row.blend, row.vocab)
    return walk(
        f, state, from_body, row, head, body, row.V, lo, hi,
        PACK, ALIGNED, False, BLOCK_V, BLOCK_V,
    )  # fmt: skip


@triton.jit
def fresh_state(BLOCK_V: tl.constexpr):
    """Of no columns."""
    empty, zero = tl.full((), -INF, tl.float32), tl.zeros((BLOCK_V,), tl.float32)
    return PairState(empty, zero, empty, zero, zero)


@triton.jit
def sum_lanes(state):
    return PairState(
        state.m_q, tl.sum(state.s_q, axis=0), state.m_p, tl.sum(state.s_p, axis=0),
        tl.sum(state.c, axis=0),
    )  # fmt: skip


@triton.jit
def save_state(STATE, row, shift_q, s_q, shift_p, s_p, mean):
    """What the gradient needs of a row: m, or 0 where that is infinite; s; and a mean."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    tl.store(at, shift_q)
    tl.store(at + 1, s_q)
    tl.store(at + 2, shift_p)
    tl.store(at + 3, s_p)
    tl.store(at + 4, mean)


@triton.jit
def load_state(STATE, row):
    """The same as a PairState, with shifts for maxima and the mean for c."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    return PairState(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    )


def rows_of_both(x: Tensor, other: Tensor) -> tuple[Tensor, Rows, Tensor, Rows]:
    """Both as rows that are counted alike, and the tensors they are in."""
    x, rows = rows_of(x)
    other, o_rows = rows_of(other)
    if rows.rows_t != o_rows.rows_t:
        alike = counted_alike(rows, o_rows)
        if alike is None:
            return rows_of_both(x, other.contiguous())
        rows, o_rows = alike
    return x, rows, other, o_rows


@functools.lru_cache(REMEMBERED)
def counted_alike(*several: Rows) -> tuple[Rows, ...] | None:
    """With one rows_t for all, so that kernels find the rows by one division; None if none fits.

    Rows of a single stride can be counted in groups of any size.
    """
    rows_t = min(rows.rows_t for rows in several)
    if any(rows.rows_t not in (rows_t, rows.count) for rows in several):
        return None
    return tuple(
        rows
        if rows.rows_t == rows_t
        else rows._replace(rows_t=rows_t, stride_b=rows_t * rows.stride_t)
        for rows in several
    )


def contiguous(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def temperature_of(reading: Reading) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
    """The last of a launch's tensors, or the first of its numbers."""
    t = contiguous(reading.row_temperature)
    return ((), (reading.temperature,)) if t is None else ((t,), ())
