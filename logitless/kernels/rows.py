"""How a kernel finds a row of logits, reads it in 16-byte pieces, and bends x into y.

A row that does not start on a 16-byte boundary is read as a `body` of whole 16-byte packs between
two ragged ends, the `fringe`: fewer than one pack before the body and fewer than one after it.
The body loads at full width whatever the row stride; the fringe is one tile of two packs.

Kernels work on y = softcap · tanh(x / softcap), or x itself. The logits proper are z = y / temperature,
but the division is left to the exponent: differences y - max(y) are exact under any common offset.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def row_offset(row, rows_t, stride_b, stride_t):
    """Elements from the base to row `row` of a (B, T, V) view. int64: 2^31 elements are no limit."""
    return (row // rows_t).to(tl.int64) * stride_b + (row % rows_t).to(tl.int64) * stride_t


@triton.jit
def split_row(offset, V, lead, PACK: tl.constexpr, ALIGNED: tl.constexpr):
    """(head, body): elements before the first 16-byte boundary, and elements in whole packs after."""
    head = 0
    body = V
    if not ALIGNED:
        head = tl.minimum((PACK - (lead + offset) % PACK) % PACK, V).to(tl.int32)
        body = (V - head) // PACK * PACK
    return head, tl.multiple_of(body, PACK)


@triton.jit
def fringe_tile(head, body, V, PACK: tl.constexpr):
    """Columns and mask of the two ragged ends, as one tile."""
    j = tl.arange(0, 2 * PACK)
    cols = tl.where(j < PACK, j, head + body + j - PACK)
    return cols, tl.where(j < PACK, j < head, cols < V)


@triton.jit
def inverse_temperature(TEMP, temperature, row):
    """1 / temperature of a row: from the per-row tensor if there is one, else from the number."""
    if TEMP is not None:
        return 1.0 / tl.load(TEMP + row).to(tl.float32)
    else:
        return 1.0 / temperature


@triton.jit
def _tanh(u):
    """tanh to an ulp or two: an odd polynomial near 0 (relative error 2e-8), exponentials beyond."""
    v = u * u
    p = ((0.01726766 * v - 0.05305872) * v + 0.13326085) * v - 0.33333153
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(tl.abs(u), 15.0)) + 1.0)
    return tl.where(v < 0.25, u + u * v * p, tl.where(u < 0, -far, far))


@triton.jit
def capped(x, softcap):
    """y in fp32, and dy/dx where it isn't 1."""
    y = x.to(tl.float32)
    if softcap is not None:
        t = _tanh(y / softcap)
        # min(|nan|, 15) would hide a NaN: put it back.
        t = tl.where(y == y, t, y)
        return softcap * t, 1.0 - t * t
    else:
        return y, 1.0
