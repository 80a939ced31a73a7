"""Statistics to the value and the coefficients of cross-entropy, and the mean, in plain PyTorch."""

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, G_LABEL, G_TOTAL, A, Coefficients, Reading, Statistics
from .rows import live_rows


def cross_entropy(
    statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Coefficients]:
    """The cross-entropy of each row, (...), and its coefficients.

    (1-ε) v[label] nll - ε/V log_total + z_loss lse²
    """
    weight = reading.class_weight
    v, live = _label_weight(reading, statistics.state.dtype), live_rows(reading)
    n = reading.vocab if weight is None else weight.to(v.dtype).sum()
    main, smooth = (1 - label_smoothing) * v, label_smoothing / reading.vocab
    value = main * statistics.nll.reshape(-1)
    rows = _rows(main, main + smooth * n)
    rows[:, G_TOTAL] = -smooth
    if label_smoothing:
        value = value - smooth * statistics.log_total.reshape(-1)
    if z_loss:
        lse = statistics.lse.reshape(-1)
        value = value + z_loss * lse.square()
        rows[:, A] += 2 * z_loss * lse
    if live is not None:
        value = torch.where(live, value, 0.0)
    has = ("a", "label", "total") if label_smoothing else ("a", "label")
    return value.view(reading.label.shape).clone(), Coefficients(rows, has)


def label_coefficients(reading: Reading, dtype: torch.dtype) -> Coefficients:
    """Coefficients of v[label] nll, in the precision of `dtype`. They need no statistics."""
    v = _label_weight(reading, dtype)
    return Coefficients(_rows(v, v), ("a", "label"))


def weighted_nll(nll: Tensor, reading: Reading) -> Tensor:
    """v[label] nll of each row, (...); 0 for ignored rows."""
    value, live = _label_weight(reading, nll.dtype) * nll.reshape(-1), live_rows(reading)
    if live is not None:
        value = torch.where(live, value, 0.0)
    return value.view(nll.shape)


def label_mass(reading: Reading, dtype: torch.dtype) -> Tensor:
    """The class weight of each row's label, (N,); 0 for ignored rows."""
    return _label_weight(reading, dtype)


def _label_weight(reading: Reading, dtype: torch.dtype) -> Tensor:
    """v[label] (N,), 1 without class weights, in the precision of losses of `dtype`."""
    label, weight = reading.label.reshape(-1), reading.class_weight
    full = torch.promote_types(dtype, torch.float32)
    if weight is None:
        return torch.ones(label.shape, dtype=full, device=label.device)
    v, live = weight.to(full)[label.clamp(0, reading.vocab - 1).long()], live_rows(reading)
    return v if live is None else torch.where(live, v, 0.0)


def _rows(main: Tensor, a: Tensor) -> Tensor:
    rows = torch.zeros((len(main), COEFFICIENTS), dtype=main.dtype, device=main.device)
    rows[:, A], rows[:, G_LABEL] = a, -main
    return rows


def share(reading: Reading, mass: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """1 / the number of rows that count, or 1 / the sum of their mass; 1 where that is 0.

    A mean is the sum of the rows' values times this number, (), in the precision of losses.
    """
    full = torch.promote_types(like.dtype, torch.float32)
    live = live_rows(reading)
    if mass is not None:
        whole = mass.sum()
    elif live is not None:
        whole = live.sum()
    else:
        return torch.full((), 1.0 / max(rows, 1), dtype=full, device=like.device)
    return torch.where(whole == 0, 1.0, 1.0 / whole.to(full))


def reduce(
    value: Tensor,  # (...)
    reading: Reading,
    row_weight: Tensor | None = None,  # (...)
    mass: Tensor | None = None,  # (N,)
    mean: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows to their sum or mean, and the factor of each row's gradient; None for 1.

    The mean is the sum times `share`. Ignored rows add exactly 0, whatever their value or weight.
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
    """x (..., V) times g, a number or one per row, in place."""
    x.mul_(g.reshape(x.shape[:-1]).unsqueeze(-1) if g.dim() else g)


one_pass = None  # looking twice at rows that are in the cache is as good


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """No: a CPU has the memory for sums in fp32."""
    return False
