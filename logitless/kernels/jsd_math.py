"""M = βp + (1-β)q of a student and a teacher, element by element: what JSD is made of."""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .numerics import INF


@triton.jit
def bits(s):
    """log2 s of a normaliser, for log2 p = d·rate - log2 s. Of a row of -inf, p is 0."""
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _log2(x, IN: tl.constexpr):
    """log2 of a normal number, as exactly as logits of dtype IN deserve; 0 of 1.

    Logits of 16 bits take NVIDIA's one instruction for it: right to 2^-22, as exp2 is. All else
    takes two dozen, right to a rounding or two.
    """
    if (IN == tl.bfloat16 or IN == tl.float16) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def mixture(log_q, log_p, beta, IN: tl.constexpr):
    """q, log q/M, p and log p/M of an element, in bits. Finite for any logits.

    By the larger of p and q, and the smaller as a share of it: μ = M / larger lies between the
    larger's weight and 1, and is 1 exactly where p = q. A difference below -1000 bits, and the NaN
    of two -inf, whose larger is 0, count as -1000.
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
    """Such that neither β nor 1 - β is 0 in fp32."""
    return min(max(beta, 1e-30), 1 - 2**-24)
