"""The losses against a dense teacher. A loss is three functions: `fold`, `finish` and `dz`.

    fold(sums, q, p, blend)       adds the columns of q and p to the sums of their rows
    finish(sums, q, p, blend)     returns the loss of a row, and the number `mean` that `dz` needs
    dz(q, p, mean, gain, blend)   returns the gradient of a tile, and `gain` times a factor per row

q is the student and p the teacher, each a `Side`; the gradient of the student's logits is the
product of the two results of `dz`. Losses of one pass have one sum c, which `fold` corrects when a
max changes. Losses whose terms need the normalisers take two passes (`twice`), and have three sums,
of which some can stay 0.

    forward KL       Σ p log(p/q)                       q - p
    reverse KL       Σ q log(q/p)                       q (log(q/p) - Σ q log(q/p))
    cross-entropy    -Σ v log q, of targets v           q Σ v - v
    JSD              β Σ p log(p/M) + (1-β) Σ q log(q/M), where M = βp + (1-β)q
                                                        (1-β) q (log(q/M) - Σ q log(q/M))
    skewed KL        Σ p log(p/(αp + (1-α)q)), or with q and p exchanged
                                                        q (g - Σ q g)
    TVD              ½ Σ |p - q|                        q below, or -q above (see `_slopes`)

If student and teacher are equal, each divergence and its gradient are exactly 0. To add a loss, put
its functions into LOSSES here and in kernels/pairs/losses.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Side:
    """The student or the teacher, for some columns of some rows (n, V).

    With m the max of a row, d is (logit - m) / temperature, and e = exp(d). Of a teacher that gives
    probabilities, e is the target v, and d is not used. `s` is the normaliser Σ e: of the whole row
    in the second pass and in the backward, and in the first pass of the columns before, after which
    m and so d changed by `moved`, and e by the factor `scale`. They have shape (n, 1).
    """

    def __init__(self, d: Tensor, s: Tensor, moved: Tensor, e: Tensor | None = None):
        self.d, self.s, self.moved, self._e = d, s, moved, e

    @property
    def e(self) -> Tensor:
        if self._e is None:
            self._e = self.d.exp()
        return self._e

    @property
    def scale(self) -> Tensor:
        return self.moved.exp()

    @property
    def log_s(self) -> Tensor:
        """log s, but +inf for a row that is all -inf: subtracting it makes every p of the row 0."""
        return _alive(self.s).log()

    @property
    def log_p(self) -> Tensor:
        return self.d - self.log_s

    @property
    def p(self) -> Tensor:
        return self.e / _alive(self.s)


def _alive(s: Tensor) -> Tensor:
    return torch.where(s == 0, torch.inf, s)


def _sum(t: Tensor) -> Tensor:
    return t.sum(1, keepdim=True)


def _positive(value: Tensor) -> Tensor:
    """Clamps rounding errors below 0; NaN stays NaN."""
    return torch.where(value < 0, 0.0, value)


# --- KL and soft cross-entropy


def _expected(e: Tensor, h: Tensor) -> Tensor:
    """Returns Σ e · h of each row. A column where e is 0 adds 0, even if h is infinite."""
    return _sum(torch.where(e == 0, 0.0, e * h))


def _cross(c: Tensor, of: Side, other: Side) -> Tensor:
    """Returns c = Σ e · (d - d of `other`), where e and d are those of `of`.

    Earlier columns whose `scale` is 0 add 0, even if their c is infinite.
    """
    moved, scale = of.moved - other.moved, of.scale
    before = torch.where(scale == 0, 0.0, c * scale + of.s * (moved * scale))
    return before + _expected(of.e, of.d - other.d)


def _forward_fold(c, q, p, blend):
    return _cross(c, p, q)


def _forward_finish(c, q, p, blend):
    return _positive(c / p.s + (q.s / p.s).log()), torch.zeros_like(c)


def _soft_dz(q, p, mean, gain, blend):
    # in place: `dz` is the last to read a tile
    return q.e.mul_(p.s / _alive(q.s)).sub_(p.e), gain


def _forward_dz(q, p, mean, gain, blend):
    return _soft_dz(q, p, mean, gain / p.s, blend)


def _reverse_fold(c, q, p, blend):
    return _cross(c, q, p)


def _reverse_finish(c, q, p, blend):
    mean = c / q.s
    return _positive(mean + (p.s / q.s).log()), mean


def _reverse_dz(q, p, mean, gain, blend):
    return torch.where(q.e == 0, 0.0, q.e * (q.d - p.d - mean)), gain / _alive(q.s)


def _soft_fold(c, q, p, blend):
    return c - (q.moved * p.s + _expected(p.e, q.d))


def _soft_finish(c, q, p, blend):
    return p.s * q.s.log() + c, torch.zeros_like(c)


# --- JSD and skewed KL


def _mixture(log_q: Tensor, log_p: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each column, the JSD term, the probability q, and log(q / M), M = βp + (1-β)q.

    All are finite. If log q and log p are both -inf, their difference is NaN and becomes 1e4; any
    number would do, because p = q = 0.
    """
    gap = log_q - log_p
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_q, log_p).exp()
    # β in the dtype of log q, so that β + (1-β) is exactly 1 and JSD is 0 for p = q
    least = torch.finfo(gap.dtype).eps / 2
    b = torch.full((), min(max(beta, 1e-30), 1 - least), dtype=gap.dtype, device=gap.device)
    w = torch.where(more, b, 1 - b)
    mu = w * share + torch.where(more, 1 - b, b)
    log_mu = mu.log()
    q = torch.where(more, big, big * share)
    return -big * (w * share * a + mu * log_mu), q, torch.where(more, 0.0, -a) - log_mu


def _jsd_fold(sums, q, p, beta):
    terms, q, log_q_m = _mixture(q.log_p, p.log_p, beta)
    return sums[0] + _sum(terms), sums[1] + _sum(q * log_q_m), sums[2]


def _first_two(sums, q, p, blend):
    return _positive(sums[0]), sums[1]


def _jsd_dz(q, p, mean, gain, beta):
    _, q, g = _mixture(q.log_p, p.log_p, beta)
    return q * (g - mean), gain * (1 - beta)


def _skewed(own: Side, other: Side, skew: float) -> tuple[Tensor, ...]:
    """Returns, for each column, the term of Σ r log(r / M), M = αr + (1-α)o, r, o, and logs by M.

    r are the probabilities of `own`, o those of `other`. The terms are r log(r / M) + M - r, of
    which none, and so no partial sum, is negative. All results are finite, as in `_mixture`.
    """
    log_own, log_other = own.log_p, other.log_p
    gap = log_other - log_own
    more = gap > 0
    a = gap.abs().nan_to_num(nan=1e4).clamp_max(1e4)
    share = (-a).exp()
    big = torch.fmax(log_own, log_other).exp()
    b = torch.full((), max(skew, 1e-30), dtype=gap.dtype, device=gap.device)
    log_mu = (share + torch.where(more, 1 - b, b) * (1 - share)).log()
    r, o = (torch.where(m, big * share, big) for m in (more, ~more))
    log_r_m, log_o_m = (torch.where(m, -a, 0.0) - log_mu for m in (more, ~more))
    return r * log_r_m + (1 - b) * (o - r), r, o, log_r_m, log_o_m, 1 - b


def _skewed_forward(q, p, skew):
    """Returns the term, the probability q, and the derivative g, which is 0 for p = q."""
    terms, _, q, log_p_m, _, rest = _skewed(p, q, skew)
    return terms, q, -rest * log_p_m.expm1()


def _skewed_reverse(q, p, skew):
    terms, q, _, log_q_m, log_p_m, rest = _skewed(q, p, skew)
    return terms, q, log_q_m + rest * log_p_m.expm1()


def _skewed_sums(sums, terms, q, g):
    return sums[0] + _sum(terms), sums[1] + _sum(q * g), sums[2]


def _skewed_forward_fold(sums, q, p, skew):
    return _skewed_sums(sums, *_skewed_forward(q, p, skew))


def _skewed_reverse_fold(sums, q, p, skew):
    return _skewed_sums(sums, *_skewed_reverse(q, p, skew))


def _skewed_forward_dz(q, p, mean, gain, skew):
    _, q, g = _skewed_forward(q, p, skew)
    return q * (g - mean), gain


def _skewed_reverse_dz(q, p, mean, gain, skew):
    _, q, g = _skewed_reverse(q, p, skew)
    return q * (g - mean), gain


# --- TVD. `above` is Σ q over the columns with q > p, and `below` over those with q < p; a q = p
# adds one half to each. `mean` is above / below.


def _tvd_fold(sums, q, p, blend):
    own = q.p
    gap = own - p.p
    above = torch.where(gap > 0, own, torch.where(gap == 0, own / 2, 0.0))
    return sums[0] + _sum(gap.abs()), sums[1] + _sum(above), sums[2] + _sum(own.sub_(above))


def _tvd_finish(sums, q, p, blend):
    """Rounding can raise a total variation above 1, which is clamped."""
    gaps, above, below = sums
    value = gaps / 2
    ratio = torch.where(below == 0, torch.inf, above / torch.where(below == 0, 1.0, below))
    return torch.where(value > 1, 1.0, value), ratio


def _slopes(ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Returns below / (above + below) and above / (above + below), each to full precision."""
    below = 1 / (1 + ratio)
    return below, torch.where(ratio > 1, 1 - below, ratio * below)


def _tvd_dz(q, p, ratio, gain, blend):
    own = q.p
    gap = own - p.p
    below, above = _slopes(ratio)
    slopes = torch.where(gap < 0, -above, (below - above) / 2)
    return own * torch.where(gap > 0, below, slopes), gain


class PairLoss(NamedTuple):
    fold: Callable
    finish: Callable
    dz: Callable
    twice: bool = True  # whether `fold` needs the normalisers of whole rows: a second pass
    probs: bool = False  # whether the teacher gives probabilities instead of logits
    divisor: int = 8  # of the chunk size (`chunks` in rows.py), about the tensors alive / 3


LOSSES = {
    "forward": PairLoss(_forward_fold, _forward_finish, _forward_dz, twice=False, divisor=1),
    "reverse": PairLoss(_reverse_fold, _reverse_finish, _reverse_dz, twice=False, divisor=1),
    "soft": PairLoss(_soft_fold, _soft_finish, _soft_dz, twice=False, probs=True, divisor=1),
    "jsd": PairLoss(_jsd_fold, _first_two, _jsd_dz),
    "skewed_forward": PairLoss(_skewed_forward_fold, _first_two, _skewed_forward_dz),
    "skewed_reverse": PairLoss(_skewed_reverse_fold, _first_two, _skewed_reverse_dz),
    "tvd": PairLoss(_tvd_fold, _tvd_finish, _tvd_dz, divisor=4),
}
