"""Narrow heads whose logits are never in memory, at the sizes people train: against fp64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support import oracle
from tests.support.head_sizes import MIB, assert_as_exact, gradients, make, truth, unfused
from tests.support.sizes import DEVICE, sized

DTYPE = sized(torch.bfloat16, torch.float32)  # the interpreter cuts bf16 off
ROWS, VOCAB = sized((1000, 50257), (5, 75))


@pytest.fixture(autouse=True)
def on_chip(monkeypatch):
    def forced(work, *_):
        assert work.narrow
        return Cut(work.rows, on_chip=True)

    monkeypatch.setattr(choose_cut, "forced", forced)
    with ll.impl("triton"):
        yield


@pytest.mark.parametrize("width", sized([16, 64, 72, 100, 128], [20]))
def test_as_exact_as_unfused(width):
    hidden, weight, target = make(ROWS, width, VOCAB, DTYPE)
    target[::5] = -100

    def ours(h, W, target):
        return ll.cross_entropy(ll.LinearLogits(h, W), target)

    first = gradients(ours, hidden, weight, target)
    plain = gradients(unfused, hidden, weight, target)
    assert_as_exact(first, plain, truth(hidden, weight, target))
    for a, b in zip(first, gradients(ours, hidden, weight, target), strict=True):
        assert torch.equal(a, b)  # no sum depends on the order of programs


def test_results_per_row_with_every_statistic():
    hidden, weight, target = make(ROWS, 64, VOCAB, DTYPE)

    def loss(z):
        found = ll.score(z, target, softcap=20.0, temperature=1.5)
        return (found.logprob - 0.1 * found.entropy).mean()

    def naive(z):
        z = 20 * torch.tanh(z / 20) / 1.5
        return (oracle.token_logprobs(z, target) - 0.1 * oracle.entropy(z)).mean()

    assert_as_exact(
        gradients(lambda h, W: loss(ll.LinearLogits(h, W)), hidden, weight),
        gradients(lambda h, W: loss(F.linear(h, W)), hidden, weight),
        gradients(lambda h, W: naive(F.linear(h, W)), hidden.double(), weight.double()),
    )


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize(("rows", "width", "vocab"), [(8192, 128, 1 << 20), (2048, 64, 10**7)])
def test_extra_memory(rows, width, vocab):
    """At most 64 MiB beyond the gradients."""
    hidden, weight, target = make(rows, width, vocab, torch.bfloat16)
    h, W = hidden.requires_grad_(), weight.requires_grad_()
    head = ll.LinearLogits(h, W).head
    work = head.work(True, gemms=1, sums=True, keeps=True)
    with mock.patch.object(choose_cut, "ON_CHIP_VOCAB", {128: 1 << 31}):
        assert choose_cut.choose.__wrapped__(work, None, DEVICE).on_chip
    for _ in range(2):  # what libraries keep for themselves is there the second time
        h.grad = W.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ll.cross_entropy(ll.LinearLogits(h, W), target).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2 * (h.numel() + W.numel()) + 64 * MIB
