"""Exchanges the max m and the normaliser s between the programs that share a row.

A split is the part of a row that one program reads. Each split has one 64-bit integer in memory.
The integer is initially 0. A program packs two fp32 numbers, the max m and the normaliser s of its
split, into this integer. The program then waits until the integers of all splits are written, and
computes the max and the normaliser of the whole row. While the program waits, its split stays in
the L1 cache.

The exchange is free of deadlocks if programs start in the order of `tl.program_id`, and if all
programs of one row fit on the GPU together. Under these two conditions, all programs of the oldest
unfinished row are always running, and no program waits forever. A row has at most MAX_PROGRAMS
programs. In Triton's interpreter, programs must not share a row, because the interpreter runs one
program after another. On a GPU that is partitioned or shared with other processes, the two
conditions can fail. For example, programs can start in another order. With LOGITLESS_WAITING=0,
programs do not wait for each other, and the kernels read every row twice instead.
"""

import os

import torch
import triton
import triton.language as tl

from .numerics import move

EMPTY = tl.constexpr(-(0x00800000 << 32))  # max -inf and normaliser 0, packed into one integer
MAX_PROGRAMS = 64  # largest number of programs that can share a row
WAITING = os.environ.get("LOGITLESS_WAITING", "1") != "0"  # read once, when the module is imported


def may_wait(programs: int, device: torch.device) -> bool:
    """Whether this number of programs is allowed to share a row and wait for each other."""
    return programs == 1 or (WAITING and programs <= MAX_PROGRAMS and device.type != "cpu")


@triton.jit
def publish(at, m, s):
    """Packs the max m and the normaliser s of a split into one integer, and stores this integer.

    The packed integer is never 0. If the normaliser is 0, the max is -inf, and the bits of -inf are
    not 0.
    """
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def collect(at, splits, rate, BLOCK_P: tl.constexpr):
    """Waits for m and s of all splits, and returns the max and the normaliser of the whole row.

    BLOCK_P must be at least `splits`.
    """
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < splits
    # First, only the last split is polled, because polling one integer causes less cache traffic.
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
