"""Losses of rows to a result, for teachers of either kind."""

from torch import Tensor, where


def reduced(
    loss: Tensor,  # (...), 0 for rows that do not count
    row_weight: Tensor | None,
    kept: Tensor | None,  # (...), rows that count, where what multiplies the others may be infinite
    live: Tensor | None,  # (...), rows that count
    reduction: str,
) -> Tensor:
    """Weighted rows, their sum, or their mean over the rows that count; of none, 0."""
    if row_weight is not None:
        loss = loss * row_weight.to(loss.dtype)
    if kept is not None:  # 0 · inf is not 0
        loss = where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    count = max(loss.numel(), 1) if live is None else live.sum().clamp(min=1)
    return loss.sum() / count
