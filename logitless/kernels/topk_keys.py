"""Keys for top-k, a logit and its column as one integer, and their sort in registers.

A larger logit has a larger key. Among equal logits the lower column has the larger key, so that a
sort decides ties too.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 63))  # the key of an empty place, below all other keys
LOWEST = tl.constexpr(-2139095041)  # -inf as an ordered integer
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _flip(bits):
    """Maps the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, cols):
    """The keys of x in fp32 at these columns."""
    ordered = _flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))  # -0 equals 0
    return (ordered.to(tl.int64) << 32) | (cols ^ LAST).to(tl.int64)


@triton.jit
def logit_of(key):
    """The logit of a key; -inf for an empty place."""
    return _flip(tl.maximum((key >> 32).to(tl.int32), LOWEST)).to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    return key.to(tl.int32) ^ LAST


@triton.jit
def _places(LOG_K: tl.constexpr):
    """The places 0, 1, 2, ... of a list, in shape (2, ..., 2): one axis per bit."""
    return tl.reshape(tl.arange(0, 1 << LOG_K), [2] * LOG_K)


@triton.jit
def _sort_runs(h, places, runs: tl.constexpr, LOG_K: tl.constexpr):
    """Sorts runs of 2^runs places downwards. Each run is bitonic: it rises once and falls once."""
    for i in tl.static_range(runs):
        # Of two keys whose places differ in one bit, the larger goes to the lower place.
        other = tl.sum(h, axis=LOG_K - runs + i, keep_dims=True) - h  # exact, because int64 wraps
        second = ((places >> (runs - 1 - i)) & 1) != 0
        h = tl.where((h > other) != second, h, other)
    return h


@triton.jit
def sort_bitonic(keys, LOG_K: tl.constexpr):
    """Sorts a bitonic list downwards, such as the place-by-place max of two sorted lists."""
    h = _sort_runs(tl.reshape(keys, [2] * LOG_K), _places(LOG_K), LOG_K, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def sort(keys, LOG_K: tl.constexpr):
    """Sorts a list downwards. Every other run goes upwards, so that two runs form a bitonic one.

    Sorting upwards is inverting all bits and sorting downwards. So only the set of inverted places
    changes from size to size. These are few masks, which fit into few registers.
    """
    places = _places(LOG_K)
    h = tl.reshape(keys, [2] * LOG_K)
    for runs in tl.static_range(1, LOG_K + 1):
        # Inverted so far: every other run of half the size. From now on: every other run.
        inverted = places >> runs
        if runs > 1:
            inverted ^= places >> (runs - 1)
        h = _sort_runs(h ^ -(inverted & 1).to(tl.int64), places, runs, LOG_K)
    return tl.reshape(h, [1 << LOG_K])
