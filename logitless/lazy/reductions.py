"""Functions of lazy logits that reduce the vocabulary: losses and statistics.

Each result has the dtype that PyTorch would return. Some functions are computed from the statistics
of our own losses. For the other functions, PyTorch's function runs on some rows at a time
(row_function.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses.cross_entropy import cross_entropy
from ..losses.dense_teacher import kl_div, soft_cross_entropy
from ..losses.statistics import logsumexp, row_stats, token_logprobs
from . import values, views
from .gradient import PROJECTED
from .logits import LazyLogits, UnscaledLogits
from .nodes import Op
from .row_function import by_rows, summed_by_rows


def dtype_of(z: LazyLogits, kinds: tuple[str, ...] = ("cuda",)) -> torch.dtype:
    """The dtype of PyTorch's result: fp32 under autocast on a device in `kinds`, else z.dtype."""
    kind, half = z.device.type, z.dtype in (torch.float16, torch.bfloat16)
    cast = half and kind in kinds and torch.is_autocast_enabled(kind)
    return torch.float32 if cast else z.dtype


def is_vocabulary(z: LazyLogits, dim: Any) -> bool:
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (views.axis_of(z), views.axis_of(z) - z.dim())


# --- losses


def cross_entropy_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    deprecated = size_average is not None or reduce is not None
    second = views.axis_of(z) == min(z.dim() - 1, 1)  # PyTorch expects the classes in dimension 1
    if not second or not z.recipe.of_logits or deprecated or not isinstance(target, Tensor):
        return NotImplemented
    options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    if target.is_floating_point():
        return _soft_cross_entropy(z, target, **options)
    if target.dim() != z.dim() - 1:
        return NotImplemented
    loss = cross_entropy(
        UnscaledLogits(z), target, ignore_index=ignore_index, **options, **z.recipe.reads
    )
    if reduction == "mean":  # PyTorch's mean of no rows, or of no weight, is NaN
        mass = target != ignore_index
        if weight is not None:
            mass = torch.where(mass, weight[target.clamp(0, len(weight) - 1)], 0.0)
        loss = torch.where(mass.sum() == 0, torch.nan, loss)
    return loss.to(dtype_of(z, ("cuda", "cpu")))


def _soft_cross_entropy(z: LazyLogits, probs: Tensor, **options):
    """F.cross_entropy with class probabilities. Its mean divides by the number of rows."""
    known = type(probs) is Tensor and probs.shape == z.shape and probs.dtype == z.dtype
    if not known or probs.requires_grad or z.recipe.shard is not None or not probs.numel():
        return NotImplemented
    if z.recipe.axis is not None:
        probs = probs.movedim(z.recipe.axis, -1)
    loss = soft_cross_entropy(UnscaledLogits(z), probs, **options, **z.recipe.reads)
    return loss.to(dtype_of(z, ("cuda", "cpu")))


def unlogged(z: LazyLogits) -> LazyLogits:
    """The logits of which z is the log_softmax. Their values may be z, as log_softmax(z) = z."""
    return values.changed(z, Op(lambda t: t, adds=frozenset({PROJECTED})), log=False)


def nll_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean",
):  # fmt: skip
    if not z.recipe.log or z.recipe.factor != 1 or z.recipe.after:
        return NotImplemented
    if isinstance(target, Tensor) and target.is_floating_point():
        return NotImplemented  # PyTorch raises
    return cross_entropy_loss(
        unlogged(z), target, weight, size_average, ignore_index, reduce, reduction
    )


def kl_div_loss(input, target, size_average=None, reduce=None, reduction="mean", log_target=False):
    """F.kl_div for a lazy input, a lazy target, or both."""
    known = isinstance(input, Tensor) and isinstance(target, Tensor)
    known = known and size_average is None and reduce is None and input.shape == target.shape
    divisor = {"sum": 1, "mean": input.numel(), "batchmean": len(input)}.get(reduction)
    if not known or not divisor or input.dim() < 2 or input.dtype != target.dtype:
        return NotImplemented
    lazy = [t for t in (input, target) if isinstance(t, LazyLogits)]
    if any(not t.from_head or t.recipe.axis is not None for t in lazy):
        return NotImplemented
    if len(lazy) == 2:
        total = _lazy_kl_div(input, target, log_target)
    else:
        (z,) = lazy
        other = target if z is input else input

        def divergence(values: Tensor, rows: Tensor) -> Tensor:
            pair = (values, rows) if z is input else (rows, values)
            return F.kl_div(*pair, reduction="none", log_target=log_target).sum(-1)

        total = summed_by_rows(z, divergence, other)
    if total is NotImplemented:
        return NotImplemented
    return (total / divisor).to(dtype_of(lazy[0], ("cuda", "cpu")))


def _lazy_kl_div(input: LazyLogits, target: LazyLogits, log_target: bool):
    """The sum of F.kl_div of two lazy log_softmax, if at most one of them needs a gradient."""
    recipes = (input.recipe, target.recipe)
    plain = all(r.log and r.factor == 1 and not r.after and r.shard is None for r in recipes)
    if not plain or not log_target:
        return NotImplemented
    grad = torch.is_grad_enabled()
    student, teacher, direction = input, target, "forward"
    if grad and target.requires_grad:
        student, teacher, direction = target, input, "reverse"
    if grad and teacher.requires_grad:
        return NotImplemented
    student, teacher = unlogged(student), unlogged(teacher)
    return kl_div(student, teacher, direction=direction, reduction="sum")


# --- statistics


def log_sum_exp(z: LazyLogits, dim, keepdim=False):
    if not is_vocabulary(z, dim) or not z.recipe.of_logits:
        return NotImplemented
    lse = logsumexp(UnscaledLogits(z), **z.recipe.reads).to(dtype_of(z))
    return lse.unsqueeze(-1) if keepdim else lse


def gather(z: LazyLogits, dim, index, **kwargs):
    if kwargs or not is_vocabulary(z, dim) or index.shape[:-1] != z.shape[:-1]:
        return NotImplemented
    recipe = z.recipe
    if recipe.after:
        picked = by_rows(z, lambda t, ids: t.gather(-1, ids), index)
        return picked if picked is NotImplemented else picked[0]
    if recipe.log:
        picked = recipe.factor * token_logprobs(
            UnscaledLogits(z), index, ignore_index=None, **recipe.reads
        )
    else:
        picked = row_stats(UnscaledLogits(z), index, ignore_index=None, **recipe.reads).picked
    return picked.to(z.dtype)  # pyright: ignore


def take_along_dim(z: LazyLogits, indices, dim=None, **kwargs):
    fits = isinstance(indices, Tensor) and indices.dim() == z.dim()
    return gather(z, dim, indices, **kwargs) if fits else NotImplemented


def argmax(z: LazyLogits, dim=None, keepdim=False):
    if not is_vocabulary(z, dim) or z.recipe.factor <= 0 or z.recipe.after:
        return NotImplemented
    with torch.no_grad():
        ids = row_stats(UnscaledLogits(z), argmax=True, **z.recipe.reads).argmax
    return ids.unsqueeze(-1) if keepdim else ids  # pyright: ignore


def _total(z: LazyLogits, dtype: torch.dtype | None) -> Tensor:
    """The sum over the vocabulary, (...), in the precision of statistics."""
    recipe = z.recipe
    if recipe.after:
        totals = by_rows(z, lambda t: t.sum(-1, dtype=dtype))
        return totals if totals is NotImplemented else totals[0]
    stats = row_stats(UnscaledLogits(z), total=True, **recipe.reads)
    total: Any = stats.total - z.shape[-1] * stats.lse if recipe.log else stats.total
    return recipe.factor * total


def _over(z: LazyLogits, dim: Any) -> tuple[int, ...] | None:
    """The dimensions in `dim` except the vocabulary.

    None if `dim` is invalid or does not include the vocabulary.
    """
    dims = range(z.dim()) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    if not all(isinstance(d, int) and -z.dim() <= d < z.dim() for d in dims):
        return None
    dims = {d % z.dim() for d in dims}
    return tuple(sorted(dims - {z.dim() - 1})) if z.dim() - 1 in dims else None


def sum(z: LazyLogits, dim=None, keepdim=False, dtype=None):
    return _summed(z, dim, keepdim, dtype, mean=False)


def mean(z: LazyLogits, dim=None, keepdim=False, dtype=None):
    return _summed(z, dim, keepdim, dtype, mean=True)


def _summed(z: LazyLogits, dim, keepdim, dtype, mean: bool):
    rows = _over(z, dim)
    wide = dtype in (None, z.dtype, torch.float32) and not (
        dtype == torch.float32 and z.dtype == torch.float64
    )
    if rows is None or not wide or not z.is_floating_point() or not z.numel():
        return NotImplemented
    total = _total(z, None if z.dtype == torch.float64 else torch.float32)
    if total is NotImplemented:
        return total
    count = z.shape[-1]
    for size in (z.shape[d] for d in rows):
        count *= size
    total = total.unsqueeze(-1) if keepdim else total
    total = total.sum(rows, keepdim) if rows else total
    # Autocast casts sums to fp32, and no means.
    return (total / count).to(dtype or z.dtype) if mean else total.to(dtype or dtype_of(z))


def reduced(function: Callable, outputs: type | None = None):
    """Returns function(z, ..., dim, keepdim) for lazy logits, computed on some rows at a time.

    `outputs` is the type of PyTorch's result if the function returns several tensors.
    """

    def reduction(z: LazyLogits, *args, **kwargs):
        args, keepdim = list(args), kwargs.pop("keepdim", False)
        leading = 1 if function is torch.topk else 0  # arguments before dim
        dim = kwargs.pop("dim", -1 if leading else None)
        if len(args) > leading:
            dim, *more = args[leading:]
            keepdim, args = (more[0] if len(more) == 1 else keepdim), args[:leading]
            if len(more) > 1 or (leading and more):
                return NotImplemented
        if not is_vocabulary(z, dim) or not isinstance(keepdim, bool) or "out" in kwargs:
            return NotImplemented
        options = kwargs if leading else {**kwargs, "keepdim": keepdim}

        def of_rows(values: Tensor):
            result = function(values, *args, dim=-1, **options)
            return tuple(result) if isinstance(result, tuple) else result

        results = by_rows(z, of_rows)
        if results is NotImplemented:
            return results
        return results[0] if outputs is None else outputs(results)

    return reduction


def of_all(function: Callable, by_dim: Callable):
    """any or all. Without a dimension, they reduce the vocabulary first, and then the rows."""

    def reduction(z: LazyLogits, *args, **kwargs):
        if args or kwargs:
            return by_dim(z, *args, **kwargs)
        rows = by_dim(z, -1)
        return rows if rows is NotImplemented else function(rows)

    return reduction


def extreme(function: Callable, amax: Callable, by_dim: Callable):
    """max or min, of one dimension or of all values."""

    def reduction(z: LazyLogits, *args, **kwargs):
        if args or kwargs:
            first = args[0] if args else None
            return NotImplemented if isinstance(first, Tensor) else by_dim(z, *args, **kwargs)

        def of_rows(t: Tensor) -> tuple[Tensor, Tensor]:
            value = amax(t, -1)
            return value, (t == value[:, None]).sum(-1)

        results = by_rows(z, of_rows) if z.numel() else NotImplemented
        if results is NotImplemented:
            return results
        rows, ties = results
        value = function(rows.detach())
        # PyTorch divides the gradient equally among all values that are equal to the extreme value.
        weight = torch.where(rows == value, ties, 0).to(rows.dtype)
        shares = ((rows - rows.detach()).nan_to_num(0.0) * (weight / weight.sum())).sum()
        return value + shares.to(value.dtype) if rows.requires_grad else value

    return reduction
