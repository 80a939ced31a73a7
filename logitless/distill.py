"""Distillation from a teacher that is known on K ids a row.

Teacher p on the ids, student q = softmax(z): a loss compares them slot by slot. Which part of the
vocabulary it compares is its `support`, how it compares them its `divergence`; neither has a
default. The student's log-probabilities at the ids, the mass outside them and a label's
cross-entropy at temperature 1 are statistics of the row, found in one pass (rows that keep little
mass outside are read twice) and differentiated in one.
"""

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _arguments, _checks, _options
from ._contract import COEFFICIENTS, NO_ID, STATE, Coefficients, Reading, Slots, precision
from ._dispatch import backend, mapped
from ._loss import RowLoss, evaluate, rows_in
from ._ops import operator


@dataclass(frozen=True, eq=False)
class SparseTargets:
    """What a teacher says of each row: K ids, their log-probabilities, the log mass of the rest.

    ids (..., K) int32 or int64; logprobs (..., K) as the teacher gave them, at its temperature;
    tail (...) the log mass outside the ids, where known; mask (..., K) True, or 1, for the slots
    that count. Ids may repeat: each slot is compared for itself, and their terms add up.

    Indexed like its rows: targets[:, 1:] drops the first position of each sequence.

    >>> targets = capture_topk(teacher_logits, 64)
    >>> loss = topk_distill(logits, targets, divergence="forward_kl", support="tail")
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self):
        _checks.sparse_targets(self.ids, self.logprobs, self.tail, self.mask)

    @property
    def shape(self) -> torch.Size:
        """Of the rows, (...)."""
        return self.ids.shape[:-1]

    @property
    def k(self) -> int:
        return self.ids.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "SparseTargets":
        return self._each(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "SparseTargets":
        return self._each(lambda t: t.pin_memory())

    def __len__(self) -> int:
        return self.ids.shape[0]

    def __getitem__(self, rows) -> "SparseTargets":
        """Of some rows; the slots stay together."""
        _checks.indexes_rows(rows, self.ids)
        return self._each(lambda t: t[rows])

    def reshape(self, *rows: int) -> "SparseTargets":
        """The same rows in another shape."""
        lead = len(self.shape)
        return self._each(lambda t: t.reshape(*rows, *t.shape[lead:]))

    def _each(self, f) -> "SparseTargets":
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: None if t is None else f(t) for k, t in found.items()})


pytree.register_pytree_node(
    SparseTargets,
    lambda t: ([t.ids, t.logprobs, t.tail, t.mask], None),
    lambda parts, _: SparseTargets(*parts),
)


@operator("sparse", saved=3)
@dataclass(eq=False)
class Sparse(RowLoss):
    """A student's whole rows beside a teacher that is known on K ids a row."""

    slots: Slots

    @property
    def names(self):
        return "labels", "targets.ids"

    def forward(self, run, x):
        found = run.read(x, self.reading)
        student = found.picked if self.slots.support == "renorm" else found.logprob
        value, coefficients = run.slots(student, self.reading, self.slots, found.tail, found.label)
        return (value,), (found.state, coefficients.rows, coefficients.ids)

    def backward(self, run, x, saved, upstream, factor=None, into=None):
        state, rows, ids = saved
        has = () if self.slots.support == "renorm" else ("a",)
        has += ("a_ids",) if self.slots.support == "tail" else ()
        has += ("label",) if self.slots.ce_weight else ()
        coefficients = Coefficients(rows, has, ids)
        return run.gradient(x, self.reading, state, coefficients, upstream[0], factor, into)

    @property
    def tensors(self):
        return *self.reading[:4], *self.slots[:4]

    def with_tensors(self, tensors, **changed):
        slots = self.slots._make((*tensors[4:8], *self.slots[4:]))
        return super().with_tensors(tensors, slots=slots, **changed)

    def shapes(self, x):
        rows, K = rows_in(x.shape[:-1]), self.reading.ids.shape[-1]
        return [x.shape[:-1], (rows, STATE), (rows, COEFFICIENTS), (rows, K)]


@operator("at_ids", saved=2)
@dataclass(eq=False)
class AtIds(Sparse):
    """The same where only the ids' logits matter: the student is normalised over its slots."""

    def forward(self, run, x):
        picked = run.gather(x, self.reading)
        value, coefficients = run.slots(picked, self.reading, self.slots)
        return (value,), (picked, coefficients.ids)

    def backward(self, run, x, saved, upstream, factor=None, into=None):
        picked, g = saved
        return run.gather_gradient(x, self.reading, picked, g, upstream[0], factor, into)

    def shapes(self, x):
        K = self.reading.ids.shape[-1]
        return [x.shape[:-1], (*x.shape[:-1], K), (rows_in(x.shape[:-1]), K)]


@operator("gathered", saved=1)
@dataclass(eq=False)
class Gathered(Sparse):
    """The same of logits (..., K) that are gathered already, whose gradient is found in forward."""

    reads: ClassVar[int | None] = 0

    def forward(self, run, x):
        t = self._temperature(precision(x.dtype))
        z = x if t is None else x.to(precision(x.dtype)) / t
        value, coefficients = run.slots(z, self.reading, self.slots)
        g = coefficients.ids
        return (value,), (g if t is None else g.view(x.shape) / t,)

    def _temperature(self, dtype: torch.dtype) -> float | Tensor | None:
        """What (..., K) is divided by; None where that is 1."""
        rows, number = self.reading.row_temperature, self.reading.temperature
        if rows is None:
            return None if number == 1 else number
        return rows.to(dtype).unsqueeze(-1)

    def backward(self, run, x, saved, upstream, factor=None, into=None):
        scale = upstream[0] if factor is None else upstream[0] * factor
        g = saved[0].view(x.shape)
        if scale.dim():
            scale = scale.reshape(*x.shape[:-1], 1)
        if into is None and x.dtype == g.dtype:
            return g * scale
        if into is None:
            into = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return torch.mul(g, scale, out=into)  # rounded once

    def shapes(self, x):
        flat = (rows_in(x.shape[:-1]), x.shape[-1])
        return [x.shape[:-1], flat if self.reading.at_temperature_1 else x.shape]


@_options.named()
@torch.no_grad()
def capture_topk(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> SparseTargets:
    """The k most probable ids of each row, exact log-probabilities and log tail mass, in one pass.

    Sorted by probability, ties to the lower id. For a teacher: nothing is differentiated. On a GPU
    k may be up to 256 in one pass; beyond, it is sorted in chunks.

    >>> capture_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
    tensor([[1, 2]])
    """
    _arguments.once(_arguments.topk, logits, k, temperature, softcap)
    how = (float(temperature), None if softcap is None else float(softcap))
    if not isinstance(logits, Tensor):
        return SparseTargets(*logits.topk(k, *how))
    if mapped(logits):
        _checks.not_mapped()
    return SparseTargets(*backend(logits).topk(logits.detach(), k, *how))


@_options.named()
def gathered_kl(
    student_logits: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    t_squared: bool = False,
    row_weight: Tensor | None = None,
    reduction: str = "sum",
) -> Tensor:
    """Σ p (log p - log q) over logits already gathered at the teacher's K ids, (..., K) each.

    q is normalised over the K slots that count, p is taken as given. mask (..., K) is True, or 1,
    for the slots that count; the others are read into nothing. A row of none is 0. "mean" divides
    by the number of rows.

    >>> gathered_kl(logits.gather(-1, targets.ids), targets.logprobs, reduction="mean")
    """
    _arguments.once(
        _arguments.gathered, student_logits, teacher_logprobs, mask, temperature, row_weight,
        reduction,
    )  # fmt: skip
    reading = _arguments.reading_of(student_logits, temperature, None)
    by_row, number = _squared(reading, t_squared)
    slots = Slots(
        teacher_logprobs.detach(), _as_bool(mask), None, by_row, "forward_kl", "gathered", 0.0,
        number, 0.0,
    )  # fmt: skip
    return evaluate(student_logits, Gathered(reading, slots), reduction, row_weight)


@_options.named()
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
    """Divergence of the student from a teacher known on K ids a row: a scalar, or (...) for "none".

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
    _checks.is_targets(targets, SparseTargets)
    _arguments.once(
        _arguments.distill, logits, targets.ids, labels, row_weight, temperature, softcap,
        divergence, support, beta, ignore_index, ce_weight, kd_weight, reduction,
    )  # fmt: skip
    mask, ids = _as_bool(targets.mask), _arguments.as_ids(targets.ids)
    if mask is not None:
        ids = torch.where(mask, ids, NO_ID)
    label = None if labels is None else _arguments.as_ids(labels, ignore_index)
    with_ce = labels is not None and ce_weight != 0
    only_ids = support == "renorm" and not with_ce
    wants = () if only_ids else ("picked",) if support == "renorm" else ("logprob",)
    wants += ("tail",) if support == "tail" else ()
    wants += ("label",) if with_ce else ()
    reading = _arguments.reading_of(
        logits, temperature, softcap, mark=label, ids=ids,
        ignore_index=None if label is None else ignore_index, wants=wants,
    )  # fmt: skip
    by_row, number = _squared(reading, t_squared)
    slots = Slots(
        targets.logprobs.detach(), mask,
        targets.tail.detach() if support == "tail" and targets.tail is not None else None,
        by_row, divergence, support, float(beta), kd_weight * number,
        float(ce_weight) if with_ce else 0.0,
    )  # fmt: skip
    loss = AtIds(reading, slots) if only_ids else Sparse(reading, slots)
    return evaluate(logits, loss, reduction, row_weight)


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def _squared(reading: Reading, wanted: bool) -> tuple[Tensor | None, float]:
    """T² that multiplies the divergence: one a row or none, and a number."""
    if not wanted:
        return None, 1.0
    if reading.row_temperature is not None:
        return reading.row_temperature.square(), 1.0
    return None, reading.temperature**2
