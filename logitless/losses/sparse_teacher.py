"""Distillation from a teacher that is known on K ids per row.

Teacher p on the ids, student q = softmax(z): a loss compares them slot by slot. `support` says
which part of the vocabulary is compared, `divergence` how; neither has a default. The student's
log-probabilities at the ids, the mass outside them and a label's cross-entropy at temperature 1 are
statistics of the row. One pass computes them (rows with little mass outside the ids are read
twice), and one pass computes their gradient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, NO_ID, PRECISION, STATE, Coefficients, Slots
from ..core import call
from ..core import checks as rules
from ..core.evaluate import evaluate, scaled
from ..core.loss import RowLoss, rows_in
from ..core.source import source_of
from ..heads.operators import operator
from ..targets.sparse import SparseTargets, unchecked
from . import checks


@operator("sparse_teacher", saved=3)
@dataclass(eq=False)
class Sparse(RowLoss):
    """The student's whole rows against a teacher known on K ids per row."""

    structs: ClassVar[tuple[str, ...]] = ("reading", "slots")

    slots: Slots

    @property
    def names(self):
        return "labels", "targets.ids"

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
        if recompute:  # backward reads no tensor of the slots, forward reads all
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
    """The same with the student normalised over its slots: only logits at the ids are read."""

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
    """The same for logits (..., K) that are already gathered."""

    saves_gradient: ClassVar[bool] = True

    def forward(self, backend, x):
        value, coefficients = backend.slots(
            x, self.reading, self.slots, temperature=self.reading.any_temperature
        )
        return (value,), (coefficients.ids,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        gradient = scaled(saved[0], x, upstream[0], factor)
        return gradient if into is None else into.copy_(gradient)

    def shapes(self, x):
        return [x.shape[:-1], x.shape]


@call.named()
@torch.no_grad()
def capture_topk(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> SparseTargets:
    """The k most probable ids of each row, exact log-probabilities and log tail mass, in one pass.

    Sorted by probability, ties to the lower id. Nothing is differentiable, because this is for a
    teacher. On a GPU one pass serves k up to 256; a larger k is sorted in chunks.

    >>> capture_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
    tensor([[1, 2]])
    """
    call.check_once(checks.capture_topk, logits, k, temperature, softcap)
    options = (float(temperature), None if softcap is None else float(softcap))
    source = source_of(logits)
    if source is not None:
        return unchecked(*source.capture_topk(k, *options))
    if call.mapped(logits):
        rules.not_mapped()
    return unchecked(*call.backend_of(logits).topk(logits.detach(), k, *options))


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
    """Σ p (log p - log q) over logits already gathered at the teacher's K ids, (..., K) each.

    q is the softmax over all K slots, p is taken as given. mask (..., K) is True, or 1, for the
    slots that count: the other slots are left out of the sum, whatever the teacher holds there, and
    with renormalise=True out of the softmax too. A row without a slot that counts is 0. "mean"
    divides by the number of rows.

    >>> gathered_kl(logits.gather(-1, targets.ids), targets.logprobs, reduction="mean")
    """
    call.check_once(
        checks.gathered_kl, student_logits, teacher_logprobs, mask, renormalise, temperature,
        row_weight, reduction,
    )  # fmt: skip
    reading = call.reading_of(student_logits, temperature, None)
    full = PRECISION[student_logits.dtype]
    by_row, number = reading.squared(full) if t_squared else (None, 1.0)
    if reduction == "mean" and row_weight is None and not call.under_transform():
        # All rows count, so a mean is the sum of shares, and its gradient needs no factor.
        number, reduction = number / max(rows_in(student_logits.shape[:-1]), 1), "sum"
    slots = Slots(
        _constant(teacher_logprobs), _as_bool(mask), None, by_row, "forward_kl",
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
    ce_weight: float = 0.0,
    kd_weight: float = 1.0,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Divergence of the student from a teacher on K ids per row: a scalar, or (...) for "none".

    With q = softmax(z) at `temperature`, p the teacher's, and P, Q their sums over the slots that
    count, `support` says what is compared:

        "truncate"        p and q at the ids, as they are
        "renorm_teacher"  p/P and q
        "renorm"          p/P and q/Q; without cross-entropy only the ids' logits are read
        "tail"            p and q, and one bucket for all else: targets.tail, or 1 - P, with the
                          student's mass outside the ids

    and `divergence` is "forward_kl" Σ p log(p/q), "reverse_kl" Σ q log(q/p), "jsd" with
    M = beta p + (1-beta) q, or "tvd" Σ |p - q| / 2. docs/distillation.md helps to choose.

    t_squared multiplies it by temperature². With labels (...) the loss of a row is ce_weight times
    the cross-entropy at temperature 1 plus kd_weight times the divergence, and a row whose label is
    ignore_index counts for neither. A row with every slot masked adds 0 for its divergence. "mean"
    divides by the number of rows that count.

    An id outside [0, V) in a slot that counts raises on a CPU and makes its row NaN on a GPU.

    >>> topk_distill(logits, targets, divergence="forward_kl", support="tail", temperature=2.0,
    ...              t_squared=True, labels=labels, ce_weight=0.5, kd_weight=0.5)
    """
    if not isinstance(targets, SparseTargets):
        rules.is_targets(targets, SparseTargets)
    call.check_once(
        checks.topk_distill, logits, targets.ids, labels, row_weight, temperature, softcap,
        divergence, support, beta, ignore_index, ce_weight, kd_weight, reduction,
    )  # fmt: skip
    mask, ids = _as_bool(targets.mask), call.as_ids(targets.ids)
    if mask is not None:
        ids = torch.where(mask, ids, NO_ID)
    label = None if labels is None else call.as_ids(labels, ignore_index)
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
        _constant(targets.logprobs), mask, _constant(targets.tail) if support == "tail" else None,
        by_row, divergence, support, float(beta), kd_weight * number,
        float(ce_weight) if with_ce else 0.0,
    )  # fmt: skip
    loss = AtIds(reading, slots) if only_ids else Sparse(reading, slots)
    return evaluate(logits, loss, reduction, row_weight)


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def _constant(t: Tensor | None) -> Tensor | None:
    return t.detach() if t is not None and t.requires_grad else t
