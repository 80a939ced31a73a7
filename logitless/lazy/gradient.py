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
    # The dispatch keys that PyTorch includes and excludes outside of any operation.
    OUTSIDE = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )


def outside() -> Any:
    """Returns a context manager. Inside the context manager, autograd records operations.

    The context manager is needed inside __torch_dispatch__, because PyTorch calls
    __torch_dispatch__ with autograd switched off.
    """
    return torch._C._ForceDispatchKeyGuard(*OUTSIDE)


COPIES = (aten.detach.default, aten.clone.default, aten.alias.default)
PRODUCTS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def is_copy(func, args: tuple) -> bool:
    """Whether the operation returns its input unchanged, as a copy or as a view."""
    return func in COPIES or (func is aten.view.default and tuple(args[1]) == args[0].shape)


class Joint:
    """An operation with several LazyLogits as arguments, such as torch.cat or a product.

    In backward, each argument gets its own LazyGradient. Only the first LazyGradient holds
    gradients of `weight` and `bias`. These gradients are sums over all arguments. For torch.cat,
    each LazyGradient holds the gradient of `hidden` for its own rows. For all other operations,
    only the first LazyGradient holds the gradient of `hidden`. So the LazyGradient of one argument
    is incomplete, and must not be changed. If n arguments need a gradient, the field `shares` of
    each LazyGradient maps the `Joint` to 1/n. A LazyGradient with a share below 1 is incomplete.
    When autograd adds LazyGradients, their shares are added too. The sum is complete if its share
    is 1.
    """

    def __init__(self, name: str, root: Any = None):
        self.name = name
        # If all arguments with a gradient come from one call of a head, `root` is the `Watch`
        # (weight_changes.py) of this call. Otherwise, `root` is None.
        self.root = root


Shares = Mapping[Joint, Fraction]


class LazyGradient(Deferred):
    """The gradient of lazy logits, stored as the gradients of `hidden`, `weight` and `bias`.

    `of_values` is a plain tensor with the part of the gradient that comes from operations on
    materialised logits. `parts` are the gradients of `hidden`, `weight` and `bias` that losses over
    lazy logits computed. The functions in `computes` return the gradients of these losses with
    respect to the logits, as plain tensors. An operation that reads the gradient, such as `norm`,
    calls the functions in `computes`. Operations that scale or add gradients do not call the
    functions in `computes`.
    """

    what, copy = "gradients of lazy logits", "gradient.materialize()"

    parts: Parts
    of_values: Tensor | None
    computes: tuple[Compute, ...]
    known: Tensor | None  # The gradient as a plain tensor, or None before it is computed.
    # True if this gradient of log-probabilities was computed by a loss over the logits. Such a
    # gradient must not be read, because it contains an additional term. The backward of log_softmax
    # removes this term.
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
        """Writes to a materialised copy.

        The copy becomes `of_values`, and `parts` becomes empty.
        """
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
        """Raises if the gradient is incomplete.

        An incomplete gradient must not be changed (see `Joint`).
        """
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
        """A tensor of this shape, dtype and device that takes the memory of only one number."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def described(t: Tensor) -> Like:
    return Like(t.shape, t.dtype, t.device)


NO_PARTS: Parts = (None, None, None, None)


def _is_number(t: Any) -> bool:
    return isinstance(t, (int, float)) or (type(t) is Tensor and t.dim() == 0)


def _addable(a: Any, b: Any) -> bool:
    """Whether a and b are tensors, lazy or plain, of the same shape and dtype."""
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
    """Adds the `shares` of two gradients, separately for each `Joint`.

    A `Joint` whose shares add up to 1 is left out, because the sum of its gradients is complete.
    """
    sums = {joint: a.get(joint, 0) + b.get(joint, 0) for joint in {**a, **b}}
    return {joint: share for joint, share in sums.items() if share != 1}


def divided_shares(g: Tensor, joint: Joint, count: int) -> Shares:
    """Returns the `shares` of one new gradient.

    The backward of `joint` splits g into `count` new gradients.
    """
    if count == 1:
        return shares_of(g)
    return {one: share / count for one, share in ({**shares_of(g), joint: Fraction(1)}).items()}


def added_parts(parts: Parts, others: Parts) -> Parts:
    pairs = zip(parts, others, strict=True)
    sums = (y if x is None else x if y is None else x + y for x, y in pairs)
    return tuple(sums)  # pyright: ignore[reportReturnType]


def split(g: Tensor) -> tuple[Parts, Tensor | None]:
    """Returns the fields `parts` and `of_values` of g (class LazyGradient)."""
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
    """Returns the gradient of x. `d` holds the gradient of each result of function(x).

    An entry of `d` is None for a result without a gradient.
    """
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
