"""Computes a divergence over the K slots of each row, and its gradient, in one pass.

A slot holds an id, the teacher's log p and the student's log q, and adds f to the divergence. The
sums of p and of q over a row need not be 1. With the mixture M = βp + (1-β)q:

                 f                                     g = ∂f / ∂log q
    forward_kl   p log(p/q)                            -p
    reverse_kl   q log(q/p)                            f + q
    jsd          β p log(p/M) + (1-β) q log(q/M)       (1-β) q log(q/M)
    tvd          ½ |p - q|                             ½ q sign(q - p)

`support` says what is compared, with P and Q the sums over the slots that are not masked:

    "truncate"           p and q
    "tail"               p and q, with one more slot for the rest of the vocabulary
    "renorm_teacher"     p/P and q
    "renorm"             p/P and q/Q
    "gathered_renorm"    p and q/Q
    "gathered"           p and q/Q, where Q is the sum over all slots, even masked ones

The first three read log q of the softmax over the whole row: with G = Σ g over the slots, the
coefficient `a` of the row (see statistics/gradient_tile.py) is -G; for "tail", G includes the
additional slot, `a_ids` is -G, and `a` follows from it. The others read the student's logits at the
slots, whose gradient is (g_k - G q_k/Q) / temperature.

A product with a probability of 0 is 0, even if its logarithm is infinite. log M is relative to the
larger of p and q, so that JSD is exactly 0 if p = q. In masked slots, p, q and the gradient are 0,
but with "gathered", only p.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from ...contract import RENORM_STUDENT, RENORM_TEACHER, Coefficients, Reading, Slots, at_the_ends
from ...eager.slot_divergence import slots as slots_in_torch
from .. import config
from ..cross_entropy.smoothing_z_loss import COEF_WIDTH
from ..launch import REMEMBERED, Launch
from ..layout import is_live
from ..numerics import INF, finite, load
from ..profiling import profiled
from ..statistics.gradient_tile import COEF_A, COEF_A_IDS, COEF_D_LOGPROB_T1
from .tail_mass import LEAST_TAIL, lift_of

LOG_ROUNDING = tl.constexpr(_contract.LOG_ROUNDING)
MAX_K = 4096  # largest number of slots per row for the kernel; eager/ computes longer rows
WARP = 512  # slots per warp; if one warp reads a whole row, the sums over the row need no barrier


@triton.jit
def _inverse_temperatures(temperature, row, mask):
    """Like `inverse_temperature` in numerics.py, for a block of rows."""
    if isinstance(temperature, float):  # in Triton's interpreter, numbers are Python floats
        return 1.0 / temperature
    elif temperature.dtype.is_ptr():
        return 1.0 / tl.load(temperature + row, mask=mask, other=1.0).to(tl.float32)
    else:
        return 1.0 / temperature


@triton.jit
def _normalised(y, inv_t):
    """Returns log q, q = softmax(y · inv_t), and a mask of the rows that are not all -inf."""
    # before the temperature applies, so that a common offset of the logits costs no precision
    d = y - finite(tl.max(y, axis=1))[:, None]
    if inv_t is not None:
        d *= inv_t
    e = tl.exp(d)
    s = tl.sum(e, axis=1)
    has_mass = s != 0
    s = tl.where(has_mass, s, 1.0)
    return d - tl.log(s)[:, None], e * (1.0 / s)[:, None], has_mass


@triton.jit
def _rest(log_p, p, k):
    """Returns log(1 - Σ p) of each row, or -inf where rounding makes Σ p ≥ 1.

    1 - max p is -expm1(log p): in fp32, 1 - p would be 0 for p = 1 - 1e-9, and leave no tail.
    """
    top, at = tl.max(log_p, axis=1, return_indices=True)
    others = tl.sum(tl.where(k[None, :] == at[:, None], 0.0, p), axis=1)
    x = -top
    series = x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6))))
    rest = tl.where(x < 0.25, x * (1 - series), 1 - tl.exp(top)) - others
    return tl.where(rest <= 0, -INF, tl.log(rest))


@triton.jit
def _terms(log_p, p, log_q, q, beta, DIVERGENCE: tl.constexpr):
    """Returns the term f that each slot adds to the divergence, and g = ∂f / ∂log q."""
    if DIVERGENCE == "forward_kl":
        return tl.where(p == 0, 0.0, p * (log_p - log_q)), -p
    elif DIVERGENCE == "reverse_kl":
        f = tl.where(q == 0, 0.0, q * (log_q - log_p))
        return f, f + q
    elif DIVERGENCE == "jsd":
        u = log_q - log_p
        lesser = tl.where(u > 0, beta, 1.0 - beta)  # the weight of min(p, q) in M
        log_m = tl.log(1.0 - lesser * (1.0 - tl.exp(-tl.abs(u))))
        f_p = tl.where(p == 0, 0.0, p * (-tl.maximum(u, 0.0) - log_m))
        f_q = tl.where(q == 0, 0.0, q * (tl.minimum(u, 0.0) - log_m))
        return beta * f_p + (1.0 - beta) * f_q, (1.0 - beta) * f_q
    else:
        tl.static_assert(DIVERGENCE == "tvd")
        slope = tl.where(log_q == log_p, 0.0, tl.where(log_q > log_p, q, -q))
        return 0.5 * tl.abs(p - q), 0.5 * slope


@triton.jit
def _tail(log_p, p, k, STUDENT_TAIL, TEACHER_TAIL, row, counts, beta, DIVERGENCE: tl.constexpr):
    """Returns f, g and log q of the additional slot for the rest of the vocabulary.

    f and g are 0 in rows that are ignored, and in rows whose slots are all masked.
    """
    log_q_tail = load(STUDENT_TAIL, row, counts).to(tl.float32)
    if TEACHER_TAIL is not None:
        log_p_tail = load(TEACHER_TAIL, row, counts).to(tl.float32)
    else:
        log_p_tail = _rest(log_p, p, k)
    # If the student's tail is empty, a teacher's tail below LOG_ROUNDING counts as empty too: it
    # can come from rounding p to 16 bits.
    no_tail = (log_q_tail == -INF) & (log_p_tail < LOG_ROUNDING)
    log_p_tail = tl.where(no_tail, -INF, log_p_tail)
    f, g = _terms(log_p_tail, tl.exp(log_p_tail), log_q_tail, tl.exp(log_q_tail), beta, DIVERGENCE)
    has_gradient = counts & (log_q_tail != -INF)  # an empty tail has gradient 0
    return tl.where(counts, f, 0.0), tl.where(has_gradient, g, 0.0), log_q_tail


@triton.jit
def _row_weights(WEIGHT, row, live, kd_weight):
    """Returns the factor of each row's divergence, 0 in ignored rows."""
    if WEIGHT is not None:
        weight = tl.load(WEIGHT + row, mask=live, other=0.0).to(tl.float32)
        return kd_weight * weight
    else:
        return tl.where(live, kd_weight, 0.0)


@triton.jit(
    **profiled("slot_divergence", shows=("DIVERGENCE", "K")),
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=[
        "STUDENT_TAIL", "TEACHER_TAIL", "WEIGHT", "LOGPROB_T1", "LABEL", "temperature",
    ],
)  # fmt: skip
def _slot_divergence_kernel(
    STUDENT, TEACHER, MASK, STUDENT_TAIL, TEACHER_TAIL, WEIGHT, LOGPROB_T1, LABEL,  # inputs
    VALUE, D_STUDENT, COEF,  # outputs
    temperature,  # the temperature of the student's logits, or None
    N, K, stride_sn, ignore_index, beta, kd_weight, ce_weight,  # sizes, options
    DIVERGENCE: tl.constexpr, RENORM_P: tl.constexpr, STUDENT_OVER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program computes ROWS whole rows as one tile (ROWS, BLOCK_K)."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    r, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    row, mask_r = first + r, r < N - first
    live_r = mask_r
    if ignore_index is not None:
        live_r = mask_r & is_live(tl.load(LABEL + row, mask=mask_r, other=0), ignore_index)
    inside = mask_r[:, None] & (k < K)[None, :]
    live = live_r[:, None] & (k < K)[None, :]
    live_q = live  # slots in the student's softmax
    at = r[:, None] * K + k[None, :]
    if MASK is not None:
        live = tl.load(MASK + first * K + at, mask=live, other=0) != 0
        if STUDENT_OVER != "all":
            live_q = live
    student = STUDENT + first * stride_sn + r[:, None] * stride_sn + k[None, :]
    log_q = tl.load(student, mask=live_q, other=0.0).to(tl.float32)
    log_p = tl.load(TEACHER + first * K + at, mask=live, other=0.0).to(tl.float32)
    log_q = tl.where(live_q, log_q, -INF)
    log_p = tl.where(live, log_p, -INF)
    inv_t = None
    if temperature is not None:
        inv_t = _inverse_temperatures(temperature, row, mask_r)
        if not isinstance(temperature, float):
            if temperature.dtype.is_ptr():
                inv_t = inv_t[:, None]

    if RENORM_P:
        log_p, p, _ = _normalised(log_p, None)
    else:
        p = tl.exp(log_p)
    if STUDENT_OVER is not None:
        log_q, q, has_mass = _normalised(log_q, inv_t)
    else:
        q = tl.exp(log_q)
    f, g = _terms(log_p, p, log_q, q, beta, DIVERGENCE)
    value = tl.sum(f, axis=1)
    if STUDENT_OVER is not None:
        # 0 if the student has no mass on the slots
        g = tl.where(has_mass[:, None], g - q * tl.sum(g, axis=1)[:, None], 0.0)
        if inv_t is not None:
            g *= inv_t
    weight = _row_weights(WEIGHT, row, live_r, kd_weight)
    g = tl.where(live_q, g * weight[:, None], 0.0)
    tl.store(D_STUDENT + first * K + at, g, mask=inside)

    if COEF is not None:
        COEF += row * COEF_WIDTH
    a = tl.zeros((ROWS,), tl.float32)
    if STUDENT_OVER is None:
        a -= tl.sum(g, axis=1)
    if STUDENT_TAIL is not None:
        counts = live_r
        if MASK is not None:  # if all slots of a row are masked, its tail adds 0
            counts = tl.max(live.to(tl.int32), axis=1) != 0
        f_tail, g_tail, log_q_tail = _tail(
            log_p, p, k, STUDENT_TAIL, TEACHER_TAIL, row, counts, beta, DIVERGENCE
        )
        value += f_tail
        g_tail = tl.where(counts, g_tail * weight, 0.0)
        # the derivative of the student's tail by z_i is -q_i at an id, else q_i / e^tail - q_i
        a -= g_tail
        tl.store(COEF + COEF_A_IDS, a, mask=mask_r)
        a = a * tl.exp(lift_of(log_q_tail)) + g_tail * tl.exp(-tl.maximum(log_q_tail, LEAST_TAIL))
    if COEF is not None:
        tl.store(COEF + COEF_A, a, mask=mask_r)
    value = tl.where(live_r, value * weight, 0.0)
    if LOGPROB_T1 is not None:
        value -= ce_weight * load(LOGPROB_T1, row, live_r)
        tl.store(COEF + COEF_D_LOGPROB_T1, tl.where(live_r, -ce_weight, 0.0), mask=mask_r)
    tl.store(VALUE + row, value, mask=mask_r)


def slots(
    student: Tensor,  # (..., K), log q, or logits if the support is in RENORM_STUDENT
    reading: Reading,
    sparse: Slots,
    tail: Tensor | None = None,  # (...), log of the student's mass outside the slots
    logprob_t1: Tensor | None = None,  # (...), log q of the label at temperature 1
    temperature: float | Tensor | None = None,  # temperature of the student's logits, () or (...)
) -> tuple[Tensor, Coefficients]:
    """Like `slots` in eager/, which computes rows of more than MAX_K slots."""
    shape = student.shape
    if shape[-1] > MAX_K or student.numel() == 0:
        return slots_in_torch(student, reading, sparse, tail, logprob_t1, temperature)
    g = torch.empty_like(student, dtype=torch.float32, memory_format=torch.contiguous_format)
    stride = shape[-1]
    if not student.is_contiguous():
        student = student.reshape(-1, stride)
        student = student if student.stride(1) == 1 else student.contiguous()
        stride = student.stride(0)
    label = None if reading.ignore_index is None else reading.label
    logprob_t1 = logprob_t1 if sparse.ce_weight != 0 else None
    tails, weight = (tail, sparse.tail), sparse.row_weight
    teacher, mask, *per_row = [
        t if t is None else t.contiguous()
        for t in (sparse.teacher, sparse.mask, *tails, weight, logprob_t1, label)
    ]
    if mask is not None:
        mask = mask.view(torch.uint8)
    number, last = temperature, ()
    if isinstance(temperature, Tensor):
        number, last = None, (temperature.contiguous(),)
    plan = _plan(
        shape, stride, student.data_ptr() % 16, teacher.data_ptr() % 16,
        None if mask is None else mask.data_ptr() % 16, tail is None, number, not last,
        reading.ignore_index, sparse.divergence, sparse.support, sparse.beta, sparse.kd_weight,
        sparse.ce_weight,
    )  # fmt: skip
    value = torch.empty(plan.shape, device=student.device, dtype=torch.float32)
    coefs = None
    if plan.has:
        size = (value.numel(), _contract.COEFFICIENTS)
        coefs = torch.zeros(size, device=student.device, dtype=torch.float32)
    plan.launch(student, teacher, mask, *per_row, value, g, coefs, *last)
    return value, Coefficients(coefs, plan.has, g)


class _Plan(NamedTuple):
    shape: tuple[int, ...]  # shape of the values
    has: tuple[str, ...]  # names of the coefficients in use
    launch: Launch


@functools.lru_cache(REMEMBERED)
def _plan(
    shape: tuple, stride: int, student_offset: int, teacher_offset: int,
    mask_offset: int | None, no_tail: bool, temperature: float | None, one_temperature: bool,
    ignore_index: int | None, divergence: str, support: str, beta: float, kd_weight: float,
    ce_weight: float,
) -> _Plan:  # fmt: skip
    """Builds a plan. The compiled kernel depends on the addresses modulo 16, `..._offset`."""
    *lead, K = shape
    N, block_k = math.prod(lead), config.ceil_pow2(K)
    rows = max(1, WARP // block_k)
    over = {"gathered": "all"}.get(support, "counted") if support in RENORM_STUDENT else None
    has = () if over else ("a",) if no_tail else ("a", "a_ids")
    has += ("logprob_t1",) if ce_weight != 0 else ()
    divergence, blend = at_the_ends(divergence, beta)
    number = (None if temperature is None else float(temperature),) if one_temperature else ()
    launch = Launch(
        _slot_divergence_kernel, (config.ceil_div(N, rows),),
        (*number, N, K, stride, ignore_index, blend, float(kd_weight), float(ce_weight)),
        num_warps=max(1, block_k // WARP), DIVERGENCE=divergence,
        RENORM_P=support in RENORM_TEACHER, STUDENT_OVER=over, ROWS=rows, BLOCK_K=block_k,
    )  # fmt: skip
    return _Plan(tuple(lead), has, launch)
