"""Keys for top-k, and sorting of keys in registers.

A key is one integer that encodes a logit and its column. A larger logit has a larger key. Among
equal logits, a lower column has a larger key. Therefore a descending sort of keys puts equal logits
in ascending order of their columns.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-(1 << 63))  # marks an empty entry of a list; smaller than all other keys
LOWEST = tl.constexpr(-2139095041)  # the result of _flip for -inf
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def _flip(bits):
    """Maps the bits of floats to integers that have the same order as the floats.

    Calling `_flip` on such an integer gives the bits of the float again.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, cols):
    """Returns the keys of logits x (fp32) at the columns `cols`."""
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
    """Sorts each run of 2^r adjacent keys in descending order, where r is the argument `runs`.

    Each run must be bitonic. A run is bitonic if the run, or a rotation of the run, first rises and
    then falls.
    """
    for i in tl.static_range(runs):
        # Compares two keys whose indices differ in one bit, and moves the larger key to the lower
        # index. Each key in h is compared with the key in `other`. `other` is computed as the sum
        # of the two keys minus h. An overflow of the sum is harmless, because int64 wraps around.
        other = tl.sum(h, axis=LOG_K - runs + i, keep_dims=True) - h
        second = ((places >> (runs - 1 - i)) & 1) != 0
        h = tl.where((h > other) != second, h, other)
    return h


@triton.jit
def sort_bitonic(keys, LOG_K: tl.constexpr):
    """Sorts a bitonic list in descending order.

    Callers pass the elementwise max of a descending list and an ascending list. The max of two such
    lists is bitonic.
    """
    h = _sort_runs(tl.reshape(keys, [2] * LOG_K), _places(LOG_K), LOG_K, LOG_K)
    return tl.reshape(h, [1 << LOG_K])


@triton.jit
def sort(keys, LOG_K: tl.constexpr):
    """Sorts a list in descending order, by a bitonic sort.

    Every second run is sorted in ascending order, so that two neighbouring runs form a bitonic run.
    To sort a run in ascending order, all bits of its keys are inverted before and after a
    descending sort. To save registers, one XOR combines the inversion after a step with the
    inversion before the next step.
    """
    places = _places(LOG_K)
    h = tl.reshape(keys, [2] * LOG_K)
    for runs in tl.static_range(1, LOG_K + 1):
        # Bit 0 of `inverted` selects the keys to invert. This step inverts every second run of
        # 2^runs keys. The `^=` also undoes the inversion of the previous step. In the previous
        # step, runs were half as long.
        inverted = places >> runs
        if runs > 1:
            inverted ^= places >> (runs - 1)
        h = _sort_runs(h ^ -(inverted & 1).to(tl.int64), places, runs, LOG_K)
    return tl.reshape(h, [1 << LOG_K])
