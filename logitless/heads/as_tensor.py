"""PyTorch's functions accept a head, which is replaced by lazy logits (lazy/logits.py)."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import checks
from .head import Head

_FIELDS = frozenset(field.name for field in fields(Head))


class AsTensor:
    """Base class that gives a head the functions, methods, operators and indexing of a tensor."""

    head: Head

    def lazy(self) -> Tensor:
        """Returns the same logits as a lazy tensor, or as a plain tensor under a compiler."""
        if torch.compiler.is_compiling():
            return self.head.logits()
        checks.no_main_grad(self.head.main_grad)
        # This import is local, because lazy/ imports heads/.
        from ..lazy.logits import lazy_logits_of

        return lazy_logits_of(self.head)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _lazily((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the head, or a public attribute or method of the lazy logits."""
        if name in _FIELDS:
            return getattr(self.head, name)
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.lazy(), name)


def _lazily(tree: Any) -> Any:
    return pytree.tree_map_only(AsTensor, AsTensor.lazy, tree)


def _operator(name: str):
    def operator(self, *args):
        return getattr(self.lazy(), name)(*_lazily(args))

    operator.__name__ = name
    return operator


for _name in ("getitem", "len", "iter", "neg", "mul", "rmul", "truediv", "add", "radd", "sub"):
    setattr(AsTensor, f"__{_name}__", _operator(f"__{_name}__"))
