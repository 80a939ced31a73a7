"""Base of the autograd functions: reverse mode only; forward mode and vmap raise."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import tensor_checks
from .call import is_batched, is_legacy_batched


class Node(torch.autograd.Function):
    jvp = staticmethod(tensor_checks.only_in_reverse)

    @staticmethod
    def refuse_vmap(upstream: Sequence[Tensor | None]) -> None:
        # Not `mapped`, which would call is_compiling once per tensor.
        if torch.compiler.is_compiling():
            return
        for t in upstream:
            if t is not None and (is_batched(t) or is_legacy_batched(t)):
                tensor_checks.not_mapped()


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises if a tensor has a tangent. Call it only while forward mode is active."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        tensor_checks.only_in_reverse()


def refuse_second(gradients: tuple, inputs: tuple) -> tuple:
    """Ties `gradients` to `inputs` in the autograd graph, so that a second derivative raises."""
    present = [t for t in gradients if t is not None]
    needed = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not present or not needed:
        return gradients
    tied = iter(_Final.apply(len(present), *present, *needed))
    return tuple(None if t is None else next(tied) for t in gradients)


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        tensor_checks.only_once()
