"""Lazy logits: a tensor to PyTorch, whose values are not computed until they are needed.

`LazyLogits` is what a fused head returns: a tensor with a shape, a dtype and a place in autograd's
graph, that holds only hidden, weight and bias. A loss over it, ours or one of torch.nn.functional,
is computed a chunk of rows at a time (heads/). Operations after which the logits are still those of
a head, such as views, slices, casts, scaling and softcaps, keep them lazy (torch_functions.py). Any
other operation computes the values and is correct as well. Writing to lazy logits raises.

The graph is the ordinary one: head → logits → views → loss, each a node. Only the gradient that
travels along it is unusual. A loss computes the gradients of hidden and weight themselves and hands
them to its logits as a `LazyGradient`; views and slices on the way re-index it, and the head
unpacks it. So hooks fire, DDP and FSDP see the output they expect, and no tensor as large as the
logits exists.
"""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..contract import Reading
from ..core import checks
from ..core.autograd import Node
from ..core.call import backend_of, check_values, in_func
from ..core.evaluate import evaluate
from ..core.loss import RowLoss
from ..core.source import Source, TopK, teacher_rows
from ..heads import per_row, total
from ..heads.head import Head
from ..heads.linear import topk_of_head
from ..heads.products import without_autocast
from ..heads.total import Call, needs_of
from ..heads.unshard import in_memory
from .gradient import Like, added_parts, aten, is_copy, joined, pulled_back, split
from .recipe import Recipe, versions


class LazyLogits(Tensor, Source):
    """Logits (..., V) of a head, to be used as any tensor; see the module's docstring."""

    recipe: Recipe
    dense_values: Tensor | None  # the logits, once something has computed them

    @classmethod
    def of(cls, recipe: Recipe) -> "LazyLogits":
        """Lazy logits without history."""
        z = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.head.device
        )
        z.recipe, z.dense_values = recipe, None
        return z

    def dense(self) -> Tensor:
        """The logits as a plain tensor, detached; computed once."""
        self.check()
        if self.dense_values is None:
            self.dense_values = self.recipe.dense()
        return self.dense_values

    def materialize(self, rows=None) -> Tensor:
        """The logits as a plain tensor, differentiable; or some rows, (n, V), as constants."""
        if rows is None:
            return Materialize.apply(self)  # pyright: ignore[reportReturnType]
        with in_memory(self.recipe.head.weight, self.recipe.head.module):
            return teacher_rows(self.as_teacher(), rows)

    def over(self, shard) -> "LazyLogits":
        """The lazy logits of all ranks, if `self` holds the columns of `shard`."""
        recipe = self.recipe._replace(shard=shard.over(None))
        sides = (shard.start, shard.vocab - shard.start - shard.width)
        return LazyOp.apply(self, recipe, None, lambda t: pad(t, sides), False)  # pyright: ignore

    def check(self) -> None:
        """Raises if the logits were written to through a view. Other writes raise at once."""
        if not torch.compiler.is_compiling() and versions(self) != (0,):
            raise RuntimeError(WRITTEN.format("assigning to a part of them"))

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        of_head = self.loss_of_head(loss)
        if of_head is None:
            return evaluate(self.materialize(), loss, reduction, row_weight)
        return UnscaledLogits(self).evaluate(of_head, reduction, row_weight)

    def loss_of_head(self, loss: RowLoss) -> RowLoss | None:
        """The loss as a function of the head's own logits; None, with a warning, if impossible."""
        recipe, softcap = self.recipe, loss.reading.softcap
        cause, of_head = recipe.obstacle(softcap), None
        if cause is None:
            of_head = loss.fold_scale(recipe.scale, recipe.cap or softcap)
            cause = "scaled logits, beside labels at temperature 1 or a teacher that is a tensor"
        if of_head is None:
            warn(f"a loss of logitless over {cause}")
        return of_head

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        recipe = self.recipe
        if recipe.obstacle(softcap):
            return backend_of(self).topk(self.dense(), k, temperature, softcap)
        reading = Reading(self.shape[-1], temperature=temperature)
        reading = reading.fold_scale(recipe.scale, recipe.cap or softcap)
        return UnscaledLogits(self).capture_topk(k, reading.temperature, reading.softcap)

    def as_teacher(self):
        """The same logits as constants."""
        return self.dense() if self.recipe.obstacle(None) else self.recipe.teacher()

    def in_columns(self, shard) -> Source:
        return LazyColumns(self, shard)

    def ranks_of_call(self):
        return None if self.recipe.shard is None else self.recipe.shard.ranks

    def describe(self) -> str:
        return f"lazy logits of {self.recipe.head.describe()}, {self.recipe.needs}"

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # Imported here, because the table of functions is built on this class.
        from .torch_functions import kept_lazy

        result = kept_lazy(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if is_copy(func, args):
            copy = LazyLogits.of(args[0].recipe)
            copy.dense_values = None if func is aten.clone.default else args[0].dense_values
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
    for t, argument in zip(args, func._schema.arguments, strict=False):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(t, LazyLogits):
            raise RuntimeError(WRITTEN.format(func))


INSTEAD = (
    "A loss computed from them keeps them lazy; for anything else, call the model under"
    " torch.no_grad()."
)


def warn(name: str) -> None:
    """Warns once per operation that materialises logits in training."""
    if torch.is_grad_enabled():
        warn_once(f"logits of a fused head are materialised by {name}. {INSTEAD}")


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=5)


class UnscaledLogits(Source):
    """The logits that the head of lazy logits computes, before any scale and softcap."""

    def __init__(self, z: LazyLogits):
        self.z, self.recipe = z, z.recipe
        self.shape = torch.Size((*z.recipe.lead, z.recipe.vocab))
        self.device = z.device
        self.dtype = z.recipe.head.hidden.dtype
        self.requires_grad = z.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if in_func():
            checks.no_head_in_func()
        if self.recipe.shard is None:
            check_values(loss)
        else:
            loss = self.recipe.shard.over(self).checked(loss, reduction, row_weight)
        grad = torch.is_grad_enabled()
        if reduction != "none":
            return LazyReducedLoss.apply(
                self.z, row_weight, loss, reduction, grad, *loss.row_inputs
            )
        outputs = LazyPerRowLoss.apply(self.z, loss, *loss.row_inputs)
        return outputs if loss.multiple_outputs else loss.reduce(outputs[0], reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        head = self.recipe.constant_head()
        with in_memory(head.weight, head.module):
            return topk_of_head(head, k, temperature, softcap)

    def materialize(self, rows=None) -> Tensor:
        return self.z.materialize(rows)

    def ranks_of_call(self):
        return self.z.ranks_of_call()


class LazyColumns(Source):
    """The logits of all ranks, if this rank holds the lazy logits of its columns.

    A loss that cannot be computed from the head materialises this rank's columns, not those of all
    ranks. The gradient of hidden is not summed over ranks here; the caller sums it.
    """

    def __init__(self, z: LazyLogits, shard):
        self.z, self.shard = z, shard
        self.shape, self.dtype, self.device = shard.shape, shard.dtype, shard.device
        self.requires_grad = z.requires_grad

    def whole(self) -> LazyLogits:
        return self.z.over(self.shard.over(None, sums_hidden=False))

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if self.z.loss_of_head(loss) is not None:
            return self.whole().evaluate(loss, reduction, row_weight)
        return self.shard.over(self.z.materialize()).evaluate(loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        if self.z.recipe.obstacle(softcap):
            columns = self.shard.over(self.z.dense()).whole()
            return columns.capture_topk(k, temperature, softcap)
        return self.whole().capture_topk(k, temperature, softcap)


def lazy_logits_of(head: Head, shard=None, kind: type[LazyLogits] = LazyLogits) -> LazyLogits:
    """The lazy logits of a head.

    With a shard, `head` has this rank's rows of the weight, and the logits are those of all ranks.
    """
    return LazyHead.apply(*head.tensors, head, shard, kind)  # pyright: ignore[reportReturnType]


class LazyHead(Node):
    """Hidden, weight and bias to lazy logits."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, shard, kind):
        tensors = (hidden, weight, bias)
        ctx.save_for_backward(*tensors)
        needs = tuple(t is not None and t.requires_grad for t in tensors)
        detached = head._replace(
            hidden=hidden.detach(), weight=weight.detach(),
            bias=None if bias is None else bias.detach(),
        )  # fmt: skip
        ctx.module, ctx.shard = head.module, shard
        return kind.of(Recipe(detached, needs, head.dtype, versions(*tensors), shard=shard))  # pyright: ignore

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_hidden, d_weight, d_bias), dense = split(g)
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
            d_hidden, d_weight, d_bias = added_parts((d_hidden, d_weight, d_bias), more)
        return d_hidden, d_weight, d_bias, None, None, None


class LazyOp(Node):
    """Lazy logits to lazy logits: an operation that keeps them lazy.

    `back` maps the gradients of the new hidden, weight and bias to those of the old ones. `op` is
    the same operation on plain logits; backward differentiates it if the upstream gradient is a
    plain tensor. If `op` only `moves` values, as views and slices do, its gradient does not depend
    on the values, and they are not computed for it.
    """

    @staticmethod
    def forward(ctx, z, recipe, back, op, moves):
        z.recipe.check()
        ctx.like, ctx.back, ctx.op, ctx.moves = Like(z.shape, z.dtype, z.device), back, op, moves
        if not moves:
            ctx.save_for_backward(*z.recipe.head.tensors)
            ctx.recipe = z.recipe.with_tensors(None, None, None)
        result = LazyLogits.of(recipe)
        if moves and z.dense_values is not None:
            result.dense_values = op(z.dense_values).contiguous()
        return result

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        parts, dense = split(g)
        parts = parts if ctx.back is None else ctx.back(parts)
        if dense is not None:
            if ctx.moves:
                values = dense.detach().new_empty(()).expand(ctx.like.shape)
            else:
                values = ctx.recipe.with_tensors(*ctx.saved_tensors).dense()
            dense = pulled_back(ctx.op, values, dense)
        return joined(ctx.like, parts, dense), None, None, None, None


class Materialize(Node):
    """Lazy logits to a plain tensor, which may be written to."""

    @staticmethod
    def forward(ctx, z):
        z.check()
        if z.dense_values is not None:
            return z.dense_values.clone()
        return z.recipe.dense().data  # F.linear may return a view, which cannot be written to

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g


def _lazy_call(ctx, z: LazyLogits, loss, row_weight, reduction, grad, row_inputs) -> Call:
    ctx.like = Like(z.shape, z.dtype, z.device)
    head = z.recipe.constant_head(ctx.needs_input_grad[0])
    needs = needs_of(head.tensors, row_weight, row_inputs, grad)
    return Call(head, loss, row_weight, reduction, needs)


class LazyReducedLoss(Node):
    """A mean or sum over lazy logits; its gradient is lazy too."""

    @staticmethod
    def forward(ctx, z, row_weight, loss, reduction, grad, *row_inputs):
        call = _lazy_call(ctx, z, loss, row_weight, reduction, grad, row_inputs)
        value, ctx.kept = total.Kept.of(ctx, call)
        return value

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        d = ctx.kept.gradients_of(ctx, upstream)
        d_z = joined(ctx.like, (d.hidden, d.weight, d.bias), None)
        return d_z, d.row_weight, None, None, None, *d.row_inputs


class LazyPerRowLoss(Node):
    """Results per row of lazy logits; their gradient is lazy too."""

    @staticmethod
    def forward(ctx, z, loss, *row_inputs):
        call = _lazy_call(ctx, z, loss, None, "none", True, row_inputs)
        outputs, ctx.kept = per_row.Kept.of(ctx, call)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        d = ctx.kept.gradients_of(ctx, upstream)
        return joined(ctx.like, (d.hidden, d.weight, d.bias), None), None, *d.row_inputs
