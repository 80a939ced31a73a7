"""row_loss: what a user's formula may return, and what the user gets.

tests/differential holds values and gradients against definitions, over every source.
"""

import pytest
import torch

import logitless as ll
from tests.support.sources import SOURCES

N, D, V = 7, 5, 37


def test_rows_that_are_not_contiguous(device):
    hidden = torch.randn(2, 3, D, dtype=torch.float64, device=device)
    weight = torch.randn(V, D, dtype=torch.float64, device=device)
    ids = torch.randint(0, V, (2, 3), device=device)
    gamma = torch.full((3, 2), 2.0, dtype=torch.float64, device=device, requires_grad=True)

    def focal(stats, gamma):
        return -((1 - stats.logprob.exp()) ** gamma) * stats.logprob

    got, want = (
        torch.autograd.grad(ll.row_loss(focal, x, ids, rows=(gamma.t(),)), gamma)[0]
        for x in (ll.LinearLogits(hidden, weight, workspace=1), hidden @ weight.T)
    )
    assert want.abs().min() > 0
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("head", [False, True])
def test_an_ignored_row_gives_no_gradient_whatever_the_formula(head, impl, device):
    """Its statistics are 0, of which a formula may make inf: 0 · inf is not 0."""
    hidden = torch.randn(4, D, device=device, requires_grad=True)
    weight = torch.randn(V, D, device=device)
    ids = torch.tensor([1, -100, 0, 3], device=device)
    r = torch.ones(4, device=device, requires_grad=True)
    x = ll.LinearLogits(hidden, weight, drop_ignored=False) if head else hidden @ weight.T
    weights = torch.tensor([1.0, torch.nan, 2.0, 3.0], device=device)
    how = {"rows": (r,), "ignore_index": -100, "row_weight": weights}
    for reduction in ("none", "sum"):
        loss = ll.row_loss(lambda s, r: r / s.lse, x, ids, reduction=reduction, **how).sum()
        d_hidden, d_r = torch.autograd.grad(loss, (hidden, r), retain_graph=True)
        assert d_hidden.isfinite().all()
        assert d_r.isfinite().all()
        assert d_r[1] == 0
        assert d_r[0] != 0


def test_a_result_is_not_the_users_tensor(impl, device):
    x, r = torch.randn(4, V, device=device), torch.ones(4, device=device)
    ll.row_loss(lambda s, r: r, x, rows=(r,), reduction="none").mul_(5)
    assert torch.equal(r, torch.ones_like(r))


def test_a_look_across_rows_is_caught_on_request(impl, device, monkeypatch):
    x = torch.randn(4, V, device=device)
    across = lambda s: s.lse - s.lse.mean()  # noqa: E731
    ll.row_loss(across, x)
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    with pytest.raises(ValueError, match="formula must not mix rows"):
        ll.row_loss(across, x)
    ll.row_loss(lambda s: s.lse.square(), x)


# --- formulas that return (loss, *more)


def with_more(stats, old):
    ratio = (stats.logprob - old).exp()
    return -ratio - 0.1 * stats.entropy, ratio, ratio > 1.5, stats.argmax, stats.entropy


def more_sources(h, w):
    return {"tensor": h @ w.T} | {
        name: made(h, w) for name, made in SOURCES.items() if name != "lazy, scaled"
    }


def more_inputs(device, dtype=torch.float64):
    h = torch.randn(N, D, dtype=dtype, device=device, requires_grad=True)
    w = torch.randn(V, D, dtype=dtype, device=device, requires_grad=True)
    old = torch.randn(N, dtype=dtype, device=device, requires_grad=True)
    ids = torch.randint(0, V, (N,), device=device)
    ids[2] = -100
    return h, w, old, ids


READ = {"entropy": True, "argmax": True}


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.few(1)
def test_more_results_compiled(head, device):
    h, w, old, ids = more_inputs(device, torch.float32)

    def call(h, w, old):
        x = ll.LinearLogits(h, w) if head else h @ w.T
        return ll.row_loss(with_more, x, ids, rows=(old,), **READ)

    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(h, w, old)
    want = call(h, w, old)
    torch.testing.assert_close(list(got), list(want), rtol=1e-5, atol=1e-6)
    assert [t.requires_grad for t in got] == [True] + [False] * 4
    found, d_want = (torch.autograd.grad(out[0], (h, w, old)) for out in (got, want))
    torch.testing.assert_close(found, d_want, rtol=1e-5, atol=1e-6)


def test_more_results_are_not_the_users_tensors(impl, device):
    x, r = torch.randn(4, V, device=device), torch.ones(4, device=device)
    for logits in (x, ll.LinearLogits(torch.eye(4, device=device), x.T.contiguous())):
        _, same, again = ll.row_loss(lambda s, r: (s.lse, r, r), logits, rows=(r,))
        same.mul_(5)
        assert torch.equal(r, torch.ones_like(r))
        assert torch.equal(again, r)


def test_more_results_without_a_gradient(device):
    h, w, old, ids = more_inputs(device)
    with torch.no_grad(), ll.lazy_logits():
        for x in more_sources(h, w).values():
            found = ll.row_loss(with_more, x, ids, rows=(old,), **READ)
            assert len(found) == 5
            assert not any(t.requires_grad for t in found)


WRONG = [
    (lambda s: s.lse.mean(), r"one number per row, shape \(4,\), got \(\)"),
    (lambda s: 3.0, "must return a Tensor, got float"),
    (lambda s: [s.lse, s.lse], "must return a Tensor, got list"),
    (lambda s: (s.lse,), r"\(loss, \*more\) of at least two .* got a tuple of 1"),
    (lambda s: (s.lse, s.lse.sum()), r"result 1 of the tuple, shape \(4,\), got \("),
    (lambda s: (s.lse, s.lse[:2]), r"one number per row .* got \(2,\)"),
    (lambda s: (s.lse, s.lse[:, None]), r"one number per row .* got \(4, 1\)"),
    (lambda s: (s.lse, 1.0), "a Tensor as result 1 of the tuple, got float"),
    (lambda s: (s.lse, s.entropy), r"result 1 .* \(pass entropy=True to row_loss\)"),
    (lambda s: (s.lse, s.lse * 1j), "real numbers as result 1 of the tuple"),
]


def test_wrong_results_are_refused(impl, device):
    h, w = torch.randn(4, D, device=device, requires_grad=True), torch.randn(V, D, device=device)
    for x in (h @ w.T, ll.LinearLogits(h, w)):
        for formula, rule in WRONG:
            with pytest.raises((TypeError, ValueError), match=rule):
                ll.row_loss(formula, x)


def test_a_gradient_flows_through_the_loss_alone(device):
    """A metric in the place of the loss is refused, and a metric has no backward."""
    h, w, old, ids = more_inputs(device)
    for x in more_sources(h, w).values():
        with pytest.raises(RuntimeError, match=r"return \(loss, \*metrics\)"):
            ll.row_loss(lambda s: (s.logprob.detach(), -s.logprob), x, ids)
    for x in more_sources(h, w).values():
        _, ratio, *_ = ll.row_loss(with_more, x, ids, rows=(old,), **READ)
        with pytest.raises(RuntimeError, match="does not require grad"):
            ratio.sum().backward()


def test_more_that_mixes_rows_is_caught_on_request(device, monkeypatch):
    x = torch.randn(4, V, device=device)
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    ll.row_loss(lambda s: (s.lse, s.lse > 1), x)
    with pytest.raises(ValueError, match="formula must not mix rows"):
        ll.row_loss(lambda s: (s.lse, s.lse - s.lse.mean()), x)
