"""Logits that are a tensor to PyTorch, and are not computed until their numbers are needed.

`LazyLogits` is what a fused head returns: a tensor with a shape, a dtype and a place in autograd's
graph, that holds only what its numbers are made of, hidden and weight. A loss over it, ours or
`torch.nn.functional`'s, is computed a chunk of rows at a time (heads/linear.py). Operations that
leave it a head's logits, such as views, slices, casts, scaling and softcaps, are absorbed
(lazy/torch_functions.py). Any other operation makes the numbers, and is right as well; writing to
them is refused.

The graph is the ordinary one: head → logits → views → loss, each a node. What is unusual is the
gradient that travels along it. A loss has found the gradients of hidden and weight themselves, and
hands them to its logits as a `LazyGradient`; views and slices on the way re-index it, and the head
unpacks it. So hooks fire, modules such as DDP and FSDP see the output they expect, and nothing as
large as the logits exists.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..contract import Reading
from ..core import call as _call
from ..core import checks as _checks
from ..core.autograd import Node
from ..core.call import backend, in_func
from ..core.later import later
from ..core.loss import RowLoss, evaluate, reduced
from ..heads.linear import LinearLogits, Total, dtypes_as_given
from ..heads.per_row import Each
from ..heads.unshard import in_memory
from .gradient import Like, added_parts, aten, is_copy, joined, pulled_back, split
from .recipe import Recipe, versions


class LazyLogits(Tensor):
    """Logits (..., V) of a head, to be used as any tensor; see the module's docstring."""

    recipe: Recipe
    made: Tensor | None

    @staticmethod
    def absorb(func: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of an operation that leaves them lazy: lazy/torch_functions.py."""
        return NotImplemented

    @classmethod
    def of(cls, recipe: Recipe) -> "LazyLogits":
        """Without history."""
        z = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device
        )
        z.recipe, z.made = recipe, None
        return z

    def dense(self) -> Tensor:
        """The numbers, without history; made once."""
        self.check()
        if self.made is None:
            self.made = self.recipe.dense()
        return self.made

    def materialize(self, rows=None) -> Tensor:
        """The logits as a plain tensor, with history; or of some rows, (n, V), as constants."""
        if rows is None:
            return _Dense.apply(self)  # pyright: ignore[reportReturnType]
        source = self.as_teacher()
        if isinstance(source, Tensor):
            return source.reshape(-1, source.shape[-1])[rows]
        with in_memory(self.recipe.weight, self.recipe.module):
            return source.materialize(rows)

    def over(self, shard) -> "LazyLogits":
        """Those of all ranks, where these are one rank's columns."""
        recipe = self.recipe._replace(shard=shard.over(None))
        sides = (shard.start, shard.vocab - shard.start - shard.width)
        return Step.apply(self, recipe, None, lambda t: pad(t, sides), False)  # pyright: ignore

    def check(self) -> None:
        """Raise where they were written to: through a view, since they refuse it themselves."""
        if not torch.compiler.is_compiling() and versions(self) != (0,):
            raise RuntimeError(WRITTEN.format("assigning to a part of them"))

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        of_head = self.loss_of_head(loss)
        if of_head is None:
            return evaluate(self.materialize(), loss, reduction, row_weight)
        return Head(self).evaluate(of_head, reduction, row_weight)

    def loss_of_head(self, loss: RowLoss) -> RowLoss | None:
        """The same loss of the head's own numbers; None, and a warning, where there is none."""
        recipe, softcap = self.recipe, loss.reading.softcap
        cause, of_head = recipe.obstacle(softcap), None
        if cause is None:
            of_head = loss.of_scaled(recipe.scale, recipe.cap or softcap)
            cause = "scaled logits, beside labels at temperature 1 or a teacher that is a tensor"
        if of_head is None:
            warn(f"a loss of logitless over {cause}")
        return of_head

    def capture_topk(self, k: int, temperature: float, softcap: float | None):
        recipe = self.recipe
        if recipe.obstacle(softcap):
            return backend(self).topk(self.dense(), k, temperature, softcap)
        reading = Reading(self.shape[-1], temperature=temperature).of_scaled(
            recipe.scale, recipe.cap or softcap
        )
        return Head(self).capture_topk(k, reading.temperature, reading.softcap)

    def as_teacher(self) -> "LinearLogits | Tensor":
        """The same logits as constants."""
        return self.dense() if self.recipe.obstacle(None) else self.recipe.teacher()

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = cls.absorb(func, args, kwargs or {})
        if found is not NotImplemented:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if is_copy(func, args):
            copy = LazyLogits.of(args[0].recipe)
            copy.made = None if func is aten.clone.default else args[0].made
            return copy
        _refuse_writing(func, args)
        warn(str(func))
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


WRITTEN = (
    "lazy logits must not be written to, by {}: they hold no numbers. Use logits.materialize()"
    " first."
)
_warned: set[str] = set()


def _refuse_writing(func, args: tuple) -> None:
    for given, argument in zip(args, func._schema.arguments, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(given, LazyLogits):
            raise RuntimeError(WRITTEN.format(func))


INSTEAD = (
    "A loss computed from them keeps them lazy; for anything else, call the model under"
    " torch.no_grad()."
)


def warn(name: str) -> None:
    """Once for each operation, where it costs the memory that a fused head saves."""
    if torch.is_grad_enabled():
        warn_once(f"logits of a fused head are materialised by {name}. {INSTEAD}")


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)


class Head:
    """Lazy logits as a source of logits for our losses, before any scale and softcap."""

    def __init__(self, z: LazyLogits):
        self.z, self.recipe = z, z.recipe
        self.shape = torch.Size((*z.recipe.rows, z.recipe.vocab))
        self.device = z.device
        self.dtype = z.recipe.hidden.dtype
        self.requires_grad = z.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if in_func():
            _checks.no_head_in_func()
        if self.recipe.shard is None:
            _call.values(loss, self.shape[-1])
        else:
            loss = self.recipe.shard.over(self).checked(loss, reduction, row_weight)
        grad, total = torch.is_grad_enabled(), reduction != "none"
        found = _Loss.apply(
            self.z, row_weight if total else None, loss, reduction, grad, *loss.others
        )
        if total or loss.several:
            return found
        return reduced(found, loss.reading, row_weight, None, reduction)  # pyright: ignore

    def capture_topk(self, k: int, temperature: float, softcap: float | None):
        source = self.recipe.source(False)
        with in_memory(source.weight, source.module):
            return source.capture_topk(k, temperature, softcap)

    def materialize(self, rows=None) -> Tensor:
        return self.z.materialize(rows)


class Made(Node):
    """Hidden, weight and bias to lazy logits; with a shard, one rank's weight to those of all."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, how, module, shard=None, kind=LazyLogits):
        parts = (hidden, weight, bias)
        ctx.save_for_backward(*parts)
        needs = tuple(t is not None and t.requires_grad for t in parts)
        plain = (None if t is None else t.detach() for t in parts)
        dtype = how.get("logits_dtype") or hidden.dtype
        recipe = Recipe(*plain, needs, dtype, how, module, versions(*parts), shard=shard)  # pyright: ignore
        ctx.module, ctx.shard = module, shard
        return kind.of(recipe)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        found, plain = split(g)
        if plain is not None:
            hidden, weight, bias = ctx.saved_tensors
            if ctx.shard is not None:
                plain = plain.narrow(-1, ctx.shard.start, ctx.shard.width)
            rows = hidden.reshape(-1, hidden.shape[-1])
            flat = plain.reshape(len(rows), plain.shape[-1]).to(hidden.dtype)
            with dtypes_as_given(hidden.device), in_memory(weight, ctx.module):
                more = (
                    (flat @ weight).view(hidden.shape) if ctx.needs_input_grad[0] else None,
                    flat.t() @ rows if ctx.needs_input_grad[1] else None,
                    flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None,
                )
            if ctx.shard is not None and ctx.shard.adds_up and more[0] is not None:
                ctx.shard.ranks.add_up(more[0]).wait()
            found = added_parts(found, more)
        return *found, None, None, None, None


class Step(Node):
    """Lazy logits to lazy logits: an operation that is absorbed.

    `back` turns the gradients of the new parts into those of the old; `op` is the operation on the
    numbers themselves, for a gradient that came from there. One that only `moves` them needs no
    numbers for that.
    """

    @staticmethod
    def forward(ctx, z, recipe, back, op, moves):
        z.recipe.check()
        ctx.like, ctx.back, ctx.op, ctx.moves = Like(z.shape, z.dtype, z.device), back, op, moves
        if not moves:
            ctx.save_for_backward(*z.recipe[:3])
            ctx.recipe = z.recipe.without_parts()
        made = LazyLogits.of(recipe)
        if moves and z.made is not None:
            made.made = op(z.made).contiguous()
        return made

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        parts, plain = split(g)
        parts = parts if ctx.back is None else ctx.back(parts)
        if plain is not None:
            if ctx.moves:
                numbers = plain.detach().new_empty(()).expand(ctx.like.shape)
            else:
                numbers = ctx.recipe.with_parts(*ctx.saved_tensors).dense()
            plain = pulled_back(ctx.op, numbers, plain)
        return joined(ctx.like, parts, plain), None, None, None, None


class _Dense(Node):
    """Lazy logits to a plain tensor, whose owner may write to it."""

    @staticmethod
    def forward(ctx, z):
        z.check()
        if z.made is not None:
            return z.made.clone()
        return z.recipe.dense().data  # linear may give a view, which autograd lets nobody write to

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


class _Loss(Node):
    """A loss of lazy logits, whose gradient is lazy too."""

    @staticmethod
    def forward(ctx, z, row_weight, loss, reduction, grad, *others):
        ctx.like, ctx.total = Like(z.shape, z.dtype, z.device), reduction != "none"
        source = z.recipe.source(ctx.needs_input_grad[0])
        if ctx.total:
            how = (row_weight, source, loss, reduction, grad)
            return Total.forward(ctx, *source.parts, *how, *others)
        outputs = Each.forward(ctx, *source.parts, source, loss, *others)
        return outputs if loss.several else outputs[0]

    @staticmethod
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.total:
            found = Total.backward(ctx, *upstream)
            parts, d_rows, others = found[:3], found[3], found[8:]
        else:
            found = Each.backward(ctx, *upstream)
            parts, d_rows, others = found[:3], None, found[5:]
        return joined(ctx.like, parts, None), d_rows, None, None, None, *others


later.lazy_logits = Made.apply
