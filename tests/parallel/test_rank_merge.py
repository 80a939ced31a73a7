"""The backend that joins the columns of all ranks: a loss sees whole rows, and V of all ranks."""

from dataclasses import dataclass

import pytest
import torch

import logitless as ll
from logitless.contract import COEFFICIENTS, G_TOTAL, A, Coefficients, Reading
from logitless.core.evaluate import evaluate
from logitless.core.loss import RowLoss
from tests.support.calls import N, V, normal
from tests.support.shards import on_shards, plainly


@dataclass(eq=False)
class MeanSurprisal(RowLoss):
    """The mean of -log p over all classes: log_total / -V, whose gradient is p - 1 / V."""

    def value(self, backend, statistics):
        return (-statistics.log_total / self.reading.vocab,), (statistics.state,)

    def coefficients(self, saved, upstream):
        rows = saved[0].new_zeros(len(saved[0]), COEFFICIENTS)
        rows[:, A], rows[:, G_TOTAL] = 1, -1 / self.reading.vocab
        return Coefficients(rows, ("a", "total")), upstream[0]


@pytest.mark.parametrize("widths", [(20, 17), (9, 0, 28)], ids=["2 ranks", "3 ranks"])
def test_a_loss_that_divides_by_the_vocabulary(widths, impl):
    """V is that of all ranks: a rank's own width gave another loss on each rank."""

    def call(source):
        loss = MeanSurprisal(Reading(V, wants=("log_total",)))
        return (evaluate(source, loss, "none"),)

    def definition(x):
        return (-x.log_softmax(-1).mean(-1),)

    x = normal(N, V, seed=1)
    got, d_got, _ = on_shards(call, x, widths)
    for want, d_want in (plainly(definition, x), plainly(call, x)):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(d_got, d_want)


def test_a_loss_that_divides_by_the_vocabulary_over_a_head(impl):
    hidden, weight = normal(N, 5, seed=1).requires_grad_(), normal(V, 5, seed=2)
    loss = MeanSurprisal(Reading(V, wants=("log_total",)))
    got = evaluate(ll.LinearLogits(hidden, weight, workspace=3 * V * 4), loss, "mean")
    want = -(hidden @ weight.T).log_softmax(-1).mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(t, hidden) for t in (got, want)))
