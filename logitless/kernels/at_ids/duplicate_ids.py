"""Finds rows in which two of the K slots hold the same id. The backward adds up equal ids only
there.

A program compares a block of slots with one id at a time: with each in the block, then with each
later one of the row. A comparison of two slots takes one instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from .. import config
from ..launch import launch
from ..profiling import profiled
from ..statistics.state import STATE_WIDTH

COMPARED = 128  # largest number of slots in a block; a block is compared with one id at a time
STATE_REPEATS = tl.constexpr(_contract.REPEATS)


@triton.jit
def load_ids(IDS, offs_k, K):
    """Loads ids as int32, with -1 for every negative id.

    An id that does not fit into int32 changes, but it is invalid and makes its row NaN anyway.
    """
    ids = tl.load(IDS + offs_k, mask=offs_k < K, other=-1).to(tl.int32)
    return tl.where(ids < 0, -1, ids)


@triton.jit
def are_repeated(IDS, K, BLOCK_K: tl.constexpr):
    repeated = tl.zeros((BLOCK_K,), tl.int1)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = load_ids(IDS, offs_k, K)
        end = tl.minimum(start + BLOCK_K, K)
        copies = tl.zeros((BLOCK_K,), tl.int32)  # number of slots with this id
        for j in range(start, end):
            copies += (ids == tl.load(IDS + j).to(tl.int32)).to(tl.int32)
        repeated = repeated | (copies > 1)
        for j in range(end, K):
            repeated = repeated | (ids == tl.load(IDS + j).to(tl.int32))
    return tl.max(repeated.to(tl.int32), axis=0) > 0


@triton.jit(
    **profiled("duplicate_ids", shows=("K",)),
    do_not_specialize_on_alignment=["IDS", "STATE"],
)
def _duplicate_ids_kernel(
    IDS, STATE,  # inputs
    OUT,  # output: a copy of STATE, with the field REPEATS filled in
    K,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    repeated = are_repeated(IDS + row * K, K, BLOCK_K)
    j = tl.arange(0, 8)
    mask = j < STATE_WIDTH
    fields = tl.load(STATE + row * STATE_WIDTH + j, mask=mask, other=0.0)
    fields = tl.where(j == STATE_REPEATS, repeated.to(tl.float32), fields)
    tl.store(OUT + row * STATE_WIDTH + j, fields, mask=mask)


def with_repeats(state: Tensor, ids: Tensor) -> Tensor:
    if ids.numel() == 0:
        return state
    out = torch.empty_like(state)
    K = ids.shape[-1]
    launch(
        _duplicate_ids_kernel, (len(state),), (ids.contiguous(), state, out), (K,),
        num_warps=1, BLOCK_K=min(COMPARED, max(config.ceil_pow2(K), 2)),
    )  # fmt: skip
    return out
