"""Autograd nodes of losses over lazy logits, whose backward returns a LazyGradient."""

from typing import Any

from torch import Tensor

from ..contract import TEACHER
from ..core.autograd import Node
from ..core.evaluate import evaluate
from ..core.loss import RowLoss
from ..core.source import teacher_rows
from ..heads.run import Call, Kept, needs_of
from .gradient import described, pulled_back
from .nodes import final, gradient_of
from .recipe import Recipe, RowInput


def _start(ctx, z: Any, loss, row_weight, reduction, grad, row_inputs, anchor) -> Call:
    ctx.like, ctx.anchor = described(z), anchor
    _, ctx.recipe = z.recipe.flatten()
    head = z.recipe.constant_head(ctx.needs_input_grad[0])
    needs = needs_of(head.tensors, row_weight, row_inputs, grad)
    return Call(head, loss, row_weight, reduction, needs)


def _finish(ctx, call: Call, d, *upstream: Tensor | None) -> Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    parts, loss = d.tensors, call.loss
    recipe: Recipe = ctx.recipe
    recipe = recipe.replace(head=recipe.head.rebuild([*call.head.tensors, None]))
    if isinstance(loss, OfValues):
        recipe = recipe.replace(inputs=loss.inputs)

    def compute() -> Tensor:
        axis = -1 if recipe.axis is None else recipe.axis
        loss, factor = of_values(call.loss, recipe)

        def function(z: Tensor):
            z = z.movedim(axis, -1) / factor
            result = evaluate(z, loss, call.reduction, call.row_weight)
            # Only the first output of a reduced loss has an upstream gradient.
            return result[: len(upstream)] if isinstance(result, tuple) else result

        return pulled_back(function, recipe.values(), *upstream)

    # A loss over log p = log_softmax(logits) can be computed from the logits. Its gradient of log p
    # then has a term that the backward of log_softmax removes, and must not be read.
    projected = recipe.logits is None and not isinstance(loss, OfValues)
    gradient = gradient_of(ctx.like, parts, None, (compute,), None, projected)
    return final(gradient, ctx.anchor, *upstream)


def of_values(loss: RowLoss, recipe: Recipe) -> tuple[RowLoss, float]:
    """Converts a loss over the head's logits into one over the values of the lazy logits.

    The caller divides the values by the returned number first.
    """
    if isinstance(loss, OfValues):
        return loss.of_values(), 1.0
    if recipe.shard is not None:
        raise RuntimeError(
            "the gradient of lazy logits of several ranks must not be read, because each rank"
            " computes only its own columns. Use logits.materialize() before the loss."
        )
    direct = recipe.direct
    assert direct is not None
    softcap = None if direct.capped else loss.reading.softcap
    unscaled = loss.fold_scale(1 / direct.scale, softcap)
    assert unscaled is not None
    lead = recipe.lead
    teachers = {TEACHER: lambda t: teacher_rows(t, slice(None)).view(*lead, -1)}
    return unscaled.map_tensors(teachers), direct.factor


class OfValues:
    """Base class of losses that first apply a recipe's formula to the head's logits."""

    inputs: tuple[RowInput, ...]  # the recipe's inputs

    def of_values(self) -> Any:
        """A loss that takes the recipe's values instead of the head's logits."""
        raise NotImplementedError


class LazyReducedLoss(Node):
    """A mean or sum of losses."""

    @staticmethod
    def forward(ctx, z, row_weight, loss, reduction, grad, anchor, *row_inputs):
        ctx.set_materialize_grads(False)
        call = _start(ctx, z, loss, row_weight, reduction, grad, row_inputs, anchor)
        result, ctx.kept = Kept.of(ctx, call)
        return result

    @staticmethod
    def backward(ctx, upstream, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        # Read once, because activation checkpointing unpacks them only once.
        tensors = ctx.saved_tensors
        call = ctx.kept.rebuild(tensors)
        if upstream is None:
            return (None,) * (6 + len(call.loss.row_inputs))
        d = ctx.kept.gradients_of(tensors, (upstream,))
        d_z = _finish(ctx, call, d, upstream)
        return d_z, d.row_weight, None, None, None, None, *d.row_inputs


class LazyPerRowLoss(Node):
    """A loss with one value per row."""

    @staticmethod
    def forward(ctx, z, loss, anchor, grad, *row_inputs):
        call = _start(ctx, z, loss, None, "none", grad, row_inputs, anchor)
        outputs, ctx.kept = Kept.of(ctx, call)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        d = ctx.kept.gradients_of(tensors, upstream)
        call = ctx.kept.rebuild(tensors)
        return _finish(ctx, call, d, *upstream), None, None, None, *d.row_inputs
