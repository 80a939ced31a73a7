"""Registers losses as PyTorch operators, for torch.compile, dispatch modes and opcheck.

`logitless::<name>` returns the outputs of a RowLoss and the tensors that backward needs (an empty
one for None, which an operator cannot return); `logitless::<name>_gradient` returns the gradient of
the logits. The arguments are the fields of the loss and of its structs. For torch.func, each
operator also has an autograd.Function. Losses over a head have others (heads/operators.py).

The compiled backward of a loss without ids calls no operator: the compiler fuses the operations of
`fusible_gradient` into one kernel, which overwrites logits that nothing else reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..contract import PRECISION, Pair, Reading, Slots
from ..eager.stats_bwd import fusible_gradient
from . import tensor_checks
from .backend import Completed
from .call import check_values, in_func
from .choose_backend import backend_of
from .invariant import refuse_operator

# The arguments of the operator for each field of a loss, as a schema: one per field of a struct.
_ARGUMENTS = {
    "reading": "SymInt vocab, Tensor? label, Tensor? ids, Tensor? class_weight,"
    " Tensor? row_temperature, float? temperature, float? softcap, int? ignore_index, str wants",
    "slots": "Tensor teacher, Tensor? mask, Tensor? tail, Tensor? slot_weight, str divergence,"
    " str support, float beta, float kd_weight, float ce_weight",
    "pair": "Tensor teacher, str kind, float blend",
    "label_smoothing": "float label_smoothing",
    "z_loss": "float z_loss",
    "label_name": "str label_name",
}
_STRUCTS: dict[str, Any] = {"reading": Reading, "slots": Slots, "pair": Pair}
# without Reading.invariant, which operators do not support
_FIELDS = {
    Reading: tuple(name for name in Reading._fields if name != "invariant"),
    Slots: Slots._fields,
    Pair: Pair._fields,
}

# The backend of a compiled backward: an operator's gradient would be a tensor beside the logits.
IN_GRAPH = Completed(SimpleNamespace(gradient=fusible_gradient))

library = torch.library.Library("logitless", "DEF")


def arguments_of(loss) -> tuple:
    arguments = []
    for name in OPERATORS[type(loss)].fields:
        value = getattr(loss, name)
        if name == "reading":
            if value.invariant:
                refuse_operator()
            value = value._replace(wants=" ".join(value.wants))
            value = tuple(getattr(value, field) for field in _FIELDS[Reading])
        arguments.extend(tuple(value) if name in _STRUCTS else (value,))
    return tuple(arguments)


def loss_of(kind: type, arguments: Sequence):
    values, rest = [], iter(arguments)
    for name in OPERATORS[kind].fields:
        struct = _STRUCTS.get(name)
        if struct is None:
            values.append(next(rest))
            continue
        value = struct(*(next(rest) for _ in _FIELDS[struct]))
        values.append(
            value._replace(wants=tuple(value.wants.split())) if struct is Reading else value
        )
    return kind(*values)


def _is_traced() -> bool:
    """Whether AOTAutograd traces a graph for a compiler."""
    kind = torch._C._TorchDispatchModeKey.FUNCTIONAL
    return torch._C._get_dispatch_mode(kind) is not None


def outputs_of(loss) -> tuple[str, ...]:
    return loss.reading.wants if loss.multiple_outputs else ("value", *loss.extras)


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if name in ("argmax", "rank") else dtype


class Operator:
    def __init__(self, kind: type, name: str, count: int):
        self.kind, self.name, self.count = kind, name, count
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
        torch.library.register_autograd(f"{full}_gradient", tensor_checks.only_once, lib=library)
        self.in_func, self.gradient_in_func = _func_nodes(self)

    def forward(self, x, *arguments) -> list[Tensor]:
        loss = loss_of(self.kind, arguments)
        check_values(loss)
        outputs, saved = loss.forward(backend_of(x), x)
        saved = [x.new_empty(0) if t is None else t for t in saved]
        # An operator must not return a tensor that another call also returns, and a saved
        # tensor of one row can be a cached constant.
        saved = [t.clone() if t.shape[:1] == (1,) else t for t in saved]
        return [*outputs, *saved]

    def gradient(self, x, *arguments) -> Tensor:
        *arguments, upstream = arguments
        count = len(arguments) - self.count
        loss, saved = loss_of(self.kind, arguments[:count]), arguments[count:]
        return loss.backward(backend_of(x), x, tuple(saved), tuple(upstream))

    def fake(self, x, *arguments) -> list[Tensor]:
        loss, dtype = loss_of(self.kind, arguments), PRECISION[x.dtype]
        names = (*outputs_of(loss), *("saved",) * self.count)
        return [
            x.new_empty(shape, dtype=dtype_of(name, dtype))
            for name, shape in zip(names, loss.shapes(x), strict=True)
        ]

    def fake_gradient(self, x, *arguments) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def save(self, ctx, inputs, output):
        x, *arguments = inputs
        outputs = len(outputs_of(loss_of(self.kind, arguments)))
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        ctx.save_for_backward(x, *tensors, *output[outputs:])
        ctx.arguments = [None if isinstance(t, Tensor) else (t,) for t in arguments]
        ctx.outputs, ctx.in_func = outputs, False
        ctx.set_materialize_grads(False)

    def backward(self, ctx, upstream):
        x, *rest = ctx.saved_tensors
        rest = iter(rest)
        arguments = [next(rest) if number is None else number[0] for number in ctx.arguments]
        upstream, d_x = list(upstream[: ctx.outputs]), None
        if any(d is not None for d in upstream):
            args = (x, *arguments, *rest)
            loss = loss_of(self.kind, arguments)
            if ctx.in_func:
                d_x = self.gradient_in_func.apply(len(args), *args, *upstream)  # type: ignore
            elif loss.structs == ("reading",) and loss.reading.ids is None and _is_traced():
                d_x = loss.backward(IN_GRAPH, x, args[-self.count :], tuple(upstream))
            else:
                d_x = getattr(torch.ops.logitless, f"{self.name}_gradient")(*args, upstream)
        return d_x, *(None,) * len(arguments)


def _func_nodes(operator: Operator) -> tuple[type, type]:
    class InFunc(torch.autograd.Function):
        @staticmethod
        def forward(x, *arguments):
            return tuple(operator.forward(x, *arguments))

        @staticmethod
        def setup_context(ctx, inputs, output):
            operator.save(ctx, inputs, output)
            ctx.in_func = True
            fixed = [t for t in output[: ctx.outputs] if not t.is_floating_point()]
            ctx.mark_non_differentiable(*fixed, *output[ctx.outputs :])

        @staticmethod
        def backward(ctx, *upstream):
            return operator.backward(ctx, upstream)

        jvp = staticmethod(tensor_checks.only_in_reverse)
        vmap = staticmethod(tensor_checks.not_mapped)

    class GradientInFunc(torch.autograd.Function):
        @staticmethod
        def forward(count, *args):
            return operator.gradient(*args[:count], args[count:])

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        backward = staticmethod(tensor_checks.only_once)
        jvp = staticmethod(tensor_checks.only_in_reverse)
        vmap = staticmethod(tensor_checks.not_mapped)

    return InFunc, GradientInFunc


OPERATORS: dict[type, Operator] = {}


def operator(name: str, *, saved: int) -> Callable[[type], type]:
    """Registers a RowLoss. `saved` is the number of tensors that forward saves."""

    def register(kind: type) -> type:
        OPERATORS[kind] = Operator(kind, name, saved)
        return kind

    return register


def call(loss, x: Tensor) -> tuple[Tensor, ...]:
    op, arguments = OPERATORS[type(loss)], arguments_of(loss)
    if not torch.compiler.is_compiling() and in_func():
        outputs = op.in_func.apply(x, *arguments)  # type: ignore
    else:
        outputs = getattr(torch.ops.logitless, op.name)(x, *arguments)
    return tuple(outputs[: len(outputs_of(loss))])
