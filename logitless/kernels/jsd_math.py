"""The terms of the Jensen-Shannon divergence (JSD) for each column.

The JSD compares the teacher's probabilities p and the student's probabilities q with the mixture
M = βp + (1-β)q.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .numerics import INF


@triton.jit
def bits(s):
    """Returns log2 s, where s is the normaliser of a row.

    If all logits of a row are -inf, s is 0, and the function returns +inf instead of log2 0 = -inf.
    Subtracting +inf makes all log-probabilities of the row -inf, and all probabilities 0.
    """
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _log2(x, IN: tl.constexpr):
    """Returns log2 x with a precision that suits logits of dtype IN. log2 of 1 is exactly 0.

    The argument x must not be subnormal. For 16-bit logits on NVIDIA GPUs, log2 is one instruction
    with an error of 2^-22, like exp2. For other dtypes and GPUs, log2 takes about 24 instructions
    and is exact to one or two units in the last place.
    """
    if (IN == tl.bfloat16 or IN == tl.float16) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def mixture(log_q, log_p, beta, IN: tl.constexpr):
    """Returns q, log2(q / M), p and log2(p / M) of each column. All results are finite.

    The results are computed from max(p, q) and from share = min(p, q) / max(p, q). The ratio
    M / max(p, q) is at most 1, and is exactly 1 if p = q. If p is larger than q, M / max(p, q) is
    at least β. Otherwise M / max(p, q) is at least 1 - β. The difference
    log2 min(p, q) - log2 max(p, q) is clamped to at least -1000. If log p and log q are both -inf,
    their difference is NaN, and is also set to -1000.
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
    """Returns β clamped so that neither β nor 1 - β is 0 in fp32."""
    return min(max(beta, 1e-30), 1 - 2**-24)
