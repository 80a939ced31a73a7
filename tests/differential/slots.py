"""Definitions of the losses over the K slots of a sparse teacher, for functions.py."""

import math
from types import SimpleNamespace

import torch

from tests.support import oracle


def distill(x, ids, logprobs, tail=None, mask=None, **how):
    if how["support"] == "tail":
        tail = tail_where_any(x, ids, logprobs, tail, mask, **how)
    targets = SimpleNamespace(ids=ids, logprobs=logprobs, tail=tail, mask=mask)
    return oracle.topk_distill(x, targets, **how)


def slot_loss(
    x, formula, ids, logprobs, tail=None, mask=None, *, rows=(), temperature=1.0, softcap=None,
    labels=None, ignore_index=-100, row_weight=None, reduction="mean",
):  # fmt: skip
    """The formula over slots. Where both probabilities are 0, both logarithms are -1e5."""
    read = {"temperature": temperature, "softcap": softcap}
    tail = tail_where_any(
        x, ids, logprobs, tail, mask, labels=labels, ignore_index=ignore_index, **read
    )
    mask = torch.ones_like(ids).bool() if mask is None else mask != 0
    live = mask.any(-1) | True if labels is None else labels != ignore_index
    mask = mask & live.unsqueeze(-1)
    log_q = torch.log_softmax(oracle.z_of(x, temperature, softcap), -1)
    at = torch.where(mask, ids, 0).long()
    outside = oracle.log_mass_outside(log_q, ids, mask)
    slots = []
    for q, p, real in (
        (log_q.gather(-1, at), logprobs.to(x.dtype), mask),
        (outside, tail.to(x.dtype), mask.any(-1)),
    ):
        none = ~real | (q == -torch.inf) & (p == -torch.inf)
        q = torch.where(q == -torch.inf, q.detach(), q)
        slots += [t.masked_fill(none, -1e5) for t in (q, p)]
    lead, names = x.shape[:-1], ("student", "teacher", "student_tail", "teacher_tail", "mask")
    flat = [t.reshape(lead.numel(), *t.shape[len(lead) :]) for t in (*slots, mask, *rows)]
    value = formula(SimpleNamespace(**dict(zip(names, flat, strict=False))), *flat[len(names) :])
    value = torch.where(mask.any(-1), value.view(lead), 0.0)
    return oracle.over_rows(value, live, row_weight, reduction)


def tail_where_any(
    x, ids, logprobs, tail, mask, *, temperature=1.0, softcap=None, labels=None, ignore_index=-100,
    **_,
):  # fmt: skip
    """A teacher's tail; nothing if it may be rounding where the student has nothing outside."""
    mask = torch.ones_like(ids).bool() if mask is None else mask != 0
    if labels is not None:
        mask = mask & (labels != ignore_index).unsqueeze(-1)
    if tail is None:
        tail = (1 - torch.where(mask, logprobs.to(x.dtype).exp(), 0.0).sum(-1)).clamp(min=0).log()
    log_q = torch.log_softmax(oracle.z_of(x, temperature, softcap), -1)
    outside = oracle.log_mass_outside(log_q, ids, mask)
    return tail.masked_fill((outside == -torch.inf) & (tail < math.log(2.0**-6)), -torch.inf)


def of_slots(slots, *rows):
    """A formula of probabilities, so that it is finite where a probability is 0."""
    p, q = slots.teacher.exp(), slots.student.exp()
    value = ((p - q).square() + 0.3 * q).sum(-1)
    value = value + (slots.teacher_tail.exp() - slots.student_tail.exp()).square()
    return beside(value, rows)


def of_ranks(slots, *rows):
    """A formula that uses the mask of the slots, and mixes the slots of a row."""
    q = torch.where(slots.mask, slots.student.exp(), 0.5)
    return beside((q * q.flip(-1)).sum(-1), rows)


def beside(value, rows):
    for t in rows:
        t = t.to(value.dtype)
        value = value * t if t.dim() == 1 else value + t.sum(-1)
    return value
