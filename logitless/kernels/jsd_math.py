"""The terms of the Jensen-Shannon divergence (JSD) and of the skewed KL, for each column of a row.

JSD compares the teacher's p and the student's q with M = βp + (1-β)q, a skewed KL one of the two
with a mixture (see `skewed`).
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from .numerics import INF, LN2


@triton.jit
def bits(s):
    """Returns log2 of a normaliser s, but +inf for s = 0, so that subtracting it gives p = 0."""
    return tl.log2(tl.where(s == 0, INF, s))


@triton.jit
def _log2(x, IN: tl.constexpr):
    """Returns log2 x, exactly 0 for x = 1, as precisely as logits of dtype IN need.

    x must not be subnormal. For 16-bit logits on NVIDIA GPUs, this is one instruction with an error
    of 2^-22; otherwise about 24 instructions, exact to one or two units in the last place.
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

    Here share = min(p, q) / max(p, q). `gap` is log_q - log_p, or None to compute it here.
    M / max(p, q) is exactly 1 if p = q, and else at least β or 1 - β, whichever weighs the larger.
    log2(share) is at least -1000, also for a `gap` of NaN: both are -inf.
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
    """Returns q, log2(q / M), p and log2(p / M), all finite. See `_mixed` for `gap`."""
    large, mu, fall, share, more = _mixed(log_q, log_p, gap, beta)
    small, log_mu = large * share, _log2(mu, IN)
    q, log_q_m = tl.where(more, large, small), tl.where(more, 0.0, fall) - log_mu
    p, log_p_m = tl.where(more, small, large), tl.where(more, fall, 0.0) - log_mu
    return q, log_q_m, p, log_p_m


@triton.jit
def skewed(log_q, log_p, gap, alpha, IN: tl.constexpr, FORWARD: tl.constexpr):
    """Returns q, the derivative g, and the term of a skewed KL in nats, for each column.

    Forward KL is Σ p log(p / M) with M = αp + (1-α)q, reverse KL is Σ q log(q / M) with
    M = αq + (1-α)p. A divergence of r from M is summed as r log(r / M) + M - r, of which no term,
    and so no partial sum, is negative.

    g is the derivative by q plus a constant, which changes only the rounding of q (g - Σ q g). For
    forward KL (pair_bwd.py multiplies by 1-α) it is -p / M for fp32 logits, exact where q is much
    larger than p, but one or two bits short where they are almost equal; for 16-bit logits,
    1 - p / M. For reverse KL it is 0 at p = q, with p / M - 1 from 1 - share, more exact than
    2^log2(p / M) - 1.
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
    """Clamps β so that neither β nor 1 - β is 0 in fp32."""
    return min(max(beta, 1e-30), 1 - 2**-24)
