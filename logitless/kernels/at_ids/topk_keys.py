"""Keys for top-k, and sorting of keys in registers.

A key is one integer for a logit and its column: larger for a larger logit and, among equal logits,
for a lower column. So a descending sort puts equal logits in ascending order of their columns.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 63))  # marks an empty entry of a list; smaller than all other keys
LOWEST = tl.constexpr(-2139095041)  # the result of _flip for -inf
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _flip(bits):
    """Maps the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, cols):
    ordered = _flip(tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True))  # -0 becomes 0
    return (ordered.to(tl.int64) << 32) | (cols ^ LAST).to(tl.int64)


@triton.jit
def logit_of(key):
    """Returns the logit of a key, or -inf for an empty entry."""
    return _flip(tl.maximum((key >> 32).to(tl.int32), LOWEST)).to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    return key.to(tl.int32) ^ LAST


@triton.jit
def _places(LOG_K: tl.constexpr):
    """Returns arange(2^LOG_K) in shape (2, ..., 2). Each axis stands for one bit."""
    return tl.reshape(tl.arange(0, 1 << LOG_K), [2] * LOG_K)


@triton.jit
def _sort_runs(h, places, runs: tl.constexpr, LOG_K: tl.constexpr):
    """Sorts each run of 2^runs adjacent keys in descending order.

    Each must be bitonic: it, or a rotation of it, first rises and then falls.
    """
    for i in tl.static_range(runs):
        # of two keys whose indices differ in one bit, the larger gets the lower index; `other` is
        # the sum of both minus h, and int64 wraps around harmlessly
        other = tl.sum(h, axis=LOG_K - runs + i, keep_dims=True) - h
        second = ((places >> (runs - 1 - i)) & 1) != 0
        h = tl.where((h > other) != second, h, other)
    return h


@triton.jit
def sort_bitonic(keys, LOG_K: tl.constexpr):
    """Sorts a bitonic list, such as max(descending list, ascending list), in descending order."""
    h = _sort_runs(tl.reshape(keys, [2] * LOG_K), _places(LOG_K), LOG_K, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def sort(keys, LOG_K: tl.constexpr):
    """Sorts a list in descending order, by a bitonic sort.

    Every second run is sorted in ascending order, so that two neighbours form a bitonic run: its
    bits are inverted before and after. To save registers, one XOR inverts after a step and before
    the next.
    """
    places = _places(LOG_K)
    h = tl.reshape(keys, [2] * LOG_K)
    for runs in tl.static_range(1, LOG_K + 1):
        # bit 0: keys to invert, every second run of 2^runs; `^=` undoes the previous step's
        inverted = places >> runs
        if runs > 1:
            inverted ^= places >> (runs - 1)
        h = _sort_runs(h ^ -(inverted & 1).to(tl.int64), places, runs, LOG_K)
    return tl.reshape(h, [1 << LOG_K])
