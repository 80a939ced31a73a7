"""What every function here shares: rows a few at a time, and the pieces of z = y / temperature."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..contract import LEAST_TAIL, NO_ID, PRECISION, Reading

CHUNK_BYTES = 8 << 20  # of logits in work at once; fewer, and threads only start and stop

Index = slice | Tensor


def chunks(x: Tensor, live: Tensor | None, parts: int = 1) -> Iterator[Index]:
    """Rows of x (N, V) to work on together; on a CPU, ignored rows are not among them.

    Work that keeps many tensors of their size alive asks for smaller ones, `parts` to the whole.
    """
    copies = 1 if x.dtype == PRECISION[x.dtype] else 2  # as given, and at full precision
    copies *= parts
    step = max(1, CHUNK_BYTES // (x.shape[1] * PRECISION[x.dtype].itemsize * copies))
    if live is not None and x.device.type == "cpu" and not bool(live.all()):
        yield from (rows for rows in live.nonzero().squeeze(1).split(step) if len(rows))
    else:
        yield from (slice(i, i + step) for i in range(0, x.shape[0], step))


def live_rows(reading: Reading) -> Tensor | None:
    """Which rows count, (N,); None for all."""
    if reading.ignore_index is None:
        return None
    return reading.label.reshape(-1) != reading.ignore_index


def locate(ids: Tensor, rows: int, V: int) -> tuple[Tensor, Tensor]:
    """ids as (N, K), safe to index with; and which of them are in [0, V)."""
    ids = ids.reshape(rows, -1 if rows else 1).contiguous()
    inside = (ids >= 0) & (ids < V)
    return torch.where(inside, ids, 0).long(), inside


def is_bad(ids: Tensor, inside: Tensor) -> Tensor:
    """Which rows have an id outside [0, V) that is not NO_ID: (N, 1)."""
    return (~inside & (ids.reshape(inside.shape) != NO_ID)).any(1, keepdim=True)


def own_columns(at: Tensor, inside: Tensor) -> Tensor:
    """The same columns (N, K), with one of the row's own wherever a slot holds none."""
    return torch.where(inside, at, at.gather(1, inside.int().argmax(1, keepdim=True)))


def lift_of(tail: Tensor) -> Tensor:
    """See contract.py. 0 where nothing is outside, and where the row is NaN."""
    return torch.where(tail > -torch.inf, (tail - LEAST_TAIL).clamp(max=0.0), 0.0)


def capped(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """y = softcap · tanh(x / softcap) at full precision, and dy/dx where it isn't 1."""
    y = x.to(PRECISION[x.dtype])
    if softcap is None:
        return y, None
    t = torch.tanh(y / softcap)
    return softcap * t, 1 - t * t


def inverse_temperature(reading: Reading, like: Tensor) -> Tensor | None:
    """1 / temperature as a column (N, 1) like `like`, or None where it is 1 and costs nothing."""
    if reading.at_temperature_1:
        return None
    rows = reading.row_temperature
    t = reading.temperature if rows is None else rows.reshape(-1, 1).to(like.dtype)
    return torch.ones_like(like) / t


def centred(y: Tensor, shift: Tensor, inv_t: Tensor | None, out: Tensor | None = None) -> Tensor:
    """d = (y - shift) / temperature."""
    d = torch.sub(y, shift, out=out)
    return d if inv_t is None else d.mul_(inv_t)


def max_of(y: Tensor) -> Tensor:
    """What to subtract, (N, 1): the max, or 0 where it is ±inf and the bare e^y is right."""
    m = y.amax(1, keepdim=True)
    return torch.where(m.isinf(), 0.0, m)


def by_row(t: Tensor | None, rows: int) -> Tensor | float:
    """A number, or one a row, as what multiplies (N, ...): 1 where there is none."""
    if t is None:
        return 1.0
    return t.reshape(-1, 1) if t.numel() == rows else t


def fill_ignored(dx: Tensor, live: Tensor | None, *, before: bool) -> None:
    """Zeros for ignored rows: before the others are written on a CPU, which leaves them out.

    A GPU writes all rows, because asking it which count would wait for it; zeros come after.
    """
    if live is None or before != (dx.device.type == "cpu"):
        return
    if before:
        dx.index_fill_(0, (~live).nonzero().squeeze(1), 0)
    else:
        dx.masked_fill_(~live[:, None], 0)


def written_to(x: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows (N, V) for the gradient of x, and the tensor (..., V) that they are of."""
    if into is None:
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat = into.view(-1, x.shape[-1]) if into.is_contiguous() else into.reshape(-1, x.shape[-1])
    return flat, into


def give(flat: Tensor, into: Tensor) -> Tensor:
    """`into`, holding what `flat`, its rows or a copy of them, holds."""
    if flat.data_ptr() != into.data_ptr():
        into.copy_(flat.view(into.shape))
    return into


def needs_no_centring(m: Tensor, inv_t: Tensor | None) -> bool:
    """Whether e^y itself is safe: no overflow, nothing lost, and a pass over the logits saved.

    Asks for values, so only a CPU is asked.
    """
    return inv_t is None and m.device.type == "cpu" and bool(m.abs().max() < 30)
