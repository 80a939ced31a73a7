"""CONTRIBUTING.md, followed: two losses, a divergence and a source, each in a few lines."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import logitless as ll
from logitless.contract import COEFFICIENTS, G_LABEL, LOG_S, A, Coefficients, Reading
from logitless.core.evaluate import evaluate
from logitless.core.loss import RowLoss
from logitless.core.source import Source
from logitless.eager import pair_losses as in_torch
from logitless.kernels.pairs import losses as in_triton
from logitless.kernels.pairs.state import Sums
from logitless.losses.dense_teacher import compared
from tests.support.shards import on_shards, plainly

N, V, D = 6, 37, 5


def focal_loss(logits, target, gamma, **options):
    """(1 - p)^γ (-log p), by `row_loss`."""

    def formula(stats):
        return -((1 - stats.logprob.exp()) ** gamma) * stats.logprob

    return ll.row_loss(formula, logits, target, **options)


@dataclass(eq=False)
class TopLogprob(RowLoss):
    """Log p of the largest logit, which is -log s, with a forward and a backward of its own."""

    def forward(self, backend, x):
        found = backend.read(x, self.reading)
        rows = torch.zeros(
            (len(found.state), COEFFICIENTS), dtype=found.state.dtype, device=x.device
        )
        rows[:, A], rows[:, G_LABEL] = -1, 1
        value = -found.state[:, LOG_S].view(x.shape[:-1])
        return (value.clone(),), (found.state, rows, found.argmax)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        state, rows, argmax = saved
        reading = self.reading._replace(label=argmax)
        coefficients = Coefficients(rows, ("a", "label"))
        return backend.gradient(x, reading, state, coefficients, upstream[0], factor, into)


def top_logprob(logits, reduction="none"):
    return evaluate(logits, TopLogprob(Reading(logits.shape[-1], wants=("argmax",))), reduction)


def hellinger(student, teacher, **options):
    """The squared Hellinger distance ½ Σ (√p - √q)² to a dense teacher."""
    return compared(student, teacher, "hellinger", **options)


def hellinger_in_fp64(student, teacher):
    q, p = (torch.log_softmax(z.double(), -1) for z in (student, teacher))
    return ((q / 2).exp() - (p / 2).exp()).square().sum(-1) / 2


def roots(*sides):
    return [(side.log_p / 2).exp() for side in sides]


def fold(sums, q, p, _):
    root_q, root_p = roots(q, p)
    return sums[0] + (root_q - root_p).square().sum(1, keepdim=True), *sums[1:]


def finish(sums, q, p, _):
    return sums[0] / 2, sums[0] / 2


def dz(q, p, distance, gain, _):
    root_q, root_p = roots(q, p)
    return root_q * (root_q - root_p - root_q * distance), gain / 2


@triton.jit
def root(side):
    return tl.exp2(0.5 * side.log_p)


@triton.jit
def fold_tile(sums, q, p, how):
    apart = root(q) - root(p)
    return Sums(sums.a + apart * apart, sums.b, sums.c)


@triton.jit
def finish_row(sums, q, p, how):
    return 0.5 * sums.a, 0.5 * sums.a


@triton.jit
def dz_of_tile(q, p, distance, gain, how):
    root_q, root_p = root(q), root(p)
    return root_q * (root_q - root_p - root_q * distance), 0.5 * gain


in_torch.LOSSES["hellinger"] = in_torch.PairLoss(fold, finish, dz)
in_triton.LOSSES["hellinger"] = in_triton.PairLoss(fold_tile, finish_row, dz_of_tile)


class Stacked(Source):
    """The rows of several tensors of logits, one after another, which are never joined."""

    def __init__(self, *parts):
        self.parts = parts

    @property
    def shape(self):
        return torch.Size((sum(len(part) for part in self.parts), self.parts[0].shape[1]))

    dtype = property(lambda self: self.parts[0].dtype)
    device = property(lambda self: self.parts[0].device)
    requires_grad = property(lambda self: any(part.requires_grad for part in self.parts))

    def evaluate(self, loss, reduction, row_weight):
        results, start = [], 0
        for part in self.parts:
            rows, start = slice(start, start + len(part)), start + len(part)
            results.append(evaluate(part, loss.rows(rows, self.shape[:-1])))
        if isinstance(results[0], Tensor):
            return loss.reduce(torch.cat(results), reduction, row_weight)
        outputs = tuple(torch.cat(parts) for parts in zip(*results, strict=True))
        return outputs if loss.multiple_outputs else loss.reduce(outputs, reduction, row_weight)


def scores_of(found):
    loss, scores = found
    return loss, *scores[:4]


@pytest.fixture
def logits(device):
    return torch.randn(N, V, device=device)


@pytest.fixture
def target(device):
    return torch.tensor([3, 0, -100, 36, 5, 5], device=device)


def grads(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def test_a_formula(logits, target, impl, device):
    def naive(x):
        live = target != -100
        logp = torch.log_softmax(x, -1)[live].gather(1, target[live, None])[:, 0]
        rows = -((1 - logp.exp()) ** 2) * logp
        return rows.mean()

    how = {"gamma": 2.0, "ignore_index": -100}
    x = logits.requires_grad_()
    got, want = focal_loss(x, target, **how), naive(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads(got, x), grads(want, x))
    h = torch.randn(N, D, device=device, requires_grad=True)
    w = torch.randn(V, D, device=device, requires_grad=True)
    got = focal_loss(ll.LinearLogits(h, w, workspace=2 * 4 * V), target, **how)
    want = naive(h @ w.T)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads(got, h, w), grads(want, h, w), rtol=1e-4, atol=1e-5)


def test_a_row_loss(logits, impl, device):
    x, g = logits.requires_grad_(), torch.randn(N, device=device)
    want = torch.log_softmax(x, -1).amax(-1)
    got = top_logprob(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads(got @ g, x), grads(want @ g, x))
    h = torch.randn(N, D, device=device, requires_grad=True)
    w = torch.randn(V, D, device=device, requires_grad=True)
    got = top_logprob(ll.LinearLogits(h, w, workspace=2 * 4 * V), "mean")
    want = torch.log_softmax(h @ w.T, -1).amax(-1).mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads(got, h, w), grads(want, h, w), rtol=1e-4, atol=1e-5)


def test_a_divergence(logits, impl, device):
    """Over a tensor, columns on two ranks, and a head, with the options of every divergence."""
    teacher = torch.randn_like(logits)
    ours = lambda x: (hellinger(x, teacher, reduction="none"),)  # noqa: E731
    (want,), d_want = plainly(lambda x: (hellinger_in_fp64(x, teacher).float(),), logits)
    (got,), d_got = plainly(ours, logits)
    (of_ranks,), d_of_ranks, _ = on_shards(ours, logits, (20, 17))
    for value, d in ((got, d_got), (of_ranks, d_of_ranks)):
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(d, d_want)
    h, w = (torch.randn(n, D, device=device, requires_grad=True) for n in (N, V))
    keep = torch.arange(N, device=device) != 2
    how = {"temperature": 2.0, "softcap": 3.0, "mask": keep}
    got = hellinger(ll.LinearLogits(h, w, workspace=2 * 4 * V), teacher, **how)
    want = hellinger_in_fp64(3 * torch.tanh(h @ w.T / 3) / 2, teacher / 2)[keep].mean().float()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads(got, h, w), grads(want, h, w), rtol=1e-4, atol=1e-6)


def test_a_source(logits, target):
    parts = [part.clone().requires_grad_() for part in logits.split([1, 3, 2])]
    teacher, weight = torch.randn_like(logits), torch.rand(V, device=logits.device)
    targets = ll.capture_topk(teacher, 4)
    for loss in (
        lambda x: ll.cross_entropy(x, target, label_smoothing=0.1),
        lambda x: ll.cross_entropy(x, target, weight=weight),
        lambda x: ll.cross_entropy(x, target, reduction="none").sum(),
        lambda x: ll.score(x, target).entropy.sum(),
        lambda x: sum(t.sum() for t in scores_of(ll.cross_entropy_and_scores(x, target))),
        lambda x: ll.kl_div(x, teacher, direction="forward", mask=target != -100),
        lambda x: ll.topk_distill(x, targets, divergence="forward_kl", support="tail"),
        lambda x: focal_loss(x, target, 2.0, ignore_index=-100),
    ):
        whole = logits.clone().requires_grad_()
        got, want = loss(Stacked(*parts)), loss(whole)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.cat(grads(got, *parts)), *grads(want, whole))
    with pytest.raises(ValueError, match="target must have shape"):
        ll.cross_entropy(Stacked(*parts), target[1:])
