"""The loop over a student's row and a teacher's row, and the five numbers saved for each row.

For each row of logits y, let d = y - max y, e = 2^(d·rate) and s = Σ e, where
rate = 1 / (temperature ln 2). With the normalisers s_q and s_p, the student's probabilities are
q = e_q / s_q, and the teacher's probabilities are p = e_p / s_p. Kernels use only differences from
the max, so that a common offset of the logits costs no precision.

The saved state has shape (N, PAIR_STATE) and holds five numbers per row: the student's shift and
normaliser, the teacher's shift and normaliser, and a mean. A shift is the max, or 0 if the max is
infinite. The mean is an expectation under the student's probabilities. For reverse KL, the mean is
Σ q (d_q - d_p), which is not divided by the temperature. For JSD, the mean is Σ q log2(q / M), in
bits, where M is the mixture of student and teacher. For a skewed KL, the mean is Σ q g in
nats (see `skewed` in jsd_math.py). For fp32 logits, this mean is divided by Σ q. For the total
variation (TVD), the state holds `ratio` (see tvd_math.py) instead of the mean. For other losses,
the mean is 0. The eager backend (eager/pair.py) saves the mean in nats. The different units cause
no conflict, because a backend never reads the state of the other backend.

The function `pair_partial` returns a partial state, which covers only some columns of a row. A
partial state holds the max instead of the shift. Instead of the mean, a partial state holds the sum
c (see pair_fwd.py), divided by the temperature. In both backends, the sum in a partial state is in
nats. The reason is that both backends merge partial states with the same function `merge_pairs`
(eager/pair.py).
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
    """The max and the sums of a student's row and a teacher's row, over the columns read so far.

    During the loop, each sum has shape (BLOCK_V,). The BLOCK_V elements are called lanes, and
    `sum_lanes` adds them after the loop.
    """

    m_q: tl.tensor  # max y of the student
    s_q: tl.tensor  # Σ e_q
    m_p: tl.tensor  # max of the teacher's logits; not used by "soft"
    s_p: tl.tensor  # Σ e_p; for "soft", the sum of `target` over the columns
    c: tl.tensor  # the sum c of the loss (see pair_fwd.py)


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


@triton.jit
def elements_to(P):
    """Returns the address of P, counted in elements instead of bytes.

    From this number, kernels compute how far P is from a 16-byte boundary.
    """
    return P.to(tl.int64) // (P.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def student(both, at, mask):
    """Loads the student's logits y, after the softcap, with -inf where the mask is False."""
    y, _ = capped(load(both.X, at, mask), both.softcap)
    if mask is not None:
        # The mask is applied after the softcap, because tanh would turn -inf into -softcap.
        y = tl.where(mask, y, -INF)
    return y


@triton.jit
def teacher(both, at, mask):
    """Loads the teacher's logits, with -inf where the mask is False."""
    t = load(both.T, at, mask).to(tl.float32)
    if mask is not None:
        t = tl.where(mask, t, -INF)
    return t


@triton.jit
def target(both, at, mask):
    """Returns the smoothed target probability of each class, times the class weight."""
    v = load(both.T, at, mask).to(tl.float32) * (1.0 - both.blend) + both.blend / both.vocab
    if both.W is not None:
        v *= load(both.W, both.first + at, mask).to(tl.float32)
    if mask is not None:
        v = tl.where(mask, v, 0.0)
    return v


@triton.jit
def extend(m, y, rate):
    """Returns the new max, the change of the max, d = y - max, and e = 2^(d·rate).

    The change is 0 if the old max is -inf.
    """
    m_new = tl.maximum(m, tl.max(y, axis=0))
    moved = tl.where((m == m_new) | (m == -INF), 0.0, tl.maximum(m - m_new, -1e38))
    d = y - finite(m_new)
    return m_new, moved, d, tl.exp2(d * rate)


@triton.jit
def walk_both(
    f: tl.constexpr, state, row, head, body, lo, hi,
    ALIGNED: tl.constexpr, T_ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Calls f for each block of columns of a student's row and a teacher's row.

    The function `walk` of layout.py loops over the blocks. The fringe tile is as wide as a block,
    because the sums have one element per column of a block.
    """
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
    """The state before any column is read."""
    empty, zero = tl.full((), -INF, tl.float32), tl.zeros((BLOCK_V,), tl.float32)
    return PairState(empty, zero, empty, zero, zero)


@triton.jit
def sum_lanes(state):
    """Returns the state with each sum reduced over all lanes."""
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
def load_state(STATE, row):
    """Loads the saved state of a row as a PairState.

    The fields m_q and m_p are the saved shifts, and the field c is the saved mean.
    """
    at = STATE + row.to(tl.int64) * PAIR_STATE
    return PairState(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    )


def rows_of_both(x: Tensor, other: Tensor) -> tuple[Tensor, Rows, Tensor, Rows]:
    """Returns x and its layout, and `other` and its layout.

    Both layouts have the same `rows_t`, which is the size T of a (B, T, V) view. If no `rows_t`
    fits both layouts, `other` is copied.
    """
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
    """Returns copies of the layouts with one common `rows_t`, or None if no `rows_t` fits all
    layouts.

    `rows_t` is the size T of a (B, T, V) view. With a common `rows_t`, a kernel finds a row in all
    tensors by one division. A layout with a single row stride can use any `rows_t`.
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
    """Returns the temperature as launch arguments: a tuple of tensors and a tuple of numbers.

    One of the two tuples is empty. If each row has its own temperature, the first tuple holds the
    tensor of temperatures. A launch takes this tensor as its last tensor. Otherwise, the second
    tuple holds the temperature. A launch takes this number as its first number.
    """
    t = contiguous(reading.row_temperature)
    return ((), (reading.temperature,)) if t is None else ((t,), ())
