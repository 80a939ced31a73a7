"""Losses over a linear head, whose logits are hidden @ weight.T + bias.

`HeadLogits` is the Source (core/source.py) of these logits. run.py evaluates a loss over them, from
one piece at a time: a chunk of rows (chunks.py), a block of columns (blocks.py), or tiles that are
never written to memory (on_chip.py). choose_cut.py chooses the pieces.

No code in heads/ depends on a particular loss. A RowLoss (core/loss.py) computes values and
gradients from the logits of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import eager
from ..contract import Reading
from ..core import call, tensor_checks
from ..core.capture import Capture, Captured
from ..core.evaluate import by_statistics, evaluate
from ..core.invariant import is_invariant, uncompiled
from ..core.loss import RowLoss
from ..core.source import Source, is_dtensor, needs_grad
from . import checks as rules
from .gemms import autocasts, cast_by_autocast, flat, side_by_side
from .head import Head, Rows, ScaledHead
from .on_chip import chunks_of
from .operators import evaluate_compiled
from .quantized import is_quantized
from .run import Call, is_straight, needs_of, plan_of, repeated, run, run_small


def checked_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, low_rank: Any = None, **options
) -> Head:
    """Checks the tensors and the options of a head. `options` are fields of Head.

    `low_rank` is None, or the pair (hidden, weight) of LinearLogits.
    """
    if is_dtensor(weight):  # `shard_of_head` checks the local tensors later
        rules.head_placements(hidden, weight, bias)
        rules.no_low_rank(low_rank)
        return Head(hidden, weight, bias, **options)
    if low_rank is not None:
        rules.is_pair(low_rank)
    second, second_weight = low_rank or (None, None)
    if isinstance(hidden, Tensor) and autocasts(hidden.device):
        given = (hidden, weight, bias, second, second_weight)
        hidden, weight, bias, second, second_weight = map(cast_by_autocast, given)
    head = Head(hidden, weight, bias, **options)
    head.signature = call.check_once(
        rules.linear, hidden, weight, bias, head.main_grad, head.workspace, head.logits_dtype,
        head.accumulate, head.drop_ignored, second, second_weight,
    )  # fmt: skip
    if low_rank is None:
        return head
    return head.replace(
        hidden=side_by_side(hidden, second),
        low_rank=second_weight,
        skips_first=not hidden.requires_grad,
    )


class HeadLogits(Source):
    """The logits of a head whose tensors and options are already checked."""

    def __init__(self, head: Head):
        self.head, self.hidden, self.spread = head, head.hidden, is_dtensor(head.weight)
        hidden = head.hidden
        self.shape = torch.Size((*hidden.shape[:-1], head.weight.shape[0]))
        self.dtype, self.device = head.logits_dtype or hidden.dtype, hidden.device
        self.requires_grad = hidden.requires_grad or needs_grad(*head.inputs)

    def current(self) -> Head:
        """Returns the head. Raises if the number of rows of the weight is no longer V."""
        head = self.head
        if head.weight.shape[0] != self.shape[-1]:  # len() would run Python code of PyTorch
            rules.same_rows(head.weight, self.shape[-1])
        return head

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """Returns the weighted and reduced loss, computed from one chunk of logits at a time."""
        return evaluate_head(self.current(), loss, reduction, row_weight)

    def again(self, signature: Any, label: Tensor) -> Tensor | None:
        # A subclass can override `evaluate`.
        return repeated(self.head, signature, label) if type(self) is HeadLogits else None

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        return captured_of_head(self.current(), capture, temperature, softcap)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        """Returns the differentiable logits, as a tensor of shape (..., V).

        With `rows`, the result holds only the logits of these rows, without a gradient.
        """
        return self.current().logits(rows)

    def as_teacher(self) -> ScaledHead:
        return ScaledHead(self.current())

    def in_columns(self, shard: Any) -> Source:
        """Returns a Source of all ranks' logits. This rank computes only its own columns."""
        return HeadColumns(self.current(), shard)

    def over_all_tokens(self, gather: Callable[[Tensor], Tensor]) -> "HeadLogits":
        """Returns the same head with the hidden states of all ranks. `gather` is an all-gather."""
        own = self.head.hidden
        hidden = gather(own.detach()).flatten(0, 1)
        return HeadLogits(self.head.replace(hidden=hidden, own_hidden=own))

    def describe(self) -> str:
        return f"a head of {self.head.describe()}"

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class HeadColumns(Source):
    """A Source of the logits of all ranks. The head of each rank computes only its own columns."""

    def __init__(self, head: Head, shard: Any):
        backend = shard.head_backend(head.hidden, head.own_hidden is not None)
        self.head, self.shard = head.replace(columns=backend), shard
        self.shape, self.dtype, self.device = shard.shape, shard.dtype, shard.device
        self.requires_grad = shard.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        loss = self.shard.checked(loss, reduction, row_weight)
        return evaluate_head(self.head, loss, reduction, row_weight)

    def capture(self, capture: Capture, temperature: float, softcap: float | None) -> Captured:
        return captured_of_head(self.head, capture, temperature, softcap)


def evaluate_head(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """Returns the weighted and reduced loss over a head."""
    transformed = call.under_transform()
    if transformed and torch.compiler.is_compiling():
        if loss.reading.invariant:
            return uncompiled(evaluate_head)(head, loss, reduction, row_weight)
        teachers = (t.head for t in loss.teachers if isinstance(t, ScaledHead))
        quantized = any(is_quantized(h.weight) for h in (head, *teachers))
        if head.main_grad is None and not quantized:
            return evaluate_compiled(head, loss, reduction, row_weight)
        # Backward adds to main_grad in place. A compiled graph cannot add to main_grad in place. A
        # quantised weight cannot be an argument of our operators, because its class intercepts
        # every operator.
        return torch.compiler.disable(evaluate_head)(head, loss, reduction, row_weight)
    if transformed and call.in_func():
        tensor_checks.no_head_in_func()
    plan = plan_of(head) if is_straight(head, loss, reduction) else None
    if loss.groups is not None and plan is None and not takes_groups(head, loss, reduction):
        return by_statistics(evaluate_head, head, loss, reduction)
    if plan is not None and transformed:  # the few logits as a tensor, which operators can read
        counted = eager.zero_ignored(flat(head.hidden), loss.reading).view(head.hidden.shape)
        return evaluate(head.replace(hidden=counted).logits(), loss, reduction, row_weight)
    call.check_values(loss)
    if plan is not None:
        return run_small(head, loss, reduction, row_weight, plan)
    return run(head, loss, reduction, row_weight)


def takes_groups(head: Head, loss: RowLoss, reduction: str) -> bool:
    """Whether chunks of whole groups take fewer GEMMs than the statistics of all rows first."""
    if not head.holds_groups(loss):
        return False
    if reduction != "none" or not torch.is_grad_enabled():
        return True
    needs = needs_of(head.inputs, None, loss.row_inputs, True)
    return Call(head, loss, None, "none", needs).only_scales


def captured_of_head(
    head: Head, capture: Capture, temperature: float, softcap: float | None
) -> Captured:
    """Returns the results of a capture, computed from one chunk of rows at a time."""
    if call.mapped(head.hidden) or call.mapped(head.weight):
        tensor_checks.not_mapped()
    invariant = is_invariant()
    head = head.replace(invariant=invariant)
    backend, width, lead = head.backend(), len(head.weight), head.lead
    options = (temperature, softcap, invariant)
    no_rows = torch.empty((0, width), device=head.device, dtype=head.dtype)
    # torch.cat needs at least one tensor, even if there are no rows
    results = [capture.rows(slice(0)).of(backend, no_rows, *options)]
    loss = RowLoss(Reading(head.vocab))  # this loss ignores no rows
    with torch.no_grad(), head.ready(loss):
        for tile in chunks_of(head, loss, head.work()).tiles(loss):
            results.append(capture.rows(tile.rows).of(backend, tile.logits, *options))
    joined = (torch.cat(chunks) for chunks in zip(*results, strict=True))
    return tuple(t.view((*lead, *t.shape[1:])) for t in joined)
