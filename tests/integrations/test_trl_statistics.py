"""Compares our results for TRL's fused head with formulas in fp64. TRL is not needed."""

import pytest
import torch
from torch import nn

from logitless.integrations.token_gradients import Ways
from logitless.integrations.trl_statistics import (
    Call,
    divergences,
    gkd_loss,
    logprobs_and_entropies,
    token_statistics,
)
from tests.support import oracle
from tests.support.sizes import DEVICE

N, D, V = 7, 16, 75
WORKSPACE = 3 * V * 4  # three rows of fp32 logits
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
FLOOR = 16  # in units of the dtype's eps times the largest number
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "all": {"temperature": 1.7, "softcap": 3.0, "scale": 2.5},
    "negative scale": {"scale": -0.5, "softcap": 3.0},
    "zero scale": {"scale": 0.0},
}


def head(dtype=torch.float32, bias=True, width=D):
    """Returns leaves (hidden, weight, bias), once in fp64 and once in `dtype`."""
    shapes = ((N, width), (V, width), (V,))
    exact = [torch.randn(s, dtype=torch.float64).to(DEVICE, dtype).double() for s in shapes]
    exact = [t if bias or t.dim() == 2 else None for t in exact]
    return tuple(
        [None if t is None else t.to(to).detach().requires_grad_() for t in exact]
        for to in (torch.float64, dtype)
    )


def formulas(hidden, weight, bias, target, temperature=1.0, softcap=None, scale=1.0):
    """Computes the results from their definitions, in the order of OUTPUTS."""
    x = scale * nn.functional.linear(hidden, weight, bias)
    z = oracle.z_of(x, temperature, softcap)
    logp = z.log_softmax(-1)
    squares = (2 * logp).logsumexp(-1)
    return (
        logp.gather(-1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), squares,
        z.mean(-1), z.argmax(-1) == target,
    )  # fmt: skip


def assert_near(got, exact, torchs):
    """The error is at most twice PyTorch's error in the same dtype, plus a floor for rounding."""
    assert got.dtype == torchs.dtype
    error, theirs = ((t.double() - exact).abs().max() for t in (got, torchs))
    eps = torch.finfo(torchs.dtype).eps
    assert error <= 2 * theirs + FLOOR * eps * exact.abs().max().clamp(min=1)


def ours(tensors, target, outputs=OUTPUTS, call=None, temperature=1.0, softcap=None, scale=1.0):
    call = call or Call({"workspace": WORKSPACE})
    return token_statistics(call, *tensors, target, temperature, 32768, softcap, scale, outputs)


@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_statistics(how, impl):
    exact, tensors = head(bias="scale" in how)
    plain = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    target = torch.randint(0, V, (N,), device=DEVICE)
    want, theirs = (formulas(*t, target, **how) for t in (exact, plain))
    got = ours(tensors, target, **how)
    for mine, w, t in zip(got[:4], want[:4], theirs[:4], strict=True):
        assert_near(mine, w, t)
    assert torch.equal(got[4], want[4])
    assert [t.requires_grad for t in got[:4]] == [True, True, False, False]
    upstream = torch.randn(2, N, device=DEVICE)
    for results in (want, theirs, got):
        loss = sum((g.to(r.dtype) * r).sum() for g, r in zip(upstream, results[:2], strict=True))
        loss.backward()
    for mine, w, t in zip(tensors, exact, plain, strict=True):
        if mine is not None:
            assert_near(mine.grad, w.grad, t.grad)


def test_results_that_are_not_requested_are_none():
    _, tensors = head()
    target = torch.randint(0, V, (N,), device=DEVICE)
    logprob, *others = ours(tensors, target, ("log_probs",))
    assert logprob.shape == (N,)
    assert others == [None] * 4


def test_ties_count_for_the_first_token():
    """The argmax is the first of several equal logits."""
    _, (hidden, weight, _) = head(bias=False)
    with torch.no_grad():
        weight[[20, 40]] = 10 * hidden[0]
    target = torch.tensor([20, 40] + [0] * (N - 2), device=DEVICE)
    hidden = hidden.detach()[[0, 0, *range(2, N)]]
    assert ours((hidden, weight, None), target)[4][:2].tolist() == [True, False]
    summed = Call({}, Ways("sum"))
    found = ours((hidden, weight, None), target, ("log_probs", "is_top1"), summed)
    assert found[4][:2].tolist() == [True, False]


def test_weights_of_another_dtype():
    """The weight is cast to the dtype of the hidden states, as in TRL."""
    _, (hidden, weight, bias) = head()
    target = torch.randint(0, V, (N,), device=DEVICE)
    for casts in (hidden.bfloat16(), weight, bias), (hidden, weight.bfloat16(), bias.bfloat16()):
        got = ours(casts, target)[0]
        want = ours([t.to(casts[0].dtype) for t in casts], target)[0]
        assert torch.equal(got, want)


class TestSum:
    """Log-probabilities that are used only in a sum over tokens."""

    summed = ("log_probs", "entropy", "is_top1")

    @pytest.mark.parametrize("how", [CASES["plain"], CASES["all"]], ids=["plain", "all"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_gradients(self, masked, how, impl):
        exact, tensors = head()
        target = torch.randint(0, V, (N,), device=DEVICE)
        counts = torch.rand(N, device=DEVICE) < (0.6 if masked else 2)
        call = Call({"workspace": WORKSPACE}, Ways("sum"), counts[None] if masked else None)
        got = ours(tensors, target, self.summed, call, **how)
        want = formulas(*exact, target, **how)
        keep = counts.nonzero()[:, 0]
        for mine, w in zip((got[0], got[1]), want[:2], strict=True):
            torch.testing.assert_close(mine[keep].double(), w[keep], rtol=1e-5, atol=1e-5)
        assert torch.equal(got[4][keep], want[4][keep])
        (-got[0].masked_fill(~counts, 0).sum() / 7).backward()
        (-want[0][keep].sum() / 7).backward()
        for mine, w in zip(tensors, exact, strict=True):
            torch.testing.assert_close(mine.grad.double(), w.grad, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("name", summed[:2])
    def test_other_uses_have_exact_gradients(self, name):
        exact, tensors = head()
        target, ways = torch.randint(0, V, (N,), device=DEVICE), Ways("sum")
        want = formulas(*exact, target)[self.summed.index(name)]
        gradients = torch.autograd.grad(want.square().sum(), exact)
        for _ in range(3):
            got = ours(tensors, target, self.summed, Call({}, ways))[self.summed.index(name)]
            found = torch.autograd.grad(got.square().sum(), tensors)
            for mine, w in zip(found, gradients, strict=True):
                torch.testing.assert_close(mine.double(), w, rtol=1e-4, atol=1e-5)
        assert ways.way == "statistics"

    def test_no_token_counts(self):
        _, tensors = head()
        call = Call({}, Ways("sum"), torch.zeros(1, N, dtype=torch.bool, device=DEVICE))
        logprob = ours(tensors, torch.zeros(N, dtype=torch.long, device=DEVICE), self.summed, call)[
            0
        ]
        logprob.masked_fill(~call.counts[0], 0).sum().backward()
        assert all(not t.grad.any() for t in tensors)

    def test_no_rows(self):
        _, (hidden, *others) = head()
        call = Call({}, Ways("sum"), torch.zeros(1, N, dtype=torch.bool, device=DEVICE))
        none = torch.zeros(0, dtype=torch.long, device=DEVICE)
        logprob = ours((hidden[:0], *others), none, self.summed, call)[0]
        logprob.sum().backward()
        assert all(not t.grad.any() for t in (hidden, *others))

    def test_other_results_are_per_row(self):
        """The mean logit needs `row_stats`, whose log-probabilities have gradients per row."""
        exact, tensors = head()
        target = torch.randint(0, V, (N,), device=DEVICE)
        got = ours(tensors, target, ("log_probs", "mean_logits"), Call({}, Ways("sum")))[0]
        got.square().sum().backward()
        formulas(*exact, target)[0].square().sum().backward()
        torch.testing.assert_close(tensors[0].grad.double(), exact[0].grad, rtol=1e-4, atol=1e-5)


def divergence(student, teacher, beta, temperature, of_student, of_teacher):
    """Computes the divergence from its definition, in the dtype of the tensors."""
    logs = [
        oracle.z_of(scale * nn.functional.linear(*t), temperature, cap).log_softmax(-1)
        for t, (scale, cap) in ((student, of_student), (teacher, of_teacher))
    ]
    logq, logp = logs
    q, p = logq.exp(), logp.exp()
    if beta == 0:
        value = (p * (logp - logq)).sum(-1)
    elif beta == 1:
        value = (q * (logq - logp)).sum(-1)
    else:
        logm = (beta * p + (1 - beta) * q).log()
        value = (beta * p * (logp - logm) + (1 - beta) * q * (logq - logm)).sum(-1)
    return value, -(q * logq).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("of_student", "of_teacher"),
    [((1.0, None), (1.0, None)), ((0.4, None), (2.0, 3.0)), ((-0.4, 5.0), (1.0, None))],
)
def test_divergences(beta, of_student, of_teacher):
    exact, tensors = head()
    exact_teacher, teacher = head(width=24)
    for t in (*exact_teacher, *teacher):
        t.requires_grad_(False)
    want = divergence(exact, exact_teacher, beta, 1.3, of_student, of_teacher)
    call = Call({"workspace": WORKSPACE})
    got = divergences(call, *tensors, *teacher, beta, 1.3, *of_student, *of_teacher)
    for mine, w in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), w, rtol=2e-5, atol=2e-5)
    assert [t.requires_grad for t in got] == [True, False]
    upstream = torch.randn(N, device=DEVICE)
    (upstream * got[0]).sum().backward()
    (upstream.double() * want[0]).sum().backward()
    for mine, w in zip(tensors, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), w.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("items", [None, 5.0, torch.tensor(5)])
@pytest.mark.parametrize("with_labels", [False, True])
def test_gkd_loss(with_labels, items, beta):
    student, teacher = torch.randn(2, 4, V).requires_grad_(), torch.randn(2, 4, V)
    labels = torch.randint(0, V, (2, 4)).masked_fill(torch.rand(2, 4) < 0.4, -100)
    given = labels if with_labels else None
    logs = [nn.functional.log_softmax(t.double() / 0.8, -1) for t in (student, teacher)]
    eye, none = torch.eye(V, dtype=torch.float64), (1.0, None)
    heads = [(t, eye) for t in logs]
    rows = divergence(*heads, beta, 1.0, none, none)[0]
    counted = labels != -100 if with_labels else torch.ones(2, 4, dtype=torch.bool)
    by = float(items) if items is not None else (int(counted.sum()) if with_labels else 2)
    want = (rows * counted).sum() / by
    got = gkd_loss(student, teacher, given, beta, 0.8, items)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    (found,), (exact,) = (torch.autograd.grad(t, student) for t in (got, want))
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [None, torch.bool, torch.int64])
def test_logprobs_and_entropies(kind):
    x, index = torch.randn(2, 4, V).requires_grad_(), torch.randint(0, V, (2, 4))
    keep = torch.rand(2, 4) < 0.6
    mask = None if kind is None else keep.to(kind)
    got = logprobs_and_entropies(x, index, 0.7, mask)
    logp = (x.double() / 0.7).log_softmax(-1)
    want = (logp.gather(-1, index[..., None])[..., 0], -(logp.exp() * logp).sum(-1))
    upstream = torch.randn(2, 2, 4)
    want = [t if kind is None else t * keep for t in want]
    for mine, w in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), w, rtol=1e-5, atol=1e-5)
    found, exact = (
        torch.autograd.grad(sum((g * t).sum() for g, t in zip(upstream, of, strict=True)), x)[0]
        for of in (got, want)
    )
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-6)
