"""Losses of torch.nn.functional over lazy logits. Each loss has the dtype of PyTorch's own loss."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..losses.cross_entropy import cross_entropy
from ..losses.dense_teacher import kl_div, soft_cross_entropy
from .by_rows import by_rows, mean_by_rows
from .formula import Formula
from .logits import LazyLogits, UnscaledLogits, derived
from .ops import applied
from .reductions import dtype_of, sum
from .rows import axis_of

signature = functools.cache(inspect.signature)


def cross_entropy_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    deprecated = size_average is not None or reduce is not None
    second = axis_of(z) == min(z.dim() - 1, 1)  # PyTorch expects the classes in dimension 1
    if not second or deprecated or not isinstance(target, Tensor) or isinstance(target, LazyLogits):
        return NotImplemented
    options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    if z.recipe.logits is None:
        return _of_targets(F.cross_entropy, z, target, ignore_index=ignore_index, **options)
    if target.is_floating_point():
        return _soft_cross_entropy(z, target, **options)
    if target.dim() != z.dim() - 1:
        return NotImplemented
    loss = cross_entropy(
        UnscaledLogits(z), target, ignore_index=ignore_index, **options, **z.recipe.logits.reads
    )
    if reduction == "mean":  # PyTorch's mean is NaN if its divisor is 0
        loss = torch.where(_mass(target, weight, ignore_index) == 0, torch.nan, loss)
    return loss.to(dtype_of(z, ("cuda", "cpu")))


def _mass(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of PyTorch's mean over the targets that are not ignored.

    The divisor is the number of these targets, or the sum of their weights if `weight` is given.
    """
    mass = target != ignore_index
    if weight is not None:
        mass = torch.where(mass, weight[target.clamp(0, len(weight) - 1)], 0.0)
    return mass.sum()


def _of_targets(function: Callable, z: LazyLogits, target: Tensor, *, reduction, **options):
    """Computes F.cross_entropy or F.nll_loss of lazy values such as probabilities.

    PyTorch's own function runs on some rows at a time.
    """
    plain = z.dim() == 2 and target.shape == z.shape[:1] and not target.is_floating_point()
    weight = options["weight"]
    needed = weight is not None and weight.requires_grad
    if not plain or needed or reduction not in ("none", "sum", "mean"):
        return NotImplemented

    def of_rows(values: Tensor, labels: Tensor) -> Tensor:
        return function(values, labels, reduction="none", **options)

    kinds = ("cuda", "cpu") if function is F.cross_entropy else ("cuda",)
    dtype = dtype_of(z, kinds)
    if reduction == "none":
        losses = by_rows(z, of_rows, target)
        return losses if losses is NotImplemented else losses[0].to(dtype)
    loss = mean_by_rows(z, of_rows, target)
    if loss is NotImplemented:
        return loss
    rows = len(target)
    mass = 1 if reduction == "sum" else _mass(target, weight, options["ignore_index"])
    return (loss * rows / mass).to(dtype)


def _soft_cross_entropy(z: LazyLogits, probs: Tensor, **options):
    """Computes F.cross_entropy for a target that holds class probabilities.

    With reduction="mean", the mean is over all rows.
    """
    known = type(probs) is Tensor and probs.shape == z.shape and probs.dtype == z.dtype
    if not known or probs.requires_grad or z.recipe.shard is not None or not probs.numel():
        return NotImplemented
    if z.recipe.axis is not None:
        probs = probs.movedim(z.recipe.axis, -1)
    loss = soft_cross_entropy(UnscaledLogits(z), probs, **options, **z.recipe.logits.reads)
    return loss.to(dtype_of(z, ("cuda", "cpu")))


def unlogged(z: LazyLogits) -> LazyLogits:
    """The logits y of lazy log-probabilities z = log_softmax(y)."""
    formula: Any = z.recipe.formula
    while formula.direct.log:
        formula = next(t for t in formula.args if isinstance(t, Formula))
    return derived(z.recipe.replace(formula=formula), z)


def nll_loss(
    z: LazyLogits, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean",
):  # fmt: skip
    if isinstance(target, Tensor) and target.is_floating_point():
        return NotImplemented  # PyTorch raises
    direct = z.recipe.direct
    if direct is not None and direct.log and direct.factor == 1:
        return cross_entropy_loss(
            unlogged(z), target, weight, size_average, ignore_index, reduce, reduction
        )
    if z.recipe.axis is not None or size_average is not None or reduce is not None:
        return NotImplemented
    options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    return _of_targets(F.nll_loss, z, target, **options)


def loss_of_values(function: Callable):
    """Returns a version of an elementwise loss, such as F.kl_div, for lazy logits."""

    def loss(*args, **kwargs):
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        pair = (given["input"], given["target"])
        known = all(isinstance(t, Tensor) for t in pair) and pair[0].shape == pair[1].shape
        known = known and given.get("size_average") is None and given.get("reduce") is None
        reduction = given["reduction"]
        divisor = {"none": 1, "sum": 1, "mean": pair[0].numel(), "batchmean": len(pair[0])}
        if not known or not divisor.get(reduction):
            return NotImplemented
        if function is F.kl_div and reduction != "none":
            total = _lazy_kl_div(*pair, given["log_target"])
            if total is not NotImplemented:
                return total / divisor[reduction]
        each = applied(function, (), {**given, "reduction": "none"})
        if reduction == "none" or each is NotImplemented:
            return each
        total = sum(each)
        return total if total is NotImplemented else total / divisor[reduction]

    return loss


def _lazy_kl_div(input: Tensor, target: Tensor, log_target: bool):
    """Computes F.kl_div with reduction="sum" for two lazy results of log_softmax.

    In all other cases, the result is NotImplemented. The result is also NotImplemented if both
    `input` and `target` need a gradient.
    """
    if not (isinstance(input, LazyLogits) and isinstance(target, LazyLogits)):
        return NotImplemented
    recipes = [input.recipe, target.recipe]
    plain = all(r.direct is not None and r.direct.log and r.direct.factor == 1 for r in recipes)
    plain = plain and all(r.axis is None and r.shard is None for r in recipes)
    usable = input.from_head and target.from_head and input.dtype == target.dtype
    if not plain or not usable or not log_target or input.dim() < 2:
        return NotImplemented
    grad = torch.is_grad_enabled()
    student, teacher, direction = input, target, "forward"
    if grad and target.requires_grad:
        student, teacher, direction = target, input, "reverse"
    if grad and teacher.requires_grad:
        return NotImplemented
    student, teacher = unlogged(student), unlogged(teacher)
    total = kl_div(student, teacher, direction=direction, reduction="sum")
    return total.to(dtype_of(input, ("cuda", "cpu")))
