"""Tensor subclasses for 8-bit weights, like those of torchao."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Int8(Tensor):
    """A quantised weight with the dtype of its scale. It implements only F.linear and detach."""

    values: Tensor  # (V, D), int8
    scale: Tensor  # (V, 1)

    @staticmethod
    def __new__(cls, values, scale):
        shape, device = values.shape, values.device
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=device)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def of(cls, t: Tensor):
        scale = t.abs().amax(1, keepdim=True) / 127
        return cls((t / scale).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, *bias = args
            return F.linear(x, w.plain(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{cls.__name__} dispatch {func}")


class ReadableInt8(Int8):
    """A quantised weight whose rows can be dequantised separately."""

    most = 0  # the largest number of rows that were dequantised at once

    def dequantize(self) -> Tensor:
        ReadableInt8.most = max(ReadableInt8.most, len(self.values))
        return self.plain()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            t, dim, *rows = args
            assert dim == 0
            return cls(func(t.values, 0, *rows), func(t.scale, 0, *rows))
        return super().__torch_dispatch__(func, types, args, kwargs)


class WithInput(ReadableInt8):
    """A quantised weight whose matrix products also quantise the input."""

    act_quant_kwargs = "int8"


def quantised(layer: nn.Linear, kind: type[Int8] = ReadableInt8) -> None:
    """Replaces the weight of a linear layer by a quantised weight."""
    layer.weight = nn.Parameter(kind.of(layer.weight.detach()), requires_grad=False)
