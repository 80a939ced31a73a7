"""Operations that write to logits for inference (class Recipe), by changing values in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .deferred import WRITERS, Deferred, on_values, written


def write_values(z: Deferred, func, args: tuple, kwargs: dict) -> Any:
    """Runs `func`, which writes to z and maybe to other Deferred tensors, on their values.

    NotImplemented if the write is differentiable, if it changes the shape or the memory of a
    tensor, or if the values must not be written to (`writable_values`).
    """
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if differentiable or not keeps_shape(func):
        return NotImplemented
    targets = [z] if func in WRITERS else written(func, args, kwargs)
    memory = {}
    for target in targets:
        values = target.writable_values()
        if values is None:
            return NotImplemented
        memory[id(target)] = values.detach()
    if func in WRITERS:
        _, *rest = args
        func(memory[id(z)], *rest, **kwargs)
        return z
    results = on_values(func, args, kwargs, memory)
    if any(memory[id(t)].shape != t.shape for t in targets):  # `out=` was resized
        return NotImplemented
    owners = {id(memory[id(t)]): t for t in targets}
    return pytree.tree_map_only(Tensor, lambda t: owners.get(id(t), t), results)


def keeps_shape(func) -> bool:
    """Whether a function that writes to a tensor keeps its shape and memory."""
    if not isinstance(func, torch._ops.OpOverload):
        return func in (Tensor.__setitem__, Tensor.apply_, Tensor.map_, Tensor.map2_)
    moves = func._schema.name in ("aten::set_", "aten::resize_", "aten::resize_as_")
    return not moves and torch.Tag.inplace_view not in func.tags
