"""Gathers the logits x at K ids per row, and computes the gradient of x, in plain PyTorch."""

import torch
from torch import Tensor

from ..contract import Reading
from .rows import (
    by_row,
    capped,
    chunks,
    is_bad,
    live_rows,
    locate,
    written_back,
    written_to,
)


def gather(x: Tensor, reading: Reading) -> Tensor:
    """Returns the softcapped logits at `reading.ids`: NaN for ids outside [0, V), 0 in ignored
    rows.
    """
    flat = x.reshape(-1, x.shape[-1])
    at, inside = locate(reading.ids, flat.shape[0], flat.shape[1])
    y, _ = capped(flat.gather(1, at), reading.softcap)
    y = y.masked_fill(~inside, torch.nan)
    live = live_rows(reading)
    if live is not None:
        y = y.masked_fill(~live[:, None], 0)
    return y.view(reading.ids.shape)


def gather_gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    picked: Tensor,  # (..., K), the result of gather
    g: Tensor,  # (..., K), the gradient of `picked`, for an upstream gradient of 1
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Returns the gradient of x. Slots of a row with the same id are added before rounding."""
    V = x.shape[-1]
    flat = x.reshape(-1, V)
    rows = flat.shape[0]
    at, inside = locate(reading.ids, rows, V)
    g = g.reshape(at.shape) * by_row(upstream, rows) * by_row(factor, rows)
    if reading.softcap is not None:
        slope = 1 - (picked.reshape(at.shape) / reading.softcap).square()
        g = torch.where(g == 0, 0.0, g * slope)
    g = torch.where(inside, g, 0.0)
    bad = is_bad(reading.ids, inside)
    live = live_rows(reading)
    if live is not None:
        live = live[:, None]
        g, bad = torch.where(live, g, 0.0), bad & live
    dx, into = written_to(x, into)
    for chunk in chunks(flat, None):
        d = torch.zeros_like(flat[chunk], dtype=g.dtype).scatter_add_(1, at[chunk], g[chunk])
        dx[chunk] = d.masked_fill_(bad[chunk], torch.nan).to(dx.dtype)
    return written_back(dx, into)
