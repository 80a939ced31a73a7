"""The calls of calls.py by the functions of oracle.py: exact in fp64, PyTorch's errors in fp32."""

import math
from types import SimpleNamespace

import torch

import logitless as ll
from tests.differential import functions, slots
from tests.support import oracle
from tests.support.calls import GIVEN, Beside, calls_of
from tests.support.laws import FLOOR, error, error_or_inf


def cross_entropy(x, target, *, inplace=False, **how):
    return oracle.cross_entropy(x, target, **how)


def cross_entropy_and_scores(x, target, *, inplace=False, **how):
    return functions.cross_entropy_and_scores(x, target, **how)


def row_loss(formula, x, ids, **how):
    return functions.row_loss(x, formula, ids=ids, **how)


def group_loss(formula, x, ids, **how):
    return functions.group_loss(x, formula, ids=ids, **how)


def slot_loss(formula, x, targets, *, tail=True, **how):
    return slots.slot_loss(
        x, formula, targets.ids, targets.logprobs, targets.tail, targets.mask, **how
    )


def squared_in(f):
    """f with the temperature in the dtype of the logits, in which the library squares it."""

    def call(x, teacher, *, temperature=1.0, **how):
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.to(x.dtype)
        return f(x, teacher, temperature=temperature, **how)

    return call


DEFINITIONS = SimpleNamespace(
    logsumexp=oracle.logsumexp, entropy=oracle.entropy, token_logprobs=oracle.token_logprobs,
    soft_cross_entropy=oracle.soft_cross_entropy, topk_distill=squared_in(oracle.topk_distill),
    kl_div=squared_in(functions.kl_div), jsd=squared_in(functions.jsd), tvd=functions.tvd,
    cross_entropy=cross_entropy, row_loss=row_loss, slot_loss=slot_loss, group_loss=group_loss,
    cross_entropy_and_scores=cross_entropy_and_scores, kept_scores=functions.kept_scores,
    score=lambda x, target, **how: ll.Scores(**functions.score(x, target, **how)),
    row_stats=lambda x, ids, **how: ll.RowStats(**functions.stats(x, ids, **how)),
    capture_topk=lambda x, k: SimpleNamespace(**functions.topk(x.detach(), k)),
)  # fmt: skip


def meanings_of(given: Beside = GIVEN) -> dict:
    return calls_of(DEFINITIONS, given)


MEANINGS = meanings_of()


def excess(got, torchs, truth) -> float:
    """The error of one result divided by the bound, which is twice PyTorch's error plus FLOOR."""
    if not got.numel():
        return 0.0
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, truth) else math.inf
    return error(got, truth) / (2 * error_or_inf(torchs, truth) + FLOOR[got.dtype])
