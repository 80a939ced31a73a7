"""The gradient of lazy logits, on its way from a loss to the head: see logits.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Parts = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias

aten = torch.ops.aten
COPIES = (aten.detach.default, aten.clone.default, aten.alias.default)


def is_copy(func, args: tuple) -> bool:
    """Whether the op returns its input unchanged (autograd wraps a returned input in a view)."""
    return func in COPIES or (func is aten.view.default and tuple(args[1]) == args[0].shape)


class LazyGradient(Tensor):
    """The gradient of lazy logits, in the form of the gradients of hidden, weight and bias.

    `dense` is the gradient of the values, from operations that materialised the logits.
    """

    parts: Parts
    dense: Tensor | None

    @staticmethod
    def of(like, parts: Parts, dense: Tensor | None = None) -> "LazyGradient":
        g = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            LazyGradient, like.shape, dtype=like.dtype, device=like.device
        )
        g.parts, g.dense = parts, dense
        return g

    def each(self, f: Callable[[Tensor], Tensor], like=None) -> "LazyGradient":
        parts = tuple(None if t is None else f(t) for t in self.parts)
        dense = None if self.dense is None else f(self.dense)
        return LazyGradient.of(self if like is None else like, parts, dense)  # pyright: ignore

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"LazyGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        g, *rest = args
        if func is aten.mul.Tensor and not isinstance(g, LazyGradient):
            g, rest = rest[0], [g]
        if is_copy(func, args):
            return g.each(lambda t: t)
        if func is aten._to_copy.default and isinstance(g, LazyGradient):
            like = Like(g.shape, (kwargs or {}).get("dtype") or g.dtype, g.device)
            return g.each(lambda t: t, like)
        if func in (aten.add.Tensor, aten.add_.Tensor) and not kwargs:
            total = added(g, rest[0])
            if func is aten.add.Tensor:
                return total
            g.parts, g.dense = total.parts, total.dense
            return g
        if func is aten.isnan.default:  # for anomaly detection
            known = [t for t in (*g.parts, g.dense) if t is not None]
            return torch.stack([t.isnan().any() for t in known]).any().expand(g.shape)
        if func in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar) and _is_number(rest[0]):
            return g.each(lambda t: func(t, rest[0]))
        if func is aten.neg.default:
            return g.each(torch.neg)
        raise RuntimeError(
            f"the gradient of lazy logits must not be computed with, by {func}: it is known as"
            " those of hidden and weight. Use logits.materialize() before the loss."
        )


class Like(NamedTuple):
    shape: Any
    dtype: torch.dtype
    device: torch.device


def _is_number(t: Any) -> bool:
    return isinstance(t, (int, float)) or (type(t) is Tensor and t.dim() == 0)


def added(a: Tensor, b: Tensor) -> LazyGradient:
    (parts, dense), (others, more) = split(a), split(b)
    both = added_parts(parts, others)
    dense = more if dense is None else dense if more is None else dense + more
    return LazyGradient.of(a, both, dense)


def added_parts(parts: Parts, others: Parts) -> Parts:
    pairs = zip(parts, others, strict=True)
    sums = (y if x is None else x if y is None else x + y for x, y in pairs)
    return tuple(sums)  # pyright: ignore[reportReturnType]


def split(g: Tensor) -> tuple[Parts, Tensor | None]:
    """The gradients of hidden, weight and bias, and the gradient of the values."""
    if isinstance(g, LazyGradient):
        return g.parts, g.dense
    return (None, None, None), g


def joined(like, parts: Parts, dense: Tensor | None) -> Tensor | None:
    """The inverse of `split`."""
    if all(t is None for t in parts):
        return dense
    return LazyGradient.of(like, parts, dense)


def pulled_back(function: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> Tensor:
    """The gradient of x, from the gradient d of function(x)."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = function(leaf)
    again = torch.is_grad_enabled()
    return torch.autograd.grad(out, leaf, d.to(out.dtype), create_graph=again)[0]
