"""Results per row over a head, and checkpoints around one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import logitless as ll
from tests.support import calls
from tests.support.calls import CALLS, made, outcome
from tests.support.heads import D, N, V, both_ways, leaves, make  # noqa: F401 - a fixture


@pytest.mark.parametrize("chunk", [2, 100])
class TestReads:
    """What gives numbers a row."""

    def test_score(self, chunk, device):
        hidden, weight, bias, target = make(device=device)
        parts, again = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        got = ll.score(ll.LinearLogits(*parts, workspace=chunk * V * 8), target)
        want = ll.score(F.linear(*again), target)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        (got.logprob * 2 - got.entropy * got.lse).sum().backward()
        (want.logprob * 2 - want.entropy * want.lse).sum().backward()
        for a, b in zip(parts, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_row_stats_and_the_rest(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        ids = torch.randint(0, V, (N, 3), device=device)
        parts, again = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        source, logits = ll.LinearLogits(*parts, workspace=chunk * V * 8), F.linear(*again)
        outs = []
        for z in (source, logits):
            stats = ll.row_stats(z, ids, entropy=True, total=True, argmax=True)
            numbers = [*stats[:4], ll.token_logprobs(z, ids), ll.entropy(z), ll.logsumexp(z)]
            outs.append([*numbers, stats.argmax])
            sum((t.sin()).sum() for t in numbers).backward()
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(parts, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_capture_topk(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        got = ll.capture_topk(ll.LinearLogits(hidden, weight, bias, workspace=chunk * V * 8), 4)
        want = ll.capture_topk(F.linear(hidden, weight, bias), 4)
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.logprobs, want.logprobs)
        torch.testing.assert_close(got.tail, want.tail)

    def test_a_teacher_s_head(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        other = make(device=device, scale=0.5)[:3]
        source = ll.LinearLogits(hidden, weight, bias, workspace=chunk * V * 8)
        got = ll.kl_div(source, ll.LinearLogits(*other), direction="reverse")
        want = ll.kl_div(source.materialize(), F.linear(*other), direction="reverse")
        torch.testing.assert_close(got, want)


def test_bug_09_every_upstream_gradient_is_used(device):
    """reduction="none" with per-token weights: right dW and dbias."""
    hidden, weight, bias, target = make(device=device)
    per_token = torch.randn(N, dtype=torch.float64, device=device)
    got, want = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    source = ll.LinearLogits(*got, workspace=2 * V * 8)
    (ll.cross_entropy(source, target, reduction="none") * per_token).sum().backward()
    (ll.cross_entropy(F.linear(*want), target, reduction="none") * per_token).sum().backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", ["score", "cross_entropy, none", "row_stats", "row_loss"])
def test_checkpointing_over_a_head(name):
    """Results a row over a head raised CheckpointError."""
    want = outcome(name, "head")
    parts = [t.requires_grad_() for t in calls.leaves("head")]
    found = checkpoint(lambda *p: CALLS[name](made("head", p)), *parts, use_reentrant=False)
    real = [t for t in found if t.is_floating_point()]
    sum((t.double() * (i + 1)).sum() for i, t in enumerate(real)).backward()
    for part, grad in zip(parts, want[len(found) :], strict=True):
        torch.testing.assert_close(part.grad, grad)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_checkpointing_a_head(reduction, device):
    hidden = torch.randn(4, D, device=device, requires_grad=True)
    weight = torch.randn(V, D, device=device, requires_grad=True)
    target = torch.tensor([1, 2, -100, 3], device=device)

    def loss(h):
        return ll.cross_entropy(ll.LinearLogits(h, weight), target, reduction=reduction).sum()

    want = torch.autograd.grad(loss(hidden), (hidden, weight))
    got = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), (hidden, weight))
    torch.testing.assert_close(got, want)
