"""The two passes over a student's row and a teacher's row, and the five numbers saved per row.

With d = y - max y, e = 2^(d·rate), rate = 1 / (temperature ln 2) and s = Σ e, the student has
q = e_q / s_q and the teacher p = e_p / s_p. Only differences from the max occur, so a common offset
of the logits costs no precision. The state (N, PAIR_STATE) holds the shift (max, or 0 if infinite)
and s of the student, both of the teacher, and the `mean` of losses.py. A partial state, of
some columns, holds the max instead of the shift, and c / temperature instead of the mean: in nats,
as eager's `merge_pairs` expects.
"""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...contract import PAIR_STATE as PAIR_STATE_
from ..launch import REMEMBERED
from ..layout import Rows, pack_of, rows_of, walk
from ..numerics import INF, capped, finite, load

PAIR_STATE = tl.constexpr(PAIR_STATE_)


class PairState(NamedTuple):
    """The max and the sums of both rows over the columns read so far.

    In the loop, each sum has shape (BLOCK_V,), its lanes, which `sum_lanes` adds up.
    """

    m_q: tl.tensor  # max y of the student
    s_q: tl.tensor  # Σ e_q
    m_p: tl.tensor  # max of the teacher's logits; not used by "soft"
    s_p: tl.tensor  # Σ e_p; for "soft", the sum of `target` over the columns
    c: tl.tensor  # the sum c of a loss of one pass (losses.py)


class Both(NamedTuple):
    """Pointers to a student's and a teacher's row, and the options of the loss."""

    X: tl.tensor
    T: tl.tensor
    W: tl.tensor  # class weights of the whole row, or None
    first: tl.tensor  # the column that X and T point to
    V: tl.tensor
    rate: tl.tensor  # log2 e / temperature
    softcap: tl.tensor  # the student's softcap, or None; the teacher has no softcap
    blend: tl.tensor  # α for a skewed KL, β for "jsd", the label smoothing ε for "soft"
    vocab: tl.tensor  # size of the whole vocabulary, even if the rows are only a shard
    inv_t: tl.tensor  # 1 / temperature


class Pass(NamedTuple):
    """What a pass over a row does. Built in an argument list: a variable would lose FOLD."""

    both: tl.tensor
    FOLD: tl.constexpr  # a loss's `fold` (losses.py), or None
    PROBS: tl.constexpr  # the function `target` if T holds probabilities; None if T holds logits


class Side(NamedTuple):
    """The student or the teacher in a tile. The functions of a loss read two of them, q and p.

    In the first pass, s covers the columns before the tile, after which the max changed by `moved`;
    afterwards s covers the row. Of a teacher that gives probabilities, e is `target`, without d.
    """

    d: tl.tensor  # logits minus the max of the row
    e: tl.tensor  # 2^(d · rate)
    log_p: tl.tensor  # log2 of the probabilities e / s; only after the first pass
    s: tl.tensor  # the normaliser Σ e
    log_s: tl.tensor  # log2 s, see `bits`; only after the first pass
    moved: tl.tensor
    scale: tl.tensor  # 2^(moved · rate)


class Sums(NamedTuple):
    """The sums of the second pass, in the loop with one element per column of a block."""

    a: tl.tensor
    b: tl.tensor
    c: tl.tensor


class Second(NamedTuple):
    """The state of the second pass: the shifts and normalisers of the row, and the sums."""

    row: tl.tensor
    sums: tl.tensor


@triton.jit
def elements_to(P):
    """Returns the address of P in elements, which shows how far it is from a 16-byte boundary."""
    return P.to(tl.int64) // (P.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def student(both, at, mask):
    """Loads the student's logits y, after the softcap, with -inf where the mask is False."""
    y, _ = capped(load(both.X, at, mask), both.softcap)
    if mask is not None:
        # as in `state.fold`
        y = tl.where(mask, y, -INF)
    return y


@triton.jit
def teacher(both, at, mask):
    t = load(both.T, at, mask).to(tl.float32)
    if mask is not None:
        t = tl.where(mask, t, -INF)
    return t


@triton.jit
def target(both, at, mask):
    """Returns the smoothed target probabilities, times the class weights."""
    v = load(both.T, at, mask).to(tl.float32) * (1.0 - both.blend) + both.blend / both.vocab
    if both.W is not None:
        v *= load(both.W, both.first + at, mask).to(tl.float32)
    if mask is not None:
        v = tl.where(mask, v, 0.0)
    return v


@triton.jit
def bits(s):
    """Returns log2 of a normaliser s, but +inf for s = 0, so that subtracting it gives p = 0."""
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _extend(m, y, rate):
    """Returns the new max, its change (0 from -inf), d = y - max, and e = 2^(d·rate)."""
    m_new = tl.maximum(m, tl.max(y, axis=0))
    moved = tl.where((m == m_new) | (m == -INF), 0.0, tl.maximum(m - m_new, -1e38))
    d = y - finite(m_new)
    return m_new, moved, d, tl.exp2(d * rate)


@triton.jit
def from_shift(y, shift, s, log_s, rate):
    """Returns a tile as a Side, after the first pass."""
    d = y - shift
    return Side(d, tl.exp2(d * rate), d * rate - log_s, s, log_s, 0.0, 1.0)


@triton.jit
def first_pass(state, how, start, offs, mask):
    """Merges one block into the maxima and the normalisers of both rows, and into the sum c."""
    both = how.both
    m_q, moved_q, d_q, e_q = _extend(state.m_q, student(both, start + offs, mask), both.rate)
    if how.PROBS is not None:
        m_p, v = state.m_p, how.PROBS(both, start + offs, mask)
        q = Side(d_q, e_q, None, state.s_q, None, moved_q, tl.exp2(moved_q * both.rate))
        p = Side(None, v, None, state.s_p, None, 0.0, 1.0)
    else:
        # both tiles are loaded before the scales, which wait for the maxima
        m_p, moved_p, d_p, e_p = _extend(state.m_p, teacher(both, start + offs, mask), both.rate)
        if how.FOLD is None:  # as below, but in the order of instructions that takes 2 % less time
            s_q = state.s_q * tl.exp2(moved_q * both.rate) + e_q
            s_p = state.s_p * tl.exp2(moved_p * both.rate) + e_p
            return PairState(m_q, s_q, m_p, s_p, state.c)
        q = Side(d_q, e_q, None, state.s_q, None, moved_q, tl.exp2(moved_q * both.rate))
        p = Side(d_p, e_p, None, state.s_p, None, moved_p, tl.exp2(moved_p * both.rate))
    c = state.c
    if how.FOLD is not None:
        c = how.FOLD(c, q, p, both)
    return PairState(m_q, q.s * q.scale + q.e, m_p, p.s * p.scale + p.e, c)


@triton.jit
def second_pass(state, how, start, offs, mask):
    """Adds one block to the sums of a loss whose terms need the normalisers."""
    both = how.both
    m_q, s_q, m_p, s_p, log_q, log_p = state.row
    q = from_shift(student(both, start + offs, mask), m_q, s_q, log_q, both.rate)
    p = from_shift(teacher(both, start + offs, mask), m_p, s_p, log_p, both.rate)
    return Second(state.row, how.FOLD(state.sums, q, p, both))


@triton.jit
def walk_both(
    f: tl.constexpr, state, row, head, body, lo, hi, FOLD: tl.constexpr, PROBS: tl.constexpr,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Folds f over a student's row and a teacher's row, as `walk` of layout.py.

    The fringe tile is as wide as a block, because the sums have one element per column of a block.
    """
    PACK: tl.constexpr = pack_of(row.X)
    T = row.T + head
    if T_ALIGNED:
        T = tl.multiple_of(T, 16)
    from_body = Both(
        tl.multiple_of(row.X + head, 16), T, row.W, head, row.V, row.rate, row.softcap, row.blend,
        row.vocab, row.inv_t,
    )  # fmt: skip
    return walk(
        f, state, Pass(from_body, FOLD, PROBS), Pass(row, FOLD, PROBS), head, body, row.V, lo, hi,
        PACK, ALIGNED, False, BLOCK_V, BLOCK_V,
    )  # fmt: skip


@triton.jit
def fresh_state(BLOCK_V: tl.constexpr):
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
    """Saves the state of a row. For a partial state, the shifts are the maxima."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    tl.store(at, shift_q)
    tl.store(at + 1, s_q)
    tl.store(at + 2, shift_p)
    tl.store(at + 3, s_p)
    tl.store(at + 4, mean)


@triton.jit
def save_mean(STATE, row, mean):
    tl.store(STATE + row.to(tl.int64) * PAIR_STATE + 4, mean)


@triton.jit
def load_state(STATE, row):
    """Loads the saved state of a row: shifts as m_q and m_p, the mean as c."""
    at = STATE + row.to(tl.int64) * PAIR_STATE
    return PairState(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    )


def rows_of_both(x: Tensor, other: Tensor) -> tuple[Tensor, Rows, Tensor, Rows]:
    """Returns x and `other` with their layouts of one `rows_t`, for which `other` may be copied."""
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
    """Returns the layouts with one common `rows_t`, or None if none fits all.

    It is the size T of a (B, T, V) view: a kernel then finds a row in all tensors by one division.
    A layout with a single row stride can use any `rows_t`.
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
