"""Row statistics in plain PyTorch, a few rows at a time so that the working set stays in cache.

The same contract as kernels/stats_fwd.py and kernels/stats_bwd.py; the formulas are explained
there.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20  # of logits in work at once; fewer, and threads only start and stop

NO_ID = -(2**31)  # in a slot among several that holds no id: not read, no gradient, not bad
IGNORED = NO_ID + 1  # in the first slot of a row that is ignored without a label

Index = slice | Tensor


def _precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, live: Tensor | None) -> Iterator[Index]:
    """Rows of x (N, V) to work on together; on a CPU, ignored rows are not among them."""
    copies = 1 if x.dtype == _precision(x) else 2  # of a chunk: as given, and at full precision
    step = max(1, CHUNK_BYTES // (x.shape[1] * _precision(x).itemsize * copies))
    if live is not None and x.device.type == "cpu" and not bool(live.all()):
        yield from (rows for rows in live.nonzero().squeeze(1).split(step) if len(rows))
    else:
        yield from (slice(i, i + step) for i in range(0, x.shape[0], step))


def _live_rows(ids: Tensor | None, rows: int, ignore_index: int | None) -> Tensor | None:
    """By their first id."""
    if ids is None or ignore_index is None:
        return None
    return _by_row(ids, rows)[:, :1].reshape(-1) != ignore_index


def _by_row(t: Tensor, rows: int) -> Tensor:
    """(...) or (..., K) as (N, 1) or (N, K)."""
    return t.reshape(rows, -1 if rows else 1)


def _locate(ids: Tensor, rows: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids as (N, K) safe to index with, which of them are real, and which slots have a bad one."""
    ids = _by_row(ids, rows).contiguous()
    inside = (ids >= 0) & (ids < V)
    bad = ~inside if ids.shape[1] == 1 else ~inside & (ids != NO_ID)
    return torch.where(inside, ids, 0).long(), inside, bad


def _members(at: Tensor, inside: Tensor) -> Tensor:
    """The same columns (N, K), with one of the row's own wherever a slot is not real."""
    return torch.where(inside, at, at.gather(1, inside.int().argmax(1, keepdim=True)))


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
    t = temperature if row_temperature is None else row_temperature.reshape(-1, 1).to(like.dtype)
    return torch.ones_like(like) / t


def _centred(y: Tensor, shift: Tensor, inv_t: Tensor | None, out: Tensor | None = None) -> Tensor:
    """d = (y - shift) / temperature."""
    d = torch.sub(y, shift, out=out)
    return d if inv_t is None else d.mul_(inv_t)


def _moderate(m: Tensor, inv_t: Tensor | None) -> bool:
    """Whether e^y needs no centring: no overflow, nothing lost, and a pass over the logits saved.

    Asks for values, so only a CPU is asked.
    """
    return inv_t is None and m.device.type == "cpu" and bool(m.abs().max() < 30)


def stats_fwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,
    outside: int | None,
    plain: bool,
    want_entropy: bool,
    want_total: bool,
    want_argmax: bool,
) -> tuple[Tensor | None, ...]:
    """shift, log_s, lse, picked, entropy, total, argmax, tail, label, log_s1, repeats.

    None if not wanted, as repeats never is.

    (...) each, picked like ids. picked and total are of z, or of log p = z - lse where
    `normalised`; tail is the log mass outside ids[..., outside:]; where `plain`, label is log p of
    the first id at temperature 1, and log_s1 its normaliser. A row whose first id is ignore_index
    is not read.
    """
    shape, V = x.shape[:-1], x.shape[-1]
    flat = x.reshape(-1, V)
    column = torch.zeros((flat.shape[0], 1), dtype=_precision(x), device=x.device)
    shift, s, w, c, rest, s1 = (column.clone() for _ in range(6))
    argmax = torch.full(shape, -1, device=x.device).view(-1) if want_argmax else None
    at = inside = bad = y_at = None
    if ids is not None:
        at, inside, bad = _locate(ids, flat.shape[0], V)
        y_at = column.expand(at.shape).clone()
    live = _live_rows(ids, flat.shape[0], ignore_index)
    inv_t = _inverse(row_temperature, temperature, column)

    for rows in _chunks(flat, live):
        y, _ = _capped(flat[rows], softcap)
        m = y.amax(1, keepdim=True)
        m = torch.where(m.isinf(), 0.0, m)  # exp of the bare y is right where m is ±inf
        shift[rows] = m
        if argmax is not None:
            argmax[rows] = y.argmax(1)
        if y_at is not None:
            y_at[rows] = y.gather(1, at[rows])
        if plain:
            s1[rows] = (y - m).exp_().sum(1, keepdim=True)
        simple = not (want_entropy or want_total or outside is not None)
        if simple and _moderate(m, inv_t):
            own = y.dtype != flat.dtype or softcap is not None  # not a view of the logits
            s[rows] = torch.exp(y, out=y if own else None).sum(1, keepdim=True) * (-m).exp()
            continue
        d = _centred(y, m, None if inv_t is None else inv_t[rows])
        if want_total:
            c[rows] = _weighted_sum(d if normalised else y, weight)
        if outside is not None:
            own = _members(at[rows][:, outside:], inside[rows][:, outside:])
            rest[rows] = d.scatter(1, own, -torch.inf).logsumexp(1, keepdim=True)
        e = d.exp() if want_entropy else d.exp_()
        if want_entropy:
            w[rows] = torch.where(e > 0, d.mul_(e), 0.0).sum(1, keepdim=True)
        s[rows] = e.sum(1, keepdim=True)

    rate = torch.ones_like(s) if inv_t is None else inv_t
    log_s = s.log()
    picked = entropy = total = tail = label = log_s1 = None
    if y_at is not None:
        z = (y_at - shift) * rate - log_s if normalised else y_at * rate
        picked = z.masked_fill(~inside, torch.nan)
    if want_entropy:
        entropy = torch.where(s == 0, 0.0, log_s - w / s)
    if want_total:
        mass = V if weight is None else weight.to(s.dtype).sum()
        total = c - mass * log_s if normalised else c * rate
    if outside is not None:
        tail = (rest - log_s).masked_fill(bad[:, outside:].any(1, keepdim=True), torch.nan)
    if plain:
        log_s1 = s1.log()
        label = (y_at[:, :1] - shift - log_s1).masked_fill(~inside[:, :1], torch.nan)
    outputs = [shift, log_s, shift * rate + log_s, picked, entropy, total, tail, label, log_s1]
    if live is not None:  # an ignored row is zeros, whatever was in it
        outputs = [None if t is None else t.masked_fill_(~live[:, None], 0) for t in outputs]
        if argmax is not None:
            argmax.masked_fill_(~live, -1)
    outputs.insert(6, argmax)
    # Cloned, for a view that an autograd function returns may not be written to by its user.
    return (
        *(None if t is None else t.view(ids.shape if t is picked else shape).clone()
          for t in outputs),
        None,  # repeats, which nobody here asks for
    )  # fmt: skip


def _weighted_sum(z: Tensor, weight: Tensor | None) -> Tensor:
    """Σ v z over columns, (N, 1). A class of weight 0 is not read."""
    if weight is None:
        return z.sum(1, keepdim=True)
    v = weight.to(z.dtype)
    return torch.where(v == 0, 0.0, v * z).sum(1, keepdim=True)


def stats_bwd(
    x: Tensor,  # (..., V)
    ids: Tensor | None,  # (...) or (..., K)
    weight: Tensor | None,  # (V,)
    row_temperature: Tensor | None,  # (...)
    temperature: float,
    softcap: float | None,
    ignore_index: int | None,
    normalised: bool,
    outside: int | None,
    plain: bool,
    shift: Tensor,  # (...)
    log_s: Tensor,  # (...)
    log_s1: Tensor | None,  # (...)
    a: Tensor | None,  # (...)
    b: Tensor | None,  # (...)
    g_id: Tensor | None,  # like ids, or the last of them; or one number for all
    g_c: Tensor | None,  # (...)
    a_ids: Tensor | None,  # (...), for ids[..., outside:]
    d_label: Tensor | None,  # (...) or a number, of the first id at temperature 1
    gain: Tensor | None = None,  # (...) or a number
    repeats: Tensor | None = None,  # (...), whether one of the ids of g_id is in two slots
    inplace: bool = False,
) -> Tensor:
    """The gradient of the logits, (..., V) in their dtype; in place, it replaces x.

    Of one id a row that is `normalised`, a need not tell: -g_id is added to it; nor of a label
    without a log_s1, which is at the temperature of the ids. A gain multiplies g_id, and of several
    ids a and a_ids too.
    """
    V = x.shape[-1]
    flat = x.reshape(-1, V)
    dx = flat if inplace else torch.empty_like(flat, memory_format=torch.contiguous_format)
    live = _live_rows(ids, flat.shape[0], ignore_index)
    # A row of -inf has no distribution: p = 0, and nothing flows.
    dead = (log_s == -torch.inf).reshape(-1, 1)
    shift = torch.where(dead, torch.inf, shift.reshape(-1, 1))
    log_s = torch.where(dead, 0.0, log_s.reshape(-1, 1))
    if g_id is not None:
        g_id = _by_row(g_id if g_id.dim() else g_id.expand(ids.shape), dead.shape[0])
        skip = _by_row(ids, dead.shape[0]).shape[1] - g_id.shape[1]
        g_id = torch.nn.functional.pad(g_id, (skip, 0))
    a = torch.zeros_like(shift) if a is None else a.reshape(-1, 1)
    a_ids = None if a_ids is None else a_ids.reshape(-1, 1)
    d_label = None if d_label is None else d_label.reshape(-1, 1).expand(dead.shape)
    if gain is not None:
        a = a * gain.reshape(-1, 1)
        g_id, a_ids = (None if t is None else t * gain.reshape(-1, 1) for t in (g_id, a_ids))
    if d_label is not None and log_s1 is None:
        a = a - d_label
        a_ids = None if a_ids is None else a_ids - d_label
    one_id = outside is None and not plain and g_id is not None and g_id.shape[1] == 1
    if normalised and one_id:
        a = a - g_id
    a = torch.where(dead, 0.0, a)
    b, g_c, g_id = (
        None if t is None else torch.where(dead, 0.0, _by_row(t, dead.shape[0]))
        for t in (b, g_c, g_id)
    )
    a_ids, d_label = (None if t is None else torch.where(dead, 0.0, t) for t in (a_ids, d_label))
    if g_id is not None or a_ids is not None or d_label is not None:
        at, inside, bad = _locate(ids, flat.shape[0], V)
        # A bad id has no gradient to give: the whole row says so.
        bad = bad.any(1, keepdim=True)
        a = torch.where(bad, torch.nan, a)
        a_ids = None if a_ids is None else torch.where(bad, torch.nan, a_ids)
        g_id = None if g_id is None else torch.where(inside, g_id, 0.0)
    inv_t = _inverse(row_temperature, temperature, shift)
    if inv_t is not None:
        a = a * inv_t
        b, g_c, g_id, a_ids = (None if t is None else t * inv_t for t in (b, g_c, g_id, a_ids))
    inv_s = (-log_s).exp()  # p = e^d / s
    simple = b is None and a_ids is None and d_label is None
    moderate = simple and shift.numel() > 0 and _moderate(shift, inv_t)
    if moderate:
        a = a * inv_s * (-shift).exp()

    if live is not None and x.device.type == "cpu":
        dx.index_fill_(0, (~live).nonzero().squeeze(1), 0)  # the rest is about to be written
    for rows in _chunks(flat, live):
        y, slope = _capped(flat[rows], softcap)
        into = dx[rows] if isinstance(rows, slice) and dx.dtype == y.dtype else None
        if moderate:
            own = y.dtype != dx.dtype or softcap is not None
            dy = torch.exp(y, out=y if own else into).mul_(a[rows])
        elif simple:
            d = _centred(y, shift[rows], None if inv_t is None else inv_t[rows], out=into)
            dy = d.exp_().mul_(a[rows] * inv_s[rows])
        else:
            d = _centred(y, shift[rows], None if inv_t is None else inv_t[rows])
            p = d.exp() * inv_s[rows]
            dy = p * a[rows]
            if a_ids is not None:
                own = _members(at[rows][:, outside:], inside[rows][:, outside:])
                dy.scatter_(1, own, (p * a_ids[rows]).gather(1, own))
            if b is not None:
                dy += torch.where(p > 0, p * (d - log_s[rows]), 0.0) * b[rows]
            if d_label is not None:
                if log_s1 is not None:
                    p1 = (y - shift[rows] - log_s1.reshape(-1, 1)[rows]).exp_()
                    dy -= torch.where(dead[rows], 0.0, p1 * d_label[rows])
                dy.scatter_add_(1, at[rows][:, :1], d_label[rows])
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


def mean_nll(
    ids: Tensor,  # (...)
    picked: Tensor | None,  # (...), log p; None if not yet known
    ignore_index: int,
    mean: bool,
) -> tuple[Tensor | None, Tensor]:
    """-Σ picked, over the number of rows that count if `mean`; and its gradient, alike for all."""
    count = (ids != ignore_index).sum().clamp(min=1) if mean else ids.new_ones(())
    if picked is None:
        return None, -1.0 / count
    return -picked.sum() / count, -1.0 / count.to(picked.dtype)


def scale_rows_(x: Tensor, g: Tensor) -> None:
    """x (..., V) times g, a scalar or (...), in place."""
    x.mul_(g.reshape(x.shape[:-1]).unsqueeze(-1) if g.dim() else g)


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """No: a CPU has the memory for sums in fp32."""
    return False


def can_visit(x: Tensor) -> bool:
    """No: looking twice at a chunk in cache is as good."""
    return False
