"""The autograd nodes of heads and of operations on lazy logits. Losses are in loss_nodes.py.

In backward, a LazyGradient (gradient.py) goes from node to node, or a plain tensor where an
operation materialised the logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autograd import Node, refuse_second
from ..heads.gemms import times_weight, two_parts, without_autocast
from ..heads.unshard import in_memory
from .formula import Direct, Formula
from .gradient import (
    NO_PARTS,
    Compute,
    Joint,
    LazyGradient,
    Like,
    Parts,
    Shares,
    added_parts,
    computes_of,
    described,
    divided_shares,
    is_projected,
    pulled_back,
    shares_of,
    split,
)
from .metrics_after_loss import Answers
from .origin import Record, recorded
from .recipe import Computation, Recipe, own, stored
from .weight_changes import Watch, versions


class Anchor(Node):
    """Returns an empty tensor that depends on lazy logits in the autograd graph.

    A node keeps it instead of the logits, because it holds no memory. `refuse_second` makes
    gradients that cannot be differentiated again depend on it, so that differentiating them raises.
    """

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        return z.recipe.head.hidden.new_empty(0)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def anchor_of(z: Any) -> Tensor | None:
    return Anchor.apply(z) if torch.is_grad_enabled() and z.requires_grad else None  # pyright: ignore


def final(gradient: Tensor | None, *inputs: Any) -> Tensor | None:
    """The gradient, whose differentiation with respect to `inputs` raises."""
    if gradient is None or not torch.is_grad_enabled():
        return gradient
    if isinstance(gradient, LazyGradient):
        gradient.parts = refuse_second(gradient.parts, inputs)  # pyright: ignore
    return refuse_second((gradient,), inputs)[0]


def gradient_of(
    like: Like,
    parts: Parts,
    of_values: Tensor | None,
    computes: tuple[Compute, ...],
    source: Tensor | None = None,
    projected: bool = False,
    shares: Shares | None = None,
) -> Tensor | None:
    """A LazyGradient, or `of_values` if `parts` and `computes` hold no gradient.

    `source` is the upstream gradient from which they were computed.
    """
    if all(t is None for t in parts) and not computes:
        return of_values
    g = LazyGradient.of(like, parts, of_values, computes, projected, shares)
    if torch.is_grad_enabled() and isinstance(source, LazyGradient):
        return refuse_second((g,), (source,))[0]
    return g


class LazyHead(Node):
    @staticmethod
    def forward(ctx, hidden, weight, bias, low_rank, head, shard, kind, trains, inference):
        ctx.set_materialize_grads(False)
        tensors = (hidden, weight, bias, low_rank)
        ctx.save_for_backward(*tensors)
        needs = tuple(t is not None and t.requires_grad for t in tensors)
        detached = head.replace(
            hidden=stored(hidden), weight=weight.detach(),
            bias=None if bias is None else bias.detach(),
            low_rank=None if low_rank is None else low_rank.detach(),
        )  # fmt: skip
        # On a GPU, the `Watch` checks for writes only after `passed` is set, by the backward or,
        # because logits for inference have none, here.
        ctx.watch = Watch(detached.weight, passed=inference)
        ctx.module, ctx.shard = head.module, shard
        formula = Direct(head.dtype)
        answers, places = Answers.of(detached, trains) if shard is None else (None, None)
        z = kind.of(
            Recipe(
                detached, needs, formula, versions(*detached.tensors), ctx.watch, trains, inference,
                shard=shard, answers=answers, places=places,
            )
        )  # fmt: skip
        if answers is not None:
            answers.cell = z.origin.cell
        return z

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.watch.passed.append(True)
        if g is None:
            return (None,) * 9
        if any(joint.root is ctx.watch for joint in shares_of(g)):
            g.refuse_shared()  # this call raises, because g is incomplete (see `Joint`)
        parts, of_values = split(g)
        if of_values is not None:
            tensors = ctx.saved_tensors
            if ctx.shard is not None:
                of_values = of_values.narrow(-1, ctx.shard.start, ctx.shard.width)
            device, weight = of_values.device, tensors[1]
            with without_autocast(device), in_memory(weight, ctx.module):
                more = gradients_of_values(of_values, tensors, ctx.needs_input_grad)
            if ctx.shard is not None and ctx.shard.sums_hidden and more[0] is not None:
                ctx.shard.ranks.all_reduce(more[0]).wait()
            parts = added_parts(parts, more)
        return *parts, None, None, None, None, None


def gradients_of_values(of_values: Tensor, tensors: tuple, needs: tuple) -> Parts:
    """The gradients of a head's tensors from `of_values`, that of the logits."""
    hidden, weight, bias, low_rank = tensors
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = of_values.reshape(len(rows), of_values.shape[-1]).to(hidden.dtype)
    d_low_rank, first = None, rows
    d_hidden = times_weight(flat, weight) if needs[0] else None
    if low_rank is not None:
        first, second = two_parts(rows, weight, low_rank)
        low = low_rank.to(hidden.dtype)
        if d_hidden is not None:
            rest = flat.new_zeros((len(rows), rows.shape[1] - weight.shape[1] - low.shape[1]))
            d_hidden = torch.cat([d_hidden, flat @ low, rest], 1)
        d_low_rank = (flat.t() @ second).to(low_rank.dtype) if needs[3] else None
    return (
        None if d_hidden is None else d_hidden.view(hidden.shape),
        flat.t() @ first if needs[1] else None,
        flat.sum(0) if bias is not None and needs[2] else None,
        d_low_rank,
    )


class Op(NamedTuple):
    """An operation on logits that are a plain tensor."""

    function: Callable[..., Tensor]  # Maps the arguments' values to the result's values.
    linear: bool = True  # False if the gradient depends on the arguments' values.
    # Maps the gradient of the result to that of the argument, for a linear function; None leaves
    # this to autograd.
    pull: Callable[[Tensor], Tensor] | None = None
    is_view: bool = False  # Whether the result can share the memory of the argument.
    # Backward returns a LazyGradient whose field `projected` has this value. If `projects` is None,
    # backward copies `projected` from the upstream gradient.
    projects: bool | None = None
    name: str = "a function"  # The operation's name in error messages.
    # For each argument, the Formula that computes the argument from the head's logits. The recipe
    # of the result holds this head. If `formulas` is empty, the formulas in the arguments' recipes
    # are used.
    formulas: tuple[Formula, ...] = ()


class LazyOp(Node):
    """An operation that maps lazy logits to lazy logits.

    `back` maps the `parts` of the result's gradient to those of the argument's; `op` is the
    operation on a plain tensor, which backward differentiates if the gradient has `of_values`. All
    arguments that need a gradient must have the same `hidden`, `weight`, `bias` and `low_rank`.
    """

    @staticmethod
    def forward(ctx, recipe, back, op, anchor, *arguments):
        for z in arguments:
            z.recipe.check_versions()
        ctx.set_materialize_grads(False)
        ctx.likes, ctx.back, ctx.op, ctx.anchor = [*map(described, arguments)], back, op, anchor
        first = arguments[0].recipe
        ctx.joint = Joint(op.name, first.watch)
        # False if the arguments have only the columns of this rank, and the result all columns
        same_ranks = recipe.shard is first.shard
        function = op.function if same_ranks else None
        new = arguments[0].derived(recipe, function, arguments, op.is_view)
        if anchor is not None:  # the gradient depends on the values
            tensors, ctx.recipe = recipe.flatten()
            ctx.save_for_backward(*tensors)
            _, _, _, _, *needs = ctx.needs_input_grad
            ctx.record = Record(needs, op.formulas or [z.recipe.formula for z in arguments])
            new.origin.record = ctx.record
        return new

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        count = len(ctx.likes)
        if g is None:
            return (None,) * (4 + count)
        parts, of_values = split(g)
        parts = parts if ctx.back is None else ctx.back(parts)
        pulled = LazyOp.puller(ctx)
        gradients: list[Tensor | None] = [None] * count
        if of_values is not None:
            gradients = pulled(of_values)
            if not ctx.op.linear:
                gradients = [final(d, ctx.anchor, g) for d in gradients]
        projected = is_projected(g) if ctx.op.projects is None else ctx.op.projects
        needed = [i for i in range(count) if ctx.needs_input_grad[4 + i]]
        shares = divided_shares(g, ctx.joint, len(needed)) if isinstance(g, LazyGradient) else {}
        results: list[Tensor | None] = [None] * count
        for i in needed:
            computes = tuple(
                lambda compute=compute, i=i: zeros_if_none(pulled(compute())[i], ctx.likes[i])
                for compute in computes_of(g)
            )
            # `parts` are sums over all arguments, which share the head's tensors, so only the first
            # argument gets them.
            own_parts = parts if i == needed[0] else NO_PARTS
            results[i] = gradient_of(
                ctx.likes[i], own_parts, gradients[i], computes, g, projected, shares
            )
        return None, None, None, None, *results

    @staticmethod
    def puller(ctx) -> Callable[[Tensor], list[Tensor | None]]:
        """Maps a gradient of the result to gradients of the arguments."""
        likes, function = ctx.likes, ctx.op.function
        if ctx.op.linear:
            (like,) = likes
            pull = ctx.op.pull or (lambda d: pulled_back(function, like.blank(), d))
            return lambda d: [pull(d).to(like.dtype)]
        saved, recipe, record = ctx.saved_tensors, ctx.recipe, ctx.record

        def pulled(d: Tensor) -> list[Tensor | None]:
            graph, record.graph = record.graph, None  # the graph is used only once
            if graph is None:
                computation = Computation(recipe.rebuild(saved))
                values = [computation.values(formula) for formula in record.formulas]
                with torch.no_grad(), without_autocast(d.device):
                    _, graph = recorded(function, values, record.needs)
            gradients = graph.gradients(d)
            return [
                None if t is None else t.to(like.dtype)
                for t, like in zip(gradients, likes, strict=True)
            ]

        return pulled


def zeros_if_none(d: Tensor | None, like: Like) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device) if d is None else d


class Materialize(Node):
    """Returns lazy logits as a plain, writable tensor."""

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        if z.origin.known:
            return z.origin.values().clone()
        return z.recipe.values().data  # F.linear can return a view, which callers cannot write to

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


class LazyCat(Node):
    """torch.cat over rows, for lazy logits of the same head."""

    @staticmethod
    def forward(ctx, recipe, dim, *batches):
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.likes = dim, [described(z) for z in batches]
        roots = {z.recipe.watch for z in batches}
        ctx.joint = Joint("torch.cat", recipe.watch if len(roots) == 1 else None)
        return batches[0].derived(recipe)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return None, None, *(None for _ in ctx.likes)
        (d_hidden, *of_weight), of_values = split(g)
        sizes = [like.shape[ctx.dim] for like in ctx.likes]
        shares = divided_shares(g, ctx.joint, len(sizes))

        def pieces(t: Tensor | None) -> tuple:
            return (None,) * len(sizes) if t is None else t.split(sizes, ctx.dim)

        gradients = []
        for i, like in enumerate(ctx.likes):
            # Only the first batch gets the gradient of the weight, which is a sum over all batches.
            parts = (pieces(d_hidden)[i], *(of_weight if i == 0 else NO_PARTS[1:]))
            computes = tuple(
                lambda compute=compute, i=i: pieces(compute())[i] for compute in computes_of(g)
            )
            of_piece = pieces(of_values)[i]
            gradients.append(
                gradient_of(like, parts, of_piece, computes, g, is_projected(g), shares)
            )
        return None, None, *gradients


class LazyBias(Node):
    """Adds one number per column to lazy logits, by changing the bias."""

    @staticmethod
    def forward(ctx, z, bias, recipe, sign):
        z.recipe.check_versions()
        ctx.set_materialize_grads(False)
        old = z.recipe.head.bias
        ctx.like, ctx.of_bias = described(z), described(bias)
        ctx.sign, ctx.old = sign, None if old is None else old.dtype
        ctx.kept_bias = z.recipe.needs[2]
        constant = own(bias.detach())
        return z.derived(recipe, lambda t: t + sign * constant)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        if g is None:
            return None, None, None, None
        (d_hidden, d_weight, d_total, d_low_rank), of_values = split(g)
        like, d_bias = ctx.like, None
        if ctx.needs_input_grad[1]:
            terms = [] if d_total is None else [d_total * ctx.sign]
            if of_values is not None:
                terms.append(of_values.reshape(-1, of_values.shape[-1]).sum(0) * ctx.sign)
            if terms:
                total = terms[0] if len(terms) == 1 else terms[0].to(terms[1].dtype) + terms[1]
                d_bias = total.to(ctx.of_bias.dtype).view(ctx.of_bias.shape)
        d_old = d_total.to(ctx.old) if ctx.kept_bias and d_total is not None else None
        of_values = None if of_values is None else of_values.to(like.dtype)
        computes = tuple(
            lambda compute=compute: compute().to(like.dtype) for compute in computes_of(g)
        )
        parts, shares = (d_hidden, d_weight, d_old, d_low_rank), shares_of(g)
        d_z = gradient_of(like, parts, of_values, computes, g, is_projected(g), shares)
        return d_z, d_bias, None, None
