"""Kinds of what a teacher says: of whole rows, or of K ids a row."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

import logitless as ll

from .arguments import (
    NO_INTEGERS,
    NO_TENSOR,
    Argument,
    Kinds,
    constant,
    ones,
    other_shapes,
    rows,
    zeros,
)
from .case import Maker
from .sources import MOST_D, VALUES


def dense(dtype: torch.dtype | None = None, values: str = "plain") -> Callable[[Maker], Tensor]:
    def teacher(m: Maker) -> Tensor:
        t = m.rand((*m.lead, m.vocab), -4, 4, torch.float64).to(dtype or m.dtype)
        change = VALUES[values].dense
        return t if change is None else change(m, t)

    return teacher


def dense_head(m: Maker) -> ll.LinearLogits:
    hidden, weight = m.normal(*m.lead, MOST_D), m.normal(m.vocab, MOST_D)
    return ll.LinearLogits(hidden, weight)


def like_logits(m: Maker) -> tuple:
    return (*m.lead, m.vocab)


BAD_DENSE = (
    NO_TENSOR
    | constant(None)
    | other_shapes(ones, like_logits)
    | {
        "integers": lambda m: zeros(m, like_logits(m)),
        "wants a gradient": lambda m: ones(m, like_logits(m)).requires_grad_(),
    }
)
TEACHER = Argument(
    {
        "of the dtype": dense(),
        "fp16": dense(torch.float16),
        "fp64": dense(torch.float64),
        "-inf": dense(values="-inf"),
        "a head": dense_head,
        "strided": lambda m: m.rand((m.vocab, *m.lead), -4, 4).movedim(0, -1),
    },
    BAD_DENSE,
    needed=True,
)
PROBS = Argument(
    {
        "of the dtype": lambda m: dense(torch.float64)(m).softmax(-1).to(m.dtype),
        "fp32": lambda m: dense(torch.float32)(m).softmax(-1),
        "some 0": lambda m: dense(values="-inf")(m).nan_to_num(0, neginf=-9e9).float().softmax(-1),
        "of one class": lambda m: torch.nn.functional.one_hot(m.integers(m.lead, m.vocab), m.vocab)
        .float(),
    },
    BAD_DENSE,
    needed=True,
)  # fmt: skip
ROW_MASK = Argument(
    {
        "bool": lambda m: m.some(m.lead, 0.6),
        "0 and 1": lambda m: m.some(m.lead, 0.6).long(),
        "floats": lambda m: m.some(m.lead, 0.6).float(),
        "none": lambda m: m.some(m.lead, -1),
        "all": lambda m: m.some(m.lead, 2),
    },
    NO_TENSOR
    | other_shapes(ones, rows)
    | {"complex": lambda m: ones(m, m.lead).to(torch.complex64)},
)

# --- slots: K numbers a row, K being that of the case, or the width of logits already gathered

Width = Callable[[Maker], int]


def of_ids(m: Maker) -> int:
    return m.slots


def of_logits(m: Maker) -> int:
    return m.vocab


def masks(K: Width) -> Kinds:
    return {
        "bool": lambda m: m.some((*m.lead, K(m)), 0.6),
        "0 and 1": lambda m: m.some((*m.lead, K(m)), 0.6).int(),
        "none": lambda m: m.some((*m.lead, K(m)), -1),
        "all": lambda m: m.some((*m.lead, K(m)), 2),
        "some rows": lambda m: m.some((*m.lead, 1), 0.6).expand(*m.lead, K(m)),
    }


def hidden_slots(m: Maker, K: Width) -> Tensor:
    """Which slots the mask of this case hides, the same for all that ask."""
    kinds, kind = masks(K), m.kind("mask")
    if kind not in kinds:
        return m.full((*m.lead, K(m)), False)
    return kinds[kind](m.case.make("mask")) == 0


def slot_mask(K: Width) -> Argument:
    bad = other_shapes(ones, lambda m: (*m.lead, K(m)))
    cast = {"complex": lambda m: ones(m, (*m.lead, K(m))).to(torch.complex64)}
    return Argument(masks(K), NO_TENSOR | bad | cast)


def logprobs(K: Width) -> Argument:
    """Log-probabilities, of less than half in all: a tail has room beside them."""

    def plain(m: Maker) -> Tensor:
        found = torch.log_softmax(m.rand((*m.lead, K(m) + 1), -3, 3), -1)
        return found[..., :-1] - math.log(2)

    def nonsense(m: Maker) -> Tensor:
        found = plain(m)
        odd = torch.tensor([math.nan, -math.inf, math.inf], device=found.device)
        return torch.where(hidden_slots(m, K), odd[m.integers(found.shape, 3)], found)

    good = {
        "fp32": plain,
        "fp64": lambda m: plain(m).double(),
        "bf16": lambda m: plain(m).bfloat16(),
        "nonsense where masked": nonsense,
        "some -inf": lambda m: plain(m).masked_fill(m.some((*m.lead, K(m)), 0.3), -math.inf),
    }
    bad = other_shapes(ones, lambda m: (*m.lead, K(m)))
    bad |= constant(None) | {"integers": lambda m: zeros(m, (*m.lead, K(m)))}
    return Argument(good, NO_TENSOR | bad, needed=True)


def slot_ids(m: Maker) -> Tensor:
    return m.integers((*m.lead, m.slots), m.vocab)


def out_of_range(m: Maker) -> Tensor:
    """Everywhere: wherever a slot counts."""
    return slot_ids(m) + m.vocab


SLOT_IDS = Argument(
    {
        "int64": slot_ids,
        "int32": lambda m: slot_ids(m).int(),
        "repeated": lambda m: slot_ids(m)[..., :1].expand(*m.lead, m.slots),
        "nonsense where masked": lambda m: slot_ids(m).masked_fill(hidden_slots(m, of_ids), -7),
    },
    NO_INTEGERS
    | constant(None)
    | other_shapes(zeros, lambda m: (*m.lead, m.slots))
    | {
        "uint8": lambda m: slot_ids(m).to(torch.uint8),
        "no slots": lambda m: zeros(m, (*m.lead, 0)),
        "out of range, above": out_of_range,
        "out of range, below": lambda m: slot_ids(m) - m.vocab - 3,
    },
    needed=True,
)
TAIL = Argument(
    {
        "fp32": lambda m: m.rows(-5, -0.7),
        "fp64": lambda m: m.rows(-5, -0.7, torch.float64),
        "some -inf": lambda m: m.rows(-5, -0.7).masked_fill(m.some(m.lead), -math.inf),
    },
    NO_TENSOR | other_shapes(ones, rows) | {"integers": lambda m: zeros(m, m.lead)},
)
LOGPROBS, SLOT_MASK = logprobs(of_ids), slot_mask(of_ids)
GATHERED, GATHERED_MASK = logprobs(of_logits), slot_mask(of_logits)
