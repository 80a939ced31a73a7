"""The coefficients of the backward formula (contract.py) from the gradients of row statistics.

RULES lists the terms that the gradient of each statistic adds to the coefficients.
kernels/statistics/coefficients.py applies the same RULES, in one launch or in the gradient's
kernel.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, ENTROPY, FIELDS, TAIL, Coefficients, Reading, made_once
from .rows import tail_coefficients


class Term(NamedTuple):
    """sign · times · d, where d is the gradient of a statistic."""

    coefficient: str  # a name in `contract.FIELDS`
    sign: int
    # "" is 1, "entropy" the row's entropy, "classes" the sum of the class weights, or V without
    # them
    times: str = ""


# All statistics with a gradient except the tail. With K ids per row, "label" means their
# coefficients.
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
    """Returns the coefficients that can be nonzero for the statistics in `wants`."""
    used = {term.coefficient for name in wants for term in RULES.get(name, ())}
    if "tail" in wants:
        used |= {"a", "a_ids"}
    if has_ids:
        used.discard("label")
    return tuple(field for field in FIELDS if field in used)


@functools.cache
def fields_given(names: tuple[str, ...], wants: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the coefficients that the gradients of the statistics `names` need.

    "label" is among them if any statistic in `wants` uses it, because a label outside the
    vocabulary makes its row's gradient NaN.
    """
    used = {*fields_of(names, False)} | ({"label"} & {*fields_of(wants, False)})
    return tuple(field for field in FIELDS if field in used)


@made_once
def of_one(name: str, device: torch.device, dtype: torch.dtype) -> Coefficients | None:
    """Returns the coefficients of a loss that is the statistic `name`.

    None if they depend on the row or on the class weights.
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
    """Coefficients from the gradients of statistics, by name; one that is missing means 0."""
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


# Computes `coefficients` and `gradient` in one launch, from (x, reading, state, gradients, factor,
# into), or returns None if that is not possible.
stats_gradient = None


def _factor(times: str, reading: Reading, state: Tensor) -> Tensor | int:
    if times == "entropy":
        return state[:, ENTROPY]
    v = reading.class_weight
    return reading.vocab if v is None else v.to(state.dtype).sum()
