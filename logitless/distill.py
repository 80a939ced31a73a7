"""Distillation from a teacher that is known on K ids a row.

Teacher p on the ids, student q = softmax(z): a loss compares them slot by slot (slots.py), on what
part of the vocabulary is its `support`, how is its `divergence`. Neither has a default. The
student's log-probabilities at the ids, the mass outside them and a label's cross-entropy at
temperature 1 are statistics of the row (stats.py), found in one pass (rows that keep little mass
outside are read twice) and differentiated in one.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _checks
from ._dispatch import backend
from ._node import is_watched
from ._reduce import reduced
from .compare import Comparison, compare, gathered_sum
from .eager.stats import IGNORED, NO_ID
from .linear import over_rows
from .pick import pick
from .slots import DIVERGENCES, SUPPORTS
from .stats import Reading, as_ids


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


@torch.no_grad()
@over_rows()
def capture_topk(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> SparseTargets:
    """The k most probable ids of each row, exact log-probabilities and log tail mass, in one pass.

    Sorted by probability, ties to the lower id. For a teacher: nothing is differentiated. On a GPU
    k may be up to 256 in one pass; beyond, it is sorted in chunks.

    >>> capture_topk(torch.tensor([[0.0, 2.0, 1.0]]), 2).ids
    tensor([[1, 2]])
    """
    _checks.logits(logits)
    _checks.how_many(k, logits)
    _checks.number_temperature(temperature)
    _checks.softcap(softcap)
    logits = logits.detach()
    softcap = None if softcap is None else float(softcap)
    return SparseTargets(*backend(logits).topk(logits, k, float(temperature), softcap))


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
    _checks.logits(student_logits, "student_logits")
    _checks.slots("teacher_logprobs", teacher_logprobs, "student_logits", student_logits)
    _checks.slot_mask(mask, student_logits)
    _checks.temperature(temperature, student_logits)
    _checks.row_weight(row_weight, student_logits)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    mask, teacher = _as_bool(mask), teacher_logprobs.detach()
    weight = _squared(temperature, student_logits) if t_squared else 1.0
    number = not isinstance(temperature, Tensor)
    if number and row_weight is None and reduction != "none" and not is_watched():
        rows = student_logits.shape[:-1].numel() if reduction == "mean" else 1
        return gathered_sum(student_logits, teacher, mask, temperature, weight / max(rows, 1))
    given = Comparison(teacher, mask, None, "forward_kl", "gathered", 0.0, weight)
    loss = given.weighed(given.over_slots(_cooled(student_logits, temperature), None))
    return reduced(loss, row_weight, None, None, reduction)


def _labelled(*, labels: Tensor | None, ignore_index: int, **_) -> Tensor | None:
    return None if labels is None else labels != ignore_index


@over_rows(_labelled)
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
    _checks.logits(logits)
    _checks.targets(targets, SparseTargets, logits)
    _checks.one_of("divergence", divergence, DIVERGENCES)
    _checks.one_of("support", support, SUPPORTS)
    _checks.beta(beta)
    _checks.row_weight(row_weight, logits)
    _checks.one_of("reduction", reduction, _checks.REDUCTIONS)
    _checks.finite_number("ce_weight", ce_weight)
    _checks.finite_number("kd_weight", kd_weight)
    _checks.labels(labels, logits, ce_weight)
    _checks.ignore_index(ignore_index)

    ids, counts, live = as_ids(targets.ids), _as_bool(targets.mask), None
    nothing = NO_ID if targets.k > 1 else 0  # one id a row is read in any case
    if counts is not None:
        ids = torch.where(counts, ids, nothing)
    if labels is not None:
        labels = as_ids(labels, ignore_index)
        live = labels != ignore_index
        counts = live if counts is None else counts & live.unsqueeze(-1)
    if not is_watched() and _checks.looks_at(ids):  # the operators look again
        _check_ids(ids, counts, labels, logits.shape[-1], ignore_index)

    with_ce = labels is not None and ce_weight != 0
    weight = kd_weight * (_squared(temperature, logits) if t_squared else 1.0)
    given = Comparison(
        targets.logprobs.detach(), counts,
        targets.tail.detach() if support == "tail" and targets.tail is not None else None,
        divergence, support, float(beta), weight, ce_weight if with_ce else None,
    )  # fmt: skip
    if support == "renorm" and not with_ce:
        if live is not None:
            ids = torch.where(live.unsqueeze(-1), ids, nothing)
        student = pick(logits, ids, temperature, softcap)
        loss = given.weighed(given.over_slots(student, None))
    else:
        reading = _reading(
            logits, ids, labels if with_ce else None, live, support, temperature, softcap,
            ignore_index,
        )  # fmt: skip
        loss = compare(logits, reading, given)
    uneven = row_weight is not None or isinstance(temperature, Tensor) or reduction == "none"
    return reduced(loss, row_weight, live if uneven else None, live, reduction)


def _check_ids(ids, counts, labels, V, ignore_index) -> None:
    if counts is not None:
        counts = counts if counts.dim() == ids.dim() else counts.unsqueeze(-1)
        ids = torch.where(counts, ids, 0)
    _checks.ids_in_range(ids, V, None, "targets.ids")
    if labels is not None:
        _checks.ids_in_range(labels, V, ignore_index, "labels")


def _reading(
    logits: Tensor,
    ids: Tensor,  # (..., K)
    labels: Tensor | None,  # (...), where cross-entropy is wanted
    live: Tensor | None,  # (...)
    support: str,
    temperature: float | Tensor,
    softcap: float | None,
    ignore_index: int,
) -> Reading:
    """What the student is asked for: the ids, with a label before them where there is one."""
    first = 0
    if labels is not None:
        ids, first = torch.cat([labels.unsqueeze(-1), ids], -1), 1
    elif live is not None:  # marked by a number that no id is
        ids, ignore_index = torch.where(live.unsqueeze(-1), ids, IGNORED), IGNORED
    # At temperature 1 the label is one id among the others; else it has a normaliser of its own.
    plain = labels is not None and (isinstance(temperature, Tensor) or temperature != 1)
    return Reading.of(
        logits, ids, None, temperature, softcap, ignore_index if live is not None else None,
        normalised=True, outside=first if support == "tail" else None, plain=plain,
    )  # fmt: skip


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask != 0


def _cooled(z: Tensor, temperature: float | Tensor) -> Tensor:
    full = torch.promote_types(z.dtype, torch.float32)
    if isinstance(temperature, Tensor):
        return z.to(full) / temperature.to(full).expand(z.shape[:-1]).unsqueeze(-1)
    return z if temperature == 1 else z.to(full) / temperature


def _squared(temperature: float | Tensor, z: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(torch.promote_types(z.dtype, torch.float32)).square()
    return float(temperature) ** 2
