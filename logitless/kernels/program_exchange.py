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
from torch import Tensor
from triton.runtime import driver

from . import config
from .numerics import move

EMPTY = tl.constexpr(-(0x00800000 << 32))  # max -inf and normaliser 0, packed into one integer
MAX_PROGRAMS = 64  # largest number of programs that can share a row
WAITING = os.environ.get("LOGITLESS_WAITING", "1") != "0"  # read once, when the module is imported
LARGEST_PIECE = 1 << 13  # integers; larger arrays of zeros are not filled in advance
FILL = 8 * LARGEST_PIECE  # the largest number of integers that one fill sets to 0 (512 KiB)
MOST_PIECES = 64  # the largest number of pieces of one fill

_pieces: dict[tuple[torch.device, int], list[Tensor]] = {}  # unused zeros, by device and size


def may_wait(programs: int, device: torch.device) -> bool:
    """Whether this number of programs is allowed to share a row and wait for each other."""
    return programs == 1 or (WAITING and programs <= MAX_PROGRAMS and device.type != "cpu")


def piece_of(count: int) -> int:
    """Returns the size of the piece for `count` integers.

    The size is rounded up to a power of two, so that there are few different sizes. A size above
    LARGEST_PIECE is not rounded.
    """
    return count if count > LARGEST_PIECE else max(config.ceil_pow2(count), 64)


def zeros(size: int, like: Tensor) -> Tensor:
    """Returns `size` 64-bit zeros on the device of `like`, for one launch.

    `size` must be a result of `piece_of`.

    A fill takes as much host time as a launch. Therefore one fill serves many calls, and each call
    gets a piece of memory that no other call gets. At most 512 KiB per size and device stay
    allocated. A launch must run after the fill of its piece. Therefore pieces are used only on the
    default stream of a GPU, where the fill and all launches run in order. A CUDA graph cannot be
    captured on the default stream, so a graph never contains a piece.
    """
    device = like.device
    on_default_stream = like.is_cuda and driver.active.get_current_stream(device.index) == 0
    if size > LARGEST_PIECE or not on_default_stream:
        return like.new_zeros(size, dtype=torch.int64)
    try:
        return _pieces[device, size].pop()
    except (KeyError, IndexError):  # there are no pieces yet, or no more pieces
        count = min(FILL // size, MOST_PIECES)
        fresh = [*like.new_zeros(count * size, dtype=torch.int64).split(size)]
        piece = fresh.pop()
        _pieces[device, size] = fresh
        return piece


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
