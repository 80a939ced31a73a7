"""Operations that compute new values from lazy logits and return lazy logits, such as scaling."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contract import has_values
from ..core.option_checks import LEAST, MOST
from ..heads.head import Head
from ..heads.quantized import is_freed, is_quantized
from . import views
from .elementwise import applied
from .formula import Direct
from .logits import LazyLogits, kept
from .nodes import LazyBias, Op
from .recipe import own
from .sums import is_summable, summed
from .weight_changes import Watch


def changed(z: LazyLogits, op: Op, **fields) -> LazyLogits:
    """A copy of z whose `Direct` formula has these field values, or NotImplemented."""
    formula = replace(z.recipe.formula, **fields)  # pyright: ignore[reportArgumentType]
    if not all(LEAST <= number <= MOST for number in formula.reads.values()):
        return NotImplemented  # our losses do not accept this temperature or softcap
    return kept(z, z.recipe.replace(formula=formula), None, op)


def same(z: LazyLogits, **kwargs):
    return NotImplemented if kwargs else z


def to(z: LazyLogits, *args, **kwargs):
    """Casts the logits to another dtype on the same device, or returns NotImplemented."""
    arguments = []
    for a in (*args, *kwargs.values()):
        arguments += [a.device, a.dtype] if isinstance(a, Tensor) else [a]
    device = [a for a in arguments if isinstance(a, (str, torch.device))]
    dtypes = [a for a in arguments if isinstance(a, torch.dtype)]
    if kwargs.keys() - {"dtype", "device"} or any(torch.device(d) != z.device for d in device):
        return NotImplemented
    if len(dtypes) + len(device) < len(arguments):
        return NotImplemented
    dtype = dtypes[0] if dtypes else z.dtype
    if dtype == z.dtype:
        return z
    if is_summable(z) and dtype == own_dtype(z.recipe.head) and z.recipe.logits.pre == 1:
        # Rounding fp32 logits to the dtype of `hidden` gives the logits of a head computing in it.
        recipe = z.recipe.with_head(logits_dtype=None).replace(formula=Direct(dtype))
        return kept(z, recipe, None, Op(lambda t: t.to(dtype), pull=lambda d: d))
    if dtype != torch.float32 or z.recipe.logits is None or not z.is_floating_point():
        return applied(Tensor.to, (z, dtype), {})
    return changed(z, Op(lambda t: t.to(dtype), pull=lambda d: d), dtype=dtype)


def own_dtype(head: Head) -> torch.dtype | None:
    """The dtype of the head's hidden states, or None if the bias has another."""
    dtype = head.hidden.dtype
    return dtype if head.bias is None or head.bias.dtype == dtype else None


def number(by: Any) -> float | None:
    """`by` as a float if it is a number or a 0-d tensor on the CPU, else None.

    A tensor on a GPU is not read, because the host would wait.
    """
    readable = isinstance(by, Tensor) and by.dim() == 0 and by.is_cpu and has_values(by)
    if readable and not by.requires_grad:
        by = by.item()
    return float(by) if isinstance(by, (int, float)) and not isinstance(by, bool) else None


def scaling(factor: float) -> Op:
    return Op(lambda t: t * factor, pull=lambda d: d * factor)


def times(z: LazyLogits, by: Any, **kwargs):
    factor, direct = number(by), z.recipe.direct
    if kwargs or factor is None or direct is None:
        return NotImplemented
    if direct.log:
        return changed(z, scaling(factor), factor=direct.factor * factor)
    if factor == 0 or factor != factor:
        return NotImplemented
    field = "post" if direct.capped else "pre"
    positive = z if factor > 0 else negated(z)
    return changed(positive, scaling(abs(factor)), **{field: getattr(direct, field) * abs(factor)})


def divided(z: LazyLogits, by: Any, **kwargs):
    by = number(by)
    return NotImplemented if by is None or by == 0 else times(z, 1 / by, **kwargs)


def negated(z: LazyLogits) -> LazyLogits:
    """The logits -z, which the head computes from -hidden and -bias."""
    recipe = z.recipe
    hidden, _, bias, _ = recipe.head.tensors
    with torch.inference_mode(False), torch.no_grad():
        hidden, bias = -hidden, None if bias is None else -bias

    def back(parts):
        d_hidden, d_weight, d_bias, d_low_rank = parts
        return (
            None if d_hidden is None else -d_hidden,
            d_weight,
            None if d_bias is None else -d_bias,
            d_low_rank,
        )

    # The gradient of a weight, Σ d_logits · hidden, keeps its sign: both factors change theirs.
    return kept(z, recipe.with_head(hidden=hidden, bias=bias), back, scaling(-1.0))


def tanh(z: LazyLogits):
    if z.recipe.logits is None or z.recipe.logits.capped:
        return NotImplemented
    return changed(z, Op(torch.tanh, linear=False, name="torch.tanh"), capped=True)


def log_softmax(z: LazyLogits, dtype: torch.dtype | None):
    if z.recipe.logits is None or dtype not in (None, z.dtype, torch.float32):
        return NotImplemented
    axis, dtype = views.axis_of(z), dtype or z.dtype
    op = Op(
        lambda t: t.log_softmax(axis, dtype=dtype), linear=False, projects=False,
        name="log_softmax",
    )  # fmt: skip
    return changed(z, op, log=True, dtype=dtype)


# --- operations with one number per column


def _per_column(t: Any, z: LazyLogits) -> Tensor | None:
    """t as (V,) if it has one number per column, else None."""
    if not isinstance(t, Tensor) or isinstance(t, LazyLogits) or t.device != z.device:
        return None
    fits = 0 < t.dim() <= z.dim() and t.shape[-1] == t.numel() == z.shape[-1]
    return t.reshape(-1) if fits else None


def _takes_columns(z: LazyLogits) -> bool:
    recipe, logits = z.recipe, z.recipe.logits
    of_columns = recipe.axis is None and recipe.shard is None
    return of_columns and logits is not None and not logits.capped


def _head_in(head: Head, dtype: torch.dtype) -> Head | None:
    """A head with logits in `dtype`, so that a bias in `dtype` is not rounded, or None."""
    if dtype == head.dtype:
        return head
    narrow = head.hidden.dtype in (torch.float16, torch.bfloat16)
    return head.replace(logits_dtype=dtype) if narrow and dtype == torch.float32 else None


def plus(z: LazyLogits, other: Any, *, alpha: Any = 1, sign: float = 1.0):
    """`logits + other` as the logits of a changed head, or NotImplemented.

    `other` is a number, a tensor with one number per column, or lazy logits of another head
    (sums.py). Numbers are added to the head's bias, unless the logits are scaled: in 16 bits, both
    `other / scale` and the rounded product `(other / scale) * scale` can overflow.
    """
    if isinstance(other, LazyLogits):
        summable = alpha == 1 and is_summable(z) and is_summable(other)
        return summed(z, other if sign > 0 else negated(other)) if summable else NotImplemented
    if alpha != 1 or not _takes_columns(z) or z.recipe.logits.pre != 1:
        return NotImplemented
    if type(other) in (int, float):
        if abs(other) > torch.finfo(z.dtype).max:
            return NotImplemented
        other = torch.full((z.shape[-1],), other, dtype=z.dtype, device=z.device)
    bias = _per_column(other, z)
    if bias is None or not bias.is_floating_point():
        return NotImplemented
    recipe, dtype = z.recipe, torch.promote_types(z.dtype, bias.dtype)
    head = _head_in(recipe.head, dtype)
    if head is None:
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        total = bias.detach().to(head.dtype) * sign
        total = total if head.bias is None else head.bias + total
    new = recipe.with_head(bias=total, logits_dtype=head.logits_dtype).replace(
        needs=(*recipe.needs[:2], recipe.needs[2] or bias.requires_grad, recipe.needs[3]),
        formula=replace(recipe.logits, dtype=dtype),
    )
    return LazyBias.apply(z, other, new, sign)  # pyright: ignore


def minus(z: LazyLogits, other: Any, *, alpha: Any = 1):
    return plus(z, other, alpha=alpha, sign=-1.0)


def masked_fill(z: LazyLogits, mask: Tensor, value: Any):
    """Logits with `value` in the masked columns.

    Their rows of the weight become 0, and their bias `value / pre`, because the formula multiplies
    by `pre`. That copies the weight, so if it is larger than the logits, the mask becomes part of
    the formula instead.
    """
    columns, recipe, value = _per_column(mask, z), z.recipe, number(value)
    if columns is None or value is None or not _takes_columns(z):
        return NotImplemented
    head, pre = _head_in(recipe.head, z.dtype), recipe.logits.pre
    if columns.dtype != torch.bool or head is None:
        return NotImplemented
    _, weight, bias, low_rank = head.tensors
    # In 16 bits, `value / pre` or the rounded product `(value / pre) * pre` can overflow, so finite
    # values are accepted only up to ±`most`.
    most = torch.finfo(z.dtype).max * (1 if pre == 1 else 0.5 * min(pre, 1))
    inside = abs(value) <= most or abs(value) == torch.inf
    fixed = is_quantized(weight) or is_freed(weight)
    if not inside or fixed or weight.numel() > z.numel():
        return NotImplemented
    recipe.check()
    with torch.inference_mode(False), torch.no_grad():
        columns = own(columns)
        weight = weight.masked_fill(columns[:, None], 0)
        low_rank = None if low_rank is None else low_rank.masked_fill(columns[:, None], 0)
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        bias = bias.to(head.dtype).masked_fill(columns, value / pre)
    new = recipe.with_head(
        weight=weight, bias=bias, low_rank=low_rank, logits_dtype=head.logits_dtype
    )
    new = new.replace(watch=Watch(weight))
    before = None if recipe.head.bias is None else recipe.head.bias.dtype

    def back(parts):
        d_hidden, d_weight, d_bias, d_low_rank = parts
        d_weight, d_low_rank = (
            None if d is None else d.masked_fill(columns[:, None], 0)
            for d in (d_weight, d_low_rank)
        )
        if d_bias is not None:
            d_bias = d_bias.masked_fill(columns, 0).to(before)
        return d_hidden, d_weight, d_bias, d_low_rank

    op = Op(lambda t: t.masked_fill(columns, value), pull=lambda d: d.masked_fill(columns, 0))
    return kept(z, new, back, op)
