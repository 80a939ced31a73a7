"""The gradient that backward passes from a loss over lazy logits to the head (see logits.py)."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autograd import refuse_second
from .deferred import Deferred, on_values, written

# The gradients of a head's tensors, in the order of Head.tensors: hidden, weight, bias, low_rank.
Parts = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Compute = Callable[[], Tensor]  # computes a gradient of the logits as a plain tensor

aten = torch.ops.aten
# This module can be imported inside inference_mode(), which changes the dispatch keys.
with torch.inference_mode(False):
    # The dispatch keys outside of any operation.
    OUTSIDE = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )


def outside() -> Any:
    """A context manager in which autograd records operations.

    __torch_dispatch__ needs it, because PyTorch calls it with autograd switched off.
    """
    return torch._C._ForceDispatchKeyGuard(*OUTSIDE)


COPIES = (aten.detach.default, aten.clone.default, aten.alias.default)
PRODUCTS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def is_copy(func, args: tuple) -> bool:
    return func in COPIES or (func is aten.view.default and tuple(args[1]) == args[0].shape)


class Joint:
    """An operation with several LazyLogits as arguments, such as torch.cat or a product.

    In backward, each argument gets a LazyGradient, but only the first holds the gradients of
    `weight` and `bias`, sums over all arguments (and except for torch.cat, also that of `hidden`).
    One alone is incomplete and must not be changed: if n arguments need a gradient, its `shares`
    map the `Joint` to 1/n. Where autograd adds LazyGradients, it adds the shares; a sum of 1 is
    complete.
    """

    def __init__(self, name: str, root: Any = None):
        self.name = name
        # The `Watch` (weight_changes.py) of the call of a head from which all arguments with a
        # gradient come, or None.
        self.root = root


Shares = Mapping[Joint, Fraction]


class LazyGradient(Deferred):
    """The gradient of lazy logits, stored as the gradients of `hidden`, `weight` and `bias`.

    `parts` are those that losses over lazy logits computed, and `of_values` is the part from
    operations on materialised logits. Only operations that read the gradient, such as `norm`, call
    `computes`, which return the losses' gradients with respect to the logits as plain tensors;
    scaling and adding do not.
    """

    what, copy = "gradients of lazy logits", "gradient.materialize()"

    parts: Parts
    of_values: Tensor | None
    computes: tuple[Compute, ...]
    known: Tensor | None  # The gradient as a plain tensor, or None before it is computed.
    # Whether a loss over the logits computed this gradient of log-probabilities. It has an
    # additional term, which the backward of log_softmax removes, and so must not be read.
    projected: bool
    shares: Shares  # empty if this gradient is complete (see `Joint`)

    @staticmethod
    def of(
        like,
        parts: Parts,
        of_values: Tensor | None,
        computes: tuple[Compute, ...],
        projected: bool = False,
        shares: Shares | None = None,
    ) -> "LazyGradient":
        g = LazyGradient.blank(like)
        g.parts, g.of_values, g.computes, g.known = parts, of_values, computes, None
        g.projected, g.shares = projected, shares or {}
        return g

    def each(self, f: Callable[[Tensor], Tensor], like=None) -> "LazyGradient":
        """Applies a linear function to `parts`, `of_values` and the results of `computes`."""
        parts: Any = tuple(None if t is None else f(t) for t in self.parts)
        of_values = None if self.of_values is None else f(self.of_values)
        computes = tuple(lambda compute=compute: f(compute()) for compute in self.computes)
        like = self if like is None else like
        return LazyGradient.of(like, parts, of_values, computes, self.projected, self.shares)

    def plain_values(self) -> Tensor:
        if self.projected:
            raise RuntimeError(
                "the gradient of log-probabilities of lazy logits must not be read, because this"
                " gradient is exact only after the backward of log_softmax. Read the gradient of"
                " the logits, or use logits.materialize() before log_softmax."
            )
        if self.known is None:
            with outside(), torch.no_grad():
                terms = [compute() for compute in self.computes]
                terms += [] if self.of_values is None else [self.of_values.detach()]
                total = terms[0] if len(terms) == 1 else sum(terms[1:], terms[0])
                self.known = total.to(self.dtype).expand(self.shape).contiguous()
        return self.known

    def write(self, func, args: tuple, kwargs: dict) -> Any:
        """Writes to a materialised copy, which becomes `of_values`; `parts` becomes empty."""
        first = args[0] if args else None
        targets = first if isinstance(first, (list, tuple)) else [first]
        known = isinstance(func, torch._ops.OpOverload) or func is Tensor.__setitem__
        if not known or all(t is not self for t in targets):
            return super().write(func, args, kwargs)
        lazy = [t for t in targets if isinstance(t, LazyGradient)]
        for t in lazy:
            t.refuse_shared()
        values = [t.plain_values().clone() if isinstance(t, LazyGradient) else t for t in targets]
        func(values if targets is first else values[0], *args[1:], **kwargs)
        for t, new in zip(targets, values, strict=True):
            if isinstance(t, LazyGradient):
                t._become(LazyGradient.of(t, NO_PARTS, new, ()))
        return None if targets is first else first

    def materialize(self) -> Tensor:
        """Returns a copy of the gradient as a plain, writable tensor."""
        return self.plain_values().clone()

    def _become(self, other: "LazyGradient") -> None:
        vars(self).update(vars(other))

    def refuse_shared(self) -> None:
        """Raises if the gradient is incomplete (see `Joint`)."""
        for joint in self.shares:
            raise RuntimeError(
                f"the gradient of a lazy argument of {joint.name} must not be changed, because a"
                " part of the gradient belongs to all arguments together. Use"
                f" logits.materialize() before {joint.name}, or change the gradient of the logits"
                " that the head returned."
            )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        g, *rest = args
        if func is aten.mul.Tensor and not isinstance(g, LazyGradient):
            g, rest = rest[0], [g]
        if is_copy(func, args):
            copy = g.each(lambda t: t)
            if func is not aten.clone.default:  # `detach`, `alias` and `view` return a view of g
                copy.__dict__ = g.__dict__  # pyright: ignore[reportAttributeAccessIssue]
            return copy
        if func is aten._to_copy.default and not kwargs.keys() - {"dtype"}:
            return g.each(lambda t: t, Like(g.shape, kwargs.get("dtype") or g.dtype, g.device))
        if func is aten.add.Tensor and not kwargs and _addable(*args):
            return added(*args)
        if func is aten.add_.Tensor and not kwargs and _addable(*args) and isinstance(g, cls):
            g._become(added(*args))
            return g
        if func is aten.isnan.default and torch.is_anomaly_enabled():  # called by anomaly mode
            known = [t.isnan().any() for t in (*g.parts, g.of_values) if t is not None]
            known = known or [torch.zeros((), dtype=torch.bool, device=g.device)]
            return torch.stack(known).any().expand(g.shape)
        if func in PRODUCTS and isinstance(g, LazyGradient) and _is_number(rest[0]):
            g.refuse_shared()
            return g.each(lambda t: func(t, rest[0]))
        if func is aten.neg.default:
            g.refuse_shared()
            return g.each(torch.neg)
        targets = written(func, args, kwargs)
        if targets:
            return targets[0].write(func, args, kwargs)
        return on_values(func, args, kwargs)


class Like(NamedTuple):
    shape: Any
    dtype: torch.dtype
    device: torch.device

    def blank(self) -> Tensor:
        """A tensor of this shape, dtype and device in the memory of one number."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def described(t: Tensor) -> Like:
    return Like(t.shape, t.dtype, t.device)


NO_PARTS: Parts = (None, None, None, None)


def _is_number(t: Any) -> bool:
    return isinstance(t, (int, float)) or (type(t) is Tensor and t.dim() == 0)


def _addable(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and a.shape == b.shape and a.dtype == b.dtype


def added(a: Tensor, b: Tensor) -> LazyGradient:
    (parts, of_values), (others, more) = split(a), split(b)
    both = added_parts(parts, others)
    of_values = more if of_values is None else of_values if more is None else of_values + more
    computes = (*computes_of(a), *computes_of(b))
    shares = added_shares(shares_of(a), shares_of(b))
    return LazyGradient.of(a, both, of_values, computes, is_projected(a) or is_projected(b), shares)


def added_shares(a: Shares, b: Shares) -> Shares:
    """Adds `shares` per `Joint`. A joint whose shares add up to 1 is complete, and left out."""
    sums = {joint: a.get(joint, 0) + b.get(joint, 0) for joint in {**a, **b}}
    return {joint: share for joint, share in sums.items() if share != 1}


def divided_shares(g: Tensor, joint: Joint, count: int) -> Shares:
    """The `shares` of one of the `count` gradients into which the backward of `joint` splits g."""
    if count == 1:
        return shares_of(g)
    return {one: share / count for one, share in ({**shares_of(g), joint: Fraction(1)}).items()}


def added_parts(parts: Parts, others: Parts) -> Parts:
    pairs = zip(parts, others, strict=True)
    sums = (y if x is None else x if y is None else x + y for x, y in pairs)
    return tuple(sums)  # pyright: ignore[reportReturnType]


def split(g: Tensor) -> tuple[Parts, Tensor | None]:
    """The fields `parts` and `of_values` of g, a LazyGradient or a plain tensor."""
    if not isinstance(g, LazyGradient):
        return NO_PARTS, g
    if torch.is_grad_enabled() and g.requires_grad:  # g has autograd history, but g.parts does not
        *parts, of_values = refuse_second((*g.parts, g.of_values), (g,))
        return tuple(parts), of_values  # pyright: ignore
    return g.parts, g.of_values


def computes_of(g: Tensor) -> tuple[Compute, ...]:
    return g.computes if isinstance(g, LazyGradient) else ()


def is_projected(g: Tensor) -> bool:
    return isinstance(g, LazyGradient) and g.projected


def shares_of(g: Tensor) -> Shares:
    return g.shares if isinstance(g, LazyGradient) else {}


def pulled_back(function: Callable[[Tensor], Any], x: Tensor, *d: Tensor | None) -> Tensor:
    """The gradient of x from `d`, the gradient of each result of function(x), or None."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = function(leaf)
        outs = out if isinstance(out, tuple) else (out,)
    pairs = [
        (o, g.to(o.dtype).expand(o.shape))
        for o, g in zip(outs, d, strict=True)
        if g is not None and o.requires_grad
    ]
    if not pairs:
        return torch.zeros_like(x)
    outs, upstream = zip(*pairs, strict=True)
    again = torch.is_grad_enabled()
    (found,) = torch.autograd.grad(outs, leaf, upstream, create_graph=again, allow_unused=True)
    return torch.zeros_like(x) if found is None else found
