"""The weight of bitsandbytes' 4-bit linear layers, dequantised in blocks of rows.

The forward of a `Linear4bit` calls a function of bitsandbytes, so the logits of a `Linear4bit`
cannot be lazy. The function `forward` in this file has the same result, but calls
torch.nn.functional.linear. The weight in this call is a `FourBitWeight`. The GEMMs of a head read a
`FourBitWeight` like other quantised weights (heads/quantized.py).
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..heads.gemms import without_autocast


class FourBitWeight(Tensor):
    """Rows of a 4-bit weight of bitsandbytes, as a tensor (V, D) without a gradient.

    bitsandbytes stores a weight as one sequence of 4-bit numbers, row after row. Every `blocksize`
    numbers of this sequence share one scale. D is a multiple of `blocksize`.
    """

    packed: Tensor  # (V · D / 2,), uint8, two numbers per byte
    scales: Tensor  # (V · D / blocksize,), fp32
    state: Any  # the QuantState of the whole weight

    @staticmethod
    def __new__(cls, packed: Tensor, scales: Tensor, state: Any, dtype: torch.dtype):
        shape = (2 * len(packed) // state.shape[1], state.shape[1])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)  # pyright: ignore
        made.packed, made.scales, made.state = packed, scales, state
        return made

    @classmethod
    def of(cls, weight: Any, dtype: torch.dtype) -> "FourBitWeight":
        """Returns all rows of a Linear4bit's weight. `dequantize` returns the rows in `dtype`."""
        from bitsandbytes.functional import dequantize_blockwise

        state, scales = weight.quant_state, weight.quant_state.absmax
        if state.nested:  # the scales are quantised too
            scales = dequantize_blockwise(scales, state.state2) + state.offset
        packed = weight.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)
        return cls(packed, scales.float(), state, dtype)

    def rows(self, start: int, stop: int) -> "FourBitWeight":
        """Returns the rows [start, stop), without copying the weight."""
        width, block = self.shape[1], self.state.blocksize
        packed = self.packed[start * width // 2 : stop * width // 2]
        scales = self.scales[start * width // block : stop * width // block]
        return FourBitWeight(packed, scales, self.state, self.dtype)

    def dequantize(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        from bitsandbytes.functional import QuantState, dequantize_4bit

        if not len(self):
            return torch.empty(self.shape, device=self.device, dtype=self.dtype)
        state = QuantState(
            self.scales,
            shape=self.shape,
            code=self.state.code,
            blocksize=self.state.blocksize,
            quant_type=self.state.quant_type,
            dtype=self.dtype,
        )
        return dequantize_4bit(self.packed.view(-1, 1), state)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns the names of the tensors that hold the weight's numbers, for `storage_of`."""
        return ["packed", "scales"], None

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"FourBitWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is linear:
            return _dense_linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (weight, *rest), aten = args, torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return weight.rows(0, len(weight))
        if func is aten.slice.Tensor and rest[0] == 0 and len(rest) == 3:
            start, stop, _ = slice(*rest[1:]).indices(len(weight))
            return weight.rows(start, max(start, stop))
        raise NotImplementedError(f"{func} of a 4-bit weight is not implemented.")


def _dense_linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    return linear(input, weight.dequantize(), bias)


def is_four_bit(module: nn.Module) -> bool:
    """Whether a module is a 4-bit linear layer of bitsandbytes, and its weight can be read."""
    bnb = sys.modules.get("bitsandbytes")
    if bnb is None or not isinstance(module, bnb.nn.Linear4bit):
        return False
    if type(module).forward is not bnb.nn.Linear4bit.forward:
        return False
    state = getattr(module.weight, "quant_state", None)
    # For inference on some CPUs, bitsandbytes stores the numbers in an order that this file cannot
    # read.
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return False
    size = (module.out_features, module.in_features)
    return tuple(state.shape) == size and size[1] % state.blocksize == 0


def weight_of(module: Any, x: Tensor) -> FourBitWeight:
    """Returns the weight of a 4-bit layer, in the dtype of the product x @ weight.T."""
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    return FourBitWeight.of(module.weight, module.compute_dtype or x.dtype)


def forward(module: Any, x: Tensor) -> Tensor:
    """Computes the forward of a 4-bit layer by torch.nn.functional.linear."""
    weight, bias = weight_of(module, x), module.bias
    bias = None if bias is None else bias.to(weight.dtype)
    with without_autocast(x.device):  # bitsandbytes ignores autocast
        return linear(x.to(weight.dtype), weight, bias).to(x.dtype)
