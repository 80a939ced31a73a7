"""A head that PyTorch takes for a tensor: its functions get the lazy logits of lazy/logits.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import options as _options
from ..core.later import later
from . import checks as _head_checks


class AsTensor:
    """The functions, methods, operators and indexing of a tensor, for a LinearLogits."""

    parts: tuple[Tensor, Tensor, Tensor | None]
    main_grad: Tensor | None
    module: nn.Module | None

    def materialize(self) -> Tensor:
        raise NotImplementedError

    def lazy(self) -> Tensor:
        """The same as a tensor; to a compiler the plain product."""
        if torch.compiler.is_compiling():
            return self.materialize()
        _head_checks.no_main_grad(self.main_grad)
        names = _options.taken_from(type(self).__init__)
        how = {name: getattr(self, name) for name in names if name != "main_grad"}
        return later.lazy_logits(*self.parts, how, self.module)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _lazily((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """A public attribute or method that a tensor has and this class has not."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.lazy(), name)


def _lazily(given: Any) -> Any:
    return pytree.tree_map_only(AsTensor, AsTensor.lazy, given)


def _operator(name: str):
    def operator(self, *args):
        return getattr(self.lazy(), name)(*_lazily(args))

    operator.__name__ = name
    return operator


for _name in ("getitem", "len", "iter", "neg", "mul", "rmul", "truediv", "add", "radd", "sub"):
    setattr(AsTensor, f"__{_name}__", _operator(f"__{_name}__"))
