"""Whether a row has an id in two slots: asked once, so that only such rows pay for adding up.

Each slot is compared with those after it, a scalar at a time: one instruction a pair.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from .. import contract as _contract
from . import config
from .launch import REMEMBERED, Launch
from .profiling import profiled
from .state import STATE_WIDTH

COMPARED = 128  # slots at a time
STATE_REPEATS = tl.constexpr(_contract.REPEATS)


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


@triton.jit(
    **profiled("duplicate_ids", shows=("K",)),
    do_not_specialize_on_alignment=["IDS", "STATE"],
)
def _duplicate_ids_kernel(
    IDS,  # input
    STATE,  # output, of which one field is written
    K,
    BLOCK_K: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    found = are_repeated(IDS + row.to(tl.int64) * K, K, BLOCK_K)
    tl.store(STATE + row.to(tl.int64) * STATE_WIDTH + STATE_REPEATS, found.to(tl.float32))


def write_repeats(ids: Tensor, state: Tensor) -> None:
    """The field REPEATS of state (N, STATE): whether one of ids (..., K) is in two slots."""
    _plan(len(state), ids.shape[-1])(ids, state)


@functools.lru_cache(REMEMBERED)
def _plan(rows: int, K: int) -> Launch:
    block = min(COMPARED, max(config.ceil_pow2(K), 2))
    return Launch(_duplicate_ids_kernel, (rows,), (K,), num_warps=1, BLOCK_K=block)
