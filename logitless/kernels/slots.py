"""A divergence over the K slots of each row, and its gradient, in one pass.

What a sparse teacher says of a row is K numbers log p; the student's are K numbers log q. A slot
adds f to the divergence, and g = ∂f / ∂log q to the gradient; each straight from its definition,
for masses that need not sum to 1:

    forward_kl    f = p log(p/q)                             g = -p
    reverse_kl    f = q log(q/p)                             g = f + q
    jsd           f = β p log(p/M) + (1-β) q log(q/M)        g = (1-β) q log(q/M)
    tvd           f = ½ |p - q|                              g = ½ q sign(q - p)

The support says what p and q are: as given ("truncate", and "tail" with one more bucket), p/P
("renorm_teacher", "renorm") and q/Q ("renorm", "gathered") with P, Q the sums over the slots. A
student that is normalised here passes the gradient on to its logits: d_k = g_k - q_k Σ g.

Everything is a difference of logarithms times a mass, and no mass, no term: p = 0 adds nothing to
the forward KL whatever q is. log M is taken relative to the larger of p and q, so that p = q gives
exactly 0. A masked slot is one of no mass on both sides, and no gradient.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..eager.slots import RENORM_STUDENT, RENORM_TEACHER, at_the_ends
from ..eager.slots import slots as slots_in_torch
from . import config
from .launch import REMEMBERED, Launch
from .rows import INF, finite

MAX_K = 4096  # slots that one program holds; more are left to PyTorch
WARP = 512  # slots that one warp holds, whole rows where they fit: sums within a warp are free


@triton.jit
def _normalised(z):
    """log and mass of e^z / Σ e^z along rows, -inf and 0 in a row of -inf; which rows aren't."""
    d = z - finite(tl.max(z, axis=1))[:, None]
    e = tl.exp(d)
    s = tl.sum(e, axis=1)
    some = s != 0
    s = tl.where(some, s, 1.0)
    return d - tl.log(s)[:, None], e * (1.0 / s)[:, None], some


@triton.jit
def _rest(log_p, p, k):
    """log(1 - P) of rows, -inf where rounding makes P 1 or more.

    The largest p is taken from 1 as -expm1(log p): a teacher sure of itself to 1e-9 keeps its tail.
    """
    top, at = tl.max(log_p, axis=1, return_indices=True)
    others = tl.sum(tl.where(k[None, :] == at[:, None], 0.0, p), axis=1)
    x = -top
    series = x / 2 * (1 - x / 3 * (1 - x / 4 * (1 - x / 5 * (1 - x / 6))))
    rest = tl.where(x < 0.25, x * (1 - series), 1 - tl.exp(top)) - others
    return tl.where(rest <= 0, -INF, tl.log(rest))


@triton.jit
def _terms(log_p, p, log_q, q, beta, DIVERGENCE: tl.constexpr):
    """f and g of slots."""
    if DIVERGENCE == "forward_kl":
        return tl.where(p == 0, 0.0, p * (log_p - log_q)), -p
    elif DIVERGENCE == "reverse_kl":
        f = tl.where(q == 0, 0.0, q * (log_q - log_p))
        return f, f + q
    elif DIVERGENCE == "jsd":
        u = log_q - log_p
        lesser = tl.where(u > 0, beta, 1.0 - beta)  # the weight of the smaller mass in M
        log_m = tl.log(1.0 - lesser * (1.0 - tl.exp(-tl.abs(u))))
        f_p = tl.where(p == 0, 0.0, p * (-tl.maximum(u, 0.0) - log_m))
        f_q = tl.where(q == 0, 0.0, q * (tl.minimum(u, 0.0) - log_m))
        return beta * f_p + (1.0 - beta) * f_q, (1.0 - beta) * f_q
    else:
        tl.static_assert(DIVERGENCE == "tvd")
        slope = tl.where(log_q == log_p, 0.0, tl.where(log_q > log_p, q, -q))
        return 0.5 * tl.abs(p - q), 0.5 * slope


@triton.jit(do_not_specialize=["N"])
def _slots_kernel(
    STUDENT, TEACHER, MASK, STUDENT_TAIL, TEACHER_TAIL,  # inputs
    VALUE, D_STUDENT, D_TAIL,  # outputs
    N, K, stride_sn, stride_mn, stride_mk, beta,  # sizes, options
    DIVERGENCE: tl.constexpr, RENORM_P: tl.constexpr, RENORM_Q: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a few whole rows, as a tile (ROWS, BLOCK_K)."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    r, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    mask_r = r < N - first
    inside = mask_r[:, None] & (k < K)[None, :]
    at = r[:, None] * K + k[None, :]
    live = inside
    if MASK is not None:
        kept = MASK + first * stride_mn + r[:, None] * stride_mn + k[None, :] * stride_mk
        live = tl.load(kept, mask=inside, other=0) != 0
    student = STUDENT + first * stride_sn + r[:, None] * stride_sn + k[None, :]
    log_q = tl.load(student, mask=inside, other=0.0).to(tl.float32)
    log_p = tl.load(TEACHER + first * K + at, mask=inside, other=0.0).to(tl.float32)
    log_q = tl.where(live, log_q, -INF)
    log_p = tl.where(live, log_p, -INF)

    if RENORM_P:
        log_p, p, _ = _normalised(log_p)
    else:
        p = tl.exp(log_p)
    if RENORM_Q:
        log_q, q, some_q = _normalised(log_q)
    else:
        q = tl.exp(log_q)
    f, g = _terms(log_p, p, log_q, q, beta, DIVERGENCE)
    value = tl.sum(f, axis=1)
    if RENORM_Q:
        # A student of no mass at all has no gradient.
        g = tl.where(some_q[:, None], g - q * tl.sum(g, axis=1)[:, None], 0.0)
    tl.store(D_STUDENT + first * K + at, tl.where(live, g, 0.0), mask=inside)

    if STUDENT_TAIL is not None:
        log_q_tail = tl.load(STUDENT_TAIL + first + r, mask=mask_r, other=0.0).to(tl.float32)
        if TEACHER_TAIL is not None:
            log_p_tail = tl.load(TEACHER_TAIL + first + r, mask=mask_r, other=0.0).to(tl.float32)
        else:
            log_p_tail = _rest(log_p, p, k)
        # Where nothing is left outside, what a teacher's rounding leaves there is nothing too.
        log_p_tail = tl.where(log_q_tail == -INF, -INF, log_p_tail)
        f_tail, g_tail = _terms(
            log_p_tail, tl.exp(log_p_tail), log_q_tail, tl.exp(log_q_tail), beta, DIVERGENCE
        )
        if MASK is not None:  # no slot, no row
            some = tl.max(live.to(tl.int32), axis=1) != 0
            f_tail, g_tail = tl.where(some, f_tail, 0.0), tl.where(some, g_tail, 0.0)
        value += f_tail
        tl.store(D_TAIL + first + r, g_tail, mask=mask_r)
    tl.store(VALUE + first + r, value, mask=mask_r)


def slots(
    student: Tensor,  # (..., K), log q, or logits for "renorm" and "gathered"
    teacher: Tensor,  # (..., K), log p
    mask: Tensor | None,  # (..., K) bool, True for the slots that count; or (...), of whole rows
    student_tail: Tensor | None,  # (...), log mass of the student outside the slots
    teacher_tail: Tensor | None,  # (...), log mass of the teacher there; None is the rest to 1
    divergence: str,
    support: str,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """value (...), d_student (..., K) and, where there is a tail, d_tail (...), all fp32.

    More than MAX_K slots a row are computed by PyTorch.
    """
    K = student.shape[-1]
    if K > MAX_K or student.numel() == 0:
        return slots_in_torch(
            student, teacher, mask, student_tail, teacher_tail, divergence, support, beta
        )
    value = torch.empty(student.shape[:-1], device=student.device, dtype=torch.float32)
    d_student = torch.empty(student.shape, device=student.device, dtype=torch.float32)
    d_tail = None if student_tail is None else torch.empty_like(value)
    by_row = mask is not None and mask.dim() < student.dim()
    mask_strides = (1, 0) if by_row else (K, 1)
    teacher, mask, student_tail, teacher_tail = (
        None if t is None else t.contiguous() for t in (teacher, mask, student_tail, teacher_tail)
    )
    student = student.reshape(-1, K)
    if student.stride(1) != 1:
        student = student.contiguous()
    how = at_the_ends(divergence, beta)
    _plan(value.numel(), K, student.stride(0), mask_strides, support, *how)(
        student, teacher, None if mask is None else mask.view(torch.uint8),
        student_tail, teacher_tail, value, d_student, d_tail,
    )  # fmt: skip
    return value, d_student, d_tail


@functools.lru_cache(REMEMBERED)
def _plan(
    N: int, K: int, stride: int, mask_strides: tuple[int, int], support: str, divergence: str,
    beta: float | None,
) -> Launch:  # fmt: skip
    block_k = config.ceil_pow2(K)
    rows = max(1, WARP // block_k)
    return Launch(
        _slots_kernel, (config.ceil_div(N, rows),), (N, K, stride, *mask_strides, beta),
        num_warps=max(1, block_k // WARP), DIVERGENCE=divergence,
        RENORM_P=support in RENORM_TEACHER, RENORM_Q=support in RENORM_STUDENT,
        ROWS=rows, BLOCK_K=block_k,
    )  # fmt: skip
