"""Lazy logits: a tensor whose values are not computed until they are needed.

A fused head returns a `LazyLogits`, a tensor with a shape, a dtype and an autograd history. Until
the values are needed, a `LazyLogits` holds `hidden`, `weight` and `bias` instead of the values.
Losses of logitless and of torch.nn.functional over lazy logits are computed chunk by chunk
(heads/). Functions that reduce over the vocabulary, such as argmax, are computed chunk by chunk
too. Views, slices, casts and elementwise functions of lazy logits are lazy logits again
(torch_functions.py). Any other operation materialises the logits, and returns the same result as
for a plain tensor. Only logits for inference can be written to (`Recipe.inference`, writes.py).
Writing to other lazy logits raises.

The autograd graph is the same as for a plain tensor: one node for the head, one node per view, and
one node for the loss. Only the gradient has an unusual type. A loss computes the gradients of
`hidden` and `weight`. The loss returns both gradients in a `LazyGradient`, which stands for the
gradient of the logits. In backward, views and slices re-index the `LazyGradient`. The head then
reads the gradients of `hidden` and `weight` from the `LazyGradient`. Hooks run as usual, and DDP
and FSDP get the output that they expect. A tensor as large as the logits is allocated only if an
operation materialises the logits, or if the logits are small.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..contract import Reading
from ..core import tensor_checks
from ..core.call import check_values, in_func
from ..core.capture import Capture, Captured
from ..core.choose_backend import captured
from ..core.evaluate import by_statistics, evaluate
from ..core.loss import RowLoss
from ..core.source import Source, teacher_rows
from ..heads.head import Head
from ..heads.linear import captured_of_head, takes_groups
from .compiled import leave_to_python
from .deferred import Deferred, called, on_values, result_of, running, written
from .gradient import LazyGradient, Like, aten, is_copy
from .loss_nodes import LazyPerRowLoss, LazyReducedLoss
from .nodes import LazyHead, LazyOp, Materialize, Op, anchor_of
from .origin import Cell, Origin
from .recipe import Recipe
from .report import note
from .writes import write_values


class LazyLogits(Deferred, Source):
    """Logits (..., V) of a head, usable like any other tensor; see the module's docstring."""

    cell: Cell
    origin: Origin

    @classmethod
    def of(cls, recipe: Recipe) -> "LazyLogits":
        """Returns lazy logits without autograd history."""
        z = cls.blank(Like(recipe.shape, recipe.formula.dtype, recipe.device))
        z.cell = Cell(recipe)
        z.origin = Origin(z.cell)
        return z

    def derived(
        self,
        recipe: Recipe,
        function: Callable[..., Tensor] | None = None,
        arguments: "tuple[LazyLogits, ...]" = (),
        is_view: bool = False,
    ) -> "LazyLogits":
        """Returns lazy logits with another recipe. The result has no autograd history.

        If `function` is given, it maps the values of `arguments` to the values of the result. The
        default of `arguments` is (self,). If `is_view` is true, the values of the result can share
        the memory of the argument's values.
        """
        z = LazyLogits.of(recipe)
        if function is not None:
            z.origin.after(tuple(t.origin for t in arguments or (self,)), function, is_view)
            if is_view and recipe.inference:
                z.origin.register()
        return z

    @property
    def recipe(self) -> Recipe:
        return self.cell.recipe

    @property
    def known_values(self) -> Tensor | None:
        """The values of the logits, or None if the values have not been computed."""
        return self.cell.values

    @property
    def from_head(self) -> bool:
        """Whether losses and functions are computed from the head instead of from the values.

        In inference (`Recipe.inference`), the result is False if the logits are small or already
        computed.
        """
        origin, recipe = self.origin, self.recipe
        if origin.exposed:
            return False
        if recipe.inference:
            return not recipe.small and not origin.known
        return not (origin.known and recipe.stale())

    @property
    def in_memory(self) -> bool:
        """Whether these logits are for inference, and their values are in memory."""
        return self.recipe.inference and self.origin.known

    @property
    def views_stay_lazy(self) -> bool:
        """Whether views of these logits are lazy.

        Views of logits for inference stay lazy until the logits are read, even if the logits are
        small. For example, code can select one row of large logits, then a part of this small row,
        and write to the part. The write must also change the large logits.
        """
        unread = self.recipe.inference and self.cell.values is None
        return self.from_head or (unread and not self.origin.exposed)

    def read(self, operation: str | None = None) -> Tensor:
        """Returns the values, and materialises them first if they are not in memory yet.

        `operation` is the name of the operation that needs the values. The default of `operation`
        is the name of the PyTorch function that is running.
        """
        self.note_if_unread(operation)
        return self.origin.values()

    def note_if_unread(self, operation: str | None = None) -> None:
        if self.cell.values is None and not self.origin.reads_exposed:
            note(self, operation or running())

    def plain_values(self) -> Tensor:
        return self.read()

    def expose(self) -> Tensor:
        """Returns the values, for a caller that can overwrite them.

        Later losses are computed from these values, including all changes by the caller.
        """
        self.note_if_unread()
        return self.origin.expose()

    @property
    def unwritable(self) -> str:  # pyright: ignore
        if not self.recipe.inference:
            return super().unwritable
        return "parts of the logits that were read earlier would keep their old values"

    @property
    def lent(self) -> list[weakref.ref] | None:  # pyright: ignore
        return self.origin.root.lent if self.recipe.inference else None

    def lend(self) -> bool:
        return self.recipe.inference and not self.requires_grad and self.origin.lend()

    def write(self, func, args: tuple, kwargs: dict) -> Any:
        """Writes to the values of logits for inference. Writing to any other logits raises."""
        result = write_values(self, func, args, kwargs)
        return super().write(func, args, kwargs) if result is NotImplemented else result

    def writable_values(self) -> Tensor | None:
        if not self.recipe.inference:
            return None
        top = self.origin.top()
        if not top.known:
            note(self, running())
        return self.origin.writable()

    def materialize(self, rows=None) -> Tensor:
        """Returns the logits as a plain, differentiable tensor.

        If `rows` is given, returns only these rows, detached.
        """
        if rows is None:
            note(self, "materialize", warns=False)
            return Materialize.apply(self)  # pyright: ignore[reportReturnType]
        with self.recipe.in_memory():
            return teacher_rows(self.as_teacher(), rows).clone()

    def over(self, shard) -> "LazyLogits":
        """Returns lazy logits with the columns of all ranks.

        `self` has only the columns of this rank. `shard` holds the range of these columns.
        """
        recipe = self.recipe.replace(shard=shard.over(None), answers=None, places=None)
        sides = (shard.start, shard.vocab - shard.start - shard.width)
        columns = slice(shard.start, shard.start + shard.width)
        op = Op(lambda t: pad(t, sides), pull=lambda d: d[..., columns])
        return kept(self, recipe, None, op)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        of_head = self.loss_of_head(loss)
        if of_head is None:
            return evaluate(self.differentiable(), loss, reduction, row_weight)
        result = UnscaledLogits(self).evaluate(of_head, reduction, row_weight)
        if self.recipe.head.dtype != torch.float64 or self.dtype == torch.float64:
            return result
        # For an fp64 head, `result` is fp64. If the logits were cast to fp32, the loss must be fp32
        # too.
        outputs = result if isinstance(result, tuple) else (result,)
        outputs = tuple(t.float() if t.is_floating_point() else t for t in outputs)
        return outputs if isinstance(result, tuple) else outputs[0]

    def loss_of_head(self, loss: RowLoss) -> RowLoss | None:
        """Rewrites a loss over scaled or capped logits as a loss over the head's own logits.

        Returns None if the loss must be computed from the values. In this case, the method also
        records for `report` that the values are materialised.
        """
        if not self.from_head:
            self.note_if_unread("a loss of logitless")
            return None
        recipe, softcap = self.recipe, loss.reading.softcap
        cause, of_head = recipe.obstacle(softcap), None
        if cause is None:
            direct = recipe.formula
            of_head = loss.fold_scale(direct.scale, direct.cap or softcap)  # pyright: ignore
            cause = "scaled logits, with labels at temperature 1 or a teacher that is a tensor"
        if of_head is None:
            note(self, f"a loss of logitless over {cause}")
        return of_head

    def differentiable(self) -> Tensor:
        """Returns the logits as a read-only plain tensor, for use in a loss."""
        known = not self.requires_grad and self.recipe.inference
        return self.origin.values() if known else Materialize.apply(self)  # pyright: ignore

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        direct = self.recipe.direct
        if direct is None or self.recipe.obstacle(softcap) or not self.from_head:
            return captured(self.read(capture.name), capture, temperature, softcap)
        reading = Reading(self.shape[-1], temperature=temperature)
        reading = reading.fold_scale(direct.scale, direct.cap or softcap)
        return UnscaledLogits(self).capture(capture, reading.temperature, reading.softcap)

    def as_teacher(self):
        """Returns the logits without gradients, for use as a teacher in a loss."""
        constant = self.recipe.obstacle(None) or not self.from_head
        return self.read("a loss over a teacher") if constant else self.recipe.teacher()

    def in_columns(self, shard) -> Source:
        return LazyColumns(self, shard)

    def ranks_of_call(self):
        return None if self.recipe.shard is None else self.recipe.shard.ranks

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shows the values of logits for inference if the logits are small or already computed."""
        recipe = self.recipe
        small = recipe.inference and recipe.small
        if self.in_memory or (small and not recipe.stale()):
            return repr(self.read("repr"))
        return super().__repr__()

    def describe(self) -> str:
        return f"lazy logits of {self.recipe.head.describe()}, {self.recipe.needs}"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.register_hook:
            z, hook = args
            args = (z, checked_hook(hook))
        with called(func):
            result = result_of(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        copied = args[0] if is_copy(func, args) else None
        if copied is not None and not (func is aten.clone.default and copied.in_memory):
            z = copied
            copy = z.derived(z.recipe, torch.clone)
            if func is not aten.clone.default:
                copy.cell, copy.origin = z.cell, z.origin
            elif z.origin.exposed:
                copy.cell.values, copy.cell.exposed = z.origin.values().clone(), True
            return copy
        targets = written(func, args, kwargs)
        if targets:
            return targets[0].write(func, args, kwargs)
        return on_values(func, args, kwargs)


leave_to_python(LazyLogits.__torch_function__, LazyLogits.__torch_dispatch__)


def checked_hook(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Returns a hook that calls `hook`.

    The returned hook raises if `hook` replaces an incomplete gradient.
    """

    @functools.wraps(hook)
    def checked(g: Tensor) -> Any:
        new = hook(g)
        if new is not None and new is not g and isinstance(g, LazyGradient):
            g.refuse_shared()
        return new

    return checked


def kept(z: LazyLogits, recipe: Recipe, back: Callable | None, op: Op) -> LazyLogits:
    """Returns the result of `op` on z, as lazy logits with the given recipe. See LazyOp."""
    anchor = None if op.linear else anchor_of(z)
    return LazyOp.apply(recipe, back, op, anchor, z)  # pyright: ignore[reportReturnType]


class UnscaledLogits(Source):
    """The logits that the head computes, before the scale and softcap of the lazy logits."""

    def __init__(self, z: LazyLogits):
        self.z, self.recipe = z, z.recipe
        self.shape = torch.Size((*z.recipe.lead, z.recipe.vocab))
        self.device = z.device
        self.dtype = z.recipe.head.hidden.dtype
        self.requires_grad = z.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        if in_func():
            tensor_checks.no_head_in_func()
        if self.recipe.shard is None:
            check_values(loss)
        else:
            loss = self.recipe.shard.over(self).checked(loss, reduction, row_weight)
        if self.recipe.answers is None:
            return self.computed(loss, reduction, row_weight)
        return self.recipe.answers.evaluate(self, loss, reduction, row_weight)

    def computed(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """Evaluates a loss from the head's tensors. The evaluation takes at least one GEMM."""
        grad = torch.is_grad_enabled()
        head = None if loss.groups is None else self.recipe.constant_head(self.requires_grad)
        if head is not None and not takes_groups(head, loss, reduction):
            return by_statistics(UnscaledLogits.evaluate, self, loss, reduction)
        if reduction != "none" and self.recipe.head.reduces(loss):
            return LazyReducedLoss.apply(
                self.z, row_weight, loss, reduction, grad, anchor_of(self.z), *loss.row_inputs
            )
        outputs = LazyPerRowLoss.apply(self.z, loss, anchor_of(self.z), grad, *loss.row_inputs)
        return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        return captured_of_head(self.recipe.constant_head(), capture, temperature, softcap)

    def ranks_of_call(self):
        return self.z.ranks_of_call()


class LazyColumns(Source):
    """The logits of all ranks. Each rank holds lazy logits with its own columns.

    A loss that cannot be computed from the head materialises only the columns of this rank. The
    caller must sum the gradient of `hidden` over the ranks.
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
        return self.shard.over(self.z.differentiable()).evaluate(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        if self.z.recipe.obstacle(softcap) or not self.z.from_head:
            columns = self.shard.over(self.z.read(capture.name)).whole()
            return columns.capture(capture, temperature, softcap)
        return self.whole().capture(capture, temperature, softcap)


def lazy_logits_of(
    head: Head, shard=None, kind: type[LazyLogits] = LazyLogits, inference: bool = False
) -> LazyLogits:
    """The lazy logits of a head.

    With a shard, `head` holds only this rank's rows of the weight, but the logits have all columns.
    The class Recipe explains `inference`.
    """
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in head.tensors
    )
    tensors = head.tensors
    return LazyHead.apply(*tensors, head, shard, kind, trains, inference)  # pyright: ignore[reportReturnType]
