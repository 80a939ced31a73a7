"""Finds formulas such as p log p, whose row sums can be computed from the scores of a loss.

Trainers compute the entropy of p = softmax(y) as -(logp.exp() * logp).sum(-1) or
y.logsumexp(-1) - (p * y).sum(-1). These sums follow from each row's entropy and logsumexp, which a
loss over the same logits can compute as well (metrics_after_loss.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formula import Applied, Direct, Formula

T = Tensor
PRODUCTS: set[Callable] = {
    torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__,
}  # fmt: skip
NEGATIONS: set[Callable] = {torch.neg, torch.negative, T.neg, T.negative, T.__neg__}
EXPONENTIALS: set[Callable] = {torch.exp, T.exp}


class Expectation(NamedTuple):
    """The formula `factor · p · log p` if `of.log`, else `factor · p · y`, with p = softmax(y).

    `of` describes y, the logits after scale and softcap.
    """

    of: Direct
    factor: float

    def sum(self, lse: Tensor, entropy: Tensor) -> Tensor:
        """The row sums, from the statistics of y."""
        return self.factor * (-entropy if self.of.log else lse - entropy)


def expectation_of(formula: Formula) -> Expectation | None:
    product, sign = _positive(formula)
    if not _calls(product, PRODUCTS, arguments=2):
        return None
    for p, of in (product.args, product.args[::-1]):
        p, sign_of_p = _positive(p)
        if isinstance(of, Direct) and _is_softmax(p, of):
            return Expectation(of, sign * sign_of_p * of.factor)
    return None


def _calls(formula: Any, functions: set[Callable], arguments: int) -> bool:
    called = isinstance(formula, Applied) and formula.function in functions
    return called and len(formula.args) == arguments and not formula.kwargs


def _positive(formula: Any) -> tuple[Any, float]:
    """The formula without its minus sign, and the sign."""
    return (formula.args[0], -1.0) if _calls(formula, NEGATIONS, arguments=1) else (formula, 1.0)


def _is_softmax(p: Any, of: Direct) -> bool:
    """Whether p is softmax(y) or exp(log_softmax(y)), where `of` describes y."""
    softmax = isinstance(p, Applied) and p.function is torch.softmax
    if not softmax and not _calls(p, EXPONENTIALS, arguments=1):
        return False
    y = p.args[0]
    right = isinstance(y, Direct) and y.reads == of.reads and y.log != softmax
    return right and (softmax or y.factor == 1)
