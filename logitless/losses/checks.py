"""Checks of the arguments of each public function. The error messages are in core/checks.py.

`check_once` (core/call.py) calls the checks in this file with the arguments of a public function.
The first argument of each check is the logits. `check_once` uses the logits to find the other ranks
that must raise the same error.
"""

from torch import Tensor

from ..core import checks, option_checks


def temperature_of(temperature, logits) -> None:
    if isinstance(temperature, Tensor):
        checks.row_temperature(temperature, logits)
    else:
        option_checks.temperature(temperature)


def statistics(
    logits, ids, temperature, softcap, ignore_index=None, mask=None, needs_ids=False
) -> None:
    checks.logits(logits)
    if ids is not None or needs_ids:
        checks.ids(ids, logits)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)
    if ignore_index is not None:
        option_checks.ignore_index(ignore_index)
    checks.row_mask(mask, logits)


def row_loss(logits, row_weight, reduction, *rows) -> None:
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    for i, t in enumerate(rows):
        checks.beside_rows(f"rows[{i}]", t, logits)


def score(logits, target, temperature, softcap, ignore_index, mask) -> None:
    checks.logits(logits)
    checks.target(target, logits)
    option_checks.ignore_index(ignore_index)
    checks.row_mask(mask, logits)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def kept_scores(logits, target, kept, temperature, softcap, ignore_index, mask, mass) -> None:
    score(logits, target, temperature, softcap, ignore_index, mask)
    checks.ids_of_rows("kept", kept, logits)
    checks.yes_or_no("mass", mass)


def cross_entropy(
    logits, target, weight, row_weight, temperature, softcap, ignore_index, reduction,
    label_smoothing, z_loss, mask,
) -> None:  # fmt: skip
    checks.logits(logits)
    checks.target(target, logits)
    checks.row_mask(mask, logits)
    checks.class_weight(weight, logits)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    option_checks.fraction("label_smoothing", label_smoothing)
    option_checks.z_loss(z_loss)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def dense_teacher(
    student, teacher, names, weight, blend, temperature, softcap, mask, row_weight, reduction
) -> None:  # fmt: skip
    """Checks the arguments of a loss against a dense teacher.

    `names` holds the names of student, teacher and blend in error messages. `blend` is the option
    `beta` or `label_smoothing`.
    """
    checks.logits(student, names[0])
    checks.dense_teacher(names[1], teacher, names[0], student)
    checks.class_weight(weight, student)
    option_checks.fraction(names[2], blend)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    checks.row_weight(row_weight, student)
    checks.row_mask(mask, student)
    temperature_of(temperature, student)
    option_checks.softcap(softcap)


def direction(student, direction) -> None:
    """Checks the direction of kl_div."""
    checks.one_of("direction", direction, option_checks.DIRECTIONS)


def gathered_kl(logits, teacher, mask, renormalise, temperature, row_weight, reduction) -> None:
    checks.logits(logits, "student_logits")
    checks.of_ids("student_logits", logits)
    checks.slots("teacher_logprobs", teacher, "student_logits", logits)
    checks.slot_mask(mask, logits)
    checks.yes_or_no("renormalise", renormalise)
    temperature_of(temperature, logits)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)


def topk_distill(
    logits, ids, labels, row_weight, temperature, softcap, divergence, support, beta,
    ignore_index, ce_weight, kd_weight, reduction, mask,
) -> None:  # fmt: skip
    checks.logits(logits)
    checks.row_mask(mask, logits)
    checks.targets(ids, logits)
    checks.one_of("divergence", divergence, option_checks.DIVERGENCES)
    checks.one_of("support", support, option_checks.SUPPORTS)
    option_checks.fraction("beta", beta)
    checks.row_weight(row_weight, logits)
    checks.one_of("reduction", reduction, checks.REDUCTIONS)
    option_checks.factor("ce_weight", ce_weight)
    option_checks.factor("kd_weight", kd_weight)
    checks.labels(labels, logits, ce_weight)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def slot_loss(logits, ids, labels, temperature, softcap, tail, ignore_index, mask) -> None:
    checks.logits(logits)
    checks.row_mask(mask, logits)
    checks.targets(ids, logits)
    checks.labels(labels, logits, 0.0)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)
    checks.yes_or_no("tail", tail)


def capture_topk(logits, k, temperature, softcap) -> None:
    checks.logits(logits)
    checks.how_many(k, logits)
    option_checks.temperature(temperature)
    option_checks.softcap(softcap)
