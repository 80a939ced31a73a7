"""Exchange of max m and normaliser s between the programs that share a row.

Each split of a row has one int64 word in memory, which is initially 0. A program writes (m, s) of
its split to the split's word, and waits until the words of all splits are written. Then the program
continues with (m, s) of the whole row, while its split is still in the L1 cache.

The exchange is free of deadlocks if programs start in the order of their ids, and if all programs
of one row, at most MAX_PROGRAMS, fit on the GPU together. Under these two conditions, all programs
of the oldest unfinished row are always running, and no program waits forever. In Triton's
interpreter, programs must not share a row, because the interpreter runs one program after another.
On a GPU that is partitioned or shared with other processes, programs may start in another order, or
may not fit on the GPU together. With LOGITLESS_WAITING=0, programs do not wait for each other, and
the kernels read every row twice instead.
"""

import os

import torch
import triton
import triton.language as tl

from .numerics import move

EMPTY = tl.constexpr(-(0x00800000 << 32))  # the word of (-inf, 0), the state of no columns
MAX_PROGRAMS = 64  # largest number of programs that may share a row
WAITING = os.environ.get("LOGITLESS_WAITING", "1") != "0"  # read once, when the module is imported


def may_wait(programs: int, device: torch.device) -> bool:
    """Whether this number of programs may share a row and wait for each other."""
    return programs == 1 or (WAITING and programs <= MAX_PROGRAMS and device.type != "cpu")


@triton.jit
def publish(at, m, s):
    """Stores (m, s) of a split as one word in one write.

    The word is never 0, because s is 0 only if m is -inf, and the bits of -inf are not 0.
    """
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def collect(at, splits, rate, BLOCK_P: tl.constexpr):
    """Waits until all splits are published, and returns (m, s) of the whole row.

    BLOCK_P must be at least `splits`.
    """
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < splits
    # First, only the last split is polled, because polling one word causes less cache traffic.
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
