"""Rules for arguments by their names: equal names mean equal rules in every function of logits.

A new function needs no check of its own if its parameters have the names below: `call.named`
collects their rules, and `call.checked` applies them. The annotation of a parameter says whether
None is legal, and whether `temperature` can hold one number per row.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import option_checks, target_checks, tensor_checks

Rule = Callable[[str, Any, Any], None]  # called with name and value of the argument, and logits


def _without_logits(rule: Callable[[str, Any], None]) -> Rule:
    return lambda name, value, x: rule(name, value)


def _unless_none(rule: Rule) -> Rule:
    return lambda name, value, x: None if value is None else rule(name, value, x)


def _student_logits(name: str, value: Any, x: Any) -> None:  # gathered at K ids per row
    tensor_checks.logits(value, name)
    tensor_checks.of_ids(name, value)


def _one_temperature(name: str, value: Any, x: Any) -> None:
    option_checks.temperature(value)


def _temperature(name: str, value: Any, x: Any) -> None:
    if isinstance(value, Tensor):
        tensor_checks.row_temperature(value, x)
    else:
        option_checks.temperature(value)


RULES: dict[str, Rule] = {
    **{name: _without_logits(rule) for name, rule in option_checks.RULES.items()},
    **dict.fromkeys(
        ("logits", "student", "hidden"), lambda name, x, _: tensor_checks.logits(x, name)
    ),
    "student_logits": _student_logits,
    "target": target_checks.classes,
    "labels": target_checks.classes,
    "ids": target_checks.ids,
    "kept": target_checks.ids_of_rows,
    "negatives": target_checks.negatives,
    "targets": tensor_checks.targets,
    "teacher": functools.partial(tensor_checks.dense_teacher, of="student"),
    "probs": functools.partial(tensor_checks.dense_teacher, of="logits"),
    "teacher_logprobs": functools.partial(tensor_checks.slots, of="student_logits"),
    "mask": tensor_checks.row_mask,
    "weight": tensor_checks.class_weight,
    "row_weight": tensor_checks.row_weight,
    "temperature": _temperature,
    "k": lambda name, k, x: tensor_checks.count(name, k, x.shape[-1]),
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
            rule = _one_temperature
        rules[name] = _unless_none(rule) if type(None) in kinds else rule
    return rules
