"""Kinds of values of every argument, good and bad, each a function of a Maker.

An argument is drawn by the name of a kind, so that a case stays plain data.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Maker

Kinds = dict[str, Callable[[Maker], Any]]
OUT_OF_RANGE = "out of range"  # kinds of this name are right where nothing reads them


@dataclass(frozen=True)
class Argument:
    good: Kinds
    bad: Kinds = field(default_factory=dict)
    needed: bool = False  # or it may be left out


def constant(*values: Any) -> Kinds:
    return {repr(value): lambda m, value=value: value for value in values}


def choice(*legal: str, needed: bool = False) -> Argument:
    return Argument(constant(*legal), constant("maen", None, 1, ["mean"]), needed)


# --- numbers

NO_NUMBER = constant("1", None, True, [1.0])
POSITIVE = constant(0, -0.5, math.inf, math.nan)
FLAG = Argument(constant(True))
RANK = Argument(constant(True), constant(1, "yes", None))
RANK_OF_IDS = Argument({"of ids": lambda m: m.kind("ids") is not None}, RANK.bad)
SOFTCAP = Argument(constant(5.0, 2, 0.7, np.float32(3.0)), POSITIVE | constant("1", True, [1.0]))
FRACTION = Argument(constant(0.0, 0.1, 0.5, 1, 1.0), constant(-0.1, 1.5, math.nan) | NO_NUMBER)
Z_LOSS = Argument(constant(0.0, 1e-4, 0.1, 1), constant(-1, math.inf, math.nan) | NO_NUMBER)
COEFFICIENT = Argument(constant(0.0, 1.0, 0.3, -2), constant(math.inf, math.nan) | NO_NUMBER)
CE_WEIGHT = Argument(
    {"0.3 with labels": lambda m: 0.3 if m.kind("labels") else 0.0}, COEFFICIENT.bad
)
IGNORE_INDEX = Argument(
    constant(-100, 0, 255, -(2**40)), constant(1.0, "-100", True, 2**63, torch.tensor(1))
)
NUMBER_TEMPERATURE = Argument(constant(0.7, 2, 1.0), POSITIVE | NO_NUMBER)
HOW_MANY = Argument(
    {"1": lambda m: 1, "half": lambda m: (m.vocab + 1) // 2, "all": lambda m: m.vocab},
    constant(0, -1, 2.0, True, None, "1") | {"more": lambda m: m.vocab + 1},
    needed=True,
)

# --- tensors, and what is wrong with one

NO_TENSOR: Kinds = constant([1.0, 2.0], "x", 1.0) | {
    "numpy": lambda m: np.ones(m.lead, dtype=np.float32)
}


def other_shapes(make: Callable[[Maker, tuple], Tensor], shape: Callable[[Maker], tuple]) -> Kinds:
    """One more in the first dimension, a dimension more, one less, and another device."""
    return {
        "one more": lambda m: make(m, (shape(m)[0] + 1, *shape(m)[1:]) if shape(m) else (2,)),
        "a dimension more": lambda m: make(m, (*shape(m), 1)),
        "a dimension before": lambda m: make(m, (1, *shape(m))),
        "on meta": lambda m: make(m, shape(m)).to("meta"),
    }


def rows(m: Maker) -> tuple:
    return m.lead


def slots(m: Maker) -> tuple:
    return (*m.lead, m.slots)


def ones(m: Maker, shape: tuple) -> Tensor:
    return m.full(shape, 1.0)


def zeros(m: Maker, shape: tuple) -> Tensor:
    return m.full(shape, 0, torch.int64)


TEMPERATURE = Argument(
    NUMBER_TEMPERATURE.good
    | {
        "rows": lambda m: m.rows(0.5, 2),
        "rows, fp64": lambda m: m.rows(0.5, 2, torch.float64),
        "rows, bf16": lambda m: m.rows(0.5, 2, torch.bfloat16),
        "0-d": lambda m: m.rand((), 0.5, 2),
    },
    NUMBER_TEMPERATURE.bad
    | other_shapes(ones, rows)
    | {
        "integers": lambda m: zeros(m, m.lead) + 1,
        "wants a gradient": lambda m: ones(m, m.lead).requires_grad_(),
    },
)
ROW_WEIGHT = Argument(
    {
        "fp32": lambda m: m.rows(),
        "fp64": lambda m: m.rows(dtype=torch.float64),
        "of the dtype": lambda m: m.rows(dtype=m.dtype),
        "some 0": lambda m: m.rows() * m.some(m.lead),
        "all 0": lambda m: m.rows() * 0,
        "any sign": lambda m: m.rows(-1, 1),
        "integers": lambda m: m.integers(m.lead, 3),
        "expanded": lambda m: m.rand(()).expand(m.lead),
        "wants a gradient": lambda m: m.rows().requires_grad_(),
        "wants a gradient, any sign": lambda m: m.rows(-1, 1, torch.float64).requires_grad_(),
    },
    NO_TENSOR
    | other_shapes(ones, rows)
    | {
        "complex": lambda m: ones(m, m.lead).to(torch.complex64),
        "bool": lambda m: m.some(m.lead),
    },
)
CLASS_WEIGHT = Argument(
    {
        "fp32": lambda m: m.rand((m.vocab,), 0.1, 2),
        "bf16": lambda m: m.rand((m.vocab,), 0.1, 2, torch.bfloat16),
        "fp64": lambda m: m.rand((m.vocab,), 0.1, 2, torch.float64),
        "some 0": lambda m: m.rand((m.vocab,), 0.1, 2) * m.some((m.vocab,)),
        "all 0": lambda m: m.full((m.vocab,), 0.0),
        "strided": lambda m: m.rand((m.vocab, 2), 0.1, 2)[:, 1],
    },
    NO_TENSOR
    | other_shapes(ones, lambda m: (m.vocab,))
    | {
        "integers": lambda m: zeros(m, (m.vocab,)),
        "wants a gradient": lambda m: ones(m, (m.vocab,)).requires_grad_(),
    },
)

# --- classes and ids


def ignore_index(m: Maker) -> int:
    """Of the case, or by default."""
    kind = m.kind("ignore_index")
    if kind is not None and kind in IGNORE_INDEX.good:
        return IGNORE_INDEX.good[kind](m)
    return -100


def ignoring(share: float, dtype=torch.int64) -> Callable[[Maker], Tensor]:
    """Classes, of which some are ignore_index if the dtype has it."""

    def target(m: Maker) -> Tensor:
        t = m.integers(m.lead, m.vocab, dtype)
        mark, info = ignore_index(m), torch.iinfo(dtype)
        fits = info.min <= mark <= info.max
        return t.masked_fill(m.some(m.lead, share), mark) if fits else t

    return target


def _with(make: Callable[[Maker], Tensor], value: Callable[[Maker], int]) -> Callable:
    """The same, with a first number that is out of range."""

    def bad(m: Maker) -> Tensor:
        t = make(m)
        t.view(-1)[:1] = value(m)
        return t

    return bad


NO_INTEGERS: Kinds = NO_TENSOR | {
    "floats": lambda m: m.rows(),
    "bools": lambda m: m.some(m.lead),
}
TARGET = Argument(
    {
        "int64": ignoring(0.0),
        "int32": ignoring(0.0, torch.int32),
        "uint8": ignoring(0.3, torch.uint8),
        "int16": ignoring(0.3, torch.int16),
        "some ignored": ignoring(0.4),
        "some ignored, int32": ignoring(0.4, torch.int32),
        "all ignored": ignoring(1.1),
        "strided": lambda m: m.integers((*m.lead, 2), m.vocab)[..., 1],
    },
    NO_INTEGERS
    | constant(None)
    | other_shapes(zeros, rows)
    | {
        "out of range, V": _with(ignoring(0.4), lambda m: m.vocab),
        "out of range, below": _with(ignoring(0.4), lambda m: -7),
        "out of range, far": _with(ignoring(0.4), lambda m: 2**40),
        "out of range, the only one": _with(ignoring(1.1), lambda m: m.vocab),
    },
    needed=True,
)
LABELS = Argument(TARGET.good, {k: v for k, v in TARGET.bad.items() if k != "None"})


def several(m: Maker) -> Tensor:
    return m.integers(slots(m), m.vocab)


def first_ignored(m: Maker) -> Tensor:
    """Rows whose first id is ignore_index, where the case has one, with no id after it."""
    ids = several(m)
    if m.kind("ignore_index") is None:
        return ids
    ids[m.some(m.lead)] = ignore_index(m)
    return ids


def one_ignored(m: Maker) -> Tensor:
    has = m.kind("ignore_index") is not None
    return (ignoring(0.4) if has else ignoring(0.0))(m)


BAD_IDS = (
    NO_INTEGERS
    | {"one more": lambda m: zeros(m, ((m.lead or (1,))[0] + 1, *m.lead[1:], 2))}
    | {"two dimensions more": lambda m: zeros(m, (*m.lead, 1, 1))}
    | {"on meta": lambda m: zeros(m, m.lead).to("meta")}
    | {"out of range, V": _with(several, lambda m: m.vocab)}
    | {"out of range, below": _with(several, lambda m: -7)}
    | {"out of range, one": _with(one_ignored, lambda m: m.vocab + 2)}
)
IDS = Argument(
    {
        "one": one_ignored,
        "several": several,
        "first ignored": first_ignored,
        "int32": lambda m: several(m).int(),
        "uint8": lambda m: several(m).to(torch.uint8),
        "repeated": lambda m: several(m)[..., :1].repeat_interleave(3, -1),
        "many": lambda m: m.integers((*m.lead, 2 * m.vocab), m.vocab),
        "strided": lambda m: m.integers((m.slots, *m.lead), m.vocab).movedim(0, -1),
    },
    BAD_IDS,
)


def with_target(m: Maker) -> Tensor:
    """Kept ids with the target of the row in the last slot, and some slots that are empty."""
    ids, kind = some_empty(m), m.kind("target")
    if kind in TARGET.good:
        target = TARGET.good[kind](m.case.make("target")).long()
        ids[..., -1] = torch.where((target < 0) | (target >= m.vocab), -1, target)
    return ids


def some_empty(m: Maker) -> Tensor:
    return several(m).masked_fill(m.some(slots(m)), -1)


KEPT = Argument(
    {
        "several": several,
        "some empty": some_empty,
        "with the target": with_target,
        "all": lambda m: torch.arange(m.vocab).expand(*m.lead, m.vocab).to(several(m)),
        "none": lambda m: zeros(m, (*m.lead, 0)),
        "only empty": lambda m: zeros(m, slots(m)) - 1,
        "int32": lambda m: with_target(m).int(),
        "uint8": IDS.good["uint8"],
        "repeated": lambda m: with_target(m).repeat_interleave(3, -1),
        "many": IDS.good["many"],
        "strided": IDS.good["strided"],
    },
    {name: kind for name, kind in BAD_IDS.items() if name != "out of range, one"}
    | constant(None)
    | {"one per row": lambda m: zeros(m, m.lead)}
    | {"out of range, far": _with(some_empty, lambda m: 2**40)},
    needed=True,
)
NEEDED_IDS = Argument(IDS.good, IDS.bad | constant(None), needed=True)
BESIDE_ROWS = Argument(
    {
        "one": lambda m: (m.rows(),),
        "one and several": lambda m: (m.rows(), m.rand((*m.lead, 3))),
        "wants a gradient": lambda m: (m.rows().requires_grad_(),),
        "several, of the dtype, want a gradient": lambda m: (
            m.rand((*m.lead, 2), dtype=m.dtype).requires_grad_(),
        ),
    },
    {
        "a list of numbers": lambda m: [1.0],
        "one more": lambda m: (m.rand(((m.lead or (1,))[0] + 1, *m.lead[1:], 1)),),
        "two dimensions more": lambda m: (m.rand((*m.lead, 1, 1)),),
        "on meta": lambda m: (m.rows().to("meta"),),
    },
)
