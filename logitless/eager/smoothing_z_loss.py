"""Cross-entropy with label smoothing ε, z-loss and class weights v, from row statistics.

loss = (1-ε) v[label] nll - ε/V log_total + z_loss lse²
"""

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, G_LABEL, G_TOTAL, A, Coefficients, Reading, Statistics
from .rows import live_rows


def cross_entropy(
    statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Coefficients]:
    """Returns each row's loss, and the coefficients of the backward formula."""
    weight = reading.class_weight
    v, live = label_mass(reading, statistics.state.dtype), live_rows(reading)
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
    """The coefficients of `weighted_nll`, which depend on no statistics."""
    v = label_mass(reading, dtype)
    return Coefficients(_rows(v, v), ("a", "label"))


def weighted_nll(nll: Tensor, reading: Reading) -> Tensor:
    """Multiplies -log p of each row's label by the label's class weight."""
    value, live = label_mass(reading, nll.dtype) * nll.reshape(-1), live_rows(reading)
    if live is not None:
        value = torch.where(live, value, 0.0)
    return value.view(nll.shape)


def label_mass(reading: Reading, dtype: torch.dtype) -> Tensor:
    """Returns the class weight of each row's label, 0 in ignored rows, or 1 without weights."""
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


# -log p of the label and the gradient in one pass over the logits, for small heads by `plan_total`
# (kernels/cross_entropy/one_pass.py). On a CPU, a row is still in the cache when it is read again.
one_pass = None


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `exponents` and `accumulate` can sum the weight's gradient in block floating point.

    A CPU has enough memory to sum it in fp32.
    """
    return False


def is_narrow(hidden: Tensor, weight: Tensor) -> bool:
    """Whether `narrow_partial` and `narrow_gradients` can compute a head without writing logits."""
    return False
