"""Rules for the values of options, and errors for unknown options.

Numbers are bounded so that all fp32 arithmetic stays finite, including temperature² and lse².
"""

import difflib
import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import tensor_checks

LEAST, MOST = 1e-12, 1e12


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r}.")


def between(name: str, value: Any, least: float = LEAST, most: float = MOST) -> None:
    _number(name, value)
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least:g}, {most:g}], got {value}.")


def temperature(value: Any) -> None:
    if isinstance(value, Tensor):
        trained = value.requires_grad
        hint = " To train a scale, multiply the hidden states by the scale." if trained else ""
        raise TypeError(f"temperature must be one number for all rows, got a Tensor.{hint}")
    between("temperature", value)


def fraction(name: str, value: Any) -> None:
    between(name, value, 0, 1)


def factor(name: str, value: Any) -> None:
    between(name, value, -MOST, MOST)


def skew(name: str, value: Any) -> None:
    # With 1, the divergence would be 0 for every student.
    _number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}.")


def ignore_index(name: str, value: Any) -> None:
    tensor_checks.whole(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {value}.")


def workspace(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, in bytes, got {value!r}.")
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def logits_dtype(name: str, value: Any) -> None:
    if value not in LOGITS_DTYPES:
        names = ", ".join(map(str, LOGITS_DTYPES))
        raise ValueError(f"{name} must be one of {names} or None, got {value!r}.")


def _or_none(rule: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    return lambda name, value: None if value is None else rule(name, value)


LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
SUPPORTS = ("truncate", "renorm_teacher", "renorm", "tail")
DIRECTIONS = ("forward", "reverse")
ACCUMULATE = ("auto", "fp32", "weight")

# Rules that need no logits, by the names of options; modules check them when they are made.
RULES: dict[str, Callable[[str, Any], None]] = {
    "temperature": lambda _, value: None if isinstance(value, Tensor) else temperature(value),
    "softcap": _or_none(between),
    "proposal": between,
    "z_loss": functools.partial(between, least=0),
    "skew": skew,
    "ignore_index": ignore_index,
    "workspace": _or_none(workspace),
    "logits_dtype": _or_none(logits_dtype),
    **dict.fromkeys(("label_smoothing", "beta"), fraction),
    **dict.fromkeys(("ce_weight", "kd_weight"), factor),
    **dict.fromkeys((
        "averaged", "drop_ignored", "lazy_inference", "mass", "rank", "remove_hits", "scores",
        "renormalise", "sparse_grad", "symmetric", "tail", "trainable",
    ), tensor_checks.yes_or_no),
    "reduction": functools.partial(tensor_checks.one_of, legal=tensor_checks.REDUCTIONS),
    "divergence": functools.partial(tensor_checks.one_of, legal=DIVERGENCES),
    "support": functools.partial(tensor_checks.one_of, legal=SUPPORTS),
    "direction": functools.partial(tensor_checks.one_of, legal=DIRECTIONS),
    "accumulate": functools.partial(tensor_checks.one_of, legal=ACCUMULATE),
}  # fmt: skip


def check(**given: Any) -> None:
    for name, value in given.items():
        if name in RULES:
            RULES[name](name, value)


def taken_from(other: Callable) -> list[str]:
    of_class = isinstance(other, type)
    kinds = inspect.signature(other).parameters.values()
    return [p.name for p in kinds if p.kind is p.KEYWORD_ONLY or of_class]


def called(function: Callable, args: tuple) -> str:
    return type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__  # type: ignore


def refuse_position(called: str, first: list[str], names: list[str], got: int) -> None:
    own = int(first[:1] == ["self"])
    free, rest = ", ".join(first[own:]), names[len(first) :]
    but = f" except {free}" if free else ""
    such = f", such as {rest[0]}=...," if rest else ""
    raise TypeError(
        f"{called} must be called with all arguments{but} by name{such} got {got - own} by"
        " position."
    )


def refuse_name(called: str, names: list[str], got: str) -> None:
    names = [name for name in names if name != "self"]
    near = difflib.get_close_matches(got, names, 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    if got == "temperature" and "scale" in names:
        meant = " scale multiplies the similarities, so pass 1 / temperature if you divide by it."
    raise TypeError(
        f"{called} must be called with only the arguments {', '.join(names)}, got {got!r}.{meant}"
    )
