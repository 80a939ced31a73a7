"""Computes cross-entropy with label smoothing, z-loss and class weights from row statistics."""

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, G_LABEL, G_TOTAL, A, Coefficients, Reading, Statistics
from .rows import live_rows


def cross_entropy(
    statistics: Statistics, reading: Reading, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Coefficients]:
    """Returns the cross-entropy of each row, and the coefficients of its gradient.

    loss = (1-ε) v[label] nll - ε/V log_total + z_loss lse²

    In this formula, ε is the label smoothing, v are the class weights, and V is the size of the
    vocabulary. contract.py defines the statistics `nll`, `log_total` and `lse`.
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
    """Returns the coefficients of the backward formula for the loss `weighted_nll`.

    The coefficients need no statistics of the logits. `dtype` is the dtype of the logits.
    """
    v = _label_weight(reading, dtype)
    return Coefficients(_rows(v, v), ("a", "label"))


def weighted_nll(nll: Tensor, reading: Reading) -> Tensor:
    """Returns the loss of each row, which is nll times the class weight of the label.

    The loss of ignored rows is 0.
    """
    value, live = _label_weight(reading, nll.dtype) * nll.reshape(-1), live_rows(reading)
    if live is not None:
        value = torch.where(live, value, 0.0)
    return value.view(nll.shape)


def label_mass(reading: Reading, dtype: torch.dtype) -> Tensor:
    """Returns the class weight of each row's label, or 0 for ignored rows.

    The reading must have class weights.
    """
    return _label_weight(reading, dtype)


def _label_weight(reading: Reading, dtype: torch.dtype) -> Tensor:
    """Returns the class weight of each row's label, or 1 without class weights.

    The result is fp32, or fp64 if `dtype` is fp64.
    """
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


# The Triton backend has a function `one_pass`, which computes the loss and the gradient in one read
# of the logits. This backend needs no such function, because the rows are still in the CPU's cache
# when the logits are read again.
one_pass = None


def can_accumulate(hidden: Tensor, weight: Tensor) -> bool:
    """Returns False, because this backend does not accumulate in block floating point.

    A CPU has enough memory to sum the weight's gradient in fp32.
    """
    return False


def is_narrow(hidden: Tensor, weight: Tensor) -> bool:
    """Returns False, because plain PyTorch must write the logits of a head to memory."""
    return False
