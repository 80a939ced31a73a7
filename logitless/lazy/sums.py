"""The sum of the lazy logits of two heads, such as a linear layer and its LoRA adapter.

hidden1 @ weight1.T + hidden2 @ weight2.T is computed as the logits of a single head, with both
hidden states side by side, weight1 as its `weight` and weight2 as its `low_rank` (heads/head.py).
So a loss over the sum materialises neither product. Joining copies the hidden states and, with
several adapters, their matrices B.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.autograd import Node
from ..heads.gemms import side_by_side
from ..heads.head import Head
from ..heads.quantized import is_freed, is_quantized
from .elementwise import have_same_rows
from .formula import Direct
from .gradient import Parts, computes_of, described, is_projected, shares_of, split
from .logits import LazyLogits
from .nodes import gradient_of
from .recipe import Recipe
from .weight_changes import Watches

NO_NEEDS = (False,) * 4


def summed(a: LazyLogits, b: LazyLogits) -> Any:
    """a + b as lazy logits of a single head, or NotImplemented.

    The head with more columns of weight is the first. If only one argument needs a gradient, it
    must be the narrower, such as a LoRA adapter beside its frozen layer; if none does, the widths
    must differ. All other sums are computed in elementwise.py.
    """
    if not (is_summable(a) and is_summable(b)) or a.shape != b.shape or a.device != b.device:
        return NotImplemented
    x, y = (a, b) if width_of(a) >= width_of(b) else (b, a)
    first, second = x.recipe, y.recipe
    adapts = (y.requires_grad or not x.requires_grad) and width_of(y) < width_of(x)
    if not (adapts or (x.requires_grad and y.requires_grad)):
        return NotImplemented
    freed = [is_freed(r.head.weight) for r in (first, second)]
    head = _joined(first, second)
    if head is None or have_same_rows(first, second) or freed[0] != freed[1]:
        return NotImplemented
    for recipe in (first, second):
        recipe.check_versions()
    needs_x, needs_y = (z.recipe.needs if z.requires_grad else NO_NEEDS for z in (x, y))
    skips_first = first.head.skips_first or not needs_x[0]
    fields = {name: getattr(head, name) for name in ("hidden", "bias", "low_rank", "logits_dtype")}
    recipe = first.with_head(**fields, skips_first=skips_first).replace(
        needs=(
            needs_x[0] or needs_y[0],
            needs_x[1],
            needs_x[2] or needs_y[2],
            needs_x[3] or needs_y[1],
        ),
        formula=Direct(torch.promote_types(a.dtype, b.dtype)),
        watch=Watches((first.watch, second.watch)),
        trains=first.trains or second.trains,
        inference=first.inference and second.inference,
    )
    return LazySum.apply(x, y, recipe)


def is_summable(z: LazyLogits) -> bool:
    recipe, logits = z.recipe, z.recipe.logits
    plain = recipe.axis is None and recipe.shard is None and not recipe.inputs
    return plain and z.from_head and logits is not None and not logits.capped


def width_of(z: LazyLogits) -> int:
    return z.recipe.head.weight.shape[1]


def used_columns(head: Head) -> int:
    """The number of columns of `hidden`, without the padding that `side_by_side` adds."""
    rank = 0 if head.low_rank is None else head.low_rank.shape[1]
    return head.weight.shape[1] + rank


def _joined(first: Recipe, second: Recipe) -> Head | None:
    """A head whose logits are the sum of the logits of both recipes, or None.

    None if the matrices of several adapters, copied into one `low_rank`, would be wider than a
    quarter of the weight, if the dtypes cannot be combined, if the logits of `first` are scaled, or
    if the second head has a quantised weight or a `low_rank` of its own.
    """
    x, y = first.head, second.head
    scale, dtype = second.logits.pre, x.hidden.dtype  # pyright: ignore[reportOptionalMemberAccess]
    common = torch.promote_types(dtype, y.hidden.dtype)
    fits = common == dtype or (common == torch.float32 and dtype.itemsize == 2)
    if not fits or first.logits.pre != 1 or y.low_rank is not None:  # pyright: ignore
        return None
    if is_quantized(y.weight):
        return None
    wide = torch.promote_types(x.dtype, torch.promote_types(y.dtype, common))
    if wide not in (dtype, torch.promote_types(dtype, torch.float32)):
        return None
    low_rank, bias = y.weight, x.bias
    with torch.inference_mode(False), torch.no_grad():
        if x.low_rank is not None:
            if 4 * (used_columns(x) - x.weight.shape[1] + y.weight.shape[1]) > x.weight.shape[1]:
                return None
            full = torch.promote_types(x.low_rank.dtype, y.weight.dtype)
            low_rank = torch.cat([x.low_rank.to(full), y.weight.to(full)], 1)
        hidden = side_by_side(x.hidden[..., : used_columns(x)], (y.hidden * scale).to(dtype))
        if y.bias is not None:
            bias = y.bias.to(wide) * scale
            bias = bias if x.bias is None else x.bias.to(wide) + bias
    logits_dtype = None if wide == dtype else wide
    return x.replace(hidden=hidden, bias=bias, low_rank=low_rank, logits_dtype=logits_dtype)


class LazySum(Node):
    """x + y for lazy logits of two heads.

    In `recipe`, that of the sum, the last columns of `low_rank` are the weight of y's head.
    """

    @staticmethod
    def forward(ctx, x, y, recipe):
        ctx.set_materialize_grads(False)
        ctx.watch, ctx.likes = recipe.watch, (described(x), described(y))
        heads = x.recipe.head, y.recipe.head
        ctx.tensors = [
            [None if t is None else described(t) for t in head.tensors] for head in heads
        ]
        ctx.used, ctx.scale = used_columns(heads[0]), y.recipe.logits.pre
        return x.derived(recipe, torch.add, (x, y))

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return None, None, None
        if any(joint.root is ctx.watch for joint in shares_of(g)):
            g.refuse_shared()  # this call raises, because g is incomplete (see `Joint`)
        parts, of_values = split(g)
        gradients = []
        pairs = zip(ctx.likes, LazySum.divided(ctx, parts), strict=True)
        for need, (like, own) in zip(ctx.needs_input_grad, pairs, strict=False):
            dtype = like.dtype
            values = None if of_values is None else of_values.to(dtype)
            computes = tuple(
                lambda compute=compute, dtype=dtype: compute().to(dtype)
                for compute in computes_of(g)
            )
            shares = shares_of(g)
            d = gradient_of(like, own, values, computes, g, is_projected(g), shares)
            gradients.append(d if need else None)
        return *gradients, None

    @staticmethod
    def divided(ctx, parts: Parts) -> list[Parts]:
        """Splits the gradients of the joined head's tensors into those of x's and of y's head."""
        (hidden, *_, low_rank), (of_y, *_) = ctx.tensors
        d_hidden, d_weight, d_bias, d_low_rank = parts
        used, rank = ctx.used, 0 if low_rank is None else low_rank.shape[1]
        of_first = of_second = d_old = d_new = d_bias_y = None
        if d_hidden is not None:
            of_first = pad(d_hidden[..., :used], (0, hidden.shape[-1] - used))
            of_second = d_hidden[..., used : used + of_y.shape[-1]] * ctx.scale
        if d_low_rank is not None:
            d_old = d_low_rank[:, :rank] if rank else None
            d_new = d_low_rank[:, rank:]
        if d_bias is not None:
            d_bias_y = d_bias * ctx.scale
        both = (of_first, d_weight, d_bias, d_old), (of_second, d_new, d_bias_y, None)
        pairs = zip(both, ctx.tensors, strict=True)
        return [tuple(map(cast_like, own, tensors)) for own, tensors in pairs]  # pyright: ignore


def cast_like(d: Tensor | None, like: Any) -> Tensor | None:
    return None if d is None or like is None else d.to(like.dtype)
