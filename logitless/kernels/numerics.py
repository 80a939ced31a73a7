"""What kernels compute with: softcaps, exponents that never overflow, states whose max changes.

Kernels work on y = softcap · tanh(x / softcap), or x itself. The logits proper are z = y /
temperature, but the division is left to the exponent: differences y - max(y) are exact under any
common offset.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..contract import NO_ID as NO_ID_

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(NO_ID_)  # in a slot that holds no id


@triton.jit
def load(P, at, mask):
    """P[at], 0 where masked out; a mask of None costs nothing."""
    if mask is not None:
        return tl.load(P + at, mask=mask, other=0.0)
    else:
        return tl.load(P + at)


@triton.jit
def only_if(flag, mask):
    """`mask` if one flag, the same for all columns, is set; else nothing.

    That is `mask & flag`. But the interpreter keeps a comparison of int32 numbers as int32, and
    from Triton 3.9 on refuses a mask that such a flag was spread over; `True &` makes it a bool,
    and costs nothing once compiled.
    """
    return mask & (True & flag)


@triton.jit
def inverse_temperature(temperature, row):
    """1 / temperature of a row: `temperature` is a number, or a pointer to one a row."""
    if isinstance(temperature, float):  # as the interpreter passes a number
        return 1.0 / temperature
    elif temperature.dtype.is_ptr():
        return 1.0 / tl.load(temperature + row).to(tl.float32)
    else:
        return 1.0 / temperature


@triton.jit
def _tanh(u, IN: tl.constexpr):
    """tanh, as exactly as logits of dtype IN deserve; NaN stays NaN.

    bf16 on NVIDIA takes the one instruction for it: right to 2^-11, a quarter of the logits' own
    rounding. All else takes u times a fitted ratio of polynomials in u²: right to 4e-7 for fp32, to
    2e-6 for fp16. The difference keeps a softcap from costing more than the memory it waits for.
    """
    if IN == tl.bfloat16 and is_cuda():
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    elif IN == tl.float32:
        u = tl.clamp(u, -9.0, 9.0, propagate_nan=tl.PropagateNan.ALL)
        v = u * u
        p = ((1.33546685e-8 * v + 2.06090863e-5) * v + 3.49558843e-3) * v + 0.133810252
        q = ((7.77656112e-7 * v + 3.28563532e-4) * v + 2.5876984e-2) * v + 0.467143416
        return u * (p * v + 1.0) / (q * v + 1.0)
    else:
        u = tl.clamp(u, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        v = u * u
        p = (3.99586543e-6 * v + 2.29308754e-3) * v + 0.123220533
        q = (1.43984333e-4 * v + 2.11516079e-2) * v + 0.456546128
        r = tl.rsqrt(q * v + 1.0)
        return u * (p * v + 0.999998987) * (r * r)


@triton.jit
def _rounded_product(a, b):
    """a · b, rounded before anything is subtracted from it.

    A compiler that makes one fused multiply-add of it and y - max(y) does not round y there as it
    did for the max: the max itself is then not 0 away, which a temperature of 1e-12 makes infinite.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def capped(x, softcap):
    """y in fp32, and dy/dx where it isn't 1."""
    y = x.to(tl.float32)
    if softcap is not None:
        t = _tanh(y * (1.0 / softcap), x.dtype)
        return _rounded_product(softcap, t), 1.0 - t * t
    else:
        return y, 1.0


@triton.jit
def finite(m):
    """What to subtract: m, or 0 where m is ±inf and the bare exponential is right."""
    return tl.where(tl.abs(m) == INF, 0.0, m)


@triton.jit
def move(m, m_new, s):
    """d of a state whose max moves from m to m_new; the empty state (-inf, 0) moves at no cost."""
    return tl.where((m == m_new) | (s == 0), 0.0, tl.maximum(m - m_new, -1e38))
