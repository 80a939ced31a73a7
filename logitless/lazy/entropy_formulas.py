"""Finds formulas such as p log p, whose row sums can be computed from the scores of a loss.

Trainers compute the entropy of p = softmax(y) with functions of PyTorch. Two examples are
-(logp.exp() * logp).sum(-1) and y.logsumexp(-1) - (p * y).sum(-1). The sums in these examples can
be computed from the entropy and the logsumexp of each row. A loss over the same logits can compute
the entropy and the logsumexp too (metrics_after_loss.py).
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
    """The formula is `factor · p · log p` if `of.log` is true, and `factor · p · y` otherwise.

    `of` describes y, the logits after scale and softcap, and p is softmax(y).
    """

    of: Direct
    factor: float

    def sum(self, lse: Tensor, entropy: Tensor) -> Tensor:
        """Sums the formula's values over each row. `lse` and `entropy` are the statistics of y."""
        return self.factor * (-entropy if self.of.log else lse - entropy)


def expectation_of(formula: Formula) -> Expectation | None:
    """Describes a formula as an `Expectation`, or returns None."""
    product, sign = _positive(formula)
    if not _calls(product, PRODUCTS, arguments=2):
        return None
    for p, of in (product.args, product.args[::-1]):
        p, sign_of_p = _positive(p)
        if isinstance(of, Direct) and _is_softmax(p, of):
            return Expectation(of, sign * sign_of_p * of.factor)
    return None


def _calls(formula: Any, functions: set[Callable], arguments: int) -> bool:
    """Whether the formula calls one of `functions`, with this number of positional arguments."""
    called = isinstance(formula, Applied) and formula.function in functions
    return called and len(formula.args) == arguments and not formula.kwargs


def _positive(formula: Any) -> tuple[Any, float]:
    """Returns the formula without its minus sign, and the sign as 1.0 or -1.0."""
    return (formula.args[0], -1.0) if _calls(formula, NEGATIONS, arguments=1) else (formula, 1.0)


def _is_softmax(p: Any, of: Direct) -> bool:
    """Whether p is softmax(y) or exp(log_softmax(y)), where `of` describes the logits y."""
    softmax = isinstance(p, Applied) and p.function is torch.softmax
    if not softmax and not _calls(p, EXPONENTIALS, arguments=1):
        return False
    y = p.args[0]
    right = isinstance(y, Direct) and y.reads == of.reads and y.log != softmax
    return right and (softmax or y.factor == 1)
