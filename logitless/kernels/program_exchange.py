"""How the programs that share a row tell each other (m, s) of their parts, and wait for it.

Every part of a row has one int64 word in memory that starts as zeros. A program publishes (m, s) of
its part there, collects the words of all parts, and continues with (m, s) of the whole row, while
its part is still in the cache next to its processor.

Waiting rests on an assumption about the GPU: programs start in the order of their ids, and the
programs of one row, MAX_PARTS at most, fit on it together. So the oldest row that is not done
always has all of its programs running, and nobody waits forever. Triton's interpreter runs one
program after another, so there a row must not be shared. Where the assumption is in doubt, on a GPU
that is partitioned or shared with others, LOGITLESS_WAITING=0 has every row read twice instead.
"""

import os

import torch
import triton
import triton.language as tl

from .numerics import move

EMPTY = tl.constexpr(-(0x00800000 << 32))  # (-inf, 0), the identity state, as a word
MAX_PARTS = 64
WAITING = os.environ.get("LOGITLESS_WAITING", "1") != "0"  # for the whole process


def may_wait(parts: int, device: torch.device) -> bool:
    """Whether so many programs may share a row, each waiting for the others."""
    return parts == 1 or (WAITING and parts <= MAX_PARTS and device.type != "cpu")


@triton.jit
def publish(at, m, s):
    """Store a state as one word, in one write; it is never 0, for s = 0 only where m = -inf."""
    high = m.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = s.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(at, high | low, sem="relaxed")


@triton.jit
def collect(at, parts, rate, BLOCK_P: tl.constexpr):
    """(m, s) of the whole row, as soon as all parts are published. BLOCK_P ≥ parts."""
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < parts
    # Poll only the part that started last: less cache traffic.
    last = tl.load(at + parts - 1, volatile=True)
    while last == 0:
        last = tl.load(at + parts - 1, volatile=True)
    word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    while tl.min((word != 0).to(tl.int32), axis=0) == 0:
        word = tl.load(at + offs_p, mask=mask_p, other=EMPTY, volatile=True)
    m_p = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    s_p = word.to(tl.int32).to(tl.float32, bitcast=True)
    m = tl.max(m_p, axis=0)
    return m, tl.sum(s_p * tl.exp2(move(m_p, m, s_p) * rate), axis=0)
