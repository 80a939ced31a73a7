"""How lazy logits take part in autograd.

A loss sends gradients straight to the tensors of the head, which keep their history, so nothing has
to carry the gradient of logits that do not exist. The nodes here serve the rest:

- `Root` gives lazy logits a `grad_fn`. If they are read, `Alias` passes the gradient of the values
  on to it, and it computes those of the head's tensors.
- Autograd nodes and hooks that PyTorch's wrappers set on logits, such as those of DDP and FSDP,
  must run in backward. `Tie` lets a loss depend on such logits. They get an `Absent` gradient: it
  has a shape, can be passed on and added to, and raises if someone reads it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.autograd import Node
from ..heads.gemms import plain_weight, times_weight, two_parts, without_autocast
from ..heads.unshard import in_memory
from .formula import HeadLogits
from .recipe import raise_changed, versions

aten = torch.ops.aten

HOOKED_TWICE = (
    "a function of lazy logits that has a hook must not be differentiated twice, because PyTorch"
    " may call the hook again for the function's result. Use plain logits:"
    " logits = logits.materialize() before the function."
)
HOOKED = (
    "the gradient of lazy logits is not computed, because a loss sends gradients straight to the"
    " head. To read or change it, use plain logits: logits = logits.materialize() before the loss,"
    " or register the hook on the logits before anything is computed from them."
)


class Like(NamedTuple):
    shape: Any
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(t: Tensor) -> "Like":
        return Like(t.shape, t.dtype, t.device)


class Absent(Tensor):
    """The gradient of lazy logits, of which only `rest` has not yet reached the head."""

    rest: Tensor | None

    @staticmethod
    def of(like: Any, rest: Tensor | None = None) -> "Absent":
        g: Any = Tensor._make_wrapper_subclass(
            Absent, like.shape, dtype=like.dtype, device=like.device
        )
        g.rest = rest
        return g

    def __repr__(self, **_) -> str:
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args: Any = (), kwargs=None):
        kwargs, (g, *others) = kwargs or {}, args
        if is_copy(func, args) and isinstance(g, Absent):
            return Absent.of(g, g.rest)
        if func is aten._to_copy.default and not kwargs.keys() - {"dtype"}:
            dtype = kwargs.get("dtype") or g.dtype
            rest = None if g.rest is None else g.rest.to(dtype)
            return Absent.of(Like(g.shape, dtype, g.device), rest)
        if func in (aten.add.Tensor, aten.add_.Tensor) and not kwargs and len(args) == 2:
            parts = [t.rest if isinstance(t, Absent) else t for t in args]
            if all(isinstance(t, Tensor) and t.shape == g.shape for t in args):
                found = [t for t in parts if t is not None]
                rest = found[0] + found[1] if len(found) == 2 else found[0] if found else None
                if func is aten.add.Tensor or not isinstance(g, Absent):
                    return Absent.of(args[0], rest)
                g.rest = rest
                return g
        if func is aten.isnan.default or (
            func is aten.ne.Tensor and g is others[0]
        ):  # anomaly mode
            return torch.zeros((), dtype=torch.bool, device=g.device).expand(g.shape)
        raise RuntimeError(HOOKED)


def is_copy(func, args: tuple) -> bool:
    """Whether the operation returns its input unchanged, as a copy or as a view."""
    copies = (aten.detach.default, aten.clone.default, aten.alias.default)
    return func in copies or (func is aten.view.default and tuple(args[1]) == args[0].shape)


class Sent:
    """What the node of logits knows of the logits."""

    task = -1  # the backward pass in which a loss sent its gradients past them
    hooked = False  # whether a hook of the user can change their gradient


class Root(Node):
    """The autograd node of logits: of the tensors of their recipe, and of earlier logits."""

    @staticmethod
    def forward(ctx, new, *tensors):
        z, recipe, ctx.sent, anchors = new
        ctx.set_materialize_grads(False)
        ctx.recipe, ctx.count = recipe.blank(), len(tensors) - len(anchors)
        ctx.anchors = [Like.of(t) for t in anchors]
        # Parameters outlive the graph, so hooks of saved tensors need not copy or move them.
        own = tensors[: ctx.count]
        ctx.parameters = [t if isinstance(t, nn.Parameter) else None for t in own]
        others = zip(own, ctx.parameters, strict=True)
        ctx.save_for_backward(*(t if p is None else None for t, p in others))
        return z

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return (None,) * (1 + ctx.count + len(ctx.anchors))
        if not isinstance(g, Absent) and ctx.sent.task == torch._C._current_graph_task_id():
            raise RuntimeError(HOOKED)  # a hook has replaced an Absent gradient
        logits = ctx.recipe.logits
        linear = logits is not None and not logits.capped
        if ctx.sent.hooked and torch.is_grad_enabled() and not linear:
            raise RuntimeError(HOOKED_TWICE)
        g = g.rest if isinstance(g, Absent) else g
        found: Any = (None,) * ctx.count
        if g is not None:
            for p, version in zip(ctx.parameters, ctx.recipe.versions, strict=True):
                if p is not None and versions(p) != (version,):
                    raise_changed()
            saved = zip(ctx.saved_tensors, ctx.parameters, strict=True)
            recipe = ctx.recipe.rebuild([t if p is None else p for t, p in saved])
            found = gradients_of(recipe, g, ctx.needs_input_grad[1:5])
            found = (*found, *(None,) * (ctx.count - 4))
        return None, *found, *map(Absent.of, ctx.anchors)


class Tie(Node):
    """Connects results of a loss to logits whose autograd nodes and hooks must run."""

    @staticmethod
    def forward(ctx, anchors, *tensors):
        ctx.set_materialize_grads(False)
        count = len(anchors)
        ctx.likes, ctx.sent = [Like.of(z) for z in anchors], [z.sent for z in anchors]
        outs = tuple(t.clone() for t in tensors[count:])
        return outs if len(outs) > 1 else outs[0]

    @staticmethod
    def backward(ctx, *g):
        if all(d is None for d in g):
            return (None,) * (1 + len(ctx.likes) + len(g))
        for sent in ctx.sent:
            sent.task = torch._C._current_graph_task_id()
        return None, *map(Absent.of, ctx.likes), *g


class Alias(Node):
    """The values of lazy logits, plain. Shared ones must not be written to with history."""

    @staticmethod
    def forward(ctx, z, values, shared):
        ctx.set_materialize_grads(False)
        (t,) = values
        return t.view_as(t) if shared else t

    @staticmethod
    def backward(ctx, g):
        return g, None, None


def product(recipe: Any, anchors: tuple = ()) -> Tensor:
    """The head's logits of a recipe, as a plain tensor with history."""
    new = [recipe.product(), recipe.replace(formula=HeadLogits(recipe.head.dtype), axis=None)]
    return Root.apply([*new, Sent(), anchors], *recipe.tensors, *anchors)


def tied(results: Any, anchors: tuple) -> Any:
    """Connects the results of a loss to the logits that must be visited in backward."""
    if not anchors or not torch.is_grad_enabled():
        return results
    outs = list(results) if isinstance(results, tuple) else [results]
    at = [i for i, t in enumerate(outs) if t.requires_grad]
    if not at:
        return results
    found: Any = Tie.apply(anchors, *anchors, *(outs[i] for i in at))
    for i, t in zip(at, found if len(at) > 1 else (found,), strict=True):
        outs[i] = t
    return tuple(outs) if isinstance(results, tuple) else outs[0]


def gradients_of(recipe: Any, g: Tensor, needs: tuple) -> tuple:
    """The gradients of a recipe's head, given that of its values. They can be differentiated."""
    if recipe.axis is not None:
        g = g.movedim(recipe.axis, -1)
    if recipe.formula.depth:
        again = torch.is_grad_enabled()
        recipe = recipe.replace(axis=None)
        with torch.enable_grad(), recipe.in_memory():
            x = product(recipe) if again else recipe.product().requires_grad_()
            y = recipe.of_product(x)
            (g,) = torch.autograd.grad(y, x, g, create_graph=again, allow_unused=True)
        if g is None:
            return (None,) * 4
    hidden, weight, bias, low_rank = recipe.head.tensors
    shard = recipe.shard
    g = g if shard is None else g.narrow(-1, shard.start, shard.width)
    rows = hidden.reshape(-1, hidden.shape[-1])
    d = g.reshape(len(rows), g.shape[-1]).to(hidden.dtype)
    d_hidden = d_low_rank = None
    first = rows
    with without_autocast(d.device), in_memory(weight, recipe.head.module):
        if needs[0] and torch.is_grad_enabled():
            d_hidden = d @ plain_weight(weight, d.dtype)
        elif needs[0]:
            d_hidden = times_weight(d, weight)
        if low_rank is not None:
            first, second = two_parts(rows, weight, low_rank)
            low = low_rank.to(hidden.dtype)
            if d_hidden is not None:
                rest = d.new_zeros((len(rows), rows.shape[1] - weight.shape[1] - low.shape[1]))
                d_hidden = torch.cat([d_hidden, d @ low, rest], 1)
            d_low_rank = (d.t() @ second).to(low_rank.dtype) if needs[3] else None
        d_weight = d.t() @ first if needs[1] else None
    if shard is not None and shard.sums_hidden and d_hidden is not None:
        shard.ranks.all_reduce(d_hidden).wait()
    return (
        None if d_hidden is None else d_hidden.view(hidden.shape),
        d_weight,
        d.sum(0) if bias is not None and needs[2] else None,
        d_low_rank,
    )
