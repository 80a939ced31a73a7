"""`ll.invariant()` over a vocabulary that is sharded over two ranks. Here, ranks are threads."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support.invariance import WIDTH, bits, interpreted
from tests.support.rank_threads import on_ranks

VOCAB = 75
WIDTHS = (40, 35)


def results(hidden, weight, target, upstream, over_a_head):
    """Returns the bits of each rank's scores and gradient of x."""

    def work(ranks):
        start = sum(WIDTHS[: ranks.index])
        own = weight[start : start + WIDTHS[ranks.index]]
        x = hidden if over_a_head else hidden @ own.t()
        x = x.clone().requires_grad_()
        source = ll.VocabShard(ll.LinearLogits(x, own) if over_a_head else x, ranks)
        scores = ll.score(source, target, rank=True)
        (scores.logprob + scores.entropy).backward(upstream)
        assert x.grad is not None
        return [bits(t) for t in (*scores, x.grad)]

    return on_ranks(2, work)


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("over_a_head", [False, True])
def test_rows_in_other_batches(backend, over_a_head):
    """The gradient of hidden is covered too, because a + b and b + a have the same bits."""
    hidden, weight = torch.randn(5, WIDTH), torch.randn(VOCAB, WIDTH)
    if not over_a_head:  # the products of this test must not depend on the number of rows
        hidden, weight = hidden.round(), weight.round()
    target, upstream = torch.randint(VOCAB, (5,)), torch.randn(5)
    inputs = hidden, weight, target, upstream
    with ll.impl(backend), config.override(block_v=32, block_n=16, span=16), ll.invariant():
        whole = results(*inputs, over_a_head)
        for rows in (slice(3, 4), slice(1, 4)):
            part = results(hidden[rows], weight, target[rows], upstream[rows], over_a_head)
            for of_rank, some in zip(whole, part, strict=True):
                assert all(torch.equal(a[rows], b) for a, b in zip(of_rank, some, strict=True))
