"""Statistics to values and coefficients of the plain loss, and the mean, in plain PyTorch."""

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, G_MARK, G_TOTAL, A, Coefficients, Reading, Statistics
from .rows import live_rows


def plain(
    statistics: Statistics, reading: Reading, vocab: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor | None, Coefficients, Tensor | None]:
    """The cross-entropy of each row, its coefficients, and its weight in a mean.

        (1-ε) v[mark] nll - ε/V log_total + z_loss lse²

    Without statistics.nll there is no value yet: coefficients that need no statistics.
    """
    state, weight = statistics.state, reading.class_weight
    mark, live = reading.mark.reshape(-1), live_rows(reading)
    full = torch.promote_types(state.dtype, torch.float32)
    of_class, n, mass = torch.ones(mark.shape, dtype=full, device=mark.device), vocab, None
    if weight is not None:
        weight = weight.to(full)
        of_class = weight[mark.clamp(0, vocab - 1).long()]
        if live is not None:
            of_class = torch.where(live, of_class, 0.0)
        n, mass = weight.sum(), of_class
    main, smooth = (1 - label_smoothing) * of_class, label_smoothing / vocab
    rows = torch.zeros((mark.numel(), COEFFICIENTS), dtype=full, device=mark.device)
    rows[:, A], rows[:, G_MARK], rows[:, G_TOTAL] = main + smooth * n, -main, -smooth
    has = ("a", "mark", "total") if label_smoothing else ("a", "mark")
    if statistics.nll is None:
        return None, Coefficients(rows, has), mass
    value = main * statistics.nll.reshape(-1)
    if label_smoothing:
        value = value - smooth * statistics.log_total.reshape(-1)
    if z_loss:
        lse = statistics.lse.reshape(-1)
        value = value + z_loss * lse.square()
        rows[:, A] += 2 * z_loss * lse
    if live is not None:
        value = torch.where(live, value, 0.0)
    return value.view(reading.mark.shape).clone(), Coefficients(rows, has), mass


def reduce(
    value: Tensor | None,  # (...)
    reading: Reading,
    row_weight: Tensor | None = None,  # (...)
    mass: Tensor | None = None,  # (N,)
    mean: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Rows to their sum or mean, and the factor of each row's gradient; None for 1.

    The mean divides by the number of rows that count, or by the sum of their mass; by 1 where that
    is 0. Ignored rows add exactly 0, whatever their value or weight.
    """
    live = live_rows(reading)
    given = next(t for t in (value, mass, row_weight, reading.mark) if t is not None)
    full = torch.float64 if value is None else value.dtype
    factor = None
    if mean:
        if mass is not None:
            whole = mass.sum()
        elif live is not None:
            whole = live.sum()
        else:
            whole = torch.full((), given.numel(), device=given.device)
        factor = torch.where(whole == 0, 1.0, 1.0 / whole.to(full))
    if row_weight is not None:
        weight = row_weight.reshape(-1).to(full)
        if live is not None:
            weight = torch.where(live, weight, 0.0)
        factor = weight if factor is None else weight * factor
    if value is None:
        return None, factor
    total = value.reshape(-1)
    if factor is not None:
        total = total * factor
    if live is not None:
        total = torch.where(live, total, 0.0)
    return total.sum(), factor


def scale_(x: Tensor, g: Tensor) -> None:
    """x (..., V) times g, a number or one a row, in place."""
    x.mul_(g.reshape(x.shape[:-1]).unsqueeze(-1) if g.dim() else g)


one_pass = None  # looking twice at rows that are in the cache is as good


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """No: a CPU has the memory for sums in fp32."""
    return False
