"""Checks the arguments of the public functions. The error messages are in core/*_checks.py.

`check_once` (core/call.py) calls them. The first argument is the logits: with LOGITLESS_CHECK=1,
all ranks that share them raise an error of one rank.
"""

import operator

from torch import Tensor

from ..core import option_checks, target_checks, tensor_checks
from ..heads import checks as head_checks

DIFFERENTIABLE = ("entropy", "logprob", "lse")  # scores that can have a gradient


def temperature_of(temperature, logits) -> None:
    if isinstance(temperature, Tensor):
        tensor_checks.row_temperature(temperature, logits)
    else:
        option_checks.temperature(temperature)


def statistics(
    logits, ids, temperature, softcap, ignore_index=None, mask=None, needs_ids=False
) -> None:
    tensor_checks.logits(logits)
    if ids is not None or needs_ids:
        target_checks.ids(ids, logits)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)
    if ignore_index is not None:
        option_checks.ignore_index(ignore_index)
    tensor_checks.row_mask(mask, logits)


def rank(logits, ids, rank) -> None:
    tensor_checks.yes_or_no("rank", rank)
    if rank:
        target_checks.has_first_id(ids, logits)


def row_loss(logits, row_weight, reduction, *rows) -> None:
    tensor_checks.row_weight(row_weight, logits)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    for i, t in enumerate(rows):
        tensor_checks.beside_rows(f"rows[{i}]", t, logits)


def dimension_or_counts(groups) -> int | tuple[int, ...]:
    if isinstance(groups, Tensor):
        raise TypeError(
            "groups must be a dimension or a list of ints, got a Tensor, whose values would make"
            " the host wait. Pass lengths.tolist()."
        )
    if isinstance(groups, bool):
        return groups
    try:
        if hasattr(groups, "__index__"):
            return operator.index(groups)
        return tuple(map(operator.index, groups))
    except TypeError:
        raise TypeError(f"groups must be a dimension or a list of ints, got {groups!r}.") from None


def group_loss(logits, groups, reduction, *rows) -> None:
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    lead = tuple(logits.shape[:-1])
    if isinstance(groups, bool):
        raise TypeError(f"groups must be a dimension or a list of ints, got {groups!r}.")
    if isinstance(groups, int):
        if not -len(lead) <= groups < len(lead):
            raise IndexError(
                f"groups must be a dimension of the rows, in [{-len(lead)}, {len(lead)}) for logits"
                f" {tuple(logits.shape)}, got {groups}."
            )
        dim, sizes = groups % len(lead), (lead[groups],)
    else:
        if len(lead) != 1 or sum(groups) != lead[0] or min(groups, default=0) < 0:
            raise ValueError(
                "groups must be row counts that are not negative and sum to N for logits (N, V),"
                f" got {len(groups)} counts with the sum {sum(groups)} for logits"
                f" {tuple(logits.shape)}."
            )
        dim, sizes = 0, (lead[0], len(groups))
    for i, t in enumerate(rows):
        tensor_checks.beside_groups(f"rows[{i}]", t, logits, dim, sizes)


def score(logits, target, temperature, softcap, ignore_index, mask) -> None:
    tensor_checks.logits(logits)
    target_checks.target(target, logits)
    option_checks.ignore_index(ignore_index)
    tensor_checks.row_mask(mask, logits)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def differentiable(gradient) -> None:
    if not isinstance(gradient, (tuple, list)) or any(n not in DIFFERENTIABLE for n in gradient):
        names = ", ".join(map(repr, DIFFERENTIABLE))
        raise ValueError(f"gradient must be a tuple of names out of {names}, got {gradient!r}.")


def kept_scores(logits, target, kept, temperature, softcap, ignore_index, mask, mass) -> None:
    score(logits, target, temperature, softcap, ignore_index, mask)
    target_checks.ids_of_rows("kept", kept, logits)
    tensor_checks.yes_or_no("mass", mass)


def cross_entropy(
    logits, target, weight, row_weight, temperature, softcap, ignore_index, reduction,
    label_smoothing, z_loss, mask,
) -> None:  # fmt: skip
    tensor_checks.logits(logits)
    target_checks.target(target, logits)
    tensor_checks.row_mask(mask, logits)
    tensor_checks.class_weight(weight, logits)
    tensor_checks.row_weight(row_weight, logits)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    option_checks.fraction("label_smoothing", label_smoothing)
    option_checks.z_loss(z_loss)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def sampled_softmax(
    hidden, weight, target, negatives, log_q, target_log_q, bias, temperature, remove_hits,
    ignore_index, mask, reduction, row_weight, sparse_grad, workspace, casts,
) -> None:  # fmt: skip
    # `casts`: autocast is on
    head_checks.table(hidden, weight, bias, casts)
    target_checks.target(target, hidden)
    target_checks.negatives(negatives, hidden)
    for name, t, like, of in (
        ("log_q", log_q, negatives, "negatives"),
        ("target_log_q", target_log_q, target, "target"),
    ):
        if t is not None:
            tensor_checks.slots(name, t, of, like)
            tensor_checks.constant(name, t)
    option_checks.temperature(temperature)
    tensor_checks.yes_or_no("remove_hits", remove_hits)
    option_checks.ignore_index(ignore_index)
    tensor_checks.row_mask(mask, hidden)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    tensor_checks.row_weight(row_weight, hidden)
    tensor_checks.yes_or_no("sparse_grad", sparse_grad)
    option_checks.workspace(workspace)


def no_func(name: str) -> None:
    raise RuntimeError(
        f"{name} must be differentiated by torch.autograd, because torch.func (grad, vjp, vmap) is"
        " not supported."
    )


def dense_teacher(
    student, teacher, names, weight, blend, temperature, softcap, mask, row_weight, reduction
) -> None:  # fmt: skip
    """`blend` is the option `beta` or `label_smoothing`. `names`: student, teacher, this option."""
    tensor_checks.logits(student, names[0])
    tensor_checks.dense_teacher(names[1], teacher, names[0], student)
    tensor_checks.class_weight(weight, student)
    option_checks.fraction(names[2], blend)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    tensor_checks.row_weight(row_weight, student)
    tensor_checks.row_mask(mask, student)
    temperature_of(temperature, student)
    option_checks.softcap(softcap)


def kl_div(student, direction, skew) -> None:
    tensor_checks.one_of("direction", direction, option_checks.DIRECTIONS)
    option_checks.skew(skew)


def gathered_kl(logits, teacher, mask, renormalise, temperature, row_weight, reduction) -> None:
    tensor_checks.logits(logits, "student_logits")
    tensor_checks.of_ids("student_logits", logits)
    tensor_checks.slots("teacher_logprobs", teacher, "student_logits", logits)
    tensor_checks.slot_mask(mask, logits)
    tensor_checks.yes_or_no("renormalise", renormalise)
    temperature_of(temperature, logits)
    tensor_checks.row_weight(row_weight, logits)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)


def topk_distill(
    logits, ids, labels, row_weight, temperature, softcap, divergence, support, beta,
    ignore_index, ce_weight, kd_weight, reduction, mask,
) -> None:  # fmt: skip
    tensor_checks.logits(logits)
    tensor_checks.row_mask(mask, logits)
    tensor_checks.targets(ids, logits)
    tensor_checks.one_of("divergence", divergence, option_checks.DIVERGENCES)
    tensor_checks.one_of("support", support, option_checks.SUPPORTS)
    option_checks.fraction("beta", beta)
    tensor_checks.row_weight(row_weight, logits)
    tensor_checks.one_of("reduction", reduction, tensor_checks.REDUCTIONS)
    option_checks.factor("ce_weight", ce_weight)
    option_checks.factor("kd_weight", kd_weight)
    target_checks.labels(labels, logits, ce_weight)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)


def slot_loss(logits, ids, labels, temperature, softcap, tail, ignore_index, mask) -> None:
    tensor_checks.logits(logits)
    tensor_checks.row_mask(mask, logits)
    tensor_checks.targets(ids, logits)
    target_checks.labels(labels, logits, 0.0)
    option_checks.ignore_index(ignore_index)
    temperature_of(temperature, logits)
    option_checks.softcap(softcap)
    tensor_checks.yes_or_no("tail", tail)


def capture_topk(logits, k, temperature, softcap) -> None:
    tensor_checks.logits(logits)
    tensor_checks.how_many(k, logits)
    option_checks.temperature(temperature)
    option_checks.softcap(softcap)


def capture_sampled(logits, n, proposal, where, temperature, softcap) -> None:
    """`where` is the device of the argument `generator`, or the argument if it is no Generator."""
    tensor_checks.logits(logits)
    tensor_checks.draws(n, logits)
    option_checks.proposal(proposal)
    tensor_checks.generator(where, logits)
    option_checks.temperature(temperature)
    option_checks.softcap(softcap)
