"""Reads quantised weights, such as torchao's int8 and fp8 tensors.

The GEMMs of a head read them in blocks of rows, each dequantised just before its GEMM, so that the
whole dequantised weight is never in memory, except inside `ll.invariant()`. They get no gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.source import is_dtensor

BLOCK = 64 << 20  # the largest number of bytes of a dequantised block
# Rows per block are a multiple of UNIT, because some formats have one scale per UNIT rows.
UNIT = 128


PLAIN = (Tensor, nn.Parameter)  # classes of weights that are certainly not quantised


def is_quantized(t: Tensor) -> bool:
    """Whether the tensor's class implements its own matrix products, as quantised weights do."""
    if type(t) in PLAIN:
        return False
    plain = type(t).__torch_dispatch__ is Tensor.__torch_dispatch__
    # DTensors, fake tensors and results of functional collectives (`trigger_wait`) do so too.
    others = is_dtensor(t) or hasattr(t, "fake_mode") or hasattr(t, "trigger_wait")
    return not (plain or others)


def why_not_readable(t: Any) -> str | None:
    """Why a quantised weight cannot be read in blocks ("got a <class>, which ..."), or None.

    Classes that also quantise the input of the product are refused: the GEMMs of a head do not
    quantise `hidden`, so the logits would be different.
    """
    if t.requires_grad:
        return "is quantised and requires a gradient"
    if type(t).dequantize is Tensor.dequantize:
        return "is quantised, and its class has no method dequantize"
    for name in ("act_quant_kwargs", "activation_quantization", "input_quant_func"):
        if getattr(t, name, None) is not None:
            return "is quantised together with its input"
    if torch.compiler.is_compiling():  # under torch.compile, the weight has no values
        return None
    try:
        rows = t.detach()[:UNIT].dequantize()
    except Exception:  # the exceptions differ between classes of tensors
        return "is quantised, and its rows cannot be dequantised separately"
    fits = type(rows) is Tensor and rows.shape == (min(UNIT, len(t)), t.shape[1])
    return None if fits else "is quantised, and its rows cannot be dequantised separately"


def row_blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields slices of rows, and these rows of the weight, dequantised to `dtype`."""
    width = max(weight.shape[1], 1) * max(dtype.itemsize, weight.dtype.itemsize)
    step = max(BLOCK // width // UNIT, 1) * UNIT
    for start in range(0, len(weight), step):
        rows = slice(start, min(start + step, len(weight)))
        yield rows, weight[rows].dequantize().to(dtype)


def storage_of(t: Tensor) -> tuple:
    """Identifies the memory of a quantised tensor, which is several plain tensors."""
    flatten = getattr(t, "__tensor_flatten__", None)
    if flatten is None:
        return (id(t),)
    names, _ = flatten()
    return tuple(getattr(t, name).data_ptr() for name in names)


def is_freed(weight: Tensor) -> bool:
    return not is_quantized(weight) and not weight.untyped_storage().size()
