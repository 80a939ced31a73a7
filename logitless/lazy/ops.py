"""Operations that compute new values and return lazy logits.

Elementwise functions and functions of whole rows extend the formula. A bias or an adapter becomes a
part of the head, by ordinary operations of PyTorch on the head's tensors.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.call import in_func
from ..heads.gemms import side_by_side
from ..heads.head import Head
from ..heads.quantized import is_freed, is_quantized
from .formula import Applied, Autocast, Constant, Elsewhere, Formula, HeadLogits, Input
from .logits import LazyLogits, derived, unchanged
from .recipe import Recipe, own, purpose
from .rows import is_alias, view

# --- elementwise functions, and functions of whole rows

DEEPEST = 64  # formulas are computed recursively, and Python limits the recursion
CONSTANTS = (int, float, str, torch.dtype, type(None))
# The result of these functions is a lazy mask, because callers usually reduce it by any() or all().
QUESTIONS = {getattr(T, name) for T in (torch, Tensor) for name in ("isnan", "isinf", "isfinite")}


def clone(z: LazyLogits, **kwargs):
    if kwargs:
        return NotImplemented
    if z.path and (z.sends or not z.requires_grad):  # a part need not keep all hidden states
        return derived(z.recipe.with_rows(torch.clone), z)
    return unchanged(z, shares=False)


def detach(z: LazyLogits):
    z.cell.recipe = z.cell.recipe.detached()
    return LazyLogits.of(z.recipe.detached()).alias(z)


def contiguous(z: LazyLogits, **kwargs):
    if kwargs:
        return NotImplemented
    return z if z.like().is_contiguous() else derived(z.recipe, z)


def view_as(z: LazyLogits, other: Tensor):
    return unchanged(z, shares=True) if other.shape == z.shape else view(z, other.shape)


def cast(function: Callable):
    """Returns a version of Tensor.to, or of another cast, for another dtype on the same device."""

    def to(z: LazyLogits, *args, **kwargs):
        copies = any(isinstance(a, bool) for a in args) or kwargs.keys() & {"copy", "memory_format"}
        found = function(torch.empty(0, dtype=z.dtype, device=z.device), *args, **kwargs)
        dtype, head, direct = found.dtype, z.recipe.head, z.recipe.logits
        if copies or found.device != z.device:
            return NotImplemented
        if dtype == z.dtype:
            return z
        rounds = dtype == head.hidden.dtype and (head.bias is None or head.bias.dtype == dtype)
        if rounds and direct is not None and direct.pre == 1 and not direct.capped:
            # Rounding fp32 logits to the dtype of `hidden` gives those of a head of this dtype.
            head = head.replace(logits_dtype=None)
            return derived(z.recipe.with_head(head, formula=HeadLogits(dtype)), z)
        return applied(Tensor.to, (z, dtype), {}, dtype=dtype)

    return to


def applied(function: Callable, args: tuple, kwargs: dict, dtype: Any = None) -> Any:
    """Returns lazy logits with the values function(*args, **kwargs), or NotImplemented.

    At least one argument is a LazyLogits. The function is elementwise, or one of whole rows whose
    result has this `dtype`.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    lazy = list({id(t): t for t in leaves if isinstance(t, LazyLogits)}.values())
    lazy.sort(key=is_constant)  # logits that need a gradient come first
    first = lazy[0]
    shape = first.shape
    usable = all(z.from_head and z.shape == shape for z in lazy) and not in_func()
    if not usable or not first.recipe.lead.numel():
        return NotImplemented
    first.recipe.check_versions()
    arguments = [argument_of(t, first) for t in leaves]
    if any(a is None or getattr(a.formula, "depth", 0) >= DEEPEST for a in arguments):
        return NotImplemented
    in_rows = len(lazy) > 1 or any(map(varies, arguments))
    if in_rows and first.recipe.axis is not None:
        return NotImplemented
    autocast = Autocast.of(first.device)
    if dtype is None:
        dtype = dtype_of_result(function, tree, autocast, [a.blank for a in arguments], shape[-1])
    if dtype is None:
        return NotImplemented
    if dtype.is_floating_point and not all(is_differentiable(t, first) for t in leaves):
        return NotImplemented
    if not is_constant(first):
        pairs = zip(arguments, leaves, strict=True)
        arguments = [as_constant(a) if is_constant(t) else a for a, t in pairs]
    args, kwargs = pytree.tree_unflatten([a.formula for a in arguments], tree)
    inputs = {key: t for a in arguments for key, t in a.inputs.items()}
    old = first.recipe
    formula = Applied(function, args, kwargs, dtype, autocast)
    recipe = old.replace(formula=formula, **purpose(*(z.recipe for z in lazy)))
    if inputs or old.inputs:
        kept = {"scores": old.scores, "places": old.places, "base": old.base}
        recipe = recipe.with_head(old.head, inputs=inputs, **kept)
    result = derived(recipe, *lazy)
    if dtype.is_floating_point or function in QUESTIONS:
        return result
    return in_memory(result)


def in_memory(z: LazyLogits) -> Any:
    """Computes a mask or integers as a plain tensor, because callers often write to masks."""
    from .by_rows import by_rows

    found = NotImplemented if z.recipe.axis is not None else by_rows(z, lambda t: t)
    return found if found is NotImplemented else found[0]


class Argument(NamedTuple):
    """An argument of a function that is applied to lazy logits."""

    formula: Any  # a Formula, or a constant
    blank: Any  # an empty tensor (0, width) of the argument's dtype, or a constant
    inputs: Any = MappingProxyType({})  # dict[Input, Tensor | Head]


def varies(a: Argument) -> bool:
    """Whether the argument holds different numbers for different rows or columns."""
    return bool(a.inputs) or (isinstance(a.formula, Tensor) and a.formula.numel() > 1)


def argument_of(t: Any, first: LazyLogits) -> Argument | None:
    """Describes t as an `Argument`, or returns None if the result cannot be lazy."""
    if not isinstance(t, Tensor):
        return Argument(t, t) if isinstance(t, CONSTANTS) else None
    if isinstance(t, LazyLogits):
        return _lazy_argument(t, first)
    elsewhere = t.device != first.device and not (t.dim() == 0 and t.is_cpu)
    if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or elsewhere:
        return None
    t = t.detach()
    *lead, last = t.shape or (1,)
    want, vocab = first.shape[:-1], first.shape[-1]
    if t.dim() > first.dim() or last not in (1, vocab):
        return None
    if t.numel() == last:  # t has one number per column, or a single number
        t = own(t) if t.dim() == 0 else own(t).view(-1)
        return Argument(t, t)
    if last > 1 and t.shape == first.shape:
        t = own(t) if t.is_inference() else t
    elif last == 1 and all(n in (1, m) for n, m in zip(lead[::-1], want[::-1], strict=False)):
        t = own(t.expand(*want, 1))
    else:
        return None
    return Argument(key := Input(t.dtype), no_rows(t), {key: t})


def _lazy_argument(z: LazyLogits, first: LazyLogits) -> Argument | None:
    recipe = z.recipe
    if have_same_rows(recipe, first.recipe):
        return Argument(recipe.formula, no_rows(z), recipe.inputs)
    if recipe.shard is not None or recipe.axis is not None:
        return None
    logits = Input(recipe.head.dtype)
    inputs = {**recipe.inputs, logits: recipe.head}
    return Argument(Elsewhere(recipe.formula, logits), no_rows(z), inputs)


def no_rows(t: Tensor) -> Tensor:
    return torch.empty((0, t.shape[-1]), dtype=t.dtype, device=t.device)


def have_same_rows(a: Recipe, b: Recipe) -> bool:
    """Whether two recipes hold the same `hidden`, `weight` and `bias`, from one call of a head."""
    if a.watches != b.watches or a.axis != b.axis or a.shard is not b.shard:
        return False
    return all(map(is_alias, a.head.tensors, b.head.tensors))


def is_constant(t: Any) -> bool:
    return not (isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled())


def as_constant(a: Argument) -> Argument:
    known = isinstance(a.formula, Input) or not isinstance(a.formula, Formula)
    return a if known else a._replace(formula=Constant(a.formula))


def is_differentiable(t: Any, first: LazyLogits) -> bool:
    """False if argument t needs a gradient that the head's tensors do not give."""
    if is_constant(t):
        return True
    return isinstance(t, LazyLogits) and have_same_rows(t.recipe, first.recipe)


def dtype_of_result(function, tree, autocast: Autocast, blanks: list, vocab: int) -> Any:
    """The dtype of the result, or None if the result cannot be lazy logits."""
    args, kwargs = pytree.tree_unflatten(blanks, tree)
    try:
        with torch.no_grad(), autocast.on():
            result = function(*args, **kwargs)
    except Exception:  # PyTorch raises the same error on a plain tensor
        return None
    fits = isinstance(result, Tensor) and result.shape == (0, vocab)
    return result.dtype if fits and not result.is_complex() else None


# --- operations that change the head: bias, adapters


def simple_head(z: LazyLogits) -> bool:
    """Whether the logits are those of the head, perhaps scaled."""
    recipe, logits = z.recipe, z.recipe.logits
    plain = recipe.axis is None and recipe.shard is None and not recipe.inputs
    return plain and z.from_head and logits is not None and not logits.capped


def plus(z: LazyLogits, other: Any, *, alpha: Any = 1, sign: float = 1.0):
    """Adds one number per column to the bias, or the logits of an adapter to the head."""
    if alpha != 1 or not simple_head(z):
        return NotImplemented
    if isinstance(other, LazyLogits):
        return summed(z, other, sign)
    if z.recipe.logits.pre != 1:
        return NotImplemented
    if not isinstance(other, Tensor) or not other.is_floating_point() or other.device != z.device:
        return NotImplemented
    if not 0 < other.dim() <= z.dim() or not other.shape[-1] == other.numel() == z.shape[-1]:
        return NotImplemented
    recipe, bias, dtype = z.recipe, other.reshape(-1), torch.promote_types(z.dtype, other.dtype)
    head, narrow = recipe.head, recipe.head.hidden.dtype in (torch.float16, torch.bfloat16)
    if bias.requires_grad and torch.is_grad_enabled() and not z.sends:
        return NotImplemented
    if dtype != head.dtype:
        if not narrow or dtype != torch.float32:
            return NotImplemented
        head = head.replace(logits_dtype=dtype)
    recipe.check_versions()
    with torch.inference_mode(False):
        total = own(bias).to(head.dtype) * sign
        total = total if head.bias is None else head.bias + total
    return derived(recipe.with_head(head.replace(bias=total), formula=HeadLogits(dtype)), z)


def minus(z: LazyLogits, other: Any, *, alpha: Any = 1):
    return plus(z, other, alpha=alpha, sign=-1.0)


def summed(a: LazyLogits, b: LazyLogits, sign: float) -> Any:
    """Returns a + sign · b as lazy logits of a single head, or NotImplemented.

    The wider head is the first head of the sum. A LoRA adapter is narrower than its layer.
    """
    if not simple_head(b) or a.shape != b.shape or a.device != b.device:
        return NotImplemented
    x, y = (a, b) if width_of(a) >= width_of(b) else (b, a)
    signs = {id(a): 1.0, id(b): sign}
    adapts = (y.requires_grad or not x.requires_grad) and width_of(y) < width_of(x)
    if not (adapts or (x.requires_grad and y.requires_grad)):
        return NotImplemented
    first, second = x.recipe, y.recipe
    freed = {is_freed(r.head.weight) for r in (first, second)}
    if have_same_rows(first, second) or len(freed) > 1:
        return NotImplemented
    for recipe in (first, second):
        recipe.check_versions()
    head = joined(first, second, signs[id(x)] * first.logits.pre, signs[id(y)] * second.logits.pre)
    if head is None:
        return NotImplemented
    formula, watches = (
        HeadLogits(torch.promote_types(a.dtype, b.dtype)),
        first.watches + second.watches,
    )
    recipe = first.with_head(head, formula=formula, watches=watches, **purpose(first, second))
    return derived(recipe, x, y)


def width_of(z: LazyLogits) -> int:
    return z.recipe.head.weight.shape[1]


def used_columns(head: Head) -> int:
    """The number of columns of `hidden`, without the padding that `side_by_side` adds."""
    rank = 0 if head.low_rank is None else head.low_rank.shape[1]
    return head.weight.shape[1] + rank


def joined(first: Recipe, second: Recipe, sign: float, scale: float) -> Head | None:
    """Returns a head whose logits are sign · first + scale · second, or None."""
    x, y = first.head, second.head
    dtype = x.hidden.dtype
    common = torch.promote_types(dtype, y.hidden.dtype)
    fits = common == dtype or (common == torch.float32 and dtype.itemsize == 2)
    if not fits or abs(sign) != 1 or y.low_rank is not None or is_quantized(y.weight):
        return None
    wide = torch.promote_types(x.dtype, torch.promote_types(y.dtype, common))
    if wide not in (dtype, torch.promote_types(dtype, torch.float32)):
        return None
    low_rank, bias, hidden = y.weight, x.bias, x.hidden[..., : used_columns(x)]
    skips = x.skips_first or not x.hidden.requires_grad
    with torch.inference_mode(False):
        if x.low_rank is not None:
            if 4 * (used_columns(x) - x.weight.shape[1] + y.weight.shape[1]) > x.weight.shape[1]:
                return None
            full = torch.promote_types(x.low_rank.dtype, y.weight.dtype)
            low_rank = torch.cat([x.low_rank.to(full), y.weight.to(full)], 1)
        if sign < 0:
            hidden, bias = -hidden, None if bias is None else -bias
        hidden = side_by_side(hidden, (y.hidden * scale).to(dtype))
        if y.bias is not None:
            bias = (
                y.bias.to(wide) * scale if bias is None else bias.to(wide) + y.bias.to(wide) * scale
            )
    return x.replace(
        hidden=hidden, bias=bias, low_rank=low_rank, skips_first=skips,
        logits_dtype=None if wide == dtype else wide,
    )  # fmt: skip
