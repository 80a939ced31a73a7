"""Row statistics in plain PyTorch, a few rows at a time so that the working set stays in cache.

The same contract as kernels/stats_fwd.py and kernels/stats_bwd.py; the formulas are explained
there.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20  # of logits in work at once: about the cache of a core

Index = slice | Tensor


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, live: Tensor | None) -> Iterator[Index]:
    """Rows of x (N, V) to work on together; on a CPU, ignored rows are not among them."""
    step = max(1, CHUNK_BYTES // (x.shape[1] * _precision(x).itemsize))
    if live is not None and x.device.type == "cpu" and not bool(live.all()):
        yield from live.nonzero().squeeze(1).split(step)
    else:
        yield from (slice(i, i + step) for i in range(0, x.shape[0], step))


def _live_rows(ids: Tensor | None, ignore_index: int | None) -> Tensor | None:
    return None if ids is None or ignore_index is None else (ids != ignore_index).reshape(-1)


def _by_row(t: Tensor, rows: int) -> Tensor:
    """(...) or (..., K) as (N, 1) or (N, K)."""
    return t.reshape(rows, -1 if rows else 1)


def _locate(ids: Tensor, rows: int, V: int) -> tuple[Tensor, Tensor]:
    """ids as (N, K) safe to index with, and which of them are real."""
    ids = _by_row(ids, rows)
    inside = (ids >= 0) & (ids < V)
    return torch.where(inside, ids, 0).long(), inside


def _capped(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """y = softcap · tanh(x / softcap) at full precision, and dy/dx where it isn't 1."""
    y = x.to(_precision(x))
    if softcap is None:
        return y, None
    t = torch.tanh(y / softcap)
    return softcap * t, 1 - t * t


def _inverse(row_temperature: Tensor | None, temperature: float, like: Tensor) -> Tensor | None:
    """1 / temperature as a column (N, 1), or None where it is 1 and costs nothing."""
    if row_temperature is None and temperature == 1:
        return None
    t = temperature if row_temperature is None else row_temperature.reshape(-1).to(like.dtype)
    return (torch.ones_like(like) / t).unsqueeze(1)


def _centred(y: Tensor, shift: Tensor, inv_t: Tensor | None, out: Tensor | None = None) -> Tensor:
    """d = (y - shift) / temperature."""
    d = torch.sub(y, shift, out=out)
    return d if inv_t is None else d.mul_(inv_t)


def stats_fwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,
    want_entropy: bool,
    want_total: bool,
    want_argmax: bool,
) -> tuple[Tensor | None, ...]:
    """shift, log_s, lse (...); picked like ids; entropy, total, argmax (...); None if not wanted.

    picked and total are of z, or of log p = z - lse where `normalised`.
    """
    shape, V = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, V)
    shift = torch.zeros(flat.shape[0], dtype=_precision(x), device=x.device)
    log_s, lse = torch.zeros_like(shift), torch.zeros_like(shift)
    entropy = torch.zeros_like(shift) if want_entropy else None
    total = torch.zeros_like(shift) if want_total else None
    argmax = torch.full_like(shift, -1, dtype=torch.int64) if want_argmax else None
    picked = None
    if ids is not None:
        at, inside = _locate(ids, flat.shape[0], V)
        picked = torch.zeros(at.shape, dtype=shift.dtype, device=x.device)
    live = _live_rows(ids, ignore_index)
    inv_t = _inverse(row_temperature, temperature, shift)

    for rows in _chunks(flat, live):
        y, _ = _capped(flat[rows], softcap)
        m = y.amax(1, keepdim=True)
        m = torch.where(m.isinf(), 0.0, m)  # exp of the bare y is right where m is ±inf
        rate = None if inv_t is None else inv_t[rows]
        d = _centred(y, m, rate)
        e = d.exp() if want_entropy else d.exp_()
        s = e.sum(1, keepdim=True)
        origin = m if normalised else torch.zeros_like(m)
        norm = s.log() if normalised else torch.zeros_like(m)
        shift[rows], log_s[rows] = m.squeeze(1), s.log().squeeze(1)
        lse[rows] = (m if rate is None else m * rate).add(s.log()).squeeze(1)
        if entropy is not None:
            w = torch.where(e > 0, d * e, 0.0).sum(1, keepdim=True)
            entropy[rows] = torch.where(s == 0, 0.0, s.log() - w / s).squeeze(1)
        if total is not None:
            total[rows] = _weighted_sum(_centred(y, origin, rate), norm, weight)
        if argmax is not None:
            argmax[rows] = y.argmax(1)
        if picked is not None:
            z = _centred(y.gather(1, at[rows]), origin, rate) - norm
            picked[rows] = torch.where(inside[rows], z, torch.nan)

    if live is not None:  # an ignored row is zeros, whatever was in it
        for out in (shift, log_s, lse, entropy, total):
            if out is not None:
                out.masked_fill_(~live, 0)
        picked.masked_fill_(~live[:, None], 0)
        if argmax is not None:
            argmax.masked_fill_(~live, -1)
    like_ids = None if picked is None else picked.view(ids.shape)
    by_row = (None if t is None else t.view(shape) for t in (entropy, total, argmax))
    return shift.view(shape), log_s.view(shape), lse.view(shape), like_ids, *by_row


def _weighted_sum(z: Tensor, norm: Tensor, weight: Tensor | None) -> Tensor:
    """Σ v (z - norm) over columns. A class of weight 0 is not read."""
    if weight is None:
        return z.sum(1) - z.shape[1] * norm.squeeze(1)
    v = weight.to(z.dtype)
    return torch.where(v == 0, 0.0, v * z).sum(1) - v.sum() * norm.squeeze(1)


def stats_bwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,  # the kernels' need, with picked; not ours
    shift: Tensor,  # (...)
    log_s: Tensor,  # (...)
    picked: Tensor | None,  # like ids
    a: Tensor | None,  # (...)
    b: Tensor | None,  # (...)
    g_id: Tensor | None,  # like ids
    g_c: Tensor | None,  # (...)
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits, (..., V) in their dtype; in place, it replaces x."""
    V = x.shape[-1]
    flat = x.reshape(-1, V)
    dx = flat if inplace else torch.empty_like(flat, memory_format=torch.contiguous_format)
    live = _live_rows(ids, ignore_index)
    # A row of -inf has no distribution: p = 0, and nothing flows.
    dead = (log_s == -torch.inf).reshape(-1, 1)
    shift = torch.where(dead, torch.inf, shift.reshape(-1, 1))
    log_s = torch.where(dead, 0.0, log_s.reshape(-1, 1))
    a = torch.where(dead, 0.0, torch.zeros_like(shift) if a is None else a.reshape(-1, 1))
    b, g_c, g_id = (
        None if t is None else torch.where(dead, 0.0, _by_row(t, dead.shape[0]))
        for t in (b, g_c, g_id)
    )
    if g_id is not None:
        at, inside = _locate(ids, flat.shape[0], V)
        # A bad id has no gradient to give: the whole row says so.
        a = torch.where(inside.all(1, keepdim=True), a, torch.nan)
    inv_t = _inverse(row_temperature, temperature, shift.squeeze(1))
    if inv_t is not None:
        a = a * inv_t
        b, g_c, g_id = (None if t is None else t * inv_t for t in (b, g_c, g_id))
    inv_s = (-log_s).exp()  # p = e^d / s

    if live is not None:
        dx.masked_fill_(~live[:, None], 0)
    for rows in _chunks(flat, live):
        y, slope = _capped(flat[rows], softcap)
        into = dx[rows] if isinstance(rows, slice) and dx.dtype == y.dtype and not inplace else None
        d = _centred(y, shift[rows], None if inv_t is None else inv_t[rows], out=into)
        if b is None:
            dy = d.exp_().mul_(a[rows] * inv_s[rows])
        else:
            p = d.exp() * inv_s[rows]
            dy = p * a[rows] + torch.where(p > 0, p * (d - log_s[rows]), 0.0) * b[rows]
        if g_c is not None:
            dy += g_c[rows] if weight is None else g_c[rows] * weight
        if g_id is not None:
            dy.scatter_add_(1, at[rows], g_id[rows])
        if slope is not None:
            dy *= slope
        if dy is not into:
            dx[rows] = dy.to(dx.dtype)
    if live is not None and x.device.type != "cpu":
        dx.masked_fill_(~live[:, None], 0)  # rows that could not be left out without asking the GPU
    if inplace and flat.data_ptr() != x.data_ptr():
        x.copy_(flat.view(x.shape))
    return (x if inplace else dx).view(x.shape)


def scale_rows_(x: Tensor, g: Tensor) -> None:
    """x (..., V) times g, a scalar or (...), in place."""
    x.mul_(g.reshape(x.shape[:-1]).unsqueeze(-1) if g.dim() else g)


def can_visit(x: Tensor) -> bool:
    """No: looking twice at a chunk in cache is as good."""
    return False
