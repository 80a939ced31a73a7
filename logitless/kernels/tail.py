"""The mass of a row outside some of its ids, without cancellation.

Where it is a fair share of the whole, it is what is left when the ids' masses, known from what was
picked, are taken away, and that is right to many digits. Where it is small, subtracting would leave
noise: such a row is read once more, and what is not among its ids is summed for itself, with a max
of its own. An id counts once however often it is repeated; what that costs, only rows that repeat
one pay.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch
from .repeats import COMPARED, are_repeated, load_ids
from .rows import (
    INF,
    LOG2E,
    NO_ID,
    capped,
    finite,
    inverse_temperature,
    load,
    move,
    row_offset,
)
from .view import Rows

ENOUGH = tl.constexpr(2.0**-6)  # of the mass: six bits may be lost


@triton.jit
def _copies(IDS, ids, K):
    """How many slots hold each of `ids`."""
    count = tl.zeros(ids.shape, tl.int32)
    for j in range(K):
        count += (ids == tl.load(IDS + j).to(tl.int32)).to(tl.int32)
    return count


@triton.jit
def _rank(IDS, ids, offs_k, K, repeated):
    """How many slots come before each in the order of ids."""
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
    """(max, sum) of the columns that are not in SORTED, which ends with a number ≥ V."""
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


@triton.jit(do_not_specialize=["rows_t"])
def _tail_kernel(
    X, IDS, PICKED, TEMP, SHIFT, LOG_S,  # inputs
    SORTED, TAIL, REPEATS,  # outputs; SORTED (rows, K - first + 1), for rows that need it
    rows_t, stride_xb, stride_xt, V, K, first,  # sizes
    temperature, softcap, ignore_index,  # options
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    IDS += row.to(tl.int64) * K
    if ignore_index is not None:
        if tl.load(IDS) == ignore_index:
            tl.store(TAIL + row, 0.0)
            tl.store(REPEATS + row, 0)
            return
    IDS += first
    PICKED += row.to(tl.int64) * K + first
    own = K - first
    repeated = are_repeated(IDS, own, BLOCK_K)
    tl.store(REPEATS + row, repeated.to(tl.int8))
    q_in = tl.zeros((BLOCK_K,), tl.float32)
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, own, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(IDS + offs_k, mask=offs_k < own, other=NO_ID)
        inside = (ids >= 0) & (ids < V)
        bad |= (~inside & (ids != NO_ID)).to(tl.int32)
        q = tl.exp2(load(PICKED, offs_k, inside) * LOG2E)
        if repeated:
            q = q / tl.maximum(_copies(IDS, load_ids(IDS, offs_k, own), own), 1)
        q_in += tl.where(inside, q, 0.0)
    mass = 1.0 - tl.sum(q_in, axis=0)
    tail = tl.log(mass)
    if tl.max(bad, axis=0) > 0:
        tail = tail * float("nan")
    elif mass < ENOUGH:
        Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
        inv_t = inverse_temperature(TEMP, temperature, row)
        shift = tl.load(SHIFT + row)
        SORTED += row.to(tl.int64) * (own + 1)
        none = tl.zeros((BLOCK_K,), tl.int32)  # slots that hold no id come first, and are skipped
        for start in range(0, own, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            ids = tl.load(IDS + offs_k, mask=offs_k < own, other=0).to(tl.int32)
            none += (ids == NO_ID).to(tl.int32)
            rank = _rank(IDS, ids, offs_k, own, repeated)
            tl.store(SORTED + rank, ids, mask=(offs_k < own) & (ids != NO_ID))
        tl.store(SORTED + own, V)
        tl.debug_barrier()
        SORTED += tl.sum(none, axis=0)
        m, s = _sum_between(Xrow, SORTED, V, inv_t * LOG2E, softcap, BLOCK_V)
        log_s = tl.load(LOG_S + row)
        tail = tl.where(s == 0, -INF, (finite(m) - shift) * inv_t + tl.log(s) - log_s)
    tl.store(TAIL + row, tail)


def mass_outside(
    x: Tensor,
    rows: Rows,  # of x
    ids: Tensor,  # (..., K)
    picked: Tensor,  # (..., K), log p at the ids
    row_temperature: Tensor | None,  # (...)
    shift: Tensor,  # (...)
    log_s: Tensor,  # (...)
    tail: Tensor,  # (...), output
    repeats: Tensor,  # (...), output: whether one of ids[..., first:] is in two slots
    K: int,
    first: int,
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
) -> None:
    """log of the mass outside ids[..., first:]; NaN where one of these is not in [0, V).

    A slot of NO_ID holds none.
    """
    ordered = torch.empty((rows.count, K - first + 1), device=x.device, dtype=torch.int32)
    _plan(rows, K, first, temperature, softcap, ignore_index, config.backward(rows.vocab))(
        x, ids, picked, row_temperature, shift, log_s, ordered, tail, repeats
    )


@functools.lru_cache(REMEMBERED)
def _plan(
    rows: Rows, K: int, first: int, temperature: float, softcap: float | None,
    ignore_index: int | None, cut: config.Config,
) -> Launch:  # fmt: skip
    block = min(COMPARED, max(config.ceil_pow2(K - first), 2))
    return Launch(
        _tail_kernel, (rows.count,),
        (*rows.where, rows.vocab, K, first, temperature, softcap, ignore_index),
        num_warps=1, BLOCK_K=block, BLOCK_V=min(cut.block_v, 512),
    )  # fmt: skip
