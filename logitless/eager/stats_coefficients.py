"""Computes the coefficients of the backward formula from the gradients of the row statistics.

contract.py defines the formula and its coefficients. For each statistic, RULES lists the terms that
the gradient of the statistic adds to the coefficients. kernels/stats_coefficients.py applies the
same RULES, in one launch or inside the kernel of the gradient.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, ENTROPY, FIELDS, TAIL, Coefficients, Reading, made_once
from .rows import tail_coefficients


class Term(NamedTuple):
    """One term of a coefficient: sign · times · d, where d is the gradient of a statistic."""

    coefficient: str  # a name in `contract.FIELDS`
    sign: int
    # The name of a factor. "" stands for 1, and "entropy" stands for the row's entropy. "classes"
    # stands for the sum Σ v of the class weights, or for V if there are no class weights.
    times: str = ""


# RULES has one line for each statistic that has a gradient, except the tail. If there are K ids per
# row, the terms of "label" are added to the coefficients of the ids.
RULES: dict[str, tuple[Term, ...]] = {
    "lse": (Term("a", 1),),  # d lse / dz_i = p_i
    "picked": (Term("label", 1),),  # d z[id] / dz_i = [i = id]
    "logprob": (Term("label", 1), Term("a", -1)),  # log p = z - lse
    "nll": (Term("label", -1), Term("a", 1)),
    "entropy": (Term("b", -1), Term("a", -1, "entropy")),  # dH / dz_i = -p_i (log p_i + H)
    "total": (Term("total", 1),),  # d Σ v z / dz_i = v_i
    "log_total": (Term("total", 1), Term("a", -1, "classes")),  # Σ v log p = Σ v z - lse Σ v
}
AT_IDS = ("picked", "logprob")  # statistics of shape (..., K) if there are K ids per row


@functools.cache
def fields_of(wants: tuple[str, ...], has_ids: bool) -> tuple[str, ...]:
    """Returns the names of the coefficients that can be nonzero for the statistics in `wants`."""
    used = {term.coefficient for name in wants for term in RULES.get(name, ())}
    if "tail" in wants:
        used |= {"a", "a_ids"}
    if has_ids:
        used.discard("label")
    return tuple(field for field in FIELDS if field in used)


@functools.cache
def fields_given(names: tuple[str, ...], wants: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the coefficients that the gradients of the statistics `names` need.

    "label" is included if a statistic in `wants` uses the label, because a label outside the
    vocabulary makes the whole gradient of its row NaN.
    """
    used = {*fields_of(names, False)} | ({"label"} & {*fields_of(wants, False)})
    return tuple(field for field in FIELDS if field in used)


@made_once
def of_one(name: str, device: torch.device, dtype: torch.dtype) -> Coefficients | None:
    """Returns the coefficients of a loss that is equal to the statistic `name`.

    The gradient of this statistic is 1 in every row, and the gradients of all other statistics are
    0. If the coefficients depend on the row or on the class weights, the result is None.
    """
    rule = RULES.get(name)
    if rule is None or any(term.times for term in rule):
        return None
    rows = torch.zeros((1, COEFFICIENTS), device=device, dtype=dtype)
    for field, sign, _ in rule:
        rows[0, FIELDS.index(field)].fill_(sign)  # `= sign` would make the host wait
    return Coefficients(rows, fields_of((name,), False))


def coefficients(
    reading: Reading, state: Tensor, gradients: dict[str, Tensor | None]
) -> Coefficients:
    """Returns the coefficients of the backward formula.

    `gradients` maps the name of each statistic to its gradient. A missing gradient is 0.
    """
    rows: dict[str, Tensor] = {}
    ids = None
    if reading.ids is not None and any(name in reading.wants for name in AT_IDS):
        ids = state.new_zeros((len(state), reading.ids.shape[-1]))
    for name, rule in RULES.items():
        d = gradients.get(name)
        if d is None:
            continue
        at_ids = ids is not None and name in AT_IDS
        d = d.reshape(ids.shape if at_ids else -1)
        if at_ids:
            ids, d = ids + d, d.sum(1)
        for field, sign, times in rule:
            if at_ids and field == "label":  # d was already added to `ids`
                continue
            term = d * _factor(times, reading, state) if times else d
            term = term if sign > 0 else -term
            rows[field] = rows[field] + term if field in rows else term
    zero = torch.zeros_like(state[:, 0])
    if "tail" in reading.wants:
        d = gradients.get("tail")
        d = zero if d is None else d.reshape(-1)
        tail = state[:, TAIL]
        rows["a"], rows["a_ids"] = tail_coefficients(rows.get("a", zero), d, tail)
    table = torch.stack([rows.get(field, zero) for field in FIELDS], 1)
    return Coefficients(table, fields_of(reading.wants, reading.ids is not None), ids)


# None, because PyTorch's operations cannot compute coefficients and gradient in one launch.
stats_gradient = None


def _factor(times: str, reading: Reading, state: Tensor) -> Tensor | int:
    """Returns the value of the factor that `times` names (see `Term`)."""
    if times == "entropy":
        return state[:, ENTROPY]
    v = reading.class_weight
    return reading.vocab if v is None else v.to(state.dtype).sum()
