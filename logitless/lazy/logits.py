"""Lazy logits: a tensor whose values are not computed until they are needed.

A fused head returns a `LazyLogits`, a tensor with a shape, a dtype and an autograd history that
holds `hidden`, `weight` and `bias` instead of values. Losses, and functions that reduce over the
vocabulary, such as argmax, are computed from it chunk by chunk (heads/); views, slices, casts and
elementwise functions return lazy logits again (torch_functions.py); anything else materialises the
logits. Only logits for inference can be written to (`Recipe.inference`, writes.py).

The autograd graph is that of a plain tensor, one node each for the head, every view and the loss,
so hooks, DDP and FSDP work as usual. Only the gradient differs: a loss computes those of `hidden`
and `weight` and passes both on in a `LazyGradient`, which views re-index and the head reads.
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
        """Lazy logits with another recipe and no autograd history.

        `function` maps the values of `arguments`, by default (self,), to those of the result. If
        `is_view` is true, they can share memory.
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
        return self.cell.values

    @property
    def from_head(self) -> bool:
        """Whether losses and functions are computed from the head instead of from the values.

        Logits for inference use the values if they are small or already computed.
        """
        origin, recipe = self.origin, self.recipe
        if origin.exposed:
            return False
        if recipe.inference:
            return not recipe.small and not origin.known
        return not (origin.known and recipe.stale())

    @property
    def in_memory(self) -> bool:
        return self.recipe.inference and self.origin.known

    @property
    def views_stay_lazy(self) -> bool:
        """Whether views of these logits are lazy.

        Those for inference are until the logits are read, even if small, because a write to a part
        of one row, say, must also change the large logits from which the row was selected.
        """
        unread = self.recipe.inference and self.cell.values is None
        return self.from_head or (unread and not self.origin.exposed)

    def read(self, operation: str | None = None) -> Tensor:
        """The values, materialised if needed, by `operation` or the PyTorch function that runs."""
        self.note_if_unread(operation)
        return self.origin.values()

    def note_if_unread(self, operation: str | None = None) -> None:
        if self.cell.values is None and not self.origin.reads_exposed:
            note(self, operation or running())

    def plain_values(self) -> Tensor:
        return self.read()

    def expose(self) -> Tensor:
        """The values, for a caller that can overwrite them. Later losses use what it wrote."""
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
        """Returns the logits as a plain, differentiable tensor, or only `rows`, detached."""
        if rows is None:
            note(self, "materialize", warns=False)
            return Materialize.apply(self)  # pyright: ignore[reportReturnType]
        with self.recipe.in_memory():
            return teacher_rows(self.as_teacher(), rows).clone()

    def over(self, shard) -> "LazyLogits":
        """The columns of all ranks, of which `self` has the part that `shard` describes."""
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
        # An fp64 head gives an fp64 loss, but for logits cast to fp32 it must be fp32.
        outputs = result if isinstance(result, tuple) else (result,)
        outputs = tuple(t.float() if t.is_floating_point() else t for t in outputs)
        return outputs if isinstance(result, tuple) else outputs[0]

    def loss_of_head(self, loss: RowLoss) -> RowLoss | None:
        """Rewrites a loss over scaled or capped logits as a loss over the head's own logits.

        Returns None, and notes it for `report`, if the values must be materialised instead.
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
        """The logits as a read-only plain tensor, for use in a loss."""
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
        """The logits without gradients, for use as a teacher in a loss."""
        constant = self.recipe.obstacle(None) or not self.from_head
        return self.read("a loss over a teacher") if constant else self.recipe.teacher()

    def in_columns(self, shard) -> Source:
        return LazyColumns(self, shard)

    def ranks_of_call(self):
        return None if self.recipe.shard is None else self.recipe.shard.ranks

    def __repr__(self, **_) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shows the values of logits for inference if they are small or already computed."""
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
    """A hook that calls `hook`, and raises if it replaces an incomplete gradient."""

    @functools.wraps(hook)
    def checked(g: Tensor) -> Any:
        new = hook(g)
        if new is not None and new is not g and isinstance(g, LazyGradient):
            g.refuse_shared()
        return new

    return checked


def kept(z: LazyLogits, recipe: Recipe, back: Callable | None, op: Op) -> LazyLogits:
    """The result of `op` on z, as lazy logits with the given recipe (LazyOp)."""
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
    """The logits of all ranks, each of which holds lazy logits with its own columns.

    A loss that cannot be computed from the head materialises only these. The caller must sum the
    gradient of `hidden` over the ranks.
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
    """The lazy logits of a head (class Recipe explains `inference`).

    With a shard, `head` holds only this rank's rows of the weight, but the logits have all columns.
    """
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in head.tensors
    )
    tensors = head.tensors
    return LazyHead.apply(*tensors, head, shard, kind, trains, inference)  # pyright: ignore[reportReturnType]
