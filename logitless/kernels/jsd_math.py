"""The terms of the Jensen-Shannon divergence (JSD) and of the skewed KL, for each column of a row.

The JSD compares the teacher's probabilities p and the student's probabilities q with the mixture
M = βp + (1-β)q. The skewed KL compares either p or q with a mixture (see `skewed`).
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .numerics import INF, LN2


@triton.jit
def bits(s):
    """Returns log2 s, where s is the normaliser of a row.

    If all logits of a row are -inf, s is 0, and the function returns +inf instead of log2 0 = -inf.
    Subtracting +inf makes all log-probabilities of the row -inf, and all probabilities 0.
    """
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _log2(x, IN: tl.constexpr):
    """Returns log2 x with the precision that logits of dtype IN need. For x = 1, the result is
    exactly 0.

    The argument x must not be subnormal. For 16-bit logits on NVIDIA GPUs, log2 is one instruction
    with an error of 2^-22. For other dtypes and GPUs, log2 takes about 24 instructions and is exact
    to one or two units in the last place.
    """
    if (IN == tl.bfloat16 or IN == tl.float16) and is_cuda():
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _mixed(log_q, log_p, gap, beta):
    """Returns max(p, q), M / max(p, q), log2(share), share, and whether q > p.

    `gap` is log_q - log_p. If `gap` is None, the function computes the difference from log_q and
    log_p. `share` is min(p, q) / max(p, q) = 2^-|gap|. The ratio M / max(p, q) is at most 1, and is
    exactly 1 if p = q. If p is larger than q, M / max(p, q) is at least β. Otherwise M / max(p, q)
    is at least 1 - β. The result log2(share) is clamped to at least -1000. If log p and log q are
    both -inf, `gap` is NaN, and log2(share) is -1000.
    """
    top = tl.maximum(log_q, log_p)
    if gap is None:  # this takes fewer instructions than |log_q - log_p|
        fall, more = tl.minimum(log_q, log_p) - top, log_q > log_p
    else:
        fall, more = -tl.abs(gap), gap > 0
    fall = tl.where(fall > -1000.0, fall, -1000.0)
    large, share = tl.exp2(top), tl.exp2(fall)
    mu = share + tl.where(more, 1.0 - beta, beta) * (1.0 - share)
    return large, mu, fall, share, more


@triton.jit
def mixture(log_q, log_p, gap, beta, IN: tl.constexpr):
    """Returns q, log2(q / M), p and log2(p / M) of each column. All results are finite.

    See `_mixed` for `gap`.
    """
    large, mu, fall, share, more = _mixed(log_q, log_p, gap, beta)
    small, log_mu = large * share, _log2(mu, IN)
    q, log_q_m = tl.where(more, large, small), tl.where(more, 0.0, fall) - log_mu
    p, log_p_m = tl.where(more, small, large), tl.where(more, fall, 0.0) - log_mu
    return q, log_q_m, p, log_p_m


@triton.jit
def skewed(log_q, log_p, gap, alpha, IN: tl.constexpr, FORWARD: tl.constexpr):
    """For each column, returns q, the derivative g, and the term of a skewed KL in nats.

    Forward KL is Σ p log(p / M) with M = αp + (1-α)q. Reverse KL is Σ q log(q / M) with
    M = αq + (1-α)p. The divergence of a distribution r from M is Σ (r log(r / M) + M - r), and each
    of these terms is at least 0. So a sum over only some columns of a row is at least 0 too. `gap`
    is log_q - log_p.

    g is the derivative of the divergence with respect to q, plus a constant. For forward KL, g is
    -p / M for fp32 logits and 1 - p / M for 16-bit logits, and pair_bwd.py multiplies by 1-α. The
    constant changes only the rounding error of the gradient q (g - Σ q g). -p / M is exact where q
    is much larger than p, and loses one or two bits where p and q are almost equal. For reverse KL,
    g is 0 for p = q. p / M - 1 is computed from 1 - share, because 2^log2(p / M) - 1 has a larger
    rounding error.
    """
    if FORWARD:
        _, mu, _, share, more = _mixed(log_q, log_p, gap, alpha)
        q, _, p, log_p_m = mixture(log_q, log_p, gap, alpha, IN)
        if IN == tl.float32:
            g = -tl.where(more, share, 1.0) / mu
        else:
            past = (1.0 - alpha) * (1.0 - share) / mu  # |p / M - 1|
            g = tl.where(more, past, -past)
        return q, g, p * log_p_m * LN2 + (1.0 - alpha) * (q - p)
    else:
        _, mu, _, share, more = _mixed(log_p, log_q, -gap, alpha)
        p, _, q, log_q_m = mixture(log_p, log_q, -gap, alpha, IN)
        past = alpha * (1.0 - share) / mu  # |p / M - 1|
        g = log_q_m * LN2 + (1.0 - alpha) * tl.where(more, past, -past)
        return q, g, q * log_q_m * LN2 + (1.0 - alpha) * (p - q)


def safe_beta(beta: float) -> float:
    """Returns β clamped so that neither β nor 1 - β is 0 in fp32."""
    return min(max(beta, 1e-30), 1 - 2**-24)
