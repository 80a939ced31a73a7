"""The terms of the total variation distance (TVD) and of its gradient, for each column.

The TVD is ½ Σ |p - q|, with the teacher's probabilities p and the student's probabilities q. Let
`above` be Σ q over the columns with q > p, and `below` be Σ q over the columns with q < p. For a
column with q = p, one half of q is added to `above`, and the other half to `below`. Then
above + below = 1, and the gradient of the student's logit z is

     q · below                  if q > p
    -q · above                  if q < p
     q · (below - above) / 2    if q = p

The state of a row holds `ratio` = above / below. From `ratio`, kernels compute `above` and `below`
with full relative precision.

Let e_q and e_p be the exponentials, and s_q and s_p the normalisers. Kernels compute q - p as
(e_q - e_p · s_q / s_p) / s_q. If student and teacher are equal, s_q / s_p is 1, and the difference
is exactly 0. The difference e_q / s_q - e_p / s_p would not always be exactly 0. The reason is that
the compiler can use a fused multiply-add, which rounds only one of the two terms.
"""

import triton
import triton.language as tl

from .numerics import INF


@triton.jit
def to_student(s_q, s_p):
    """Returns s_q / s_p, or 0 if all logits of the teacher's row are -inf.

    If s_q = s_p, the result is set to 1, because a division of two equal numbers on a GPU does not
    always give exactly 1.
    """
    return tl.where((s_q == s_p) & (s_p > 0), 1.0, s_q / tl.where(s_p == 0, INF, s_p))


@triton.jit
def apart(e_q, e_p, scale):
    """Returns |q - p| and the terms of `above` and `below`, for each column.

    All results are multiplied by s_q. `scale` is s_q / s_p.
    """
    gap = e_q - e_p * scale
    above = tl.where(gap > 0, e_q, tl.where(gap == 0, 0.5 * e_q, 0.0))
    return tl.abs(gap), above, e_q - above


@triton.jit
def ratio_of(above, below):
    """Returns above / below, or inf if `below` is 0.

    If above = below, the result is set to 1, as in `to_student`.
    """
    ratio = tl.where(above == below, 1.0, above / tl.where(below == 0, 1.0, below))
    return tl.where(below == 0, INF, ratio)


@triton.jit
def gradient_of(e_q, e_p, scale, ratio):
    """Returns the gradient of z for each column, times s_q. `scale` is s_q / s_p."""
    below = 1.0 / (1.0 + ratio)
    above = tl.where(ratio > 1, 1.0 - below, ratio * below)
    gap = e_q - e_p * scale
    return e_q * tl.where(gap > 0, below, tl.where(gap < 0, -above, 0.5 * (below - above)))
