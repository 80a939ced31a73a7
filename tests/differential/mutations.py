"""Bugs put in on purpose: a tester that does not find them tests nothing."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

from torch import Tensor

from logitless import contract, eager
from logitless.core import call as _call
from logitless.core import tensor_checks as _checks
from logitless.heads import chunks as _chunks


def wrong_chunk() -> AbstractContextManager:
    """Every chunk of a head but the first takes the rows one before its own."""
    right = _chunks.bounds

    def bounds(*args):
        return [(a - 1, b - 1) if a else (a, b) for a, b in right(*args)]

    return mock.patch.object(_chunks, "bounds", bounds)


def dropped_coefficient() -> AbstractContextManager:
    """The gradient of the entropy forgets p log p."""
    right = eager.coefficients

    def coefficients(*args):
        found = right(*args)
        found.rows[:, contract.B] = 0
        return found

    return mock.patch.object(eager, "coefficients", coefficients)


def skipped_check() -> AbstractContextManager:
    """row_weight is checked beside tensors of logits, and not beside a head."""
    right = _checks.row_weight

    def row_weight(t, x):
        if isinstance(x, Tensor):
            right(t, x)

    return mock.patch.object(_checks, "row_weight", row_weight)


MUTATIONS = {
    "a wrong chunk index": wrong_chunk,
    "a dropped coefficient": dropped_coefficient,
    "a skipped check over a head": skipped_check,
}


@contextlib.contextmanager
def mutated(bug: str) -> Iterator[None]:
    """The library with this bug, which remembers nothing that it took for right before or here."""
    with mock.patch.object(_call, "_passed", {}), MUTATIONS[bug]():
        yield
