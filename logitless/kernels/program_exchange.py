"""Exchanges the max m and the normaliser s between the programs that share a row.

Each program packs m and s of its split, two fp32 numbers, into a 64-bit integer in memory that is
initially 0, waits until those of all splits are written, and computes m and s of the row. Meanwhile
its split stays in the L1 cache.

This is free of deadlocks if programs start in the order of `tl.program_id` and all programs of a
row, at most MAX_PROGRAMS, fit on the GPU together: those of the oldest unfinished row then always
run. It can fail on a GPU that is partitioned or shared with other processes; with
LOGITLESS_WAITING=0 the kernels read every row twice instead. In Triton's interpreter, which runs
one program after another, rows are not shared.
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
    return programs == 1 or (WAITING and programs <= MAX_PROGRAMS and device.type != "cpu")


def piece_of(count: int) -> int:
    """Rounds up to a power of two, up to LARGEST_PIECE, so that there are few sizes."""
    return count if count > LARGEST_PIECE else max(config.ceil_pow2(count), 64)


def zeros(size: int, like: Tensor) -> Tensor:
    """Returns `size` 64-bit zeros for one launch, on the device of `like`.

    A fill takes as much host time as a launch, so one fill serves many calls, each with its own
    piece; at most 512 KiB per size and device stay allocated. Pieces are for the default stream
    only, where fill and launches run in order, and which no CUDA graph can capture.
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
    """Stores m and s of a split as one integer, which is never 0: if s is 0, m is -inf."""
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def collect(at, splits, rate, BLOCK_P: tl.constexpr):
    """Waits for m and s of all splits, at most BLOCK_P, and returns those of the whole row."""
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < splits
    # first the last split alone, because polling one integer causes less cache traffic
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
