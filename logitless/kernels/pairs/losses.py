"""The formulas of eager/losses.py in Triton: `fold`, `finish` and `dz` of each loss.

They get the options in `how` (`Both` of state.py), and differ from eager's in units: d is not
divided by the temperature, which `finish` and `dz` do, and logs are to base 2. Sums of the second
pass are a `Sums`. What is scalar in a row stays outside of the loop over its tiles, if the compiler
sees it: after a change, compare registers and spills (`python -m tests.support.aot cuda:90`), and
try other orders of the same subtractions, which are worth up to 14 registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton import JITFunction
from triton.language.target_info import is_cuda

from ..numerics import INF, LN2
from .state import Sums


@triton.jit
def _positive(value):
    # a divergence below 0 is a rounding error; NaN stays NaN
    return tl.where(value < 0, 0.0, value)


@triton.jit
def _alive(s):
    return tl.where(s == 0, INF, s)


# --- KL and soft cross-entropy


@triton.jit
def _cross(c, of, other):
    """Returns c = Σ e · (d - d of `other`), where e and d are those of `of`.

    Columns where e is 0, and earlier tiles where `scale` is 0, add 0, even if d or c is infinite.
    """
    moved, gap = of.moved - other.moved, of.d - other.d
    before = tl.where(of.scale == 0, 0.0, c * of.scale + of.s * (moved * of.scale))
    return before + tl.where(of.e != 0, of.e * gap, 0.0)


@triton.jit
def _forward_fold(c, q, p, how):
    return _cross(c, p, q)


@triton.jit
def _forward_finish(c, q, p, how):
    return _positive(c / p.s * how.inv_t + tl.log(q.s / p.s)), 0.0


@triton.jit
def _forward_dz(q, p, mean, gain, how):
    return q.e * (p.s / _alive(q.s)) - p.e, gain / p.s


@triton.jit
def _reverse_fold(c, q, p, how):
    return _cross(c, q, p)


@triton.jit
def _reverse_finish(c, q, p, how):
    mean = c / q.s
    return _positive(mean * how.inv_t + tl.log(p.s / q.s)), mean


@triton.jit
def _reverse_dz(q, p, mean, gain, how):
    dz = tl.where(q.e != 0, q.e * (q.d - p.d - mean), 0.0)
    return dz, gain * how.inv_t / _alive(q.s)


@triton.jit
def _soft_fold(c, q, p, how):
    return c - (q.moved * p.s + tl.where(p.e != 0, p.e * q.d, 0.0))


@triton.jit
def _soft_finish(c, q, p, how):
    return c * how.inv_t + p.s * tl.log(q.s), 0.0


@triton.jit
def _soft_dz(q, p, mean, gain, how):
    return q.e * (p.s / _alive(q.s)) - p.e, gain


# --- JSD and skewed KL


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
def _mixture(log_q, log_p, gap, beta, IN: tl.constexpr):
    """Returns q, log2(q / M), p and log2(p / M), all finite. See `_mixed` for `gap`."""
    large, mu, fall, share, more = _mixed(log_q, log_p, gap, beta)
    small, log_mu = large * share, _log2(mu, IN)
    q, log_q_m = tl.where(more, large, small), tl.where(more, 0.0, fall) - log_mu
    p, log_p_m = tl.where(more, small, large), tl.where(more, fall, 0.0) - log_mu
    return q, log_q_m, p, log_p_m


@triton.jit
def _jsd_fold(sums, q, p, how):
    IN: tl.constexpr = how.X.dtype.element_ty
    q, log_q_m, p, log_p_m = _mixture(q.log_p, p.log_p, None, how.blend, IN)
    return Sums(sums.a + q * log_q_m, sums.b + p * log_p_m, sums.c)


@triton.jit
def _jsd_finish(sums, q, p, how):
    return _positive(((1.0 - how.blend) * sums.a + how.blend * sums.b) * LN2), sums.a


@triton.jit
def _jsd_dz(q, p, mean, gain, how):
    q, g, _, _ = _mixture(q.log_p, p.log_p, None, how.blend, how.X.dtype.element_ty)
    return q * (g - mean), gain * (1.0 - how.blend) * LN2


@triton.jit
def _skewed(q, p, how, FORWARD: tl.constexpr):
    """Returns q, the derivative g, and the term of a skewed KL in nats, for each column.

    A divergence of r from M is summed as r log(r / M) + M - r, of which no term, and so no partial
    sum, is negative.

    g is the derivative by q plus a constant, which changes only the rounding of q (g - Σ q g). For
    forward KL (`dz` multiplies by 1-α) it is -p / M for fp32 logits, exact where q is much larger
    than p, but one or two bits short where they are almost equal; for 16-bit logits, 1 - p / M. For
    reverse KL it is 0 at p = q, with p / M - 1 from 1 - share, more exact than 2^log2(p / M) - 1.
    """
    IN: tl.constexpr = how.X.dtype.element_ty
    alpha = how.blend
    gap = (q.d - p.d) * how.rate - (q.log_s - p.log_s)
    log_q, log_p = q.log_p, p.log_p
    if FORWARD:
        _, mu, _, share, more = _mixed(log_q, log_p, gap, alpha)
        q, _, p, log_p_m = _mixture(log_q, log_p, gap, alpha, IN)
        if IN == tl.float32:
            g = -tl.where(more, share, 1.0) / mu
        else:
            past = (1.0 - alpha) * (1.0 - share) / mu  # |p / M - 1|
            g = tl.where(more, past, -past)
        return q, g, p * log_p_m * LN2 + (1.0 - alpha) * (q - p)
    else:
        _, mu, _, share, more = _mixed(log_p, log_q, -gap, alpha)
        p, _, q, log_q_m = _mixture(log_p, log_q, -gap, alpha, IN)
        past = alpha * (1.0 - share) / mu  # |p / M - 1|
        g = log_q_m * LN2 + (1.0 - alpha) * tl.where(more, past, -past)
        return q, g, q * log_q_m * LN2 + (1.0 - alpha) * (p - q)


@triton.jit
def _skewed_sums(sums, of_q, how):
    q, g, term = of_q
    mass = sums.c
    if how.X.dtype.element_ty == tl.float32:
        mass += q
    return Sums(sums.a + q * g, sums.b + term, mass)


@triton.jit
def _skewed_forward_fold(sums, q, p, how):
    return _skewed_sums(sums, _skewed(q, p, how, True), how)


@triton.jit
def _skewed_reverse_fold(sums, q, p, how):
    return _skewed_sums(sums, _skewed(q, p, how, False), how)


@triton.jit
def _skewed_finish(sums, q, p, how):
    # All q share the rounding error of one normaliser, so Σ q is not exactly 1. For fp32 logits,
    # dividing by it removes this error from q (g - mean).
    return _positive(sums.b), sums.a / tl.where(sums.c == 0, 1.0, sums.c)


@triton.jit
def _skewed_forward_dz(q, p, mean, gain, how):
    q, g, _ = _skewed(q, p, how, True)
    return q * (g - mean), gain * (1.0 - how.blend)


@triton.jit
def _skewed_reverse_dz(q, p, mean, gain, how):
    q, g, _ = _skewed(q, p, how, False)
    return q * (g - mean), gain


# --- TVD, with the sums times s_q. The gap q - p is (e_q - e_p · s_q / s_p) / s_q, exactly 0 if
# student and teacher are equal; in e_q / s_q - e_p / s_p, a fused multiply-add could round only one
# of the terms.


@triton.jit
def _gap(q, p):
    # 1 for equal normalisers, which a division on a GPU does not always give
    scale = tl.where((q.s == p.s) & (p.s > 0), 1.0, q.s / _alive(p.s))
    return q.e - p.e * scale


@triton.jit
def _tvd_fold(sums, q, p, how):
    gap = _gap(q, p)
    above = tl.where(gap > 0, q.e, tl.where(gap == 0, 0.5 * q.e, 0.0))
    apart, below = tl.abs(gap), q.e - above
    return Sums(sums.a + apart, sums.b + above, sums.c + below)


@triton.jit
def _tvd_finish(sums, q, p, how):
    value = 0.5 * sums.a / q.s
    # as in `_gap`, equal numbers have the ratio 1; a TVD above 1 is a rounding error
    ratio = tl.where(sums.b == sums.c, 1.0, sums.b / tl.where(sums.c == 0, 1.0, sums.c))
    return tl.where(value > 1, 1.0, value), tl.where(sums.c == 0, INF, ratio)


@triton.jit
def _tvd_dz(q, p, ratio, gain, how):
    below = 1.0 / (1.0 + ratio)
    above = tl.where(ratio > 1, 1.0 - below, ratio * below)
    gap = _gap(q, p)
    slope = tl.where(gap > 0, below, tl.where(gap < 0, -above, 0.5 * (below - above)))
    return q.e * slope, gain / _alive(q.s)


class PairLoss(NamedTuple):
    fold: JITFunction
    finish: JITFunction
    dz: JITFunction
    heavy: bool = False  # whether `dz` needs shorter blocks beside a softcap (`config.pair_bwd`)


LOSSES = {
    "forward": PairLoss(_forward_fold, _forward_finish, _forward_dz),
    "reverse": PairLoss(_reverse_fold, _reverse_finish, _reverse_dz),
    "soft": PairLoss(_soft_fold, _soft_finish, _soft_dz),
    "jsd": PairLoss(_jsd_fold, _jsd_finish, _jsd_dz),
    "skewed_forward": PairLoss(_skewed_forward_fold, _skewed_finish, _skewed_forward_dz, True),
    "skewed_reverse": PairLoss(_skewed_reverse_fold, _skewed_finish, _skewed_reverse_dz, True),
    "tvd": PairLoss(_tvd_fold, _tvd_finish, _tvd_dz),
}


def safe_blend(blend: float, kind: str) -> float:
    """Clamps α or β so that neither it nor its difference from 1 is 0 in fp32."""
    return blend if kind == "soft" else min(max(blend, 1e-30), 1 - 2**-24)
