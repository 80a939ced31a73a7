"""y at K ids a row, and the gradient of that, in plain PyTorch."""

import torch
from torch import Tensor

from .stats import _capped, _chunks, _locate


def pick(
    x: Tensor,  # (..., V)
    ids: Tensor,  # (..., K)
    softcap: float | None,
) -> Tensor:
    """softcap · tanh(x / softcap) at ids, (..., K), in full; NaN for an id outside [0, V)."""
    inside = (ids >= 0) & (ids < x.shape[-1])
    y, _ = _capped(x.gather(-1, torch.where(inside, ids, 0).long()), softcap)
    return y.masked_fill(~inside, torch.nan)


def pick_bwd(
    x: Tensor,  # (..., V)
    ids: Tensor,  # (..., K)
    y: Tensor,  # (..., K), what was picked
    softcap: float | None,
    d_y: Tensor,  # (..., K)
    inplace: bool = False,  # which a CPU need not be
) -> Tensor:
    """The gradient of y: rounded after what repeated ids bring is added."""
    V = x.shape[-1]
    flat = x.reshape(-1, V)
    dx = torch.zeros_like(flat, memory_format=torch.contiguous_format)
    if softcap is not None:
        d_y = torch.where(d_y == 0, 0.0, d_y * (1 - (y / softcap).square()))
    at, inside, bad = _locate(ids, flat.shape[0], V)
    d_y, bad = torch.where(inside, d_y.reshape(at.shape), 0.0), bad.any(1, keepdim=True)
    for rows in _chunks(flat, None):
        d = torch.zeros_like(flat[rows], dtype=d_y.dtype).scatter_add_(1, at[rows], d_y[rows])
        dx[rows] = d.masked_fill_(bad[rows], torch.nan).to(dx.dtype)
    return dx.view(x.shape)
