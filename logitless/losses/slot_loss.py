"""`slot_loss` computes a user-defined divergence for a teacher with K ids per row.

A slot is one of the K positions of a row. The user's formula gets the log-probabilities of student
and teacher at each slot. The formula can also get two tails: the log of the student's probability
mass outside the slots, and the log of the teacher's mass outside the slots. The student's numbers
are row statistics. So `slot_loss` is a `row_loss` whose formula gets the statistics of the student
together with the targets of the teacher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..contract import LOG_ROUNDING, NO_ID, PRECISION
from ..core import call
from ..core import tensor_checks as rules
from ..core.evaluate import evaluate
from ..eager.slot_divergence import rest
from ..targets.sparse import SparseTargets
from . import checks
from .row_loss import Formula, check_formula, constant_where
from .statistics import Read, SlotRead

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])

# If the probabilities of student and teacher are both 0, both log-probabilities are set to
# `NOTHING`. `NOTHING` is finite, so that the difference of the two log-probabilities is 0 instead
# of NaN. exp(NOTHING) is 0. Even exp(NOTHING / 100) is 0 in fp64, so a formula can divide the
# log-probabilities by up to 100.
NOTHING = -1e5


class SlotProbs(NamedTuple):
    """The log-probabilities of student and teacher in n rows, in fp32 (fp64 for fp64 logits).

    Only `student` and `student_tail` have a gradient.
    """

    student: Tensor  # (n, K)  log q at the ids
    teacher: Tensor  # (n, K)  log p at the ids
    student_tail: Tensor | None  # (n,)  the log of the student's mass outside the ids
    teacher_tail: Tensor | None  # (n,)  the log of the teacher's mass outside the ids
    mask: Tensor  # (n, K)  bool, True for unmasked slots of rows that are not ignored


@dataclass(eq=False)
class SlotFormula(Formula):
    """A `Formula` whose function gets a SlotProbs.

    The row_inputs are the mask of the slots, the teacher's log-probabilities, the teacher's tail if
    requested, and then the tensors in `rows`.
    """

    names: ClassVar[tuple[str, str]] = ("labels", "targets.ids")
    caller: ClassVar[str] = "slot_loss"
    reads: ClassVar[type[Read]] = SlotRead

    @property
    def real_ids(self):
        return self.row_inputs[0]

    def first_argument(self, statistics, row_inputs):
        mask, teacher, *rows = row_inputs
        some = mask.any(-1)
        student, teacher = _compared(statistics["logprob"], teacher, mask)
        student_tail = teacher_tail = None
        if "tail" in statistics:
            student_tail, (teacher_tail, *rows) = statistics["tail"], rows
            # A tiny mass of the teacher outside the ids can be a rounding error. If the student's
            # mass outside the ids is 0, this tiny mass is set to 0 too.
            small = (student_tail == -torch.inf) & (teacher_tail < LOG_ROUNDING)
            teacher_tail = torch.where(small, -torch.inf, teacher_tail)
            student_tail, teacher_tail = _compared(student_tail, teacher_tail, some)
        return SlotProbs(student, teacher, student_tail, teacher_tail, mask), rows

    def hints(self, argument):
        names = [name for name, t in argument._asdict().items() if t is None]
        return [f"slots.{name} (pass tail=True to slot_loss)" for name in names]

    def apply(self, statistics, row_inputs, lead, dtype):
        empty = ~row_inputs[0].any(-1)
        row_inputs = [constant_where(empty, t) for t in row_inputs]
        value, *more = super().apply(statistics, row_inputs, lead, dtype)
        return torch.where(empty, 0.0, value), *more


def _compared(student: Tensor, teacher: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of student and teacher.

    `real` is False in masked slots and in ignored rows. If `real` is False, or if both
    probabilities are 0, both log-probabilities are set to `NOTHING`. If the student's probability
    is 0, the student's log-probability is detached, because its gradient could be 0 · inf = NaN.
    """
    teacher = teacher.to(student.dtype)
    gone = student == -torch.inf
    student = torch.where(gone, -torch.inf, student)
    nothing = ~real | (gone & (teacher == -torch.inf))
    return torch.where(nothing, NOTHING, student), torch.where(nothing, NOTHING, teacher)


@call.named()
def slot_loss(
    formula: Callable[..., Result],
    logits: Tensor,
    targets: SparseTargets,
    *,
    rows: Sequence[Tensor] = (),
    reduction: str = "mean",
    row_weight: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    tail: bool = True,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
) -> Result:
    """Computes a user-defined divergence between the student and a teacher with K ids per row.

    The result is a scalar, or one number per row for reduction="none". Let p be the teacher's
    probabilities, and let q = softmax(z), with z = softcap · tanh(logits / softcap) / temperature.
    `formula(slots, *rows)` gets these numbers for n rows, in fp32 (fp64 for fp64 logits):

        slots.student is log q at the ids, of shape (n, K).
        slots.teacher is log p at the ids, of shape (n, K).
        slots.student_tail is the log of the mass of q outside the ids, of shape (n,).
        slots.teacher_tail is the log of the mass of p outside the ids, of shape (n,). This tail is
        targets.tail, or log(1 - Σ p) if targets.tail is None.
        With tail=False, both tails are None, and the loss takes less time.
        slots.mask is True for unmasked slots, and has shape (n, K).

    The formula returns a tensor of shape (n,), with one number per row, or a tuple (loss, *more) as
    in `row_loss`. The formula also gets the same n rows of each tensor in `rows`. The tensors in
    `rows` can require gradients. All other tensors that the formula uses, including the targets,
    get no gradient. The formula can be called several times, each time for some of the rows. So the
    formula must not mix rows.

    In a masked slot, log q and log p are the same finite number, whose exp is 0. So masked slots
    add 0 to most divergences. Masked slots would change the result of some formulas, such as a
    ranking of slots. Such a formula must use slots.mask. If p and q of a slot are both 0, log q and
    log p have the same values as in a masked slot. If both masses outside the ids are 0, the tails
    have these values too. If only p is 0, log p is -inf, and if only q is 0, log q is -inf. If q is
    0, log q has no gradient.

    A row is ignored if its label is ignore_index or its entry in `mask` is False. If all ids of a
    row are masked, the loss and the gradients of this row are 0. `row_weight` multiplies the loss
    of each row. "mean" divides by the number of rows that are not ignored, even with a row_weight.
    Over a LinearLogits, a mean or sum takes three GEMMs. Ids outside [0, V) have the same effect as
    in `topk_distill`.

    >>> def forward_and_reverse(slots, share):
    ...     p, q = slots.teacher.exp(), slots.student.exp()
    ...     weight = share.unsqueeze(-1) * p - (1 - share.unsqueeze(-1)) * q
    ...     return (weight * (slots.teacher - slots.student)).sum(-1)
    >>> loss = slot_loss(forward_and_reverse, logits, targets, rows=(share,))
    """
    check_formula(formula, rows)
    if not isinstance(targets, SparseTargets):
        rules.is_targets(targets, SparseTargets)
    call.check_once(
        checks.slot_loss, logits, targets.ids, labels, temperature, softcap, tail, ignore_index,
        mask,
    )  # fmt: skip
    call.check_once(checks.row_loss, logits, row_weight, reduction, *rows)
    if labels is not None:
        label = call.as_ids(labels, ignore_index, mask)
    else:
        label, ignore_index = call.as_label(mask), 0
    ids = call.as_ids(targets.ids)
    real = torch.ones_like(ids, dtype=torch.bool)
    if targets.mask is not None:
        real = call.as_bool(targets.mask)
        ids = torch.where(real, ids, NO_ID)
    if label is not None:
        real = real & (label != ignore_index).unsqueeze(-1)
    reading = call.reading_of(
        logits, temperature, softcap, label=label, ids=ids,
        ignore_index=None if label is None else ignore_index,
        wants=("lse", "logprob", "tail") if tail else ("lse", "logprob"),
    )  # fmt: skip
    teacher = [targets.logprobs.detach()]
    if tail:
        teacher.append(_teacher_tail(targets, real, PRECISION[logits.dtype]))
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (logits, *rows))
    loss = SlotFormula(reading, formula, (real, *teacher, *rows), wanted)
    return evaluate(logits, loss, reduction, row_weight)


def _teacher_tail(targets: SparseTargets, real: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the log of the teacher's mass outside the unmasked slots."""
    if targets.tail is not None:
        return targets.tail.detach()
    logprobs = torch.where(real, targets.logprobs.detach().to(dtype), -torch.inf)
    return rest(logprobs)
