"""Helpers of the plain PyTorch backend for ids, exponents, reductions and chunks of rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import LEAST_TAIL, NO_ID, PRECISION, Reading, has_values

# bytes of logits per chunk; PyTorch would spend smaller chunks mostly on starting threads
CHUNK_BYTES = 8 << 20

Index = slice | Tensor


def chunks(x: Tensor, live: Tensor | None, divisor: int = 1) -> Iterator[Index]:
    """Yields the indices of the rows of x (N, V), one chunk at a time; on a CPU, of live rows only.

    Callers that allocate many temporary tensors per chunk pass a larger divisor of its size.
    """
    copies = 1 if x.dtype == PRECISION[x.dtype] else 2  # 16-bit logits also have an fp32 copy
    copies *= divisor
    step = max(1, CHUNK_BYTES // (x.shape[1] * PRECISION[x.dtype].itemsize * copies))
    if live is not None and skips_ignored(x) and not bool(live.all()):
        yield from (rows for rows in live.nonzero().squeeze(1).split(step) if len(rows))
    else:
        yield from (slice(i, i + step) for i in range(0, x.shape[0], step))


def address(t: Tensor) -> int:
    """The address of the values in memory, or 0 if there are no values."""
    return t.data_ptr() if has_values(t) else 0


def skips_ignored(x: Tensor) -> bool:
    """Whether `chunks` leaves out ignored rows. On a GPU, the host would have to wait for them."""
    return x.is_cpu and has_values(x)


def live_rows(reading: Reading) -> Tensor | None:
    """Returns a mask (N,) of the rows that are not ignored, or None if no row can be ignored."""
    if reading.ignore_index is None:
        return None
    return reading.label.reshape(-1) != reading.ignore_index


def locate(ids: Tensor, rows: int, V: int) -> tuple[Tensor, Tensor]:
    """Returns the ids in shape (N, K), and a mask of those in [0, V); the others become 0."""
    ids = ids.reshape(rows, -1 if rows else 1).contiguous()
    inside = (ids >= 0) & (ids < V)
    return torch.where(inside, ids, 0).long(), inside


def is_bad(ids: Tensor, inside: Tensor) -> Tensor:
    """Returns a mask (N, 1) of the rows with an id outside [0, V) that is not NO_ID."""
    return (~inside & (ids.reshape(inside.shape) != NO_ID)).any(1, keepdim=True)


def real_columns(at: Tensor, inside: Tensor) -> Tensor:
    """Returns one valid column per slot, in shape (N, K).

    A slot without a valid id gets the first valid id of its row, or 0. So slots can share a column,
    and a scatter must write the same value for all of them.
    """
    return torch.where(inside, at, at.gather(1, inside.int().argmax(1, keepdim=True)))


def lift_of(tail: Tensor) -> Tensor:
    """Returns the lift of contract.py, which is 0 if the tail is empty or NaN."""
    return torch.where(tail > -torch.inf, (tail - LEAST_TAIL).clamp(max=0.0), 0.0)


def tail_coefficients(a: Tensor, d: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the terms of the tail to the coefficient `a`. Returns the new `a`, and `a_ids`.

    d is the gradient of the tail, whose derivative with respect to z_i is -p_i at an id and
    p_i / e^tail - p_i elsewhere; an empty tail has the gradient 0. The new `a` is multiplied by
    e^lift (contract.py).
    """
    d = torch.where(tail == -torch.inf, 0.0, d)
    a_ids = a - d
    return a_ids * lift_of(tail).exp() + d * (-tail.clamp(min=LEAST_TAIL)).exp(), a_ids


def capped(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns y = softcap · tanh(x / softcap) in full precision, and dy/dx, or None for 1."""
    y = x.to(PRECISION[x.dtype])
    if softcap is None:
        return y, None
    t = torch.tanh(y / softcap)
    return softcap * t, 1 - t * t


def inverse_temperature(reading: Reading, like: Tensor) -> Tensor | None:
    """Returns 1 / temperature per row in the dtype of `like`, or None if the temperature is 1."""
    if reading.at_temperature_1:
        return None
    rows = reading.row_temperature
    t = reading.temperature if rows is None else rows.reshape(-1, 1).to(like.dtype)
    return torch.ones_like(like) / t


def centred(y: Tensor, shift: Tensor, inv_t: Tensor | None, out: Tensor | None = None) -> Tensor:
    d = torch.sub(y, shift, out=out)
    return d if inv_t is None else d.mul_(inv_t)


def max_of(y: Tensor) -> Tensor:
    """Returns the max of each row (N, 1), or 0 where it is ±inf: what exp subtracts from y."""
    m = y.amax(1, keepdim=True)
    return torch.where(m.isinf(), 0.0, m)


def by_row(t: Tensor | None, rows: int) -> Tensor | float:
    """Returns t in a shape that broadcasts to (N, V). None becomes 1.0."""
    if t is None:
        return 1.0
    return t.reshape(-1, 1) if t.numel() == rows else t


def fill_ignored(dx: Tensor, live: Tensor | None, *, before: bool) -> None:
    """Writes zeros to the ignored rows of a gradient.

    If `chunks` leaves them out, this happens before the other rows are written, otherwise after.
    """
    if live is None or before != skips_ignored(dx):
        return
    if before:
        dx.index_fill_(0, (~live).nonzero().squeeze(1), 0)
    else:
        dx.masked_fill_(~live[:, None], 0)


def written_to(x: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns `flat` (N, V), to which the caller writes the gradient, and `into` (..., V).

    `flat` is a view of a contiguous `into`, otherwise perhaps a copy, which `written_back` copies
    back.
    """
    if into is None:
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat = into.view(-1, x.shape[-1]) if into.is_contiguous() else into.reshape(-1, x.shape[-1])
    return flat, into


def written_back(flat: Tensor, into: Tensor) -> Tensor:
    if address(flat) != address(into):
        into.copy_(flat.view(into.shape))
    return into


def needs_no_centring(m: Tensor, inv_t: Tensor | None) -> bool:
    """Whether e^y is as exact as e^(y - m), m the max of the row, so that m need not be subtracted.

    Never on a GPU, where the host would have to wait for m.
    """
    return inv_t is None and skips_ignored(m) and bool(m.abs().max() < 30)


def share(reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """Returns the factor of a mean over rows: 1 / Σ mass, or 1 / (number of live rows) without
    masses.

    `mass` holds the class weight of each row's label. A sum of 0 gives the factor 1.
    """
    full = torch.promote_types(like.dtype, torch.float32)
    live = live_rows(reading)
    if mass is not None:
        total = mass.sum()
    elif live is not None:
        total = live.sum()
    else:
        return torch.full((), 1.0 / max(rows, 1), dtype=full, device=like.device)
    return torch.where(total == 0, 1.0, 1.0 / total.to(full))


def reduce(
    value: Tensor,  # (...)
    reading: Reading,
    row_weight: Tensor | None = None,  # (...)
    mass: Tensor | None = None,  # (N,)
    mean: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns the sum or mean over the rows, and the factor of each row's gradient, None for 1.

    An ignored row adds 0, even if its value or weight is NaN.
    """
    live, factor = live_rows(reading), None
    if mean:
        factor = share(reading, mass, value.numel(), value)
    if row_weight is not None:
        weight = row_weight.reshape(-1).to(value.dtype)
        if live is not None:
            weight = torch.where(live, weight, 0.0)
        factor = weight if factor is None else weight * factor
    total = value.reshape(-1)
    if factor is not None:
        total = total * factor
    if live is not None:
        total = torch.where(live, total, 0.0)
    return total.sum(), factor


def scale_(x: Tensor, g: Tensor) -> None:
    """Multiplies x in place by g, one number or one per row."""
    x.mul_(g.reshape(x.shape[:-1]).unsqueeze(-1) if g.dim() else g)


def scale_two_(x: Tensor, y: Tensor, g: Tensor) -> None:
    scale_(x, g)
    scale_(y, g)


def zero_ignored(x: Tensor, reading: Reading) -> Tensor:
    """Returns x (N, D) with zeros in ignored rows."""
    ignored = reading.ignored_rows()
    return x if ignored is None else x.masked_fill(ignored.reshape(-1, 1), 0.0)
