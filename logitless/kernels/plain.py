"""The plain loss of a row, from its statistics, and the coefficients of its gradient.

(1-ε) v_t nll - ε/V log_total + z_loss lse²            v_t the class weight of the row's mark
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import contract as _contract
from ..contract import Coefficients, Reading, Statistics, made_once
from . import config
from .gradient import COEF_A, COEF_G_MARK, COEF_G_TOTAL
from .launch import REMEMBERED, Launch
from .numerics import load
from .state import is_live

COEF_WIDTH = tl.constexpr(_contract.COEFFICIENTS)


@triton.jit(
    do_not_specialize=["N", "V"],
    do_not_specialize_on_alignment=["MARK", "NLL", "LSE", "LOG_TOTAL", "W", "SUM_W"],
)
def _plain_kernel(
    MARK, NLL, LSE, LOG_TOTAL, W, SUM_W,  # inputs; SUM_W is one number
    VALUE, COEF, MASS,  # outputs
    N, V, keep, spread, z_loss, ignore_index,  # sizes, options; keep = 1 - ε, spread = ε / V
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program a block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < N
    mark = tl.load(MARK + row, mask=mask, other=0)
    live = mask & is_live(mark, ignore_index)
    own = keep  # of the mark's term
    if W is not None:
        # Any number will do for a bad mark, whose row is NaN already.
        v = tl.load(W + tl.minimum(tl.maximum(mark, 0), V - 1), mask=live, other=0.0)
        own = keep * v.to(tl.float32)
        tl.store(MASS + row, v.to(tl.float32), mask=mask)
    a = tl.zeros((BLOCK_N,), tl.float32) + own
    value = tl.zeros((BLOCK_N,), tl.float32)
    if NLL is not None:
        value += own * load(NLL, row, live)
    at = COEF + row * COEF_WIDTH
    if LOG_TOTAL is not None:
        value -= spread * load(LOG_TOTAL, row, live)
        n = V.to(tl.float32)
        if SUM_W is not None:
            n = tl.load(SUM_W).to(tl.float32)
        a += spread * n
        tl.store(at + COEF_G_TOTAL, tl.where(live, -spread, 0.0), mask=mask)
    if LSE is not None:
        lse = load(LSE, row, live)
        value += z_loss * (lse * lse)
        a += 2.0 * z_loss * lse
    if VALUE is not None:
        tl.store(VALUE + row, tl.where(live, value, 0.0), mask=mask)
    tl.store(at + COEF_A, tl.where(live, a, 0.0), mask=mask)
    tl.store(at + COEF_G_MARK, tl.where(live, -own, 0.0), mask=mask)


def plain(
    statistics: Statistics,
    reading: Reading,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor | None, Coefficients, Tensor | None]:
    """The loss of each row (...), its coefficients, and the class weight of its mark (N,).

    The last is None without class weights. Without nll there is no loss, but coefficients.
    """
    nll, mark, weight = statistics.nll, reading.mark, reading.class_weight
    has = ("a", "mark", "total") if label_smoothing else ("a", "mark")
    if weight is None and not label_smoothing and not z_loss:
        return nll, Coefficients(_alike[mark.device], has), None
    count = mark.numel()
    coefs = torch.zeros((count, _contract.COEFFICIENTS), device=mark.device, dtype=torch.float32)
    value = None if nll is None else torch.empty_like(nll)
    mass = None
    if weight is not None:
        mass = torch.empty(count, device=mark.device, dtype=torch.float32)
    if count == 0:
        return value, Coefficients(coefs, has), mass
    total = sum_w = None
    if label_smoothing:
        total = statistics.log_total
        sum_w = None if weight is None else weight.sum(dtype=torch.float32)
    lse = statistics.lse if z_loss else None
    spread = label_smoothing / vocab
    _plan(count, vocab, 1.0 - label_smoothing, spread, z_loss, reading.ignore_index)(
        mark if mark.is_contiguous() else mark.contiguous(),
        nll, lse, total, None if weight is None else weight.contiguous(), sum_w, value, coefs, mass,
    )  # fmt: skip
    return value, Coefficients(coefs, has), mass


@made_once
def _alike(device: torch.device) -> Tensor:
    """Coefficients of -log p, the same for all rows."""
    rows = torch.zeros((1, _contract.COEFFICIENTS), device=device, dtype=torch.float32)
    rows[0, _contract.A], rows[0, _contract.G_MARK] = 1.0, -1.0
    return rows


@functools.lru_cache(REMEMBERED)
def _plan(
    N: int, V: int, keep: float, spread: float, z_loss: float, ignore_index: int | None
) -> Launch:
    block = 512
    return Launch(
        _plain_kernel, (config.ceil_div(N, block),), (N, V, keep, spread, z_loss, ignore_index),
        num_warps=4, BLOCK_N=block,
    )  # fmt: skip
