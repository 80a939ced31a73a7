"""A student row beside a teacher row: how kernels walk over both, and the state that is saved.

With d = y - max y, e = 2^(d·rate) and s = Σ e for each row, the student is q = e_q / s_q and the
teacher p = e_p / s_p. Only differences to a max are used, so that a common offset costs no digits.

The saved state, (N, PAIR_STATE), holds shift and s of the student, shift and s of the teacher, and
a mean. Each backend has its own unit for the mean, because only its own backward reads it. The
kernels save

    reverse KL    Σ q (d_q - d_p), in units of y, not divided by the temperature
    JSD           Σ q log2(q / M), in bits
    the others    0

and eager/pair.py saves both in nats. The partial state of some columns (`pair_partial`) holds m
instead of shift and a sum instead of the mean. The sum is in nats in both backends, because ranks
merge partial states.
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
    """The state after some columns. During a walk, each lane has a sum of its own."""

    m_q: tl.tensor  # max y of the student
    s_q: tl.tensor  # Σ e_q
    m_p: tl.tensor  # max of the teacher; unused by "soft"
    s_p: tl.tensor  # Σ e_p, or the target's mass
    c: tl.tensor  # the sum of the divergence (pair_fwd.py)


class Both(NamedTuple):
    """Both rows in memory, and the options of the loss."""

    X: tl.tensor
    T: tl.tensor
    W: tl.tensor  # class weights of the whole row, or None
    first: tl.tensor  # the column that X and T point to
    V: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    softcap: tl.tensor  # the student's alone, or None
    blend: tl.tensor  # β of "jsd", the label smoothing ε of "soft"
    vocab: tl.tensor  # V of the whole vocabulary, if the rows are some of its columns


@triton.jit
def elements_to(P):
    """Elements from address 0 to P, from which follows how far P is from a 16-byte boundary."""
    return P.to(tl.int64) // (P.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def student(both, at, mask):
    """y of the student; -inf past the end of the row."""
    y, _ = capped(load(both.X, at, mask), both.softcap)
    if mask is not None:
        # After the softcap, because tanh would turn -inf into -softcap.
        y = tl.where(mask, y, -INF)
    return y


@triton.jit
def teacher(both, at, mask):
    """Logits of the teacher; -inf past the end of the row."""
    t = load(both.T, at, mask).to(tl.float32)
    if mask is not None:
        t = tl.where(mask, t, -INF)
    return t


@triton.jit
def target(both, at, mask):
    """The mass of each class in soft cross-entropy: smoothed, times the class weight."""
    v = load(both.T, at, mask).to(tl.float32) * (1.0 - both.blend) + both.blend / both.vocab
    if both.W is not None:
        v *= load(both.W, both.first + at, mask).to(tl.float32)
    if mask is not None:
        v = tl.where(mask, v, 0.0)
    return v


@triton.jit
def extend(m, y, rate):
    """The max after one more block, its move (0 from -inf), and d and e of the block."""
    m_new = tl.maximum(m, tl.max(y, axis=0))
    moved = tl.where((m == m_new) | (m == -INF), 0.0, tl.maximum(m - m_new, -1e38))
    d = y - finite(m_new)
    return m_new, moved, d, tl.exp2(d * rate)


@triton.jit
def walk_both(
    f: tl.constexpr, state, row, head, body, lo, hi,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """layout.walk over both rows. The fringe is as wide as a block, because sums are per lane."""
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
    """The state of no columns."""
    empty, zero = tl.full((), -INF, tl.float32), tl.zeros((BLOCK_V,), tl.float32)
    return PairState(empty, zero, empty, zero, zero)


@triton.jit
def sum_lanes(state):
    """The state with one sum for all lanes."""
    return PairState(
        state.m_q, tl.sum(state.s_q, axis=0), state.m_p, tl.sum(state.s_p, axis=0),
        tl.sum(state.c, axis=0),
    )  # fmt: skip


@triton.jit
def save_state(STATE, row, shift_q, s_q, shift_p, s_p, mean):
    """Saves the state of a row. shift is m, or 0 where m is infinite."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    tl.store(at, shift_q)
    tl.store(at + 1, s_q)
    tl.store(at + 2, shift_p)
    tl.store(at + 3, s_p)
    tl.store(at + 4, mean)


@triton.jit
def load_state(STATE, row):
    """The saved state as a PairState, with shifts instead of maxima and the mean instead of c."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    return PairState(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    )


def rows_of_both(x: Tensor, other: Tensor) -> tuple[Tensor, Rows, Tensor, Rows]:
    """x and its rows, other and its rows, with the same rows_t. Either tensor may be a copy."""
    x, rows = rows_of(x)
    other, o_rows = rows_of(other)
    if rows.rows_t != o_rows.rows_t:
        both = with_one_rows_t(rows, o_rows)
        if both is None:
            return rows_of_both(x, other.contiguous())
        rows, o_rows = both
    return x, rows, other, o_rows


@functools.lru_cache(REMEMBERED)
def with_one_rows_t(*several: Rows) -> tuple[Rows, ...] | None:
    """The same rows with one rows_t for all; None if no rows_t fits.

    So a kernel finds a row in all tensors by one division. Rows with a single stride can be counted
    in groups of any size.
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
    """The temperature as the last tensor of a launch, or else as its first number."""
    t = contiguous(reading.row_temperature)
    return ((), (reading.temperature,)) if t is None else ((t,), ())
