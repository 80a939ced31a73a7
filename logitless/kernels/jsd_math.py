"""The terms of the Jensen-Shannon divergence for one column: p, q and M = βp + (1-β)q."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .numerics import INF


@triton.jit
def bits(s):
    """log2 s of a normaliser, for log2 p = d·rate - log2 s. It is inf for a row of -inf: p = 0."""
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _log2(x, IN: tl.constexpr):
    """log2 of a normal number, as exact as logits of dtype IN need. log2 of 1 is exactly 0.

    For 16-bit logits, NVIDIA GPUs have one instruction, exact to 2^-22 like exp2. Otherwise log2
    takes two dozen instructions and is exact to one or two roundings.
    """
    if (IN == tl.bfloat16 or IN == tl.float16) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def mixture(log_q, log_p, beta, IN: tl.constexpr):
    """q, log q/M, p and log p/M of each column, with logarithms in bits. Finite for all logits.

    They are computed from the larger of p and q, and the smaller as a share of the larger.
    μ = M / larger lies between the weight of the larger and 1, and is exactly 1 where p = q. A
    difference below -1000 bits counts as -1000. So does the NaN of two -inf, where p = q = 0.
    """
    top = tl.maximum(log_q, log_p)
    fall = tl.minimum(log_q, log_p) - top
    fall = tl.where(fall > -1000.0, fall, -1000.0)
    more = log_q > log_p
    large, share = tl.exp2(top), tl.exp2(fall)
    small = large * share
    log_mu = _log2(share + tl.where(more, 1.0 - beta, beta) * (1.0 - share), IN)
    q, log_q_m = tl.where(more, large, small), tl.where(more, 0.0, fall) - log_mu
    p, log_p_m = tl.where(more, small, large), tl.where(more, fall, 0.0) - log_mu
    return q, log_q_m, p, log_p_m


def safe_beta(beta: float) -> float:
    """β, moved so far into (0, 1) that neither β nor 1 - β is 0 in fp32."""
    return min(max(beta, 1e-30), 1 - 2**-24)
