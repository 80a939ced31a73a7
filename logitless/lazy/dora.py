"""A forward of PEFT's DoRA adapter on a linear layer that keeps the logits lazy.

A DoRA adapter computes the logits scale · (x @ W.T + s · x @ A.T @ B.T) + bias. The scale has one
number per column: the adapter's magnitude, divided by the norm of the same row of W + s · B @ A. As
in PEFT, the norm is a constant in backward.

PEFT multiplies the logits by the scale, which materialises the logits. Here, the rows of W and B
are multiplied by the scale. The logits are then the sum of two products, as with a LoRA adapter
(sums.py). The scaled copy of W is as large as W. The gradient of this copy gives the gradient of
the scale. So a loss takes three GEMMs even if W is frozen.
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
from ..heads.products import without_autocast
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
    """Returns a forward of a module with a DoRA adapter, or None.

    The result is None if the adapter is not active, is merged, drops elements of its input, or is
    not the only active adapter. The result is also None if other code runs before or after a layer
    of the adapter, or if the whole weight is not on the device of x.
    """
    if module.disable_adapters or module.merged or type(module).__name__ not in SUPPORTED:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    known = getattr(module, "lora_variant", {})  # PEFT has variants since 0.16
    variants = [type(known[name]).__name__ for name in active if name in known]
    if len(active) != 1 or variants != ["DoraLinearVariant"]:
        return None
    name, base = active[0], module.base_layer
    drops = module.training and type(module.lora_dropout[name]) is not nn.Identity
    layers = (base, module.lora_B[name], module.lora_magnitude_vector[name])
    if drops or not all(map(runs_alone, layers)):
        return None
    weight = base.weight
    quantized = four_bit.is_four_bit(base)
    plain = type(weight) in PLAIN and weight.shape == (base.out_features, base.in_features)
    if weight.device != x.device or not (quantized or (plain and not is_freed(weight))):
        return None

    def forward(x: Tensor) -> Tensor:
        A, B, magnitude = module.lora_A[name], *(layer.weight for layer in layers[1:])
        weight = four_bit.weight_of(base, x).dequantize().to(x.dtype) if quantized else base.weight
        adapted = module._cast_input_dtype(x, A.weight.dtype)
        s = module.scaling[name]
        norms = row_norms(weight, A.weight, B, s).to(adapted.dtype)  # rounded as in PEFT
        return dora_logits(x, weight, base.bias, A(adapted) * s, B, magnitude, norms)

    return forward


SUPPORTED = ("Linear", "Linear4bit")  # classes of peft.tuners.lora with a DoRA adapter


def runs_alone(layer: nn.Module) -> bool:
    """Whether a call of the layer runs only the forward of its class, and no hooks."""
    forward = layer.__dict__.get("forward")
    # A FusedForward (fused_head.py) has an attribute `below`, which is None if the FusedForward
    # calls the forward of the layer's class.
    ours = getattr(getattr(forward, "__self__", None), "below", forward) is None
    return ours and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def dora_logits(
    x: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    a: Tensor,  # (..., R), the adapter's input of B
    B: Tensor,  # (V, R)
    magnitude: Tensor,  # (V,)
    norms: Tensor,  # (V,), without a gradient
) -> Tensor:
    """Returns magnitude / norms · (x @ weight.T + a @ B.T) + bias, in the dtype of x @ weight.T."""
    full = PRECISION[norms.dtype]
    scale = magnitude.to(full) / norms.to(full)
    first = linear(x, ScaledRows.apply(weight, scale), bias)  # pyright: ignore
    second = linear(a, (B.to(full) * scale[:, None]).to(B.dtype))
    return (first + second).to(first.dtype)


def row_norms(weight: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    """The norms (V,) of the rows of weight + s · B @ A, as a constant, in fp32 or fp64."""
    full = PRECISION[weight.dtype]
    norms = torch.empty(len(weight), device=weight.device, dtype=full)
    with torch.no_grad(), without_autocast(weight.device):
        for rows in row_slices(weight):
            whole = torch.addmm(weight[rows].to(full), B[rows].to(full), A.to(full), alpha=s)
            torch.linalg.vector_norm(whole, dim=1, out=norms[rows])
    return norms


def row_slices(weight: Tensor) -> Iterator[slice]:
    """Slices of rows of a weight. In fp32, the rows of a slice take at most BLOCK bytes."""
    step = max(BLOCK // (4 * max(weight.shape[1], 1)), 1)
    for start in range(0, len(weight), step):
        yield slice(start, min(start + step, len(weight)))


class ScaledRows(Node):
    """Multiplies the rows of a weight (V, D) by the numbers (V,) of `scale`."""

    @staticmethod
    def forward(ctx, weight, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, scale)
        return times_rows(weight, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):  # pyright: ignore[reportIncompatibleMethodOverride]
        if d is None:
            return None, None
        weight, scale = ctx.saved_tensors
        d_weight = times_rows(d, scale) if ctx.needs_input_grad[0] else None
        d_scale = None
        if ctx.needs_input_grad[1]:
            d_scale = torch.empty_like(scale)
            for rows in row_slices(weight):
                products = d[rows].to(scale.dtype) * weight[rows]
                torch.sum(products, 1, out=d_scale[rows])
        return d_weight, d_scale


def times_rows(t: Tensor, scale: Tensor) -> Tensor:
    """Returns t · scale[:, None]. Each product is rounded once, to the dtype of t."""
    result = torch.empty_like(t)
    for rows in row_slices(t):
        result[rows] = t[rows] * scale[rows, None]
    return result
