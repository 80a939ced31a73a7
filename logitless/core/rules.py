"""Rules for arguments by their names: equal names mean equal rules in every function of logits.

A new function needs no check of its own if its parameters have the names below: `call.named`
collects their rules, and `call.checked` applies them. The annotation of a parameter says whether
None is legal, and whether `temperature` can hold one number per row.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import option_checks, target_checks, tensor_checks

Rule = Callable[[Any, Any], None]  # called with the argument, and with the logits


def _named(rule: Callable[..., None], name: str, *of: str) -> Rule:
    return lambda value, x: rule(name, value, x, *of)


def _option(rule: Callable[[Any], None]) -> Rule:
    return lambda value, x: rule(value)


def _unless_none(rule: Rule) -> Rule:
    return lambda value, x: None if value is None else rule(value, x)


def _logits(name: str) -> Rule:
    return lambda value, x: tensor_checks.logits(value, name)


def _student_logits(value: Any, x: Any) -> None:  # gathered at K ids per row
    tensor_checks.logits(value, "student_logits")
    tensor_checks.of_ids("student_logits", value)


def _temperature(value: Any, x: Any) -> None:
    if isinstance(value, Tensor):
        tensor_checks.row_temperature(value, x)
    else:
        option_checks.temperature(value)


RULES: dict[str, Rule] = {
    **{name: _option(rule) for name, rule in option_checks.RULES.items()},
    **{name: _logits(name) for name in ("logits", "student", "hidden")},
    "student_logits": _student_logits,
    "target": target_checks.target,
    "labels": _named(target_checks.classes, "labels"),
    "ids": target_checks.ids,
    "kept": _named(target_checks.ids_of_rows, "kept"),
    "negatives": target_checks.negatives,
    "targets": tensor_checks.targets,
    "teacher": _named(tensor_checks.dense_teacher, "teacher", "student"),
    "probs": _named(tensor_checks.dense_teacher, "probs", "logits"),
    "teacher_logprobs": _named(tensor_checks.slots, "teacher_logprobs", "student_logits"),
    "mask": tensor_checks.row_mask,
    "weight": tensor_checks.class_weight,
    "row_weight": tensor_checks.row_weight,
    "temperature": _temperature,
    "k": tensor_checks.how_many,
    "n": tensor_checks.draws,
    "generator": tensor_checks.generator,
}


def collected(parameters: list[inspect.Parameter]) -> dict[str, Rule]:
    rules = {}
    for parameter in parameters:
        name, kinds = parameter.name, typing.get_args(parameter.annotation)
        rule = RULES.get(name)
        if rule is None:
            continue
        if name == "temperature" and Tensor not in kinds:
            rule = _option(option_checks.temperature)
        rules[name] = _unless_none(rule) if type(None) in kinds else rule
    return rules
