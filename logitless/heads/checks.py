"""Checks of the arguments of a head."""

from typing import Any

import torch
from torch import Tensor

from ..core import option_checks
from ..core.source import is_dtensor
from ..core.tensor_checks import _floating, _same_device, _shape, _shaped, logits, placed
from .quantized import is_quantized, why_not_readable


def linear(
    hidden: Any, weight: Any, bias: Any, grad: Any, workspace: Any, dtype: Any, accumulate: Any,
    drop_ignored: Any, second_hidden: Any = None, second_weight: Any = None,
) -> None:  # fmt: skip
    """Checks the arguments of LinearLogits. The last two are the pair `low_rank`."""
    head(hidden, weight, bias, workspace)
    if second_hidden is not None or second_weight is not None:
        low_rank(second_hidden, second_weight, hidden, weight)
    logits_dtype(dtype, hidden)
    main_grad(grad, weight)
    option_checks.check(accumulate=accumulate, drop_ignored=drop_ignored)


def head(hidden: Any, weight: Any, bias: Any, workspace: Any) -> None:
    logits(hidden, "hidden")
    logits(weight, "weight")
    D = hidden.shape[-1]
    _shaped("weight", weight, (len(weight), D), hidden, "hidden", f"(V, {D})")
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
        if is_quantized(t):
            readable(name, t)
        elif t.dtype != hidden.dtype:
            raise TypeError(f"{name} must be {hidden.dtype} like hidden, got {t.dtype}.")
        _same_device(name, t, hidden, "hidden")
    option_checks.check(workspace=workspace)


def table(hidden: Any, weight: Any, bias: Any, casts: bool) -> None:
    """Checks `hidden` (..., D), `weight` (V, D) and `bias` (V,) of sampled_softmax.

    With `casts`, their dtypes can differ, because autocast casts them before the products.
    """
    for name, t in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if name == "bias" and t is None:
            continue
        if not isinstance(t, Tensor) or is_dtensor(t) or is_quantized(t):
            raise TypeError(f"{name} must be a plain Tensor, got {type(t).__name__}.")
    if not casts:
        head(hidden, weight, bias, None)
        return
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            _same_device(name, t, hidden, "hidden")
            logits(t, name)
        if t is not None and (t.dtype == torch.float64) != (hidden.dtype == torch.float64):
            # Autocast does not change the dtype of fp64 tensors.
            raise TypeError(f"{name} must be {hidden.dtype} like hidden, got {t.dtype}.")
    # `head` reads only shapes and dtypes, so tensors on the device "meta" are enough.
    wide = [None if t is None else t.to("meta", torch.float32) for t in (hidden, weight, bias)]
    head(wide[0], wide[1], wide[2], None)


def same_rows(weight: Tensor, rows: int) -> None:
    if len(weight) != rows:
        was = (rows, *weight.shape[1:])
        raise ValueError(
            f"weight must keep the shape {_shape(was)} that it had when the LinearLogits was made,"
            f" got {_shape(weight)}; make a new LinearLogits."
        )


def readable(name: str, t: Tensor) -> None:
    """Checks that a quantised tensor is a weight that can be dequantised in blocks of rows."""
    if name != "weight":
        raise TypeError(f"{name} must be a plain tensor, got a {type(t).__name__}.")
    reason = why_not_readable(t)
    if reason is not None:
        raise TypeError(
            f"{name} must be a plain tensor, or a quantised weight whose rows can be dequantised,"
            f" got a {type(t).__name__}, which {reason}."
        )


def is_pair(low_rank: Any) -> None:
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        size = f" of length {len(low_rank)}" if isinstance(low_rank, (tuple, list)) else ""
        raise TypeError(
            "low_rank must be a pair (hidden, weight) of tensors, or None, got a"
            f" {type(low_rank).__name__}{size}."
        )


def low_rank(second: Any, second_weight: Any, hidden: Tensor, weight: Tensor) -> None:
    pairs = (("low_rank[0]", second, hidden), ("low_rank[1]", second_weight, weight))
    for name, t, like in pairs:
        if not isinstance(t, Tensor) or is_dtensor(t):
            raise TypeError(f"{name} must be a plain tensor, got a {type(t).__name__}.")
        if t.dtype != hidden.dtype:
            raise TypeError(f"{name} must be {hidden.dtype} like hidden, got {t.dtype}.")
        if t.dim() != like.dim() or t.shape[:-1] != like.shape[:-1] or not t.shape[-1]:
            wanted = ", ".join([*map(str, like.shape[:-1]), "R"])
            raise ValueError(f"{name} must have shape ({wanted}) with R >= 1, got {_shape(t)}.")
        _same_device(name, t, hidden, "hidden")
    wanted = (len(weight), second.shape[-1])
    _shaped("low_rank[1]", second_weight, wanted, second, "low_rank[0]")


def no_low_rank(low_rank: Any) -> None:
    if low_rank is not None:
        raise TypeError(
            "low_rank must be None if weight is a DTensor, got a pair; pass this rank's rows of"
            " both weights to LinearLogits, and the LinearLogits to VocabShard."
        )


def logits_dtype(dtype: Any, hidden: Tensor) -> None:
    legal = torch.promote_types(hidden.dtype, torch.float32)
    if dtype not in (None, hidden.dtype, legal):
        raise ValueError(
            f"logits_dtype must be {legal} or None for hidden of {hidden.dtype}, got {dtype}."
        )


def main_grad(t: Any, weight: Tensor) -> None:
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
            "main_grad must be None if a LinearLogits is passed to PyTorch's own functions, got a "
            "Tensor; only losses of logitless add to main_grad."
        )


def head_placements(hidden: Any, weight: Any, bias: Any) -> None:
    placed("weight", weight, 0)
    if all(placement.is_replicate() for placement in weight.placements):
        raise TypeError(
            f"weight must be sharded on dimension 0, got a DTensor of placements "
            f"{weight.placements}; for a replicated weight, pass weight.to_local()."
        )
    for name, t in (("hidden", hidden), ("bias", bias)):
        if t is None:
            continue
        if not is_dtensor(t) or t.device_mesh != weight.device_mesh:
            raise TypeError(
                f"{name} must be a DTensor on the mesh of weight, got a {type(t).__name__};"
                " DTensor.from_local sets the placements. (If FSDP shards the weight, compute the"
                " loss inside the forward of the FSDP module, or fuse the model.)"
            )
    if bias is not None and bias.placements != weight.placements:
        raise TypeError(
            f"bias must have the placements of weight, {weight.placements}, got {bias.placements}."
        )
    for own, other in zip(weight.placements, hidden.placements, strict=True):
        tokens = not own.is_replicate() and other.is_shard() and other.dim < hidden.dim() - 1
        if not (other.is_replicate() or tokens):
            raise TypeError(
                "hidden must be replicated, or sharded by tokens over the ranks that shard weight,"
                f" got a DTensor of placements {hidden.placements}."
            )
