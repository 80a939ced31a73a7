"""Whether a row has an id in two slots: asked once, so that only such rows pay for adding up.

Each slot is compared with those after it, a scalar at a time: one instruction a pair.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import config
from .launch import REMEMBERED, Launch

COMPARED = 128  # slots at a time


@triton.jit
def load_ids(IDS, offs_k, K):
    """Slots' ids, in 32 bits: a row with wider ones is NaN in the end. -1 where there is none."""
    ids = tl.load(IDS + offs_k, mask=offs_k < K, other=-1).to(tl.int32)
    return tl.where(ids < 0, -1, ids)


@triton.jit
def are_repeated(IDS, K, BLOCK_K: tl.constexpr):
    """Whether two slots hold the same id: each slot against those after it."""
    found = tl.zeros((BLOCK_K,), tl.int1)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = load_ids(IDS, offs_k, K)
        end = tl.minimum(start + BLOCK_K, K)
        seen = tl.zeros((BLOCK_K,), tl.int32)  # itself among them
        for j in range(start, end):
            seen += (ids == tl.load(IDS + j).to(tl.int32)).to(tl.int32)
        found = found | (seen > 1)
        for j in range(end, K):
            found = found | (ids == tl.load(IDS + j).to(tl.int32))
    return tl.max(found.to(tl.int32), axis=0) > 0


@triton.jit
def _repeats_kernel(
    IDS,  # input
    REPEATS,  # output
    K, first,  # sizes
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    found = are_repeated(IDS + row.to(tl.int64) * K + first, K - first, BLOCK_K)
    tl.store(REPEATS + row, found.to(tl.int8))


def repeats_of(ids: Tensor, rows: int, first: int) -> Tensor:
    """Whether one of ids[..., first:] is in two slots, int8 (rows,), of ids (..., K)."""
    repeats = torch.empty(rows, device=ids.device, dtype=torch.int8)
    _plan(rows, ids.numel() // rows, first)(ids, repeats)
    return repeats


@functools.lru_cache(REMEMBERED)
def _plan(rows: int, K: int, first: int) -> Launch:
    block = min(COMPARED, max(config.ceil_pow2(K), 2))
    return Launch(_repeats_kernel, (rows,), (K, first), num_warps=1, BLOCK_K=block)
