"""Applies elementwise functions and functions of whole rows, such as softmax, to lazy logits.

The result is lazy logits with an `Applied` formula (formula.py), which a later operation computes
for some rows at a time if it reduces over the vocabulary, and for all rows otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.call import in_func
from .deferred import running
from .formula import Applied, Autocast, Constant, Elsewhere, Formula, Input, depth_of
from .logits import LazyLogits
from .nodes import LazyOp, Op, anchor_of
from .recipe import Recipe, RowInput, own
from .row_function import by_rows
from .views import is_alias

# Formulas of nested functions are computed recursively, and Python limits the recursion.
DEEPEST = 64
# Their result is a lazy mask, because callers usually reduce it by any() or all().
QUESTIONS = {getattr(T, name) for T in (torch, Tensor) for name in ("isnan", "isinf", "isfinite")}
CONSTANTS = (int, float, str, torch.dtype, type(None))


def applied(function: Callable, args: tuple, kwargs: dict, whole_rows: bool = False) -> Any:
    """Lazy logits with the values function(*args, **kwargs), or NotImplemented.

    With `whole_rows`, each value of the result depends on a whole row, as in softmax; otherwise the
    function is elementwise.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    lazy = list({id(t): t for t in leaves if isinstance(t, LazyLogits)}.values())
    lazy.sort(key=is_constant)  # logits that need a gradient come first
    first = lazy[0]
    usable = all(z.from_head and z.shape == first.shape for z in lazy) and not in_func()
    if not usable or not first.numel():
        return NotImplemented
    arguments = [argument_of(t, first) for t in leaves]
    if any(a is None or depth_of(a.formula) >= DEEPEST for a in arguments):
        return NotImplemented
    in_rows = whole_rows or len(lazy) > 1 or any(map(varies, arguments))
    if in_rows and first.recipe.axis is not None:
        return NotImplemented
    call = Call(function, tree, Autocast.of(first.device))
    dtype = call.dtype_of_result([a.blank for a in arguments], first.shape[-1])
    if dtype is None:
        return NotImplemented
    floating = dtype.is_floating_point
    if floating and not all(is_differentiable(t, first, lazy) for t in leaves):
        return NotImplemented
    grad = floating and not is_constant(first)
    if grad:
        pairs = zip(arguments, leaves, strict=True)
        arguments = [as_constant(a) if is_constant(t) else a for a, t in pairs]
    args, kwargs = pytree.tree_unflatten([a.formula for a in arguments], tree)
    inputs = {r.input: r for a in arguments for r in a.inputs}
    recipe = first.recipe.replace(
        formula=Applied(function, args, kwargs, dtype, call.autocast),
        inputs=tuple(inputs.values()),
        trains=any(z.recipe.trains for z in lazy),
        inference=all(z.recipe.inference for z in lazy),
    )
    places = [next(i for i, t in enumerate(leaves) if t is z) for z in lazy]
    op = Op(
        call.of_values(leaves, arguments, lazy),
        linear=False,
        name=running(function),
        formulas=tuple(arguments[i].formula for i in places),
    )
    with torch.set_grad_enabled(grad):
        result = LazyOp.apply(recipe, None, op, anchor_of(first), *lazy)
    return result if floating or function in QUESTIONS else in_memory(result)


def in_memory(z: LazyLogits) -> Tensor:
    """Computes a lazy mask or lazy integers as a plain tensor, without materialising the logits.

    Masks other than those of QUESTIONS are computed at once: they are smaller than the logits, and
    callers often write to them.
    """
    if z.recipe.axis is not None:
        return NotImplemented
    rows = by_rows(z, lambda t: t)
    return rows if rows is NotImplemented else rows[0]


class Argument(NamedTuple):
    formula: Any  # a Formula, or a constant
    blank: Any  # an empty tensor (0, width) of the argument's dtype, or a constant
    inputs: tuple[RowInput, ...] = ()


def varies(a: Argument) -> bool:
    return bool(a.inputs) or (isinstance(a.formula, Tensor) and a.formula.numel() > 1)


def argument_of(t: Any, first: LazyLogits) -> Argument | None:
    """Describes an argument beside the lazy logits `first`, or returns None if it is not lazy."""
    if not isinstance(t, Tensor):
        return Argument(t, t) if isinstance(t, CONSTANTS) else None
    if isinstance(t, LazyLogits):
        return _lazy_argument(t, first)
    elsewhere = t.device != first.device and not (t.dim() == 0 and t.is_cpu)
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or elsewhere:
        return None
    t = t.detach()
    *rows, last = t.shape or (1,)
    lead, vocab = first.shape[:-1], first.shape[-1]
    if t.dim() > first.dim() or last not in (1, vocab):
        return None
    if t.numel() == last:  # t has one number per column, or a single number
        t = own(t) if t.dim() == 0 else own(t).view(-1)
        return Argument(t, t)
    if last > 1 and t.shape == first.shape:
        t = own(t) if t.is_inference() else t
    elif last == 1 and all(n in (1, m) for n, m in zip(rows[::-1], lead[::-1], strict=False)):
        t = own(t.expand(*lead, 1))
    else:
        return None
    return Argument(formula := Input(t.dtype), no_rows(t), (RowInput.of(formula, t),))


def _lazy_argument(z: LazyLogits, first: LazyLogits) -> Argument | None:
    recipe = z.recipe
    if have_same_rows(recipe, first.recipe):
        return Argument(recipe.formula, no_rows(z), recipe.inputs)
    if recipe.shard is not None or recipe.axis is not None:
        return None
    logits = Input(recipe.head.dtype)
    inputs = (*recipe.inputs, RowInput.of(logits, recipe.head))
    return Argument(Elsewhere(recipe.formula, logits), no_rows(z), inputs)


def no_rows(t: Tensor) -> Tensor:
    return torch.empty((0, t.shape[-1]), dtype=t.dtype, device=t.device)


def have_same_rows(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes hold the same `hidden`, `weight` and `bias`, from one call of a head."""
    if a.watch is not b.watch or a.axis != b.axis or a.shard is not b.shard:
        return False
    return all(map(is_alias, a.head.tensors, b.head.tensors))


def is_constant(t: Any) -> bool:
    return not (isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled())


def as_constant(a: Argument) -> Argument:
    """Marks an argument as constant: backward computes no gradient of it."""
    known = isinstance(a.formula, Input) or not isinstance(a.formula, Formula)
    return a if known else a._replace(formula=Constant(a.formula))


def is_differentiable(t: Any, first: LazyLogits, lazy: list[LazyLogits]) -> bool:
    if is_constant(t):
        return True
    if not isinstance(t, LazyLogits) or not have_same_rows(t.recipe, first.recipe):
        return False
    # If several need a gradient, each gets an incomplete LazyGradient (gradient.Joint), which no
    # hook and no `retain_grad` may see.
    alone = all(z is t or is_constant(z) for z in lazy)
    return alone or not (t._backward_hooks or t.retains_grad)


class Call(NamedTuple):
    function: Callable[..., Tensor]
    tree: Any  # the pytree structure of the arguments
    autocast: Autocast

    def run(self, leaves: list) -> Tensor:
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        with self.autocast.on():
            return self.function(*args, **kwargs)

    def dtype_of_result(self, blanks: list, vocab: int) -> torch.dtype | None:
        """The dtype of the result, or None if it cannot be lazy logits."""
        try:
            with torch.no_grad():
                result = self.run(blanks)
        except Exception:  # PyTorch raises the same error on a plain tensor
            return None
        fits = isinstance(result, Tensor) and result.shape == (0, vocab)
        return result.dtype if fits and not result.is_complex() else None

    def of_values(
        self, leaves: list, arguments: list[Argument], lazy: list[LazyLogits]
    ) -> Callable[..., Tensor]:
        """Maps the values of the lazy arguments to the result."""
        places = [next((i for i, z in enumerate(lazy) if z is t), None) for t in leaves]
        fixed = [a.inputs[0] if isinstance(a.formula, Input) else a.formula for a in arguments]
        fixed = [None if at is not None else a for at, a in zip(places, fixed, strict=True)]

        def computed(*values: Tensor) -> Tensor:
            given = []
            for at, a in zip(places, fixed, strict=True):
                if isinstance(a, RowInput):
                    a.check()
                given.append(values[at] if at is not None else a)
            return self.run([a.source if isinstance(a, RowInput) else a for a in given])

        return computed
