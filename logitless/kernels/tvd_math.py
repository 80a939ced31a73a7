"""The terms of the total variation distance (TVD) ½ Σ |p - q| and of its gradient, per column.

Let `above` be Σ q over the columns with q > p, and `below` over those with q < p; of a q = p, each
gets one half. Then above + below = 1, and the gradient of the student's logit z is

     q · below                  if q > p
    -q · above                  if q < p
     q · (below - above) / 2    if q = p

The state holds `ratio` = above / below, which gives both with full relative precision.

q - p is computed as (e_q - e_p · s_q / s_p) / s_q, with exponentials e and normalisers s, which is
exactly 0 if student and teacher are equal. In e_q / s_q - e_p / s_p, a fused multiply-add could
round only one of the terms.
"""

import triton
import triton.language as tl

from .numerics import INF


@triton.jit
def to_student(s_q, s_p):
    """Returns s_q / s_p, or 0 if all logits of the teacher's row are -inf.

    It is 1 if they are equal, which a division on a GPU does not always give.
    """
    return tl.where((s_q == s_p) & (s_p > 0), 1.0, s_q / tl.where(s_p == 0, INF, s_p))


@triton.jit
def apart(e_q, e_p, scale):
    """Returns |q - p| and the terms of `above` and `below`, times s_q; `scale` is s_q / s_p."""
    gap = e_q - e_p * scale
    above = tl.where(gap > 0, e_q, tl.where(gap == 0, 0.5 * e_q, 0.0))
    return tl.abs(gap), above, e_q - above


@triton.jit
def ratio_of(above, below):
    """Returns above / below, or inf if `below` is 0; 1 if they are equal, as in `to_student`."""
    ratio = tl.where(above == below, 1.0, above / tl.where(below == 0, 1.0, below))
    return tl.where(below == 0, INF, ratio)


@triton.jit
def gradient_of(e_q, e_p, scale, ratio):
    """Returns the gradient of z for each column, times s_q. `scale` is s_q / s_p."""
    below = 1.0 / (1.0 + ratio)
    above = tl.where(ratio > 1, 1.0 - below, ratio * below)
    gap = e_q - e_p * scale
    return e_q * tl.where(gap > 0, below, tl.where(gap < 0, -above, 0.5 * (below - above)))
