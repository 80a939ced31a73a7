"""Programs that share a row publish (m, s) of their splits, and wait for those of the others.

Each split of a row has one int64 word in memory, which starts as 0. A program publishes (m, s) of
its split in its word and collects the words of all splits. Then it continues with (m, s) of the
whole row, while its split is still in the L1 cache.

Waiting rests on an assumption about the GPU: programs start in the order of their ids, and the
programs of one row, at most MAX_PROGRAMS, fit on the GPU together. So all programs of the oldest
unfinished row are always running, and no program waits forever. Triton's interpreter runs one
program after another, so that programs must not share a row there. On a GPU that is partitioned or
shared with others the assumption is in doubt. There LOGITLESS_WAITING=0 makes the kernels read
every row twice instead.
"""

import os

import torch
import triton
import triton.language as tl

from .numerics import move

EMPTY = tl.constexpr(-(0x00800000 << 32))  # (-inf, 0), the identity state, as a word
MAX_PROGRAMS = 64  # that may share a row
WAITING = os.environ.get("LOGITLESS_WAITING", "1") != "0"  # for the whole process


def may_wait(programs: int, device: torch.device) -> bool:
    """Whether this number of programs may share a row, each waiting for the others."""
    return programs == 1 or (WAITING and programs <= MAX_PROGRAMS and device.type != "cpu")


@triton.jit
def publish(at, m, s):
    """Stores a state as one word, in one write. It is never 0, because s = 0 only if m = -inf."""
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def collect(at, splits, rate, BLOCK_P: tl.constexpr):
    """(m, s) of the whole row, as soon as all splits are published. BLOCK_P ≥ splits."""
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < splits
    # Poll only the split that started last, which causes less cache traffic.
    last = tl.load(at + splits - 1, volatile=True)
    while last == 0:
        last = tl.load(at + splits - 1, volatile=True)
    word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    while tl.min((word != 0).to(tl.int32), axis=0) == 0:
        word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    m_p = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    s_p = word.to(tl.int32).to(tl.float32, bitcast=True)
    m = tl.max(m_p, axis=0)
    return m, tl.sum(s_p * tl.exp2(move(m_p, m, s_p) * rate), axis=0)
