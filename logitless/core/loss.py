"""A loss of rows as data, and how it is evaluated on a tensor of logits.

A `RowLoss` has two methods, and whoever evaluates it decides when each is called:

    forward(run, x)                       outputs (...), and what backward needs
    backward(run, x, saved, upstream)     the gradient of the logits

Most losses need statistics of a row alone. They implement `settle` (statistics to outputs) and
`coefficients` (of the one backward), from which both methods follow. A loss that needs the logits
of whole rows overrides `forward` and `backward`.

`run` is the backend: `kernels` or `eager`; or one that reads some columns of a row and joins what
they tell, of those on other ranks (Columns in parallel/columns.py) or of the next blocks of a head
(ByBlock in heads/blocks.py, where x is its `Blocks`). Neither method knows autograd. `evaluate`
makes an autograd function of them for a tensor: the gradient is made in backward from what forward
saved, or, of small logits, in forward already. A source that is no tensor (core/source.py)
evaluates the loss itself, by the same two methods. To a compiler, a dispatch mode or torch.func the
same work is an operator (core/operators.py), and the reduction plain PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import eager
from ..contract import PRECISION, Coefficients, Reading, Statistics, made_once
from . import call as _call
from . import checks as _checks
from . import operators as _ops
from .autograd import Node, refuse_second
from .call import backend, on_gpu, under_transform
from .later import later

Saved = tuple[Tensor | None, ...]


@dataclass(eq=False)
class RowLoss:
    """A loss of each row by itself."""

    reading: Reading

    several: ClassVar[bool] = False  # whether it has several outputs, or one number a row
    # How many of its tensors backward reads, from the first on; None is all. The four of the
    # reading are the label (a label or a mask, one a row), ids, class weights and temperatures.
    reads: ClassVar[int | None] = 4
    # Whether what forward saves is the gradient itself, for an upstream gradient of 1.
    saves_gradient: ClassVar[bool] = False
    others = ()  # tensors besides the logits that may want a gradient

    @property
    def names(self) -> tuple[str, str]:
        """Of the label and of the ids, as users know them."""
        return "target", "ids"

    def settle(self, run: ModuleType, found: Statistics) -> tuple[tuple[Tensor, ...], Saved]:
        """Outputs (...) from the statistics of whole rows, and what `coefficients` needs."""
        raise NotImplementedError

    def coefficients(
        self, saved: Saved, upstream: tuple[Tensor | None, ...]
    ) -> tuple[Coefficients, Tensor]:
        """Of the one backward, and what multiplies them, () or (...)."""
        raise NotImplementedError

    def forward(self, run: ModuleType, x: Tensor) -> tuple[tuple[Tensor, ...], Saved]:
        return self.settle(run, run.read(x, self.reading))

    def backward(
        self,
        run: ModuleType,
        x: Tensor,
        saved: Saved,
        upstream: tuple[Tensor | None, ...],  # of each output, () or (...)
        factor: Tensor | None = None,  # () or one a row: what else multiplies
        into: Tensor | None = None,  # where the gradient goes, x itself perhaps
    ) -> Tensor:
        coefficients, gain = self.coefficients(saved, upstream)
        return run.gradient(x, self.reading, saved[0], coefficients, gain, factor, into)

    @property
    def merges(self) -> bool:
        """Whether parts of a row tell all that it needs: its statistics, but for a tail, do."""
        return type(self).forward is RowLoss.forward and "tail" not in self.reading.wants

    def at_once(
        self, run: ModuleType, x: Tensor, factor: Tensor | None, into: Tensor
    ) -> tuple[Tensor, Tensor, Saved]:
        """Value, gradient for an upstream gradient of 1, and what backward would need."""
        (value,), saved = self.forward(run, x)
        gradient = self.backward(run, x, saved, (one[x.device, value.dtype],), factor, into)
        return value, gradient, saved

    def mean_at_once(self, run: ModuleType, x: Tensor, into: Tensor) -> Tensor | None:
        """The mean over rows and, in the same launch, its gradient; None where there is no such.

        For logits so small that a launch takes longer than reading them.
        """
        return None

    def traced(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs through an operator, for a compiler, a dispatch mode or torch.func."""
        return _ops.call(self, x)

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Of the outputs, then of what is saved."""
        raise NotImplementedError

    def mass(self, run: ModuleType, dtype: torch.dtype) -> Tensor | None:
        """What each row weighs in a mean, (N,); None for 1 each that counts."""
        return None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors that backward reads, besides the logits: first the four of the reading."""
        r = self.reading
        return r.label, r.ids, r.class_weight, r.row_temperature

    def with_tensors(self, tensors: Sequence[Tensor | None], **changed) -> "RowLoss":
        """The same loss over other tensors."""
        label, ids, class_weight, temperatures = tensors[:4]
        reading = self.reading._replace(
            label=label, ids=ids, class_weight=class_weight, row_temperature=temperatures
        )
        copy = object.__new__(type(self))  # a quarter of the time of dataclasses.replace
        copy.__dict__ = {**self.__dict__, "reading": reading, **changed}
        return copy

    def of_scaled(self, scale: float, softcap: float | None) -> "RowLoss | None":
        """With this softcap, of logits not yet multiplied by `scale`; None if there is no such."""
        if scale != 1 and "logprob_t1" in self.reading.wants:  # which is read at temperature 1
            return None
        return self.with_tensors(self.tensors, reading=self.reading.of_scaled(scale, softcap))

    def d_others(self, saved: Saved, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of `others`, for what multiplies each row's value: a number, or one a row."""
        return ()

    def with_columns(self, cut: Callable[[Any], Any]) -> "RowLoss":
        """The same loss over some columns: what it has of whole rows beside the logits, cut."""
        return self

    def take(self, rows, lead: torch.Size) -> "RowLoss":
        """The same loss of some of its rows, whose shape is `lead`."""
        taken: list[Any] = list(self.tensors)
        for place, t in enumerate(taken):
            if hasattr(t, "evaluate"):  # a teacher that is another source of logits
                taken[place] = t.materialize(rows)
            elif t is not None and place != CLASS_WEIGHT:
                part = t.reshape(lead.numel(), *t.shape[len(lead) :])[rows]
                taken[place] = part.detach().requires_grad_() if t.requires_grad else part
        return self.with_tensors(taken)


CLASS_WEIGHT = 2  # the one tensor that is not of rows


@made_once
def one(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones((), device=device, dtype=dtype)


def rows_in(lead: torch.Size) -> int:
    """How many rows there are. Size.numel() would turn a symbolic size into a constant."""
    return math.prod(lead)


def flat_rows(t: Tensor, lead: torch.Size) -> Tensor:
    return t.reshape(rows_in(lead), *t.shape[len(lead) :])


def evaluate(
    source,  # a Tensor (..., V), or what has an `evaluate` of its own
    loss: RowLoss,
    reduction: str = "none",
    row_weight: Tensor | None = None,  # (...)
):
    """The loss of the rows, weighted and reduced; for Read, the tuple of its statistics."""
    if source.__class__ is not Tensor:
        if hasattr(source, "evaluate"):
            return source.evaluate(loss, reduction, row_weight)
        if hasattr(source, "placements"):
            return later.evaluate_dtensor(evaluate, source, loss, reduction, row_weight)
    if under_transform():
        return _traced(source, loss, reduction, row_weight)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(source).tangent is not None:
        _checks.only_in_reverse()
    _call.values(loss, source.shape[-1])
    return evaluate_on(backend(source), source, loss, reduction, row_weight)


def evaluate_on(run, x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """The same by a backend, of logits that may be some columns of a vocabulary."""
    by_row = reduction == "none" or (row_weight is not None and row_weight.requires_grad)
    how = (None, None) if by_row else (row_weight, reduction)
    others = loss.others
    if torch.is_grad_enabled() and (x.requires_grad or any(t.requires_grad for t in others)):
        small = x.numel() <= SMALL and on_gpu(x)
        if loss.saves_gradient or (small and not by_row and not others):
            outputs = _now(x, run, loss, *how)
        else:
            outputs = _later(x, run, loss, *how, *others)
    else:
        outputs, _, _ = _forward(run, x, loss, *how)
    if not by_row or loss.several:
        return outputs
    mass = _mass(loss, x, reduction)
    return reduced(outputs, loss.reading, row_weight, mass, reduction)


def _mass(loss: RowLoss, x: Tensor, reduction: str) -> Tensor | None:
    return loss.mass(eager, x.dtype) if reduction == "mean" else None


def reduced(
    value: Tensor,  # (...)
    reading: Reading,
    row_weight: Tensor | None,
    mass: Tensor | None,
    reduction: str,
) -> Tensor:
    """Rows to the result, differentiable: the reduction of those that a kernel does not reduce."""
    if reduction != "none":
        return eager.reduce(value, reading, row_weight, mass, reduction == "mean")[0]
    if row_weight is None:
        return value
    value = value * row_weight.to(value.dtype)
    if reading.ignore_index is None:
        return value
    # 0 · inf is not 0.
    return torch.where(reading.label == reading.ignore_index, 0.0, value)


def _forward(run: ModuleType, x: Tensor, loss: RowLoss, row_weight, reduction: str | None):
    """Outputs, the factor of each row's gradient, and what backward needs."""
    outputs, saved = loss.forward(run, x)
    if reduction is None:
        return outputs if loss.several else outputs[0], None, saved
    return *_total(run, x, loss, outputs[0], row_weight, reduction), saved


def _total(run: ModuleType, x: Tensor, loss: RowLoss, value: Tensor, row_weight, reduction: str):
    """The sum or mean of the rows' values, and the factor of each row's gradient."""
    mean, mass = reduction == "mean", None
    if mean and loss.reading.class_weight is not None:
        mass = loss.mass(run, x.dtype)
    return run.reduce(value, loss.reading, row_weight, mass, mean)


# Elements of logits on a GPU whose gradient is made in forward, in fp32: where launching costs more
# than the memory, a backward that only scales is half the host's time.
SMALL = 1 << 20


def scaled(
    gradient: Tensor,  # (..., V), for an upstream gradient of 1, in the precision of losses
    x: Tensor,
    upstream: Tensor,  # () or (...)
    factor: Tensor | None,  # () or one a row
) -> Tensor:
    """The gradient times upstream and factor, rounded once, to the dtype of x."""
    scale = upstream if factor is None else upstream * factor
    if scale.dim():
        scale = scale.reshape(*x.shape[:-1], 1)
    if gradient.dtype == x.dtype:
        return gradient * scale
    into = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.mul(gradient, scale, out=into)


class _Now(Node):
    """The gradient is made in forward, for an upstream gradient of 1: backward only scales it."""

    @staticmethod
    def forward(ctx, x, run, loss, row_weight, reduction):
        factor = None
        if loss.saves_gradient:
            total, factor, (gradient,) = _forward(run, x, loss, row_weight, reduction)
        else:
            total, dense = None, torch.contiguous_format
            gradient = torch.empty_like(x, dtype=PRECISION[x.dtype], memory_format=dense)
            if reduction == "mean" and row_weight is None:
                total = loss.mean_at_once(run, x, gradient)
            if total is None:
                value, gradient, _ = loss.at_once(run, x, None, gradient)
                total, factor = _total(run, x, loss, value, row_weight, reduction)
        ctx.save_for_backward(x, gradient, factor)
        return total

    @staticmethod
    def backward(ctx, upstream):
        Node.each_by_itself((upstream,))
        x, gradient, factor = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return scaled(gradient, x, upstream, factor), None, None, None, None
        with torch.no_grad():
            found = scaled(gradient, x, upstream, factor)
        return *refuse_second((found,), (x, upstream)), None, None, None, None


class _Later(Node):
    """The gradient is made in backward.

    Whatever it reads is saved as autograd saves it, so that a change in place raises.
    """

    @staticmethod
    def forward(ctx, x, run, loss, row_weight, reduction, *others):
        ctx.run = run
        outputs, factor, saved = _forward(run, x, loss, row_weight, reduction)
        tensors = loss.tensors
        read = tensors[: loss.reads]
        ctx.save_for_backward(x, factor, *read, *saved)
        ctx.loss = loss.with_tensors((None,) * len(tensors))
        ctx.count, ctx.unread = len(read), len(tensors) - len(read)
        if isinstance(outputs, tuple):
            whole = [t for t in outputs if not t.is_floating_point()]
            ctx.mark_non_differentiable(*whole)
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *upstream):
        Node.each_by_itself(upstream)
        if not torch.is_grad_enabled():
            found, _ = _Later.gradients(ctx, upstream)
        else:
            with torch.no_grad():
                found, inputs = _Later.gradients(ctx, upstream)
            found = refuse_second(found, (*inputs, *upstream))
        return found[0], None, None, None, None, *found[1:]

    @staticmethod
    def gradients(ctx, upstream) -> tuple[tuple, tuple]:
        """Of the logits and of the loss's other tensors; and all that they depend on."""
        # Asked for once: activation checkpointing unpacks them only once.
        x, factor, *rest = ctx.saved_tensors
        tensors, saved = rest[: ctx.count], rest[ctx.count :]
        d_x, d_others = None, (None,) * len(ctx.loss.others)
        if any(d is not None for d in upstream):
            loss = ctx.loss.with_tensors((*tensors, *(None,) * ctx.unread))
            if ctx.needs_input_grad[0]:
                d_x = loss.backward(ctx.run, x, saved, upstream, factor)
            if loss.others:
                scale = upstream[0] if factor is None else upstream[0] * factor
                d_others = loss.d_others(saved, scale)
        return (d_x, *d_others), (x, *tensors)


# Function.apply without its handling of torch.func, which takes another route (_traced).
_now = super(torch.autograd.Function, _Now).apply  # pyright: ignore[reportAttributeAccessIssue]
_later = super(torch.autograd.Function, _Later).apply  # pyright: ignore[reportAttributeAccessIssue]


def _traced(x: Tensor, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """As operators and plain PyTorch, for compilers, dispatch modes and torch.func."""
    outputs = loss.traced(x)
    if loss.several:
        return outputs
    return reduced(outputs[0], loss.reading, row_weight, _mass(loss, x, reduction), reduction)
