"""The rules of a head, worded as those of core/checks.py."""

from typing import Any

import torch
from torch import Tensor

from ..core.checks import _floating, _same_device, _shape, logits


def linear(hidden: Any, weight: Any, bias: Any, workspace: Any) -> None:
    """A head: hidden (..., D), weight (V, D), bias (V,)."""
    logits(hidden, "hidden")
    logits(weight, "weight")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have shape (V, {hidden.shape[-1]}) to match hidden {_shape(hidden)}, "
            f"got {_shape(weight)}."
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if name == "bias":
            _floating(name, t)
            if t.shape != weight.shape[:1]:
                raise ValueError(
                    f"bias must have shape {_shape(weight.shape[:1])} to match weight "
                    f"{_shape(weight)}, got {_shape(t)}."
                )
        if t.dtype != hidden.dtype:
            raise TypeError(f"{name} must be {hidden.dtype} like hidden, got {t.dtype}.")
        _same_device(name, t, hidden, "hidden")
    if workspace is not None and (isinstance(workspace, bool) or not isinstance(workspace, int)):
        raise TypeError(f"workspace must be an int, in bytes, got {workspace!r}.")
    if workspace is not None and workspace <= 0:
        raise ValueError(f"workspace must be positive, got {workspace}.")


def logits_dtype(dtype: Any, hidden: Tensor) -> None:
    legal = torch.promote_types(hidden.dtype, torch.float32)
    if dtype not in (None, hidden.dtype, legal):
        raise ValueError(
            f"logits_dtype must be {legal} or None for hidden of {hidden.dtype}, got {dtype}."
        )


def main_grad(t: Any, weight: Tensor) -> None:
    """Where a weight's gradient is added up elsewhere."""
    if t is None:
        return
    full = torch.promote_types(weight.dtype, torch.float32)
    if not isinstance(t, Tensor) or t.dtype != full:
        got = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"main_grad must be a tensor of {full}, got {got}.")
    if t.shape != weight.shape:
        raise ValueError(
            f"main_grad must have the shape of weight {_shape(weight)}, got {_shape(t)}."
        )
    _same_device("main_grad", t, weight, "weight")


def no_main_grad(t: Tensor | None) -> None:
    if t is not None:
        raise ValueError(
            "main_grad must be None where PyTorch's own functions take a LinearLogits, got a "
            "Tensor: only losses of logitless add to it."
        )
