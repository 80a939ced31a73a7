"""Each row's tail, the log of the softmax mass outside the ids, without cancellation.

It is 1 minus the mass of the ids, unless that is below ENOUGH, where the subtraction loses too many
bits. Then the kernel reads the row again, and sums the exponentials outside the ids relative to
their own max. A repeated id counts once: its mass is divided by the number of its slots, in rows
that have repeated ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from ...contract import Reading, Statistics
from .. import config
from ..launch import launch
from ..layout import Rows, is_live, load_label, row_offset, rows_of, temperature_of
from ..numerics import INF, LOG2E, NO_ID, capped, finite, inverse_temperature, load, move
from ..profiling import nothing, profiled
from ..statistics.state import LOG_S, SHIFT, STATE_WIDTH
from .duplicate_ids import COMPARED, STATE_REPEATS, are_repeated, load_ids

STATE_TAIL = tl.constexpr(_contract.TAIL)
# the subtraction loses at most six bits
ENOUGH = tl.constexpr(2.0**-6)
LEAST_TAIL = tl.constexpr(_contract.LEAST_TAIL)


@triton.jit
def lift_of(tail):
    return tl.where(tail > -INF, tl.minimum(tail - LEAST_TAIL, 0.0), 0.0)


@triton.jit
def _copies(IDS, ids, K):
    """Returns, for each id in `ids`, how many slots hold it."""
    count = tl.zeros(ids.shape, tl.int32)
    for j in range(K):
        count += (ids == tl.load(IDS + j).to(tl.int32)).to(tl.int32)
    return count


@triton.jit
def _rank(IDS, ids, offs_k, K, repeated):
    """Returns the position of each slot after a stable sort of the slots by id."""
    rank = tl.zeros(ids.shape, tl.int32)
    for j in range(K):
        rank += (tl.load(IDS + j).to(tl.int32) < ids).to(tl.int32)
    if repeated:
        for j in range(K):
            same = (tl.load(IDS + j).to(tl.int32) == ids) & (j < offs_k)
            rank += same.to(tl.int32)
    return rank


@triton.jit
def _sum_between(Xrow, SORTED, V, rate, softcap, BLOCK_V: tl.constexpr):
    """Returns the max m of y, and Σ e^((y - m) / temperature), without the columns in SORTED.

    SORTED ends with a number ≥ V, so that the search for the next id ends.
    """
    m = tl.full((), -INF, tl.float32)
    s = tl.full((), 0.0, tl.float32)
    id = tl.load(SORTED)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        y, _ = capped(load(Xrow, cols, cols < V), softcap)
        y = tl.where(cols < V, y, -INF)
        while id < tl.minimum(start + BLOCK_V, V):
            y = tl.where(cols == id, -INF, y)
            SORTED += 1
            id = tl.load(SORTED)
        m_new = tl.maximum(m, tl.max(y, axis=0))
        s = s * tl.exp2(move(m, m_new, s) * rate)
        s += tl.sum(tl.exp2((y - finite(m_new)) * rate), axis=0)
        m = m_new
    return m, s


@triton.jit
def _sort_ids(IDS, SORTED, K, V, repeated, BLOCK_K: tl.constexpr):
    """Writes the sorted ids and then V to SORTED. Returns the number of empty slots.

    These come first, because NO_ID is negative, and are not written.
    """
    empty = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + offs_k, mask=offs_k < K, other=0).to(tl.int32)
        empty += (ids == NO_ID).to(tl.int32)
        rank = _rank(IDS, ids, offs_k, K, repeated)
        tl.store(SORTED + rank, ids, mask=(offs_k < K) & (ids != NO_ID))
    tl.store(SORTED + K, V)
    tl.debug_barrier()
    return tl.sum(empty, axis=0)


@triton.jit
def _mass_inside(IDS, LOGPROB, K, V, repeated, BLOCK_K: tl.constexpr):
    """Returns the mass of the distinct ids, and whether an id is invalid."""
    q_in = tl.zeros((BLOCK_K,), tl.float32)
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + offs_k, mask=offs_k < K, other=NO_ID)
        inside = (ids >= 0) & (ids < V)
        bad |= (~inside & (ids != NO_ID)).to(tl.int32)
        q = tl.exp2(load(LOGPROB, offs_k, inside) * LOG2E)
        if repeated:
            q = q / tl.maximum(_copies(IDS, load_ids(IDS, offs_k, K), K), 1)
        q_in += tl.where(inside, q, 0.0)
    return tl.sum(q_in, axis=0), tl.max(bad, axis=0) > 0


@triton.jit(
    **profiled("tail_mass", shows=("K",), X=nothing, SORTED=nothing),
    do_not_specialize=["rows_t"],
    do_not_specialize_on_alignment=["LABEL", "IDS", "LOGPROB", "temperature"],
)
def _tail_mass_kernel(
    X, LABEL, IDS, LOGPROB,  # inputs
    STATE, SORTED, TAIL,  # STATE is read and written; SORTED (N, K + 1) is scratch memory
    temperature,
    rows_t, stride_xb, stride_xt, V, K,  # sizes
    softcap, ignore_index,  # options
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    STATE += row.to(tl.int64) * STATE_WIDTH
    if ignore_index is not None:
        if not is_live(load_label(LABEL, row), ignore_index):
            tl.store(TAIL + row, 0.0)
            tl.store(STATE + STATE_TAIL, 0.0)
            tl.store(STATE + STATE_REPEATS, 0.0)
            return
    IDS += row.to(tl.int64) * K
    LOGPROB += row.to(tl.int64) * K
    repeated = are_repeated(IDS, K, BLOCK_K)
    tl.store(STATE + STATE_REPEATS, repeated.to(tl.float32))
    inside, bad = _mass_inside(IDS, LOGPROB, K, V, repeated, BLOCK_K)
    mass = 1.0 - inside
    tail = tl.log(mass)
    if bad | (tl.load(STATE + LOG_S) == INF):  # with a logit of +inf, the softmax is inf / inf
        tail = tail * float("nan")
    elif mass < ENOUGH:
        Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
        inv_t = inverse_temperature(temperature, row)
        SORTED += row.to(tl.int64) * (K + 1)
        SORTED += _sort_ids(IDS, SORTED, K, V, repeated, BLOCK_K)
        m, s = _sum_between(Xrow, SORTED, V, inv_t * LOG2E, softcap, BLOCK_V)
        distance = (finite(m) - tl.load(STATE + SHIFT)) * inv_t
        tail = tl.where(s == 0, -INF, distance + tl.log(s) - tl.load(STATE + LOG_S))
    tl.store(TAIL + row, tail)
    tl.store(STATE + STATE_TAIL, tail)


def write_tail(
    x: Tensor,
    rows: Rows,  # the layout of x
    reading: Reading,
    state: Tensor,  # (N, STATE), whose fields TAIL and REPEATS are written
    logprob: Tensor,  # (..., K), log p at the ids
    shape: tuple[int, ...],
) -> Tensor:
    """Returns the tails, and writes the fields TAIL and REPEATS of the state.

    The tail is NaN for a row with an id outside [0, V) that is not NO_ID.
    """
    K = reading.ids.shape[-1]
    tail = torch.empty(shape, device=x.device, dtype=torch.float32)
    if tail.numel() == 0:
        return tail
    ordered = torch.empty((rows.count, K + 1), device=x.device, dtype=torch.int32)
    label = None if reading.ignore_index is None else reading.label.contiguous()
    tensor, number = temperature_of(reading)
    cut = config.tail_mass(rows.vocab)
    launch(
        _tail_mass_kernel, (rows.count,),
        (x, label, reading.ids.contiguous(), logprob, state, ordered, tail, *tensor),
        (*number, *rows.strides, rows.vocab, K, reading.softcap, reading.ignore_index),
        num_warps=cut.num_warps, BLOCK_K=min(COMPARED, max(config.ceil_pow2(K), 2)),
        BLOCK_V=cut.block_v,
    )  # fmt: skip
    return tail


def outside(x: Tensor, reading: Reading, statistics: Statistics) -> Tensor:
    x, rows = rows_of(x)
    state, logprob = statistics.state, statistics.logprob
    return write_tail(x, rows, reading, state, logprob, x.shape[:-1])
