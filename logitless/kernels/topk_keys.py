"""Keys, a logit and its column as one integer, and how a list of them is sorted in registers.

Keys are ordered by logit, and among equals by column, leftmost first, so every sort settles ties.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 63))  # the key of no element, below every other
LOWEST = tl.constexpr(-2139095041)  # -inf, ordered
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _flip(bits):
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, cols):
    """x in fp32 and its column as one number: a larger x is larger, then a lower column."""
    ordered = _flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))  # -0 is 0
    return (ordered.to(tl.int64) << 32) | (cols ^ LAST).to(tl.int64)


@triton.jit
def logit_of(key):
    """x of a key; -inf of an empty one."""
    return _flip(tl.maximum((key >> 32).to(tl.int32), LOWEST)).to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    return key.to(tl.int32) ^ LAST


@triton.jit
def _places(LOG_K: tl.constexpr):
    """0, 1, 2, ... of the places of a list, as (2, ..., 2): an axis for each bit."""
    return tl.reshape(tl.arange(0, 1 << LOG_K), [2] * LOG_K)


@triton.jit
def _settle(h, places, runs: tl.constexpr, LOG_K: tl.constexpr):
    """Sort, downwards, runs of 2^runs places; each is bitonic: it rises and falls, and no more."""
    for i in tl.static_range(runs):
        # Of two keys whose places differ in one bit, the larger to the lower place.
        other = tl.sum(h, axis=LOG_K - runs + i, keep_dims=True) - h  # int64 wraps: exact
        second = ((places >> (runs - 1 - i)) & 1) != 0
        h = tl.where((h > other) != second, h, other)
    return h


@triton.jit
def sort_bitonic(keys, LOG_K: tl.constexpr):
    """Sorted downwards: the larger of a falling and a rising list, place by place."""
    h = _settle(tl.reshape(keys, [2] * LOG_K), _places(LOG_K), LOG_K, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def sort(keys, LOG_K: tl.constexpr):
    """Sorted downwards: every other run upwards, so that two make a bitonic one of twice the size.

    To go up is to go down with all bits turned, so which places are turned is all that changes
    from size to size: few masks, which the compiler keeps in few registers.
    """
    places = _places(LOG_K)
    h = tl.reshape(keys, [2] * LOG_K)
    for runs in tl.static_range(1, LOG_K + 1):
        # Turned until now: every other run of half the size. From now on: every other one.
        turned = places >> runs
        if runs > 1:
            turned ^= places >> (runs - 1)
        h = _settle(h ^ -(turned & 1).to(tl.int64), places, runs, LOG_K)
    return tl.reshape(h, [1 << LOG_K])
