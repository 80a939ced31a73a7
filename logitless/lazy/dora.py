"""A second forward, with lazy logits, for linear layers that have a DoRA adapter of PEFT.

A DoRA adapter computes the logits scale · (x @ W.T + s · x @ A.T @ B.T) + bias. The scale has one
number per column of the logits. For column i, this number is magnitude[i] / norm[i]. `magnitude` is
a parameter of the adapter. The number norm[i] is the norm of row i of the matrix W + s · B @ A. As
in PEFT, the norm is a constant in backward.

PEFT multiplies the logits by the scale. This multiplication materialises the logits. In this file,
the rows of W and B are multiplied by the scale instead. The logits are then the sum of two
products, as with a LoRA adapter (sums.py). The scaled copy of W is as large as W. The gradient of
the scale is computed from the gradient of this copy. So a loss needs the gradient of the copy, even
if W is frozen. Such a loss takes three GEMMs.

With dropout, PEFT computes two products with W: x @ W.T and dropped @ W.T, where `dropped` is x
after dropout. The term scale · x @ W.T becomes x @ W.T + (scale - 1) · dropped @ W.T. Each of the
two terms needs a product with a matrix as large as W. So a loss takes five GEMMs.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ..contract import PRECISION
from ..core.autograd import Node
from ..heads.gemms import without_autocast
from ..heads.quantized import BLOCK, PLAIN, is_freed
from . import four_bit


def is_dora(module: nn.Module) -> bool:
    """Whether a module is a linear layer with a DoRA adapter of PEFT."""
    peft = sys.modules.get("peft.tuners.lora.dora")
    if peft is None or "lora_magnitude_vector" not in module._modules:
        return False
    layers: Any = module._modules["lora_magnitude_vector"]
    return any(type(layer) is peft.DoraLinearLayer for layer in layers.values())


def forward_of(module: Any, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Returns a forward of a module with a DoRA adapter, or None if the module is not supported.

    The adapter must be active, must not be merged, and must be the only active adapter. The base
    layer, the layer B and the magnitude layer must have no hooks and no replaced forward. The base
    layer's weight must be a plain or 4-bit weight on the device of x. With dropout, x must require
    a gradient. Without this gradient, sums.py does not support the sum in `with_dropout`.
    """
    if module.disable_adapters or module.merged or type(module).__name__ not in SUPPORTED:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    known = getattr(module, "lora_variant", {})  # old versions of PEFT have no lora_variant
    variants = [type(known[name]).__name__ for name in active if name in known]
    if len(active) != 1 or variants != ["DoraLinearVariant"]:
        return None
    name, base = active[0], module.base_layer
    drops = module.training and type(module.lora_dropout[name]) is not nn.Identity
    layers = (base, module.lora_B[name], module.lora_magnitude_vector[name])
    if (drops and not x.requires_grad) or not all(map(runs_alone, layers)):
        return None
    quantized = four_bit.is_four_bit(base)
    if not (quantized or has_plain_weight(base)) or base.weight.device != x.device:
        return None

    def forward(x: Tensor) -> Tensor:
        A, s = module.lora_A[name], module.scaling[name]
        B, magnitude = (layer.weight for layer in layers[1:])
        weight = four_bit.weight_of(base, x).dequantize().to(x.dtype) if quantized else base.weight
        adapted = module._cast_input_dtype(x, A.weight.dtype)
        norms = row_norms(weight, A.weight, B, s).to(adapted.dtype)  # rounded as in PEFT
        full = PRECISION[norms.dtype]
        scale = magnitude.to(full) / norms.to(full)
        if not drops:
            return without_dropout(x, weight, base.bias, A(adapted) * s, B, scale)
        dropped = module.lora_dropout[name](adapted)
        return with_dropout(x, weight, base.bias, dropped, A(dropped) * s, B, scale)

    return forward


SUPPORTED = ("Linear", "Linear4bit")  # classes of peft.tuners.lora that can have a DoRA adapter


def has_plain_weight(base: nn.Module) -> bool:
    """Whether a layer computes x @ weight.T + bias, and its weight is a plain tensor in memory."""
    if getattr(type(base), "forward", None) is not nn.Linear.forward:
        return False
    weight: Any = base.weight
    shape = (base.out_features, base.in_features)
    return type(weight) in PLAIN and weight.shape == shape and not is_freed(weight)


def runs_alone(layer: nn.Module) -> bool:
    """Whether a call of the layer runs only the forward of its class, and no hooks."""
    forward = layer.__dict__.get("forward")
    # A FusedForward (fused_head.py) has an attribute `below`. This attribute is None if the
    # FusedForward calls the forward of the layer's class.
    ours = getattr(getattr(forward, "__self__", None), "below", forward) is None
    return ours and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def without_dropout(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    a: Tensor,  # (..., R), s · x @ A.T
    B: Tensor,  # (V, R)
    scale: Tensor,  # (V,), fp32 or fp64
) -> Tensor:
    """Returns scale · (x @ weight.T + a @ B.T) + bias, in the dtype of x @ weight.T."""
    first = linear(x, times_rows(weight, scale), bias)
    second = linear(a, times_rows(B, scale))
    return (first + second).to(first.dtype)


def with_dropout(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dropped: Tensor,  # (..., D), x after dropout
    a: Tensor,  # (..., R), s · dropped @ A.T
    B: Tensor,
    scale: Tensor,
) -> Tensor:
    """Returns x @ weight.T + bias + (scale - 1) · dropped @ weight.T + scale · a @ B.T."""
    both = torch.cat([dropped.to(x.dtype), a.to(x.dtype)], -1)
    rows = torch.cat([times_rows(weight, scale - 1), times_rows(B, scale).to(weight.dtype)], 1)
    first = linear(x, weight, bias)
    return (first + linear(both, rows)).to(first.dtype)


def row_norms(weight: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    """Returns the norm of each row of weight + s · B @ A, as a constant of shape (V,).

    The dtype is fp32 or fp64.
    """
    full = PRECISION[weight.dtype]
    norms = torch.empty(len(weight), device=weight.device, dtype=full)
    with torch.no_grad(), without_autocast(weight.device):
        for rows in row_slices(weight):
            whole = torch.addmm(weight[rows].to(full), B[rows].to(full), A.to(full), alpha=s)
            torch.linalg.vector_norm(whole, dim=1, out=norms[rows])
    return norms


def row_slices(weight: Tensor) -> Iterator[slice]:
    """Yields slices of a weight's rows. In fp32, the rows of a slice take at most BLOCK bytes."""
    step = max(BLOCK // (4 * max(weight.shape[1], 1)), 1)
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))


def times_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Returns weight (V, D), with row i multiplied by scale[i].

    Each product is rounded once, to the weight's dtype.
    """
    return ScaledRows.apply(weight, scale)  # pyright: ignore[reportReturnType]


class ScaledRows(Node):
    """The autograd node of `times_rows`. Forward and backward take one block of rows at a time."""

    @staticmethod
    def forward(ctx, weight, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, scale)
        return in_blocks(weight, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):  # pyright: ignore[reportIncompatibleMethodOverride]
        if d is None:
            return None, None
        weight, scale = ctx.saved_tensors
        d_weight = in_blocks(d, scale) if ctx.needs_input_grad[0] else None
        d_scale = None
        if ctx.needs_input_grad[1]:
            d_scale = torch.empty_like(scale)
            for rows in row_slices(weight):
                products = d[rows].to(scale.dtype) * weight[rows]
                torch.sum(products, 1, out=d_scale[rows])
        return d_weight, d_scale


def in_blocks(t: Tensor, scale: Tensor) -> Tensor:
    result = torch.empty_like(t, memory_format=torch.contiguous_format)
    for rows in row_slices(t):
        result[rows] = t[rows] * scale[rows, None]
    return result
