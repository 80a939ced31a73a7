"""Arithmetic that all kernels share: softcap, temperature, and subtracting the max of a row.

y = softcap · tanh(x / softcap), or x without a softcap, and z = y / temperature. Kernels subtract
max y before they divide: the differences are exact even under a large common offset of the logits.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from ..contract import NO_ID as NO_ID_

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(NO_ID_)  # the id of an empty (masked) slot


@triton.jit
def load(P, at, mask):
    """Loads P[at], or 0 where the mask is False. If the mask is None, the load is not masked."""
    if mask is not None:
        return tl.load(P + at, mask=mask, other=0.0)
    else:
        return tl.load(P + at)


@triton.jit
def only_if(flag, mask):
    """Returns `mask & flag`, where `flag` is a scalar.

    In Triton's interpreter an int32 comparison is int32, and from 3.9 on it rejects masks combined
    with one. `True & flag` is a bool; the compiler removes `True &`.
    """
    return mask & (True & flag)


@triton.jit
def inverse_temperature(temperature, row):
    """Returns 1 / temperature, which is a number, or a pointer to one per row."""
    if isinstance(temperature, float):  # in Triton's interpreter, numbers are Python floats
        return 1.0 / temperature
    elif temperature.dtype.is_ptr():
        return 1.0 / tl.load(temperature + row).to(tl.float32)
    else:
        return 1.0 / temperature


@triton.jit
def _tanh(u, IN: tl.constexpr):
    """Returns tanh(u) as precisely as logits of dtype IN need. NaN stays NaN.

    For bf16 on NVIDIA GPUs it is one instruction, with an error of 2^-11, a quarter of bf16's
    rounding error. Otherwise it is u times a ratio of polynomials in u², with an error of 4e-7 for
    fp32 and 2e-6 for fp16; a more exact one would take longer than the loads and stores of the
    kernel.
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
def rounded_product(a, b):
    """Returns a · b, rounded to fp32 before any further arithmetic.

    The compiler could fuse a product y = a · b into a later y - max y, with y unrounded but max y
    rounded. The difference at the max would not be exactly 0, and divided by a temperature of 1e-12
    it would make the exponent infinite.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def capped(x, softcap):
    """Returns the logits y after the softcap, in fp32, and dy/dx."""
    y = x.to(tl.float32)
    if softcap is not None:
        t = _tanh(y * (1.0 / softcap), x.dtype)
        return rounded_product(softcap, t), 1.0 - t * t
    else:
        return y, 1.0


@triton.jit
def reciprocal(u):
    """Returns 1 / u for u in [1, 2], exact to one unit in the last place.

    `/` takes more instructions, because it must be right for all u.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / u


@triton.jit
def finite(m):
    """Returns the max m of a row, or 0 where it is ±inf: what exponentials subtract from y."""
    return tl.where(tl.abs(m) == INF, 0.0, m)


@triton.jit
def move(m, m_new, s):
    """Returns the old max m minus the new max m_new of a row, or 0 if the old sum s is 0."""
    return tl.where((m == m_new) | (s == 0), 0.0, tl.maximum(m - m_new, -1e38))
