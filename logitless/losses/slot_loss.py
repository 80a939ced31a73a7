"""`slot_loss` computes a user-defined divergence for a teacher with K ids (slots) per row.

The student's numbers are row statistics, so it is a `row_loss` whose formula gets them together
with the teacher's targets.
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
from .row_loss import Formula, check_formula, constant_where
from .statistics import Read, SlotRead

Result = TypeVar("Result", bound=Tensor | tuple[Tensor, ...])

# Both log-probabilities where student and teacher are 0. Finite, so that their difference is 0
# instead of NaN; even exp(NOTHING / 100) is 0 in fp64, so a formula can divide by up to 100.
NOTHING = -1e5


class SlotProbs(NamedTuple):
    """Log-probabilities of student and teacher in n rows; only the student's have a gradient."""

    student: Tensor  # (n, K)  log q at the ids
    teacher: Tensor  # (n, K)  log p at the ids
    student_tail: Tensor | None  # (n,)  the log of the student's mass outside the ids
    teacher_tail: Tensor | None  # (n,)  the log of the teacher's mass outside the ids
    mask: Tensor  # (n, K)  bool, True for unmasked slots of rows that are not ignored


@dataclass(eq=False)
class SlotFormula(Formula):
    """A `Formula` whose function gets a SlotProbs.

    The row_inputs are the mask of the slots, the teacher's log p, its tail on request, and `rows`.
    """

    names: ClassVar[tuple[str, str]] = ("labels", "targets.ids")
    caller: ClassVar[str] = "slot_loss"
    reads: ClassVar[type[Read]] = SlotRead  # type: ignore

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
            # A tiny mass of the teacher can be a rounding error, where the student's is 0.
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
    """Sets both log-probabilities to NOTHING where `real` is False, or both probabilities are 0.

    Where the student's probability is 0, it is detached: its gradient could be 0 · inf = NaN.
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
    `formula(slots, *rows)` gets n rows at a time, in fp32 (fp64 for fp64 logits):

        slots.student       (n, K)  log q at the ids
        slots.teacher       (n, K)  log p at the ids
        slots.student_tail  (n,)    the log of the mass of q outside the ids
        slots.teacher_tail  (n,)    targets.tail, or log(1 - Σ p) if it is None
        slots.mask          (n, K)  True for unmasked slots

    With tail=False, both tails are None, and the loss takes less time. The formula also gets the
    same n rows of each tensor in `rows`, which can require gradients, and returns n numbers, one
    per row, or a tuple (loss, *more) as in `row_loss`. It can be called several times, each time
    for some of the rows, so it must not mix rows. All other tensors that it uses, including the
    targets, get no gradient.

    In a masked slot, and where p and q are both 0, log q and log p are the same finite number,
    whose exp is 0. So masked slots add 0 to most divergences; a formula that they would change,
    such as a ranking of slots, must use slots.mask. The same holds for the tails if both masses
    are 0. If only one of p and q is 0, its log is -inf. Where q is 0, log q has no gradient.

    A row is ignored if its label is ignore_index or its entry in `mask` is False. If all ids of a
    row are masked, its loss and gradients are 0. `row_weight` (...) multiplies the loss of each
    row, and "mean" divides by the number of rows that are not ignored, even with a row_weight. Over
    a LinearLogits, a mean or sum takes three GEMMs. Ids outside [0, V) have the same effect as in
    `topk_distill`.

    >>> def forward_and_reverse(slots, share):
    ...     p, q = slots.teacher.exp(), slots.student.exp()
    ...     weight = share.unsqueeze(-1) * p - (1 - share.unsqueeze(-1)) * q
    ...     return (weight * (slots.teacher - slots.student)).sum(-1)
    >>> loss = slot_loss(forward_and_reverse, logits, targets, rows=(share,))
    """
    check_formula(formula, rows)
    if not isinstance(targets, SparseTargets):
        rules.is_targets(targets, SparseTargets)
    call.checked(
        slot_loss, logits=logits, targets=targets.ids, reduction=reduction, row_weight=row_weight,
        temperature=temperature, softcap=softcap, tail=tail, labels=labels,
        ignore_index=ignore_index, mask=mask,
    )  # fmt: skip
    call.check_once(rules.beside_rows, logits, *rows)
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
    if targets.tail is not None:
        return targets.tail.detach()
    logprobs = torch.where(real, targets.logprobs.detach().to(dtype), -torch.inf)
    return rest(logprobs)
