"""Lazy logits: a tensor whose values are not computed until they are needed.

A fused head returns a `LazyLogits`. It holds the head's hidden states, weight, bias and adapters
with their autograd history, and a formula over their product (recipe.py). A view of rows is the
view of `hidden`, a slice of columns the slice of `weight`; a bias or an adapter is an ordinary sum
(rows.py, ops.py); other functions extend the formula. A loss brings the formula into normal form
(formula.py) and is computed from the head, chunk by chunk, so gradients go straight to `hidden` and
`weight` (history.py). Anything else reads the values (memory.py).
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import Reading
from ..core.capture import Capture, Captured
from ..core.choose_backend import captured
from ..core.evaluate import evaluate
from ..core.loss import RowLoss
from ..core.source import Source, teacher_rows
from ..heads.head import Head
from .compiled import leave_to_python
from .formula import HeadLogits
from .history import Alias, Root, Sent, is_copy, product, tied
from .memory import Cell, Shared, running
from .recipe import Recipe, Watch, own, same, versions
from .report import note
from .scores import Remembered

T = Tensor


class LazyLogits(Shared, Source):
    """Logits (..., V) of a head, usable like any other tensor; see the module's docstring."""

    recipe: Recipe
    sent: Sent
    anchors: tuple["LazyLogits", ...]  # logits that backward must visit, for hooks of PyTorch
    settled: bool  # whether the attributes below are known
    used: bool  # whether a loss or other logits were computed from these, past their own node
    # Whether the gradient passes these logits as a plain tensor, because a hook of the user or an
    # autograd function of other code reads it.
    opaque: bool

    @staticmethod
    def of(recipe: Recipe, kind: type | None = None) -> "LazyLogits":
        z = Shared.blank(kind or LazyLogits, recipe.shape, recipe.formula.dtype, recipe.device)
        z.recipe, z.cell, z.sent, z.anchors = recipe, Cell(recipe), Sent(), ()
        z.settled, z.used, z.opaque = False, False, False
        if not recipe.formula.depth and recipe.axis is None:
            recipe.base = weakref.ref(z)
        return z

    def rooted(self, anchors: tuple["LazyLogits", ...] = ()) -> "LazyLogits":
        """Gives new logits their autograd node."""
        self.anchors, self.settled = anchors, True
        new = [self, self.recipe, self.sent, anchors]
        return Root.apply(new, *self.recipe.tensors, *anchors)

    def settle(self) -> "LazyLogits":
        """Finds out how gradients pass these logits, which may be the result of other code."""
        if self.settled:
            return self
        self.settled = True
        if not self.requires_grad:
            self.recipe = self.recipe.detached()
            self.cell.recipe = self.cell.recipe.detached()
            return self
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is not None and node.name() in PASSES and self.recipe.has_history:
            self.anchors = (self,)
        else:
            self.recipe, self.opaque = self.recipe.detached(), True
        return self

    def show_gradient(self, operation: str) -> None:
        """From now on, the gradient passes these logits as a plain tensor, for `operation`."""
        if self.requires_grad and not self.settle().opaque:
            self.read(operation)
            self.recipe, self.opaque = self.recipe.detached(), True

    # --- where losses, functions and values come from

    @property
    def from_head(self) -> bool:
        """Whether losses and functions are computed from the head instead of from the values."""
        if self.opaque or self.cell.exposed:
            return False
        if torch.is_grad_enabled() and self.requires_grad:
            return not (self.known and self.recipe.stale())
        return not self.known and not (self.recipe.inference and self.recipe.small)

    @property
    def views_stay_lazy(self) -> bool:
        """Whether views of these logits are lazy.

        Small logits for inference are read rather than computed by our kernels, but their views
        must share what is later written.
        """
        return self.from_head or not (self.opaque or self.cell.exposed or self.known)

    @property
    def sends(self) -> bool:
        """Whether gradients go straight to the tensors of the head."""
        return torch.is_grad_enabled() and self.requires_grad and not self.opaque

    def values(self) -> Tensor:
        if not self.known and not self.is_whole:
            self.own = self.recipe.values()
        return super().values()

    @property
    def is_whole(self) -> bool:
        """Whether these are all logits that share the memory of the cell."""
        return not self.path or self.numel() == torch.Size(self.cell.recipe.shape).numel()

    def read(self, operation: str | None = None) -> Tensor:
        if not self.known:
            note(self, operation or running())
        return self.values()

    def plain(self, operation: str | None = None) -> Tensor:
        """The values as a plain tensor, with its history."""
        values_only = not (torch.is_grad_enabled() and self.settle().requires_grad)
        if values_only:
            return self.read(operation)
        if not self.known:
            note(self, operation or running())
        return self.with_history()

    def with_history(self, copy: bool = False) -> Tensor:
        """The values with their history, as a tensor that nobody may write to, or as a copy."""
        recipe, visited = self.recipe, any(z is self for z in self.anchors)
        if self.opaque or self.known or visited or not recipe.formula.depth:
            values = self.values() if self.known or not copy else recipe.values()
            shared = not copy
            values = values.clone() if copy and self.known else values
            return Alias.apply(self, [values], shared)
        recipe.check()
        with torch.inference_mode(False), recipe.in_memory():
            t = recipe.of_product(self.head_logits())
        if copy:
            return t
        if self.is_whole and not self.path:
            self.cell.keep(t.detach())
        else:
            self.own = t.detach()
        return Alias.apply(t, [t], True)

    def head_logits(self) -> Tensor:
        """The logits of the head, before the formula, with their history."""
        base = None if self.recipe.base is None else self.recipe.base()
        if base is not None and not base.cell.exposed:
            return base.with_history()
        return product(self.recipe, self.anchors)

    def materialize(self, rows=None) -> Tensor:
        """Returns the logits as a plain, differentiable tensor, or only `rows`, detached."""
        if rows is not None:
            with self.recipe.in_memory():
                return teacher_rows(self.as_teacher(), rows).clone()
        self.settle()
        note(self, "materialize", warns=False)
        if torch.is_grad_enabled() and self.requires_grad:
            return self.with_history(copy=True)
        return self.values().clone() if self.known else self.recipe.values()

    def expose(self) -> None:
        if not self.known:
            note(self, running())
        super().expose()

    def hook(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Registers a hook. Who reads the gradient gets that of plain logits."""
        if not is_of_pytorch(args[1] if len(args) > 1 else None):
            if self.used and not self.opaque:
                raise RuntimeError(LATE.format(func.__name__))  # type: ignore
            self.show_gradient(f"Tensor.{func.__name__}")  # type: ignore
            self.sent.hooked = self.sent.hooked or func is T.register_hook
        elif self.requires_grad and not self.settle().opaque:
            self.anchors = (self,)
        with torch._C.DisableTorchFunctionSubclass():
            return func(self, *args[1:], **kwargs)

    # --- a source of logits, for the losses of logitless

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        of_head = self.settle().loss_of_head(loss)
        if isinstance(of_head, str):
            return evaluate(self.plain(of_head), loss, reduction, row_weight)
        result = UnscaledLogits(self).evaluate(of_head, reduction, row_weight)
        if self.recipe.head.dtype != torch.float64 or self.dtype == torch.float64:
            return result
        # An fp64 head gives an fp64 loss, but for logits cast to fp32 it must be fp32.
        outputs = result if isinstance(result, tuple) else (result,)
        outputs = tuple(t.float() if t.is_floating_point() else t for t in outputs)
        return outputs if isinstance(result, tuple) else outputs[0]

    def loss_of_head(self, loss: RowLoss) -> RowLoss | str:
        """The same loss over the head's own logits, before their scale and softcap.

        If the values must be materialised instead, returns what `report` says about it.
        """
        if not self.from_head:
            return "a loss of logitless"
        recipe, softcap = self.recipe, loss.reading.softcap
        cause = recipe.obstacle(softcap)
        if cause is None:
            direct: Any = recipe.direct
            of_head = loss.fold_scale(direct.scale, direct.cap or softcap)
            if of_head is not None:
                return of_head
            cause = "scaled logits, with labels at temperature 1 or a teacher that is a tensor"
        return f"a loss of logitless over {cause}"

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        direct = self.settle().recipe.direct
        if direct is None or self.recipe.obstacle(softcap) or not self.from_head:
            return captured(self.plain(capture.name).detach(), capture, temperature, softcap)
        reading = Reading(self.shape[-1], temperature=temperature)
        reading = reading.fold_scale(direct.scale, direct.cap or softcap)
        return UnscaledLogits(self).capture(capture, reading.temperature, reading.softcap)

    def as_teacher(self):
        """The logits without gradients, for use as a teacher in a loss."""
        if self.settle().recipe.obstacle(None) or not self.from_head:
            return self.plain("a loss over a teacher").detach()
        return self.recipe.teacher()

    def in_columns(self, shard) -> Source:
        return LazyColumns(self, shard)

    def ranks_of_call(self):
        return None if self.recipe.shard is None else self.recipe.shard.ranks

    def __repr__(self, **_) -> str:
        """Shows the values of logits for inference if they are small or already computed."""
        recipe = self.recipe
        if recipe.inference and (self.known or (recipe.small and not recipe.stale())):
            return repr(self.plain("repr"))
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def describe(self) -> str:
        needs = tuple(t is not None and t.requires_grad for t in self.recipe.head.tensors)
        return f"lazy logits of {self.recipe.head.describe()}, {needs}"

    # --- functions of PyTorch

    @classmethod
    def __torch_function__(cls, func, types, args: Any = (), kwargs=None):
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in HOOKS and isinstance(first, LazyLogits):
            return first.hook(func, args, kwargs)
        if func in LEAVES and isinstance(first, LazyLogits):
            first.settled = False
        if func is torch.autograd.grad:
            for z in args[1] if isinstance(args[1], (list, tuple)) else args[1:2]:
                if isinstance(z, LazyLogits) and not z.settle().opaque:
                    raise RuntimeError(NO_GRADIENT)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args: Any = (), kwargs=None):
        if is_copy(func, args):
            z, clone = args[0], func is torch.ops.aten.clone.default
            if not clone or not (z.known or z.cell.exposed):
                copy = LazyLogits.of(z.recipe, type(z))
                for key in ("recipe", "sent") if clone else tuple(vars(z)):
                    setattr(copy, key, vars(z)[key])
                copy.settled = False
                return copy
        return super().__torch_dispatch__(func, types, args, kwargs)


# Autograd functions of PyTorch that pass a gradient on unchanged.
PASSES = {
    "BackwardHookFunctionBackward", "_DDPSinkBackward", "RegisterPostBackwardFunctionBackward",
}  # fmt: skip
HOOKS = {T.register_hook, T.retain_grad}
LEAVES = {T.requires_grad_, T.requires_grad.__set__}  # type: ignore
LATE = (
    "Tensor.{} of lazy logits must be called before anything is computed from them, because a loss"
    " sends gradients straight to the head. Call it right after the forward, or use plain logits:"
    " logits = logits.materialize() before the loss."
)
NO_GRADIENT = (
    "the gradient of lazy logits must not be asked for, because a loss sends gradients straight to"
    " the head. Use plain logits: logits = logits.materialize() before the loss."
)


def is_of_pytorch(hook: Any) -> bool:
    """Whether PyTorch set this hook, to see that backward reaches the logits."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.")


def unchanged(z: LazyLogits, shares: bool) -> LazyLogits:
    """A copy or, if it shares memory, an alias of z.

    Without gradients it keeps the history too, because the forward of an autograd function may
    return it, such as those of PyTorch that pass gradients on (PASSES).
    """
    if z.sends or not z.requires_grad or z.opaque:
        return derived(z.recipe, z, view=same if shares else None)
    copy = LazyLogits.of(z.recipe)
    copy.sent, copy.used = z.sent, z.used
    return copy.alias(z) if shares else copy


def derived(
    recipe: Recipe, *lazy: LazyLogits, view: Callable[[Tensor], Tensor] | None = None
) -> LazyLogits:
    """New logits that are computed from others. With `view`, they are a view of the first."""
    new = LazyLogits.of(recipe)
    if view is not None:
        z = lazy[0]
        z.cell.recipe = z.cell.recipe.detached()  # an alias must not keep the history of others
        new.cell, new.path = z.cell, (*z.path, view)
    sends = [z for z in lazy if z.sends]
    if not sends:
        new.recipe = new.recipe.detached()
        return new
    for z in sends:
        z.used = True
    return new.rooted(anchors_of(sends))


def anchors_of(lazy: list[LazyLogits]) -> tuple[LazyLogits, ...]:
    return tuple({id(t): t for z in lazy for t in z.anchors}.values())


class UnscaledLogits(Source):
    """The logits that the head computes, before the scale and softcap of the lazy logits."""

    def __init__(self, z: LazyLogits):
        self.z, self.recipe = z.settle(), z.recipe
        self.shape = torch.Size((*z.recipe.lead, z.recipe.vocab))
        self.device, self.dtype = z.recipe.device, z.recipe.head.hidden.dtype
        self.requires_grad = z.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        z, recipe = self.z, self.recipe
        z.used = z.used or z.sends
        source = recipe.source(recipe.oriented(z.sends))

        def computed(loss: RowLoss) -> Any:
            result = source.evaluate(loss, reduction, row_weight)
            return tied(result, z.anchors) if z.sends else result

        if recipe.scores is None or recipe.direct is None or recipe.direct.negative:
            return computed(loss)
        return recipe.scores.evaluate(recipe, loss, computed, z.sends)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        source = self.recipe.source(self.recipe.oriented(False))
        return source.capture(capture, temperature, softcap)

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
        shard = self.shard.over(None, sums_hidden=False)
        return derived(self.z.settle().recipe.replace(shard=shard), self.z)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        of_head = self.z.settle().loss_of_head(loss)
        if isinstance(of_head, str):
            return self.shard.over(self.z.plain(of_head)).evaluate(loss, reduction, row_weight)
        return self.whole().evaluate(loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        if self.z.settle().recipe.obstacle(softcap) or not self.z.from_head:
            columns = self.shard.over(self.z.plain(capture.name).detach()).whole()
            return columns.capture(capture, temperature, softcap)
        return self.whole().capture(capture, temperature, softcap)


def lazy_logits_of(
    head: Head,
    shard=None,
    kind: type[LazyLogits] = LazyLogits,
    inference: bool = False,
    scores: bool = False,
) -> LazyLogits:
    """The lazy logits of a head. With `scores`, losses remember the scores of each row.

    With a shard, `head` holds only this rank's rows of the weight, but the logits have all columns.
    """
    if "torch._dynamo" in sys.modules:
        leave_to_python(Shared, LazyLogits)
    hidden = head.hidden
    if hidden.is_inference():  # without a version counter that shows a later write
        head = head.replace(hidden=own(hidden))
    elif not hidden.is_contiguous():  # so that its views are views where those of logits are
        head = head.replace(hidden=hidden.contiguous())
    tensors = head.tensors
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    watches = (Watch(head.weight, inference),)
    recipe = Recipe(
        head, HeadLogits(head.dtype), watches, trains, inference, shard=shard,
        versions=versions(*tensors),
    )  # fmt: skip
    if scores and (remembered := Remembered.of(recipe)) is not None:
        places = torch.arange(head.rows, device=head.device).view(*head.lead, 1)
        recipe = recipe.replace(scores=remembered, places=places)
    z = LazyLogits.of(recipe if trains else recipe.detached(), kind)
    return z.rooted() if trains else z
