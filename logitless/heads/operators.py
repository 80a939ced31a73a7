"""Losses over a head as operators, so that torch.compile has them in one graph.

Each RowLoss that is an operator over logits (core/operators.py) is three over a head:

    logitless::head_<name>_total             a mean or sum, and all gradients at an upstream of 1
    logitless::head_<name>_rows              its results a row
    logitless::head_<name>_rows_gradient     their gradients

They do what heads/linear.py and heads/per_row.py do without a compiler, by their own functions.
Ignored rows are computed with the others: to know their number the host would have to wait, which a
graph cannot do.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core import call as _call
from ..core import checks as _checks
from ..core import operators as _ops
from ..core.call import in_func
from ..core.later import later
from ..core.loss import RowLoss, _mass, reduced
from .chunks import as_parts
from .linear import LinearLogits, Total, dtypes_as_given
from .per_row import Each

_HEAD = (  # the head, that of a teacher, and how
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? teacher_hidden, Tensor? teacher_weight,"
    " Tensor? teacher_bias, ScalarType? logits_dtype, int? workspace, str accumulate,"
    " ScalarType? teacher_dtype, float teacher_scale, float? teacher_cap"
)
HEAD_TENSORS, HEAD_ARGUMENTS = 6, 12


def _flat(source: LinearLogits, loss: RowLoss) -> tuple:
    """A head and a loss over it as an operator's arguments; a teacher's head is apart."""
    flat, teacher, teacher_how = list(_ops.flat(loss)), (None, None, None), (None, 1.0, None)
    for i, t in enumerate(flat):
        if isinstance(t, LinearLogits):
            teacher, teacher_how = t.parts, (t.dtype, t.scale, t.cap)
            flat[i] = t.hidden  # a placeholder: the schema wants a Tensor
    how = (source.dtype, source.workspace, source.accumulate)
    return (*source.parts, *teacher, *how, *teacher_how, *flat)


def _unpack(kind: type, args: tuple) -> tuple[LinearLogits, RowLoss]:
    """A head and a loss from an operator's arguments."""
    parts, teacher = args[:3], args[3:HEAD_TENSORS]
    dtype, workspace, accumulate, teacher_dtype, scale, cap = args[HEAD_TENSORS:HEAD_ARGUMENTS]
    how = {"logits_dtype": dtype, "workspace": workspace, "accumulate": accumulate}
    loss = _ops.loss_of(kind, args[HEAD_ARGUMENTS:])
    with dtypes_as_given(parts[0].device):
        if teacher[0] is not None:
            head = LinearLogits(*teacher, logits_dtype=teacher_dtype)
            head.scale, head.cap = scale, cap
            loss = loss.with_tensors((*loss.tensors[:4], head))
        return LinearLogits(*parts, drop_ignored=False, **how), loss


def _context(needs: list[bool], **fields) -> SimpleNamespace:
    """What a head's node asks of autograd's context; an operator has its own."""

    def nothing(*_):
        pass

    return SimpleNamespace(
        needs=needs, others=[], known=None, save_for_backward=nothing,
        mark_non_differentiable=nothing, set_materialize_grads=nothing, **fields,
    )  # fmt: skip


class HeadOperator:
    """A RowLoss over a head, as operators with gradients."""

    def __init__(self, logits_operator: _ops.Operator):
        self.kind, self.name = logits_operator.kind, f"head_{logits_operator.name}"
        self.logits_operator = logits_operator
        loss = f"{_HEAD}, {logits_operator.arguments}"
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
            ("rows_gradient", _ops.refuse, None),
        ):
            torch.library.register_autograd(
                f"logitless::{self.name}_{suffix}", backward, setup_context=save, lib=_ops.library
            )

    def _define(self, suffix: str, arguments: str, run, fake) -> None:
        name, library = f"{self.name}_{suffix}", _ops.library
        library.define(f"{name}{arguments} -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"logitless::{name}", fake, lib=library)

    def call(self, source: LinearLogits, loss: RowLoss) -> tuple[Tensor, ...]:
        """The results of the rows."""
        return tuple(getattr(torch.ops.logitless, f"{self.name}_rows")(*_flat(source, loss)))

    def total(self, *args) -> list[Tensor]:
        """The loss, the share of a row in its mean, and the gradients; empty what is not needed."""
        *args, row_weight, reduction, needs = args
        source, loss = _unpack(self.kind, tuple(args))
        _call.values(loss, source.shape[-1])
        late = _scale_in_backward(reduction, source.hidden.dtype)
        ctx = _context(needs, mean=reduction == "mean", late=late)
        with dtypes_as_given(source.device):
            value, share, found = Total.compute(ctx, source, row_weight, loss)
        found[:3] = _shaped(found[:3], source.parts) if late else as_parts(found[:3], source.parts)
        return [_or_empty(t, value) for t in (value, share if late else None, *found)]

    def fake_total(self, hidden, weight, bias, *args) -> list[Tensor]:
        *_, row_weight, reduction, needs = args
        full, late = PRECISION[hidden.dtype], _scale_in_backward(reduction, hidden.dtype)
        value = hidden.new_empty((), dtype=full)
        wide = full if late else None  # of a sum
        found = [
            _like_or_none(hidden, needs[0]), _like_or_none(weight, needs[1], wide),
            _like_or_none(bias, needs[2], wide), _like_or_none(row_weight, needs[3]),
        ]  # fmt: skip
        return [_or_empty(t, value) for t in (value, _like_or_none(value, late), *found)]

    def rows(self, *args) -> list[Tensor]:
        source, loss = _unpack(self.kind, args)
        _call.values(loss, source.shape[-1])
        return list(Each.forward(_context([False] * 3), *source.parts, source, loss))

    def fake_rows(self, *args) -> list[Tensor]:
        (hidden, weight), dtype, rest = args[:2], args[HEAD_TENSORS], args[HEAD_ARGUMENTS:]
        x = hidden.new_empty((), dtype=dtype).expand(*hidden.shape[:-1], weight.shape[0])
        return self.logits_operator.fake(x, *rest)[: _ops.outputs_of(_ops.loss_of(self.kind, rest))]

    def gradient(self, *args) -> list[Tensor]:
        *args, needs, upstream = args
        source, loss = _unpack(self.kind, tuple(args))
        with dtypes_as_given(source.device):
            found = Each.compute(_context(needs), upstream, source, loss)
        return [_or_empty(t, source.hidden) for t in found]

    def fake_gradient(self, hidden, weight, bias, *args) -> list[Tensor]:
        *_, needs, _ = args
        pairs = zip((hidden, weight, bias), needs, strict=True)
        return [_or_empty(_like_or_none(t, need), hidden) for t, need in pairs]

    def save(self, ctx, inputs, output) -> None:
        loss = _ops.loss_of(self.kind, inputs[HEAD_ARGUMENTS:])
        ctx.save_for_backward(*inputs[:HEAD_TENSORS], *loss.tensors)
        ctx.loss = loss.with_tensors((None,) * len(loss.tensors))
        ctx.how, ctx.arguments = inputs[HEAD_TENSORS:HEAD_ARGUMENTS], len(inputs)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, upstream):
        heads, tensors = ctx.saved_tensors[:HEAD_TENSORS], ctx.saved_tensors[HEAD_TENSORS:]
        found = [None] * 3
        if any(d is not None for d in upstream):
            needs = list(ctx.needs_input_grad[:3])
            args = (*heads, *ctx.how, *_ops.flat(ctx.loss.with_tensors(tensors)))
            op = getattr(torch.ops.logitless, f"{self.name}_rows_gradient")
            made = op(*args, needs, list(upstream))
            found = [t if need else None for t, need in zip(made, needs, strict=True)]
        return *found, *(None,) * (ctx.arguments - 3)


def _scale_in_backward(reduction: str, dtype: torch.dtype) -> bool:
    """Whether gradients get their share of a mean at the end, as those of fp16 do."""
    return reduction == "mean" and dtype == torch.float16


def _shaped(gradients: list, parts: tuple) -> list:
    """Each in the shape of what it is the gradient of, with all its bits."""
    pairs = zip(gradients, parts, strict=True)
    return [None if t is None else t.view(part.shape) for t, part in pairs]


def _or_empty(t: Tensor | None, like: Tensor) -> Tensor:
    """An operator's outputs cannot be None."""
    return like.new_empty(0) if t is None else t


def _like_or_none(t: Tensor, need: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    if not need:
        return None
    return torch.empty_like(t, dtype=dtype, memory_format=torch.contiguous_format)


def _save_total(ctx, inputs, output) -> None:
    *_, row_weight, _, needs = inputs
    _, share, *found = output
    ctx.save_for_backward(share, *found)
    ctx.dtypes = [None if t is None else t.dtype for t in (*inputs[:3], row_weight)]
    ctx.needs, ctx.arguments = needs, len(inputs)
    ctx.set_materialize_grads(False)


def _scale(ctx, upstream):
    share, *found = ctx.saved_tensors
    d, gradients = upstream[0], [None] * 4
    if d is not None:
        scale = d * share if share.numel() else d
        gradients = [
            torch.ops.logitless.head_scale(t, by, dtype) if need else None
            for t, by, dtype, need in zip(
                found, (scale, scale, scale, d), ctx.dtypes, ctx.needs, strict=True
            )
        ]
    *head, d_rows = gradients
    return *head, *(None,) * (ctx.arguments - 6), d_rows, None, None


def scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Their product, rounded once; on a GPU without a copy in fp32."""
    found = fake_scale(gradient, by, dtype)
    return torch.mul(gradient, by.view((1,) * gradient.dim()), out=found)


def fake_scale(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)


# An operator of its own, so that a second differentiation is refused here too.
_ops.library.define(
    "head_scale(Tensor gradient, Tensor by, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_ops.library.impl("head_scale", scale, "CompositeExplicitAutograd")
torch.library.register_fake("logitless::head_scale", fake_scale, lib=_ops.library)
torch.library.register_autograd("logitless::head_scale", _ops.refuse, lib=_ops.library)


@_ops.for_each
def _register(operator: _ops.Operator) -> None:
    operator.over_a_head = HeadOperator(operator)


def evaluate(source: LinearLogits, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """As LinearLogits.evaluate, for a compiler."""
    if in_func():
        _checks.no_head_in_func()
    if source.main_grad is not None:  # backward adds to it, which a graph cannot say
        return torch.compiler.disable(LinearLogits.evaluate)(source, loss, reduction, row_weight)  # pyright: ignore[reportCallIssue]
    operator = _ops.OPERATORS.get(type(loss))
    if reduction == "none" or operator is None:  # a user's formula has no operator
        outputs = loss.traced(source)
        if loss.several:
            return outputs
        mass = _mass(loss, source, reduction)
        return reduced(outputs[0], loss.reading, row_weight, mass, reduction)
    wanted = torch.is_grad_enabled()
    parts = (*source.parts, row_weight)
    needs = [wanted and t is not None and t.requires_grad for t in parts]
    op = getattr(torch.ops.logitless, f"{operator.over_a_head.name}_total")
    return op(*_flat(source, loss), row_weight, reduction, needs)[0]


later.evaluate_compiled = evaluate
