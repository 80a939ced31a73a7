"""The autograd nodes of lazy logits, for heads, for operations and for losses.

Backward passes a LazyGradient (gradient.py) from node to node. An operation that materialised the
logits passes a plain tensor. A node without a gradient computes nothing in backward.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..contract import TEACHER
from ..core.autograd import Node, refuse_second
from ..core.evaluate import evaluate
from ..core.loss import RowLoss
from ..core.source import teacher_rows
from ..heads import per_row, total
from ..heads.products import without_autocast
from ..heads.total import Call, needs_of
from ..heads.unshard import in_memory
from .gradient import (
    PROJECTED,
    SHARED,
    Compute,
    LazyGradient,
    Like,
    Parts,
    added_parts,
    computes_of,
    limits_of,
    pulled_back,
    split,
)
from .recipe import Recipe, Watch, own, versions

if TYPE_CHECKING:
    from .logits import LazyLogits


class Anchor(Node):
    """Maps lazy logits to an empty tensor that depends on them in the graph.

    A node keeps this tensor, because the tensor holds no memory. A gradient that cannot be
    differentiated again depends on this tensor (refuse_second), so that a second differentiation
    raises.
    """

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        return z.recipe.head.hidden.new_empty(0)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def anchor_of(z: "LazyLogits") -> Tensor | None:
    return Anchor.apply(z) if torch.is_grad_enabled() and z.requires_grad else None  # pyright: ignore


def final(gradient: Tensor | None, *inputs: Any) -> Tensor | None:
    """The same gradient. If backward records a graph, a second differentiation raises."""
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    if isinstance(gradient, LazyGradient):
        gradient.parts = refuse_second(gradient.parts, inputs)  # pyright: ignore
    return refuse_second((gradient,), inputs)[0]


def gradient_of(
    like: Like,
    parts: Parts,
    dense: Tensor | None,
    computes: tuple[Compute, ...],
    source: Tensor | None = None,
    limits: frozenset[str] = frozenset(),
) -> Tensor | None:
    """The gradient with these parts, as `split` returns them.

    `source` is the upstream gradient that the result depends on.
    """
    if all(t is None for t in parts) and not computes:
        return dense
    g = LazyGradient.of(like, parts, dense, computes, limits)
    if torch.is_grad_enabled() and isinstance(source, LazyGradient):
        return refuse_second((g,), (source,))[0]
    return g


class LazyHead(Node):
    """The node that creates lazy logits from hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, shard, kind, trains):
        ctx.set_materialize_grads(False)
        tensors = (hidden, weight, bias)
        ctx.save_for_backward(*tensors)
        needs = tuple(t is not None and t.requires_grad for t in tensors)
        detached = head.replace(
            hidden=hidden.detach(), weight=weight.detach(),
            bias=None if bias is None else bias.detach(),
        )  # fmt: skip
        watch = Watch(detached.weight)
        ctx.module, ctx.shard, ctx.passed = head.module, shard, watch.passed
        return kind.of(
            Recipe(detached, needs, head.dtype, versions(*tensors), watch, trains, shard=shard)
        )

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.passed.append(True)
        if g is None:
            return (None,) * 7
        parts, dense = split(g)
        if dense is not None:
            hidden, weight, bias = ctx.saved_tensors
            if ctx.shard is not None:
                dense = dense.narrow(-1, ctx.shard.start, ctx.shard.width)
            rows = hidden.reshape(-1, hidden.shape[-1])
            flat = dense.reshape(len(rows), dense.shape[-1]).to(hidden.dtype)
            with without_autocast(hidden.device), in_memory(weight, ctx.module):
                more = (
                    (flat @ weight).view(hidden.shape) if ctx.needs_input_grad[0] else None,
                    flat.t() @ rows if ctx.needs_input_grad[1] else None,
                    flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None,
                )
            if ctx.shard is not None and ctx.shard.sums_hidden and more[0] is not None:
                ctx.shard.ranks.all_reduce(more[0]).wait()
            parts = added_parts(parts, more)
        return *parts, None, None, None, None


class Op(NamedTuple):
    """An operation on plain logits, and a function for its gradient."""

    function: Callable[[Tensor], Tensor]
    # Returns the gradient from the upstream gradient and the result. None for a linear function.
    pull: Callable[[Tensor, Tensor], Tensor] | None = None
    adds: frozenset[str] = frozenset()  # limits of a lazy gradient that the operation adds
    removes: frozenset[str] = frozenset()  # limits that it removes


class LazyOp(Node):
    """The node of an operation on lazy logits whose result is lazy too.

    `back` maps the gradients of the new hidden, weight and bias to the gradients of the old hidden,
    weight and bias. `op` is the same operation on plain logits, for a gradient of the values.
    """

    @staticmethod
    def forward(ctx, z, recipe, back, op, anchor):
        z.recipe.check(numbers=False)
        ctx.set_materialize_grads(False)
        ctx.like, ctx.back, ctx.op, ctx.anchor = described(z), back, op, anchor
        same_ranks = recipe.shard is z.recipe.shard  # whether both recipes have the same columns
        new = z.derived(recipe, op.function if same_ranks else None)
        if op.pull is not None:
            ctx.save_for_backward(*recipe.head.tensors)
            ctx.recipe, ctx.cell = recipe.with_tensors(None, None, None), new.cell
        return new

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return (None,) * 5
        parts, dense = split(g)
        parts = parts if ctx.back is None else ctx.back(parts)
        pulled = LazyOp.puller(ctx)
        computes = tuple(lambda compute=compute: pulled(compute()) for compute in computes_of(g))
        if dense is not None:
            dense = pulled(dense)
            if ctx.op.pull is not None:
                # The values are freed, as autograd frees saved tensors. A second backward computes
                # the values again.
                dense, ctx.cell = final(dense, ctx.anchor, g), None
        limits = (limits_of(g) | ctx.op.adds) - ctx.op.removes
        return gradient_of(ctx.like, parts, dense, computes, g, limits), None, None, None, None

    @staticmethod
    def puller(ctx) -> Callable[[Tensor], Tensor]:
        """Returns a function that maps a gradient of the result to a gradient of the argument."""
        like, (function, pull, *_) = ctx.like, ctx.op
        if pull is None:
            return lambda d: pulled_back(function, blank_like(like), d)
        saved, recipe, cell = ctx.saved_tensors, ctx.recipe, ctx.cell

        def pulled(d: Tensor) -> Tensor:
            known = None if cell is None else cell.values
            return pull(d, recipe.with_tensors(*saved).dense() if known is None else known)

        return pulled


def blank_like(like: Like) -> Tensor:
    """An expanded tensor of one number, for a function whose gradient does not depend on values."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)


class Materialize(Node):
    """The node that computes a plain tensor from lazy logits. The tensor may be written to."""

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        if z.origin.known:
            return z.dense().clone()
        return z.recipe.dense().data  # F.linear may return a view, which cannot be written to

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


# --- losses


def _start(ctx, z: "LazyLogits", loss, row_weight, reduction, grad, row_inputs, anchor) -> Call:
    ctx.like, ctx.anchor = described(z), anchor
    ctx.recipe = z.recipe.with_tensors(None, None, None)
    head = z.recipe.constant_head(ctx.needs_input_grad[0])
    needs = needs_of(head.tensors, row_weight, row_inputs, grad)
    return Call(head, loss, row_weight, reduction, needs)


def _finish(ctx, call: Call, d, *upstream: Tensor | None) -> Tensor | None:
    """The gradient of lazy logits, which holds the gradients d of hidden, weight and bias."""
    parts = (d.hidden, d.weight, d.bias)
    recipe: Recipe = ctx.recipe.with_tensors(*call.head.tensors)

    def compute() -> Tensor:
        axis = -1 if recipe.axis is None else recipe.axis
        loss, factor = of_values(call.loss, recipe)

        def function(z: Tensor):
            z = z.movedim(axis, -1) / factor
            return evaluate(z, loss, call.reduction, call.row_weight)

        return pulled_back(function, recipe.dense(), *upstream)

    if not ctx.needs_input_grad[0]:
        return None
    # A loss of log p may be computed as a loss of the logits. Its gradient of the logits is then
    # exact, but its gradient of log p is not.
    projects = recipe.log and not isinstance(call.loss, OfValues)
    limits = frozenset({PROJECTED} if projects else ())
    return final(
        gradient_of(ctx.like, parts, None, (compute,), None, limits), ctx.anchor, *upstream
    )


def of_values(loss: RowLoss, recipe: Recipe) -> tuple[RowLoss, float]:
    """A loss of the head's logits as a loss of the recipe's values, and the values' factor."""
    if isinstance(loss, OfValues):
        return loss.of_values(), 1.0
    if recipe.shard is not None:
        raise RuntimeError(
            "the gradient of lazy logits of several ranks must not be read, because each rank"
            " computes its columns only. Use logits.materialize() before the loss."
        )
    softcap = None if recipe.capped else loss.reading.softcap
    unscaled = loss.fold_scale(1 / recipe.scale, softcap)
    assert unscaled is not None
    lead = recipe.lead
    teachers = {TEACHER: lambda t: teacher_rows(t, slice(None)).view(*lead, -1)}
    return unscaled.map_tensors(teachers), recipe.factor


class OfValues:
    """A loss that computes the values of a recipe from the head's logits."""

    def of_values(self) -> Any:
        """The same loss as a function of the values."""
        raise NotImplementedError


class LazyReducedLoss(Node):
    """The node of a loss with a mean or sum over lazy logits. Its gradient is lazy too."""

    @staticmethod
    def forward(ctx, z, row_weight, loss, reduction, grad, anchor, *row_inputs):
        ctx.set_materialize_grads(False)
        call = _start(ctx, z, loss, row_weight, reduction, grad, row_inputs, anchor)
        value, ctx.kept = total.Kept.of(ctx, call)
        return value

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        # The saved tensors are read once, because activation checkpointing unpacks them only once.
        tensors = ctx.saved_tensors
        call = ctx.kept.call.rebuild(tensors)
        if upstream is None:
            return (None,) * (6 + len(call.loss.row_inputs))
        d = ctx.kept.gradients_of(tensors, upstream)
        d_z = _finish(ctx, call, d, upstream)
        return d_z, d.row_weight, None, None, None, None, *d.row_inputs


class LazyPerRowLoss(Node):
    """The node of a loss with one result per row of lazy logits. Its gradient is lazy too."""

    @staticmethod
    def forward(ctx, z, loss, anchor, *row_inputs):
        call = _start(ctx, z, loss, None, "none", True, row_inputs, anchor)
        outputs, ctx.kept = per_row.Kept.of(ctx, call)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        d = ctx.kept.gradients_of(tensors, upstream)
        call = ctx.kept.call.rebuild(tensors)
        return _finish(ctx, call, d, *upstream), None, None, *d.row_inputs


class LazyCat(Node):
    """Lazy logits of several batches of the same head, joined along their rows."""

    @staticmethod
    def forward(ctx, recipe, dim, *batches):
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.likes = dim, [described(z) for z in batches]
        return batches[0].derived(recipe)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return None, None, *(None for _ in ctx.likes)
        (d_hidden, *of_weight), dense = split(g)
        sizes = [like.shape[ctx.dim] for like in ctx.likes]

        def pieces(t: Tensor | None) -> tuple:
            return (None,) * len(sizes) if t is None else t.split(sizes, ctx.dim)

        gradients, limits = [], limits_of(g) | {SHARED}
        for i, like in enumerate(ctx.likes):
            # The gradient of the weight is the sum over all batches. Only the first batch gets it.
            parts = (pieces(d_hidden)[i], *(of_weight if i == 0 else (None, None)))
            computes = tuple(
                lambda compute=compute, i=i: pieces(compute())[i] for compute in computes_of(g)
            )
            gradients.append(gradient_of(like, parts, pieces(dense)[i], computes, g, limits))
        return None, None, *gradients


class LazyBias(Node):
    """The node that adds a bias, with one number per column, to the bias of the recipe."""

    @staticmethod
    def forward(ctx, z, bias, recipe, sign):
        z.recipe.check(numbers=False)
        ctx.set_materialize_grads(False)
        old = z.recipe.head.bias
        ctx.like, ctx.of_bias = described(z), described(bias)
        ctx.sign, ctx.pre, ctx.old = sign, z.recipe.pre, None if old is None else old.dtype
        ctx.kept_bias = z.recipe.needs[2]
        constant = own(bias.detach())
        return z.derived(recipe, lambda t: t + sign * constant)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return None, None, None, None
        (d_hidden, d_weight, d_total), dense = split(g)
        like, d_bias = ctx.like, None
        if ctx.needs_input_grad[1]:
            terms = [] if d_total is None else [d_total * (ctx.sign / ctx.pre)]
            if dense is not None:
                terms.append(dense.reshape(-1, dense.shape[-1]).sum(0) * ctx.sign)
            total = terms[0] if len(terms) == 1 else terms[0].to(terms[1].dtype) + terms[1]
            d_bias = total.to(ctx.of_bias.dtype).view(ctx.of_bias.shape)
        d_old = d_total.to(ctx.old) if ctx.kept_bias and d_total is not None else None
        dense = None if dense is None else dense.to(like.dtype)
        computes = tuple(
            lambda compute=compute: compute().to(like.dtype) for compute in computes_of(g)
        )
        parts = (d_hidden, d_weight, d_old)
        return gradient_of(like, parts, dense, computes, g, limits_of(g)), d_bias, None, None


def described(t: Tensor) -> Like:
    return Like(t.shape, t.dtype, t.device)
