"""The GEMMs of a head, and the functions that choose the dtypes of these GEMMs."""

import contextlib

import torch
from torch import Tensor

from ..core.source import is_dtensor

SLAB = 64 << 20  # bytes of the largest fp32 copy that a CPU makes at once


def product(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Writes h @ weight.T + bias to `out`, in the dtype of h or as unrounded fp32 sums."""
    if out.dtype == h.dtype:
        if bias is None:
            return torch.mm(h, weight.t(), out=out)
        return torch.addmm(bias, h, weight.t(), out=out)
    if h.is_cuda and bias is None:
        return torch.mm(h, weight.t(), out_dtype=out.dtype, out=out)
    if h.is_cuda:
        out.copy_(bias)
        return torch.addmm(out, h, weight.t(), out_dtype=out.dtype, out=out)
    h = h.to(out.dtype)
    step = max(SLAB // (out.element_size() * max(h.shape[1], 1)), 1)
    for start in range(0, len(weight), step):
        columns = slice(start, start + step)
        wide = weight[columns].to(out.dtype).t()
        if bias is None:
            out[:, columns] = h @ wide
        else:
            out[:, columns] = torch.addmm(bias[columns].to(out.dtype), h, wide)
    return out


def dense_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the materialised logits (..., V), which are differentiable."""
    if dtype == hidden.dtype:
        return torch.nn.functional.linear(hidden, weight, bias)
    wanted = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    differentiable = torch.compiler.is_compiling() or (torch.is_grad_enabled() and wanted)
    if differentiable or is_dtensor(weight):  # torch.mm has no out_dtype for a DTensor
        tensors = (None if t is None else t.to(dtype) for t in (hidden, weight, bias))
        with without_autocast(hidden.device):
            return torch.nn.functional.linear(*tensors)  # pyright: ignore[reportArgumentType]
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.empty((len(flat), len(weight)), device=flat.device, dtype=dtype)
    with without_autocast(hidden.device):
        return product(flat, weight, bias, out).view(*hidden.shape[:-1], len(weight))


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device):
    """Returns a context manager that disables autocast."""
    if not autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast_by_autocast(t: Tensor) -> Tensor:
    """Casts t as autocast casts an argument of F.linear. fp64 tensors are not cast."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))
