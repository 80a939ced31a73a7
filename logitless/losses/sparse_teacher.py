"""Distillation from a sparse teacher, which has probabilities for K ids per row.

The loss needs at most three statistics: the student's log-probabilities at the ids, its mass
outside the ids, and the label's log-probability at temperature 1. One pass over the logits computes
them, and another the gradient. For support="tail", forward reads a row a second time if the
student's mass outside the ids is small.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, NO_ID, PRECISION, STATE, Coefficients, Slots
from ..core import call, target_checks
from ..core import tensor_checks as rules
from ..core.evaluate import evaluate, scaled
from ..core.loss import RowLoss, rows_in
from ..heads.operators import operator
from ..targets.sparse import SparseTargets


@operator("sparse_teacher", saved=3)
@dataclass(eq=False)
class Sparse(RowLoss):
    """A loss against K ids per row, with the student's softmax over the whole row."""

    structs: ClassVar[tuple[str, ...]] = ("reading", "slots")
    names: ClassVar[tuple[str, str]] = ("labels", "targets.ids")

    slots: Slots

    def gain(self, inverse_t):
        slots = self.slots
        kd, ce = abs(slots.kd_weight) * inverse_t, abs(slots.ce_weight)
        if slots.row_weight is not None:
            kd = kd * slots.row_weight.reshape(-1)
        return kd.clamp(min=ce) if isinstance(kd, Tensor) else max(kd, ce)

    @property
    def real_ids(self):
        return self.slots.mask

    def value(self, backend, statistics):
        value, coefficients = backend.slots(
            statistics.logprob, self.reading, self.slots, statistics.tail, statistics.logprob_t1
        )
        return (value,), (statistics.state, coefficients.rows, coefficients.ids)

    def coefficients(self, saved, upstream):
        has = () if self.slots.support == "renorm" else ("a",)
        has += ("a_ids",) if self.slots.support == "tail" else ()
        has += ("logprob_t1",) if self.slots.ce_weight else ()
        return Coefficients(saved[1], has, saved[2]), upstream[0]

    def flatten(self, recompute=False):
        tensors, loss = super().flatten()
        slots = self.slots
        if recompute:  # only forward reads these tensors
            tensors = (*tensors, slots.teacher, slots.mask, slots.tail, slots.row_weight)
        blank = slots._replace(teacher=None, mask=None, tail=None, row_weight=None)
        return tensors, loss.replace(slots=blank)

    def rebuild(self, tensors):
        label, ids, class_weight, row_temperature, *of_slots = tensors
        loss = super().rebuild((label, ids, class_weight, row_temperature))
        if not of_slots:
            return loss
        teacher, mask, tail, row_weight = of_slots
        return loss.replace(
            slots=self.slots._replace(teacher=teacher, mask=mask, tail=tail, row_weight=row_weight)
        )

    def shapes(self, x):
        rows = rows_in(x.shape[:-1])
        return [x.shape[:-1], (rows, STATE), (rows, COEFFICIENTS), self.reading.ids.shape]


@operator("sparse_teacher_at_ids", saved=2)
@dataclass(eq=False)
class AtIds(Sparse):
    """With the student's softmax over the ids alone. No other logits are read."""

    def forward(self, backend, x):
        picked = backend.gather(x, self.reading)
        value, coefficients = backend.slots(
            picked, self.reading, self.slots, temperature=self.reading.any_temperature
        )
        return (value,), (picked, coefficients.ids)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        picked, g = saved
        return backend.gather_gradient(x, self.reading, picked, g, upstream[0], factor, into)

    def shapes(self, x):
        return [x.shape[:-1], self.reading.ids.shape, self.reading.ids.shape]


@operator("gathered_teacher", saved=1)
@dataclass(eq=False)
class Gathered(Sparse):
    """Over logits that are already gathered at the K ids of each row."""

    saves_gradient: ClassVar[bool] = True

    def forward(self, backend, x):
        value, coefficients = backend.slots(
            x, self.reading, self.slots, temperature=self.reading.any_temperature
        )
        return (value,), (coefficients.ids,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        gradient = scaled(saved[0], x, upstream[0], factor)
        return gradient if into is None else into.copy_(gradient.view(into.shape))

    def shapes(self, x):
        return [x.shape[:-1], x.shape]


@call.named()
def gathered_kl(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    renormalise: bool = False,
    temperature: float | Tensor = 1.0,
    t_squared: bool = False,
    row_weight: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Computes Σ p (log p - log q) from logits (..., K) gathered at the teacher's K ids.

    The student's q is the softmax of student_logits / temperature over all K slots. The teacher's p
    = exp(teacher_logprobs) is not normalised. A slot whose entry in `mask` is False or 0 is left
    out of the sum, and with renormalise=True also out of the softmax. A row whose slots are all
    masked has loss 0, and "mean" divides by the number of all rows. The result is fp32 (fp64 for
    fp64 logits): a scalar, or one number per row (...) for reduction="none".

    >>> gathered_kl(logits.gather(-1, targets.ids), targets.logprobs, reduction="mean")
    """
    call.checked(
        gathered_kl, student_logits=student_logits, teacher_logprobs=teacher_logprobs,
        renormalise=renormalise, temperature=temperature, row_weight=row_weight,
        reduction=reduction,
    )  # fmt: skip
    rules.slot_mask(mask, student_logits)
    reading = call.reading_of(student_logits, temperature, None)
    full = PRECISION[student_logits.dtype]
    by_row, number = reading.squared(full) if t_squared else (None, 1.0)
    if reduction == "mean" and row_weight is None and not call.under_transform():
        # No row is ignored: a sum with 1 / rows in kd_weight, and so in the saved gradient.
        number, reduction = number / max(rows_in(student_logits.shape[:-1]), 1), "sum"
    slots = Slots(
        _constant(teacher_logprobs), None if mask is None else call.as_bool(mask), None, by_row,
        "forward_kl",
        "gathered_renorm" if renormalise else "gathered", 0.0, number, 0.0,
    )  # fmt: skip
    return evaluate(student_logits, Gathered(reading, slots), reduction, row_weight)


@call.named()
def topk_distill(
    logits: Tensor,
    targets: SparseTargets,
    *,
    divergence: str,
    support: str,
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    t_squared: bool = False,
    softcap: float | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    ce_weight: float = 0.0,
    kd_weight: float = 1.0,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Computes the divergence between the student and a teacher with K ids per row.

    The result is a scalar, or one number per row for reduction="none". Let p be the teacher's
    probabilities, and let q = softmax(z), with z = softcap · tanh(logits / softcap) / temperature.
    P and Q are their sums over the unmasked ids. `support` selects what is compared at the ids:

        "truncate"        p and q
        "renorm_teacher"  p/P and q
        "renorm"          p/P and q/Q; without cross-entropy, only the logits at the ids are read
        "tail"            p and q, and also the masses outside the ids; the teacher's is given by
                          its log targets.tail, or is 1 - P if that is None

    `divergence` selects the formula: "forward_kl" is Σ p log(p/q), "reverse_kl" is Σ q log(q/p),
    "jsd" is the formula of the function `jsd` with β = beta, and "tvd" is Σ |p - q| / 2. The page
    docs/distillation.md compares divergences and supports.

    The loss of a row is kd_weight times the divergence (t_squared=True multiplies the divergence by
    temperature²) plus, with `labels` (...), ce_weight times the cross-entropy at temperature 1. A
    row is ignored if its label is ignore_index or its entry in `mask` is False. If all ids of a row
    are masked, its divergence is 0. "mean" divides by the number of rows that are not ignored.

    An unmasked id outside [0, V) raises an IndexError on a CPU, and on a GPU with
    LOGITLESS_CHECK=1; without it, the loss of its row is NaN.

    >>> topk_distill(logits, targets, divergence="forward_kl", support="tail", temperature=2.0,
    ...              t_squared=True, labels=labels, ce_weight=0.5, kd_weight=0.5)
    """
    if not isinstance(targets, SparseTargets):
        rules.is_targets(targets, SparseTargets)
    call.checked(
        topk_distill, logits=logits, targets=targets.ids, divergence=divergence, support=support,
        beta=beta, temperature=temperature, softcap=softcap, labels=labels,
        ignore_index=ignore_index, mask=mask, ce_weight=ce_weight, kd_weight=kd_weight,
        row_weight=row_weight, reduction=reduction,
    )  # fmt: skip
    if labels is None:
        target_checks.no_labels(ce_weight)
    real, ids = targets.mask, call.as_ids(targets.ids)
    if real is not None:
        real = call.as_bool(real)
        ids = torch.where(real, ids, NO_ID)
    if labels is not None:
        label = call.as_ids(labels, ignore_index, mask)
    else:
        label, ignore_index = call.as_label(mask), 0
    with_ce = labels is not None and ce_weight != 0
    only_ids = support == "renorm" and not with_ce
    wants = () if only_ids else ("logprob",)
    wants += ("tail",) if support == "tail" else ()
    wants += ("logprob_t1",) if with_ce else ()
    reading = call.reading_of(
        logits, temperature, softcap, label=label, ids=ids,
        ignore_index=None if label is None else ignore_index, wants=wants,
    )  # fmt: skip
    by_row, number = reading.squared(PRECISION[logits.dtype]) if t_squared else (None, 1.0)
    slots = Slots(
        _constant(targets.logprobs), real, _constant(targets.tail) if support == "tail" else None,
        by_row, divergence, support, float(beta), kd_weight * number,
        float(ce_weight) if with_ce else 0.0,
    )  # fmt: skip
    loss = AtIds(reading, slots) if only_ids else Sparse(reading, slots)
    return evaluate(logits, loss, reduction, row_weight)


def _constant(t: Tensor | None) -> Tensor | None:
    return t.detach() if t is not None and t.requires_grad else t
