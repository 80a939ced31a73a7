"""Registers losses over a head as operators, so that torch.compile keeps a loss in one graph.

Each loss that core/operators.py registers over logits also has three operators over a head:

    `logitless::head_<name>_total` computes a mean or sum, and its gradients.
    `logitless::head_<name>_rows` computes the results per row.
    `logitless::head_<name>_rows_gradient` computes the gradients of the results per row.

They call run.py, and do not drop ignored rows, because the host would have to wait
for the number of the others, which it cannot inside a compiled graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core import operators, tensor_checks
from ..core.call import check_values, in_func
from ..core.loss import RowLoss
from . import run
from .gemms import without_autocast
from .gradient_sums import HeadGradients, Needs
from .head import Head, ScaledHead
from .run import Call, needs_of


class _HeadArguments(NamedTuple):
    """The operator arguments that describe a head and a teacher's head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    low_rank: Tensor | None
    teacher_hidden: Tensor | None
    teacher_weight: Tensor | None
    teacher_bias: Tensor | None
    teacher_low_rank: Tensor | None
    logits_dtype: torch.dtype | None
    workspace: int | None
    accumulate: str
    teacher_dtype: torch.dtype | None
    teacher_scale: float
    teacher_cap: float | None

    @staticmethod
    def of(head: Head, teacher: ScaledHead | None) -> "_HeadArguments":
        options = (head.dtype, head.workspace, head.accumulate)
        if teacher is None:
            return _HeadArguments(*head.tensors, None, None, None, None, *options, None, 1.0, None)
        return _HeadArguments(
            *head.tensors, *teacher.head.tensors, *options, teacher.dtype, teacher.scale,
            teacher.cap,
        )  # fmt: skip

    def head(self) -> Head:
        return Head(
            self.hidden, self.weight, self.bias, workspace=self.workspace,
            logits_dtype=self.logits_dtype, accumulate=self.accumulate, drop_ignored=False,
            low_rank=self.low_rank,
        )  # fmt: skip

    def teacher(self) -> ScaledHead:
        head = Head(
            self.teacher_hidden, self.teacher_weight, self.teacher_bias,
            logits_dtype=self.teacher_dtype, low_rank=self.teacher_low_rank,
        )  # fmt: skip
        return ScaledHead(head, self.teacher_scale, self.teacher_cap)


_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? low_rank, Tensor? teacher_hidden,"
    " Tensor? teacher_weight, Tensor? teacher_bias, Tensor? teacher_low_rank,"
    " ScalarType? logits_dtype, int? workspace, str accumulate, ScalarType? teacher_dtype,"
    " float teacher_scale, float? teacher_cap"
)


def _arguments_of(head: Head, loss: RowLoss) -> tuple:
    teacher, rest = None, []
    for value in operators.arguments_of(loss):
        if isinstance(value, ScaledHead):
            # `teacher` must be a Tensor, so the operator gets the teacher's hidden states as a
            # placeholder, which `_call_of` replaces by a ScaledHead.
            teacher, value = value, value.head.hidden
        rest.append(value)
    return *_HeadArguments.of(head, teacher), *rest


def _call_of(kind: type, arguments: Sequence, **fields) -> Call:
    rest = iter(arguments)
    of_head = _HeadArguments._make([next(rest) for _ in _HeadArguments._fields])
    loss = operators.loss_of(kind, list(rest))
    if of_head.teacher_hidden is not None:
        loss = loss.replace(pair=loss.pair._replace(teacher=of_head.teacher()))
    return Call(of_head.head(), loss, **fields)


class HeadOperator:
    """The operators of a RowLoss over a head, with their gradients."""

    def __init__(self, logits_operator: operators.Operator):
        self.kind, self.name = logits_operator.kind, f"head_{logits_operator.name}"
        self.logits_operator = logits_operator
        loss = f"{_SCHEMA}, {logits_operator.arguments}"
        self._define(
            "total", f"({loss}, Tensor? row_weight, str reduction, bool[] needs)", self.total,
            self.fake_total,
        )  # fmt: skip
        self._define("rows", f"({loss})", self.rows, self.fake_rows)
        self._define(
            "rows_gradient", f"({loss}, bool[] needs, Tensor?[] upstream)", self.gradient,
            self.fake_gradient,
        )  # fmt: skip
        for suffix, backward, save in (
            ("total", _scale, _save_total),
            ("rows", self.backward, self.save),
            ("rows_gradient", tensor_checks.only_once, None),
        ):
            torch.library.register_autograd(
                f"logitless::{self.name}_{suffix}", backward, setup_context=save,
                lib=operators.library,
            )  # fmt: skip

    def _define(self, suffix: str, arguments: str, run: Callable, fake: Callable) -> None:
        name, library = f"{self.name}_{suffix}", operators.library
        library.define(f"{name}{arguments} -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"logitless::{name}", fake, lib=library)

    def total(self, *arguments) -> list[Tensor]:
        """Returns the loss, the factor for backward (see `Result`), the gradients, and the extras.

        Extras are further results per row (core/loss.py). A tensor that is not needed is empty.
        """
        *arguments, row_weight, reduction, needs = arguments
        call = _call_of(
            self.kind, arguments, row_weight=row_weight, reduction=reduction, needs=_needs(*needs)
        )
        check_values(call.loss)
        with without_autocast(call.head.device):
            (value, *extras), d, later, *_ = run.forward(call)
        if call.scales_in_backward:  # the gradients of weight and bias stay fp32 until backward
            d = _shaped(d, call.head.tensors)
            later = value.new_ones(()) if later is None else later
        else:
            d = d.like(call.head.tensors)
        first = (value, later, *d.tensors, d.row_weight)
        return [*(_or_empty(t, value) for t in first), *extras]

    def fake_total(self, hidden, weight, bias, low_rank, *arguments) -> list[Tensor]:
        *_, row_weight, _, needs = arguments
        full, later = PRECISION[hidden.dtype], hidden.dtype == torch.float16
        value, wide = hidden.new_empty((), dtype=full), full if later else None
        needs = _needs(*needs)
        outputs = (
            value, _like(value, later), _like(hidden, needs.hidden),
            _like(weight, needs.weight, wide), _like(bias, needs.bias, wide),
            _like(low_rank, needs.low_rank, wide), _like(row_weight, needs.row_weight),
        )  # fmt: skip
        extras = [
            hidden.new_empty(hidden.shape[:-1], dtype=operators.dtype_of(name, full))
            for name in self.kind.extras  # type: ignore
        ]
        return [*(_or_empty(t, value) for t in outputs), *extras]

    def rows(self, *arguments) -> list[Tensor]:
        call = _call_of(self.kind, arguments, row_weight=None, reduction="none", needs=_NOTHING)
        check_values(call.loss)
        with call.head.ready(call.loss):
            return list(run.forward(call).outputs)

    def fake_rows(self, *arguments) -> list[Tensor]:
        call = _call_of(self.kind, arguments, row_weight=None, reduction="none", needs=_NOTHING)
        head, loss = call.head, call.loss
        x = head.hidden.new_empty((), dtype=head.dtype).expand(*head.lead, head.weight.shape[0])
        shapes = self.logits_operator.fake(x, *arguments[len(_HeadArguments._fields) :])
        return shapes[: len(operators.outputs_of(loss))]

    def gradient(self, *arguments) -> list[Tensor]:
        *arguments, needs, upstream = arguments
        call = _call_of(
            self.kind, arguments, row_weight=None, reduction="none", needs=_needs(*needs)
        )
        with without_autocast(call.head.device):
            d = run.backward(call, None, upstream)
        return [_or_empty(t, call.head.hidden) for t in d.tensors]

    def fake_gradient(self, hidden, weight, bias, low_rank, *arguments) -> list[Tensor]:
        *_, needs, _ = arguments
        pairs = zip((hidden, weight, bias, low_rank), needs, strict=True)
        return [_or_empty(_like(t, need), hidden) for t, need in pairs]

    def save(self, ctx, inputs, output) -> None:
        ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
        ctx.arguments = [None if isinstance(t, Tensor) else (t,) for t in inputs]
        ctx.set_materialize_grads(False)

    def backward(self, ctx, upstream):
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if other is None else other[0] for other in ctx.arguments]
        gradients = [None] * 4
        if any(d is not None for d in upstream):
            needs = [ctx.needs_input_grad[i] for i in range(4)]
            op = getattr(torch.ops.logitless, f"{self.name}_rows_gradient")
            computed = op(*arguments, needs, list(upstream))
            gradients = [t if need else None for t, need in zip(computed, needs, strict=True)]
        return *gradients, *(None,) * (len(arguments) - 4)


_NOTHING = Needs(False, False, False)
_EXTRAS = 7  # the index of the first extra in the result of the operator `total`


def _needs(
    hidden: bool, weight: bool, bias: bool, low_rank: bool, row_weight: bool = False
) -> Needs:
    """The first four flags are in the order of Head.tensors."""
    return Needs(hidden, weight, bias, row_weight, low_rank=low_rank)


def _shaped(d: HeadGradients, tensors: tuple) -> HeadGradients:
    """Each gradient in the shape of its tensor, in its own dtype."""
    return d.with_tensors(
        None if g is None else g.view(t.shape) for g, t in zip(d.tensors, tensors, strict=True)
    )


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    """Replaces None by an empty tensor, because an operator cannot return None."""
    return like.new_empty(0) if t is None else t


def _like(t: Tensor | None, need: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    if t is None or not need:
        return None
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def _save_total(ctx, inputs, output) -> None:
    hidden, weight, bias, low_rank, *_, row_weight, _, needs = inputs
    of_head = (hidden, weight, bias, low_rank)
    ctx.save_for_backward(*output[1:_EXTRAS])
    ctx.dtypes = [None if t is None else t.dtype for t in (*of_head, row_weight)]
    ctx.needs, ctx.arguments = needs, len(inputs)
    ctx.set_materialize_grads(False)


def _scale(ctx, upstream):
    later, *saved = ctx.saved_tensors
    d, gradients = upstream[0], [None] * 5
    if d is not None:
        scale = d * later if later.numel() else d
        gradients = [
            torch.ops.logitless.head_scale(t, by, dtype) if need else None
            for t, by, dtype, need in zip(
                saved, (*(scale,) * 4, d), ctx.dtypes, ctx.needs, strict=True
            )
        ]
    *of_head, d_row_weight = gradients
    return *of_head, *(None,) * (ctx.arguments - 7), d_row_weight, None, None


def scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * by`, rounded once to `dtype`. On a GPU, the fp32 product is not stored."""
    out = fake_scale(gradient, by, dtype)
    return torch.mul(gradient, by.view((1,) * gradient.dim()), out=out)


def fake_scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)


# The backward of the operator head_scale raises, because a gradient is not differentiated again.
operators.library.define(
    "head_scale(Tensor gradient, Tensor by, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
operators.library.impl("head_scale", scale, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::head_scale", fake_scale, lib=operators.library)
torch.library.register_autograd(
    "logitless::head_scale", tensor_checks.only_once, lib=operators.library
)

HEAD_OPERATORS: dict[type, HeadOperator] = {}


def operator(name: str, *, saved: int) -> Callable[[type], type]:
    """Registers the operators of a RowLoss whose forward saves `saved` tensors."""

    def register(kind: type) -> type:
        kind = operators.operator(name, saved=saved)(kind)
        HEAD_OPERATORS[kind] = HeadOperator(operators.OPERATORS[kind])
        return kind

    return register


def call_rows(loss: RowLoss, head: Head) -> tuple[Tensor, ...]:
    name = f"{HEAD_OPERATORS[type(loss)].name}_rows"
    return tuple(getattr(torch.ops.logitless, name)(*_arguments_of(head, loss)))


def evaluate_compiled(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None) -> Any:
    """The weighted and reduced loss over a head, by operators that compilers can trace."""
    if in_func():
        tensor_checks.no_head_in_func()
    operator = HEAD_OPERATORS.get(type(loss))
    if reduction == "none" or operator is None:  # a loss from `row_loss` has no operator
        outputs = loss.traced(head, call_rows)
        return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)
    needs = needs_of(head.tensors, row_weight, (), torch.is_grad_enabled())
    flags = [needs.hidden, needs.weight, needs.bias, needs.low_rank, needs.row_weight]
    op = getattr(torch.ops.logitless, f"{operator.name}_total")
    outputs = op(*_arguments_of(head, loss), row_weight, reduction, flags)
    extras = tuple(t.detach() for t in outputs[_EXTRAS:])
    return (outputs[0], *extras) if extras else outputs[0]
