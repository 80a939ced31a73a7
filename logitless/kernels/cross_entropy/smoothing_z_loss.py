"""Cross-entropy with label smoothing ε, z-loss and class weights v, and its coefficients.

The loss is (1-ε) v_t nll - ε/V log_total + z_loss lse², from row statistics (contract.py).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from ...contract import Coefficients, Reading, Statistics
from .. import config
from ..launch import REMEMBERED, Launch
from ..layout import is_live
from ..numerics import load
from ..profiling import elements, profiled
from ..statistics.gradient_tile import COEF_A, COEF_G_LABEL, COEF_G_TOTAL

COEF_WIDTH = tl.constexpr(_contract.COEFFICIENTS)


@triton.jit(
    **profiled("cross_entropy", W=lambda args: elements(args["LABEL"])),
    do_not_specialize=["N", "V"],
    do_not_specialize_on_alignment=["LABEL", "NLL", "LSE", "LOG_TOTAL", "W", "SUM_W"],
)
def _cross_entropy_kernel(
    LABEL, NLL, LSE, LOG_TOTAL, W, SUM_W,  # inputs; SUM_W is the sum of W
    VALUE, COEF, MASS,  # outputs
    N, V, keep, spread, z_loss, ignore_index,  # sizes, options; keep = 1 - ε, spread = ε / V
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Each program computes one block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < N
    label = tl.load(LABEL + row, mask=mask, other=0)
    live = mask & is_live(label, ignore_index)
    g = keep  # factor of nll
    if W is not None:
        # of an invalid label, any weight will do, because nll is NaN
        v = tl.load(W + tl.minimum(tl.maximum(label, 0), V - 1), mask=live, other=0.0)
        g = keep * v.to(tl.float32)
        if MASS is not None:
            tl.store(MASS + row, v.to(tl.float32), mask=mask)
    a = tl.zeros((BLOCK_N,), tl.float32) + g
    value = tl.zeros((BLOCK_N,), tl.float32)
    if NLL is not None:
        value += g * load(NLL, row, live)
    if LOG_TOTAL is not None:
        value -= spread * load(LOG_TOTAL, row, live)
        n = V.to(tl.float32)
        if SUM_W is not None:
            n = tl.load(SUM_W).to(tl.float32)
        a += spread * n
    if LSE is not None:
        lse = load(LSE, row, live)
        value += z_loss * (lse * lse)
        a += 2.0 * z_loss * lse
    if VALUE is not None:
        tl.store(VALUE + row, tl.where(live, value, 0.0), mask=mask)
    if COEF is not None:
        at = COEF + row * COEF_WIDTH
        tl.store(at + COEF_A, tl.where(live, a, 0.0), mask=mask)
        tl.store(at + COEF_G_LABEL, tl.where(live, -g, 0.0), mask=mask)
        if LOG_TOTAL is not None:
            tl.store(at + COEF_G_TOTAL, tl.where(live, -spread, 0.0), mask=mask)


def cross_entropy(
    statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Coefficients]:
    value, coefs = torch.empty_like(statistics.nll), _zero_coefficients(reading)
    _launch(
        reading, label_smoothing, z_loss, nll=statistics.nll, value=value, coefs=coefs,
        log_total=statistics.log_total if label_smoothing else None,
        lse=statistics.lse if z_loss else None,
    )  # fmt: skip
    has = ("a", "label", "total") if label_smoothing else ("a", "label")
    return value, Coefficients(coefs, has)


def label_coefficients(reading: Reading, dtype: torch.dtype) -> Coefficients:
    coefs = _zero_coefficients(reading)
    _launch(reading, coefs=coefs)
    return Coefficients(coefs, ("a", "label"))


def weighted_nll(nll: Tensor, reading: Reading) -> Tensor:
    value = torch.empty_like(nll)
    _launch(reading, nll=nll, value=value)
    return value


def label_mass(reading: Reading, dtype: torch.dtype) -> Tensor:
    label = reading.label
    mass = torch.empty(label.numel(), device=label.device, dtype=torch.float32)
    _launch(reading, mass=mass)
    return mass


def _zero_coefficients(reading: Reading) -> Tensor:
    label = reading.label
    shape = (label.numel(), _contract.COEFFICIENTS)
    return torch.zeros(shape, device=label.device, dtype=torch.float32)


def _launch(
    reading: Reading, label_smoothing: float = 0.0, z_loss: float = 0.0, *,
    nll: Tensor | None = None, lse: Tensor | None = None, log_total: Tensor | None = None,
    value: Tensor | None = None, coefs: Tensor | None = None, mass: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches the kernel for those outputs (`value`, `coefs`, `mass`) that are not None."""
    label, weight, vocab = reading.label, reading.class_weight, reading.vocab
    if label.numel() == 0:
        return
    sum_w = None
    if log_total is not None and weight is not None:
        sum_w = weight.sum(dtype=torch.float32)
    keep, spread = 1.0 - label_smoothing, label_smoothing / vocab
    _plan(label.numel(), vocab, keep, spread, z_loss, reading.ignore_index)(
        label if label.is_contiguous() else label.contiguous(), nll, lse, log_total,
        None if weight is None else weight.contiguous(), sum_w, value, coefs, mass,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _plan(
    N: int, V: int, keep: float, spread: float, z_loss: float, ignore_index: int | None
) -> Launch:
    block = 512
    return Launch(
        _cross_entropy_kernel, (config.ceil_div(N, block),),
        (N, V, keep, spread, z_loss, ignore_index), num_warps=4, BLOCK_N=block,
    )  # fmt: skip
