"""cross_entropy_and_scores: the loss of cross_entropy and the scores of score, from one pass.

Values and gradients against fp64, over every source and rank: tests/differential, tests/parallel.
"""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.core import evaluate
from logitless.heads import choose_cut
from logitless.heads import gemms as head_gemms
from tests.support import sources
from tests.support.laws import ROUNDING, error, gradients
from tests.support.sources import fused

N, D, V = 6, 5, 37
READ = ("temperature", "softcap", "ignore_index", "mask", "rank")


SOURCES = {"tensor": lambda h, w: h @ w.T, **sources.SOURCES}
OPTIONS = {
    "mean": lambda t: {},
    "sum": lambda t: {
        "reduction": "sum",
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 4.0,
        "rank": True,
    },
    "weights": lambda t: {
        "weight": torch.linspace(0.1, 2, V, device=t.device),
        "row_weight": torch.linspace(-1, 2, N, device=t.device, requires_grad=True),
    },
    "none": lambda t: {
        "reduction": "none",
        "temperature": torch.linspace(0.5, 2, N, device=t.device),
        "row_weight": torch.linspace(-1, 2, N, device=t.device),
    },
    "mask": lambda t: {"mask": torch.arange(N, device=t.device) > 2, "ignore_index": 5},
}


def make(device, dtype=torch.float32):
    h = torch.randn(N, D, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(V, D, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(0, V, (N,), device=device)
    target[1] = -100
    return h, w, target


def assert_same_scores(got: ll.Scores, want: ll.Scores):
    """Bit for bit, and without a gradient."""
    for name in ll.Scores._fields:
        a, b = getattr(got, name), getattr(want, name)
        if name == "rank" and a is None:
            assert b is None
            continue
        assert not a.requires_grad
        assert a.dtype == b.dtype
        assert torch.equal(a, b.detach()), name


CASES = [(source, options, "eager") for source in SOURCES for options in OPTIONS]
CASES += [("tensor", options, "triton") for options in OPTIONS]
CASES += [  # the interpreter takes its time
    ("head in chunks", "sum", "triton"),
    ("shard", "none", "triton"),
    ("lazy, scaled", "weights", "triton"),
]


@pytest.mark.parametrize(("source", "options", "by"), CASES)
def test_as_both_functions(source, options, by, device):
    with ll.impl(by):
        assert_as_both(source, options, device)


def assert_as_both(source, options, device):
    h, w, target = make(device)
    how = OPTIONS[options](target)
    if "ignore_index" in how:
        target = target.clamp(min=0)
    loss, scores = ll.cross_entropy_and_scores(SOURCES[source](h, w), target, **how)
    read = {name: value for name, value in how.items() if name in READ}
    how.pop("rank", None)
    want = ll.cross_entropy(SOURCES[source](h, w), target, **how)
    assert isinstance(scores, ll.Scores)
    assert_same_scores(scores, ll.score(SOURCES[source](h, w), target, **read))
    assert loss.dtype == want.dtype
    assert loss.shape == want.shape
    assert error(loss.detach(), want.detach()) < ROUNDING
    leaves = [h, w, *(t for t in how.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    for a, b in zip(gradients(loss, leaves), gradients(want, leaves), strict=True):
        assert error(a, b) < ROUNDING


def test_the_loss_is_that_of_the_scores(impl, device):
    """Both come from the same statistics, so that they have the same bits."""
    h, w, target = make(device)
    for source in ("tensor", "head", "head in chunks", "lazy"):
        x = SOURCES[source](h, w)
        loss, scores = ll.cross_entropy_and_scores(x, target, reduction="none")
        assert torch.equal(loss, -scores.logprob)


def recorded(monkeypatch, *functions):
    """Returns a list that gets one entry per call of these functions."""
    seen = []

    def count(module, name):
        function = getattr(module, name)

        def record(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, record)

    for module, name in functions:
        count(module, name)
    return seen


@pytest.fixture
def gemms(monkeypatch):
    """A list with one entry per GEMM of a head."""
    return recorded(monkeypatch, (torch, "mm"), (torch, "addmm"), (head_gemms, "dense_logits"))


@pytest.mark.parametrize("source", ["head", "shard of a head", "lazy"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_mean_over_a_head_takes_three_gemms(source, reduction, gemms, device):
    """Results per row take four, because backward computes the logits again."""
    h, w, target = make(device)
    how = {"reduction": reduction, "rank": True}
    loss, _ = ll.cross_entropy_and_scores(SOURCES[source](h, w), target, **how)
    loss.sum().backward()
    assert len(gemms) == (4 if reduction == "none" else 3)
    gemms.clear()
    with torch.no_grad(), ll.lazy_logits():
        ll.cross_entropy_and_scores(SOURCES[source](h, w), target, **how)
    assert len(gemms) == 1


def test_a_small_head_has_three_gemms(device, monkeypatch):
    gemms = recorded(monkeypatch, (torch, "mm"), (torch, "addmm"), (F, "linear"))
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 1 << 20))
    h, w, target = make(device)
    for reduction in ("mean", "none"):
        gemms.clear()
        loss, scores = ll.cross_entropy_and_scores(
            ll.LinearLogits(h, w), target, reduction=reduction
        )
        want, want_scores = ll.cross_entropy_and_scores(h @ w.T, target, reduction=reduction)
        torch.testing.assert_close(loss, want)
        assert_same_scores(scores, want_scores)
        loss.sum().backward()
        assert len(gemms) == 3


def test_the_gradient_in_forward(device, monkeypatch, impl):
    """The route of few logits on a GPU, on any device."""
    monkeypatch.setattr(evaluate, "on_gpu", lambda x: True)
    h, w, target = make(device)
    loss, scores = ll.cross_entropy_and_scores(h @ w.T, target)
    assert "GradientInForward" in loss.grad_fn.name()
    assert_same_scores(scores, ll.score(h @ w.T, target))
    for a, b in zip(
        gradients(loss, (h, w)), gradients(ll.cross_entropy(h @ w.T, target), (h, w)), strict=True
    ):
        assert error(a, b) < ROUNDING


@pytest.mark.parametrize("view", [False, True], ids=["logits", "slice"])
def test_in_place(view, impl, device):
    """The scores are those of the logits before the gradient overwrites them."""
    h, w, target = make(device)

    def logits():
        z = h @ w.T
        return torch.cat((z, z))[:N] if view else z

    want = ll.cross_entropy(h @ w.T, target, label_smoothing=0.1)
    x = logits()
    address = x.data_ptr()
    before = x.detach().clone()
    loss, scores = ll.cross_entropy_and_scores(x, target, label_smoothing=0.1, inplace=True)
    assert_same_scores(scores, ll.score(before, target))
    assert x.data_ptr() == address
    assert not torch.equal(x.detach(), before)
    assert error(loss.detach(), want.detach()) < ROUNDING
    for a, b in zip(gradients(loss, (h, w)), gradients(want, (h, w)), strict=True):
        assert error(a, b) < ROUNDING


def test_autocast(device):
    h, w, target = make(device)
    with torch.autocast(device, torch.bfloat16):
        loss, scores = ll.cross_entropy_and_scores(ll.LinearLogits(h, w), target)
        want = ll.cross_entropy(ll.LinearLogits(h, w), target)
        want_scores = ll.score(ll.LinearLogits(h, w), target)
    assert loss.dtype == torch.float32
    assert_same_scores(scores, want_scores)
    assert error(loss.detach(), want.detach()) < ROUNDING
    for a, b in zip(gradients(loss, (h, w)), gradients(want, (h, w)), strict=True):
        assert error(a, b) < 2**-8  # roundings of the gradient of logits to bf16


def test_a_gradient_of_scores_is_refused_by_pytorch(device):
    h, w, target = make(device)
    for source in ("tensor", "head", "lazy"):
        _, scores = ll.cross_entropy_and_scores(SOURCES[source](h, w), target)
        with pytest.raises(RuntimeError, match="does not require grad"):
            scores.entropy.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scores_may_be_changed_in_place(reduction, device):
    """Also by tensors that require a gradient; over a head, scores were views."""
    h, w, target = make(device)
    for source in SOURCES.values():
        loss, scores = ll.cross_entropy_and_scores(source(h, w), target, reduction=reduction)
        scores.logprob.mul_(2)
        scores.entropy.add_(h.sum())
        d_h, d_w = gradients(loss + scores.entropy.sum(), (h, w))
        assert d_h.isfinite().all()
        assert d_w.isfinite().all()


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_the_gradient_of_lazy_logits_can_be_read(device):
    """By a hook, which gets that of plain logits."""
    h, w, target = make(device, torch.float64)
    for reduction in ("mean", "none"):
        seen = []
        z = fused(h, w)
        z.register_hook(lambda g, seen=seen: seen.append(g + 0.0))
        loss, _ = ll.cross_entropy_and_scores(z, target, reduction=reduction)
        gradients(loss, (h,))
        x = (h @ w.T).detach().requires_grad_()
        (want,) = gradients(ll.cross_entropy(x, target, reduction=reduction), (x,))
        torch.testing.assert_close(seen[0], want)


def test_a_lazy_loss_of_a_double_head_cast_to_float(device):
    h, w, target = make(device, torch.float64)
    loss, scores = ll.cross_entropy_and_scores(fused(h, w).float(), target)
    assert loss.dtype == torch.float32
    assert [t.dtype for t in scores[:4]] == [torch.float32] * 3 + [torch.int64]
