"""The losses as operators, so that torch.compile, dispatch modes and opcheck see through them.

Each RowLoss has an operator `logitless::<name>` that gives its outputs and what its gradient needs,
and an operator `logitless::<name>_gradient`. The structs of contract.py are flat arguments there,
under their own names. What is None inside is an empty tensor outside: an operator's outputs cannot
be None. torch.func wants an autograd.Function of a form of its own, which is here too.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION, Pair, Reading, Slots
from . import call as _call
from . import checks as _checks
from .call import backend, in_func

_ARGUMENTS = {
    "reading": "SymInt vocab, Tensor? label, Tensor? ids, Tensor? class_weight,"
    " Tensor? row_temperature, float temperature, float? softcap, int? ignore_index, str wants",
    "slots": "Tensor teacher, Tensor? mask, Tensor? tail, Tensor? slot_weight, str divergence,"
    " str support, float beta, float kd_weight, float ce_weight",
    "pair": "Tensor teacher, str kind, float blend",
    "label_smoothing": "float label_smoothing",
    "z_loss": "float z_loss",
    "label_name": "str label_name",
}
_STRUCTS = {"reading": Reading, "slots": Slots, "pair": Pair}

library = torch.library.Library("logitless", "DEF")


def flat(loss) -> tuple:
    """The fields of a loss as an operator's arguments."""
    args = [*loss.reading[:-1], " ".join(loss.reading.wants)]
    for name in OPERATORS[type(loss)].fields[1:]:
        value = getattr(loss, name)
        args = [*args, *(value if name in _STRUCTS else (value,))]
    return tuple(args)


def loss_of(kind: type, args):
    """A loss from an operator's arguments."""
    given, args = [], list(args)
    for name in OPERATORS[kind].fields:
        struct = _STRUCTS.get(name)
        count = 1 if struct is None else len(struct._fields)
        part, args = args[:count], args[count:]
        if name == "reading":
            part[-1] = tuple(part[-1].split())
        given.append(part[0] if struct is None else struct._make(part))
    return kind(*given)


def outputs_of(loss) -> int:
    return len(loss.reading.wants) if loss.several else 1


class Operator:
    """A RowLoss as an operator with a gradient, and as torch.func wants it."""

    def __init__(self, kind: type, name: str, count: int):
        self.kind, self.name, self.count = kind, name, count
        self.over_a_head: Any = None  # heads/operators.py
        self.fields = tuple(field.name for field in fields(kind))
        self.arguments = loss = ", ".join(_ARGUMENTS[field] for field in self.fields)
        saved = ", ".join(f"Tensor saved_{i}" for i in range(count))
        tag = (torch.Tag.pt2_compliant_tag,)
        library.define(f"{name}(Tensor x, {loss}) -> Tensor[]", tags=tag)
        library.define(
            f"{name}_gradient(Tensor x, {loss}, {saved}, Tensor?[] upstream) -> Tensor", tags=tag
        )
        full = f"logitless::{name}"
        library.impl(name, self.forward, "CompositeExplicitAutograd")
        library.impl(f"{name}_gradient", self.gradient, "CompositeExplicitAutograd")
        torch.library.register_fake(full, self.fake, lib=library)
        torch.library.register_fake(f"{full}_gradient", self.fake_gradient, lib=library)
        torch.library.register_autograd(full, self.backward, setup_context=self.save, lib=library)
        torch.library.register_autograd(f"{full}_gradient", refuse, lib=library)
        self.in_func, self.gradient_in_func = _func_nodes(self)

    def forward(self, x, *args) -> list[Tensor]:
        loss = loss_of(self.kind, args)
        _call.values(loss, x.shape[-1])
        outputs, saved = loss.forward(backend(x), x)
        saved = [x.new_empty(0) if t is None else t for t in saved]
        # Cloned where it is a constant that others read too.
        saved = [t.clone() if t.shape[:1] == (1,) else t for t in saved]
        return [*outputs, *saved]

    def gradient(self, x, *args) -> Tensor:
        *args, upstream = args
        count = len(args) - self.count
        loss, saved = loss_of(self.kind, tuple(args[:count])), args[count:]
        return loss.backward(backend(x), x, tuple(saved), tuple(upstream))

    def fake(self, x, *args) -> list[Tensor]:
        loss, dtype = loss_of(self.kind, args), PRECISION[x.dtype]
        wants = loss.reading.wants if loss.several else ()
        return [
            x.new_empty(shape, dtype=torch.int64 if wants[i : i + 1] == ("argmax",) else dtype)
            for i, shape in enumerate(loss.shapes(x))
        ]

    def fake_gradient(self, x, *args) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def save(self, ctx, inputs, output):
        x, *args = inputs
        loss = loss_of(self.kind, tuple(args))
        tensors = loss.tensors
        count = outputs_of(loss)
        ctx.save_for_backward(x, *tensors, *output[count:])
        ctx.loss, ctx.tensors = loss.with_tensors((None,) * len(tensors)), len(tensors)
        ctx.outputs, ctx.arguments = count, len(args)
        ctx.in_func = False
        ctx.set_materialize_grads(False)

    def backward(self, ctx, upstream):
        x, *rest = ctx.saved_tensors
        loss, saved = ctx.loss.with_tensors(tuple(rest[: ctx.tensors])), rest[ctx.tensors :]
        upstream, d_x = list(upstream[: ctx.outputs]), None
        if any(d is not None for d in upstream):
            args = (x, *flat(loss), *saved)
            if ctx.in_func:
                d_x = self.gradient_in_func.apply(len(args), *args, *upstream)
            else:
                d_x = getattr(torch.ops.logitless, f"{self.name}_gradient")(*args, upstream)
        return d_x, *(None,) * ctx.arguments


def refuse(ctx, *_):
    raise RuntimeError(
        "logitless: a loss must not be differentiated twice; its backward has no gradient."
    )


def _func_nodes(operator: Operator) -> tuple[type, type]:
    """The operator and its gradient as torch.func wants them."""

    class InFunc(torch.autograd.Function):
        @staticmethod
        def forward(x, *args):
            return tuple(operator.forward(x, *args))

        @staticmethod
        def setup_context(ctx, inputs, output):
            operator.save(ctx, inputs, output)
            ctx.in_func = True
            fixed = [t for t in output[: ctx.outputs] if not t.is_floating_point()]
            ctx.mark_non_differentiable(*fixed, *output[ctx.outputs :])

        @staticmethod
        def backward(ctx, *upstream):
            return operator.backward(ctx, upstream)

        jvp = staticmethod(_checks.only_in_reverse)  # pyright: ignore
        vmap = staticmethod(_checks.not_mapped)  # pyright: ignore

    class GradientInFunc(torch.autograd.Function):
        @staticmethod
        def forward(count, *args):
            return operator.gradient(*args[:count], args[count:])

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        backward = staticmethod(refuse)
        jvp = staticmethod(_checks.only_in_reverse)  # pyright: ignore
        vmap = staticmethod(_checks.not_mapped)  # pyright: ignore

    return InFunc, GradientInFunc


OPERATORS: dict[type, Operator] = {}
_TOLD: list[Callable[[Operator], None]] = []


def for_each(told: Callable[[Operator], None]) -> Callable[[Operator], None]:
    """Call `told` with every operator: those that are registered, and those that will be."""
    for found in OPERATORS.values():
        told(found)
    _TOLD.append(told)
    return told


def operator(name: str, *, saved: int) -> Callable[[type], type]:
    """Register a RowLoss, which saves so many tensors for its gradient, as an operator."""

    def register(kind: type) -> type:
        OPERATORS[kind] = Operator(kind, name, saved)
        for told in _TOLD:
            told(OPERATORS[kind])
        return kind

    return register


def call(loss, x) -> tuple[Tensor, ...]:
    """The outputs of a loss over x, a tensor or a head, through its operator."""
    found = OPERATORS[type(loss)]
    if not isinstance(x, Tensor):
        return found.over_a_head.call(x, loss)
    if not torch.compiler.is_compiling() and in_func():
        outputs = found.in_func.apply(x, *flat(loss))
    else:
        outputs = getattr(torch.ops.logitless, found.name)(x, *flat(loss))
    return tuple(outputs[: outputs_of(loss)])
