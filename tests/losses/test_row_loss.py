"""row_loss: a user's own loss, over tensors and heads, held against autograd over the logits."""

import pytest
import torch

import logitless as ll
from tests.support.pairwise import pairwise
from tests.support.sources import SOURCES

N, D, V = 7, 5, 37


def grpo(stats, old, advantage):
    ratio = (stats.logprob - old).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def focal(stats, gamma):
    return -((1 - stats.logprob.exp()) ** gamma) * stats.logprob


def unlikelihood(stats, weight):
    return -(torch.log1p(-stats.logprob.exp()) * weight).sum(-1)  # of K ids a row


def reinforce(stats, reward):
    return -(stats.logprob * reward + 0.01 * stats.entropy)


def z_loss(stats, scale):
    return scale * stats.lse.square() + 0 * stats.total


LOSSES = {  # formula, ids a row (0: one), numbers beside a row, what is read
    "grpo": (grpo, 0, ((), ()), {}),
    "focal": (focal, 0, ((),), {}),
    "unlikelihood": (unlikelihood, 3, ((3,),), {}),
    "reinforce": (reinforce, 0, ((),), {"entropy": True}),
    "z-loss": (z_loss, None, ((),), {"total": True}),
}


def inputs(name, device, dtype=torch.float64, lead=(N,)):
    formula, K, beside, how = LOSSES[name]
    parts = [torch.randn(*s, dtype=dtype, device=device) for s in ((*lead, D), (V, D), (V,))]
    rows = [torch.rand(*lead, *s, dtype=dtype, device=device) + 0.5 for s in beside]
    ids = None
    if K is not None:
        ids = torch.randint(0, V, (*lead, *([K] if K else [])), device=device)
    return (
        formula,
        [t.requires_grad_() for t in parts],
        [t.requires_grad_() for t in rows],
        ids,
        how,
    )


def by_autograd(formula, logits, ids, rows, ignored, reduction):
    """The same loss in plain PyTorch, over the rows that count."""
    V = logits.shape[-1]
    keep = ~ignored.reshape(-1)
    x = logits.reshape(-1, V)[keep]
    logp = torch.log_softmax(x, -1)
    at = None if ids is None else ids.reshape(len(keep), -1)[keep]
    several = ids is not None and ids.dim() == logits.dim()
    picked = logprob = None
    if at is not None:
        picked, logprob = x.gather(1, at), logp.gather(1, at)
        if not several:
            picked, logprob = picked[:, 0], logprob[:, 0]
    stats = ll.RowStats(
        torch.logsumexp(x, -1), picked, -(logp.exp() * logp).sum(-1), x.sum(-1), None, logprob
    )
    lead = logits.shape[:-1]
    beside = [t.reshape(len(keep), *t.shape[len(lead) :])[keep] for t in rows]
    value = formula(stats, *beside)
    return value.mean() if reduction == "mean" else value.sum()


@pairwise(
    name=[*LOSSES], reduction=["mean", "sum", "none"], ignore=[False, True], lead=[(N,), (2, 3)]
)
def test_as_autograd_over_the_logits(name, reduction, ignore, lead, device):
    """In fp64, to 1e-9: the loss, and gradients of hidden, weight, bias and rows."""
    formula, parts, rows, ids, how = inputs(name, device, lead=lead)
    ignored = torch.zeros(lead, dtype=torch.bool, device=device)
    if ignore and ids is not None:
        ignored.view(-1)[1::3] = True
        ids[ignored] = -100
        how = {**how, "ignore_index": -100}
    upstream = torch.rand(lead, dtype=torch.float64, device=device)
    leaves = [*parts, *rows]

    def total(logits):
        loss = ll.row_loss(formula, logits, ids, rows=rows, reduction=reduction, **how)
        return (loss * upstream).sum() if reduction == "none" else loss

    hidden, weight, bias = parts
    dense = hidden @ weight.T + bias
    if reduction == "none":  # each row's number times its upstream gradient
        wanted = lambda s, *r: formula(s, *r[:-1]) * r[-1]  # noqa: E731
        want = by_autograd(wanted, dense, ids, [*rows, upstream], ignored, "sum")
    else:
        want = by_autograd(formula, dense, ids, rows, ignored, reduction)
    want_grads = torch.autograd.grad(want, leaves, retain_graph=True)
    for source in (
        dense,
        ll.LinearLogits(hidden, weight, bias, workspace=2 * 40 * 8),
        ll.LinearLogits(hidden, weight, bias, drop_ignored=False),
    ):
        got = total(source)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        grads = torch.autograd.grad(got, leaves, retain_graph=True)
        torch.testing.assert_close(grads, want_grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_kernels_are_as_eager(name, device):
    results = []
    formula, parts, rows, ids, how = inputs(name, device, torch.float32)
    for impl in ("eager", "triton"):
        with ll.impl(impl):
            loss = ll.row_loss(formula, ll.LinearLogits(*parts), ids, rows=rows, **how)
            results.append((loss, *torch.autograd.grad(loss, [*parts, *rows])))
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)


def test_rows_that_are_not_contiguous(device):
    formula, parts, _, ids, _ = inputs("focal", device, lead=(2, 3))
    gamma = torch.full((3, 2), 2.0, dtype=torch.float64, device=device, requires_grad=True)
    got, want = (
        torch.autograd.grad(ll.row_loss(formula, x, ids, rows=(gamma.t(),)), gamma)[0]
        for x in (ll.LinearLogits(*parts, workspace=1), parts[0] @ parts[1].T + parts[2])
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_more_results(reduction, device):
    """The loss is as without more. The others are as from row_stats, without weight or gradient."""
    h, w, old, ids = more_inputs(device)
    weight = torch.linspace(-1, 2, N, dtype=torch.float64, device=device)
    upstream = torch.randn(N if reduction == "none" else (), dtype=torch.float64, device=device)
    how = {"rows": (old,), "reduction": reduction, "row_weight": weight, **READ}
    stats = ll.row_stats((h @ w.T).detach(), ids, **READ)
    ratio = torch.where(ids < 0, 0.0, (stats.logprob - old.detach()).exp())
    want = ll.row_loss(lambda *args: with_more(*args)[0], h @ w.T, ids, **how)
    d_want = torch.autograd.grad(want, (h, w, old), upstream)
    for name, x in more_sources(h, w).items():
        loss, *more = ll.row_loss(with_more, x, ids, **how)
        torch.testing.assert_close(loss, want, msg=name)
        found = torch.autograd.grad(loss, (h, w, old), upstream)
        torch.testing.assert_close(found, d_want, msg=name)
        torch.testing.assert_close(more, [ratio, ratio > 1.5, stats.argmax, stats.entropy])
        assert not any(t.requires_grad for t in more)
        assert more[2][2] == -1


@pytest.mark.parametrize("head", [False, True])
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
