"""Tensors, options and modes of a LinearLogits; test_run.py has the laws of all losses."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support import calls
from tests.support.calls import TARGET, TEACHER
from tests.support.heads import (  # noqa: F401 - both_ways is a fixture
    LOSSES,
    D,
    N,
    V,
    assert_same,
    both_ways,
    leaves,
    make,
    result,
    rows,
)
from tests.support.refusals import refuses
from tests.support.sizes import DEVICE


def test_weights_of_any_strides(device):
    hidden, weight, bias, target = make(device=device)
    for view in (weight.t().contiguous().t(), weight[:1].expand(V, D)):
        want = result(LOSSES["cross_entropy"], leaves(hidden, view.contiguous(), bias), target)
        parts = leaves(hidden, view.contiguous(), bias)
        base = view.detach().requires_grad_()
        loss = ll.cross_entropy(
            ll.LinearLogits(parts[0], base, parts[2], workspace=3 * V * 8), target
        )
        torch.testing.assert_close(loss.detach(), want[0])


def test_without_gradients_none_is_made(device):
    hidden, weight, bias, target = make(device=device)
    source = ll.LinearLogits(hidden, weight, bias)
    assert not ll.cross_entropy(source, target).requires_grad
    with torch.no_grad():
        parts = leaves(hidden, weight, bias)
        assert not ll.cross_entropy(ll.LinearLogits(*parts), target).requires_grad
    assert source.shape == (N, V)
    assert source.dtype == torch.float64
    assert source.dim() == 2
    assert repr(source).startswith("LinearLogits(shape=(7, 23)")
    torch.testing.assert_close(source.materialize(), F.linear(hidden, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.zeros(5, 4)},
            r"weight must have shape \(V, 6\) to match hidden",
        ),
        ({"weight": torch.zeros(V, D).half()}, "weight must be torch.float32 like hidden"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \(23,\) to match weight"),
        ({"bias": torch.zeros(V).long()}, "bias must hold floating-point numbers, got"),
        ({"hidden": [1.0]}, "hidden must be a Tensor"),
        ({"workspace": 0}, "workspace must be positive, got 0"),
        ({"workspace": 1.5}, "workspace must be an int, in bytes, got 1.5"),
        ({"accumulate": "bf16"}, "accumulate must be one of"),
    ],
)
def test_bad_heads(change, message):
    good = {"hidden": torch.zeros(N, D), "weight": torch.zeros(V, D)}
    with pytest.raises((TypeError, ValueError), match=message):
        ll.LinearLogits(**{**good, **change})


def test_an_undefined_upstream_gradient_is_none(device):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_x):
            return None

    h, w = torch.randn(4, 5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    target = torch.tensor([1, 2, 0, 3], device=device)
    loss = ll.cross_entropy(ll.LinearLogits(h, w), target, reduction="none")
    Nothing.apply(loss).sum().backward()
    assert h.grad is None or not h.grad.any()


def test_one_row_alone_over_a_head():
    """A hidden state of one dimension: TypeError from reshape."""
    hidden, weight, bias = calls.leaves("head")
    row = hidden[0].requires_grad_()
    head, logits = ll.LinearLogits(row, weight, bias), F.linear(row, weight, bias)
    label = torch.tensor(3, device=DEVICE)
    want = F.cross_entropy(logits, label)
    for reduction in ("none", "sum"):
        got = ll.cross_entropy(head, label, reduction=reduction)
        torch.testing.assert_close(got, want)
        d = (torch.autograd.grad(t, row, retain_graph=True)[0] for t in (got, want))
        torch.testing.assert_close(*d)
    torch.testing.assert_close(ll.row_stats(head).lse, logits.logsumexp(-1))
    torch.testing.assert_close(
        ll.kl_div(head, TEACHER[0], direction="forward"),
        ll.kl_div(logits, TEACHER[0], direction="forward"),
    )
    assert torch.equal(ll.capture_topk(head, 3).ids, ll.capture_topk(logits, 3).ids)


def test_autocast_leaves_fp64_as_linear_does():
    """Autocast made bf16 of an fp64 head."""
    parts = calls.leaves("head", torch.float64)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert F.linear(*parts).dtype == ll.LinearLogits(*parts).dtype == torch.float64
        assert ll.LinearLogits(*(t.float() for t in parts)).dtype == torch.bfloat16
        got = ll.cross_entropy(ll.LinearLogits(*parts), TARGET)
        with pytest.raises(TypeError, match="weight must be"):  # as F.linear refuses the two
            ll.LinearLogits(parts[0], parts[1].float())
    assert torch.equal(got, ll.cross_entropy(ll.LinearLogits(*parts), TARGET))


def test_a_weight_that_changed_its_size_is_refused():
    """The vocabulary was resized while a LinearLogits was kept."""
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(20, 3, requires_grad=True)
    z, other = ll.LinearLogits(hidden, weight), torch.randn(4, 20)
    shard, target = ll.VocabShard(z), torch.full((4,), 19)
    ll.cross_entropy(z, target).backward()
    weight.data = torch.randn(15, 3)
    words = (
        "weight must keep the shape (20, 3) that it had when the LinearLogits was made,"
        " got (15, 3); make a new LinearLogits."
    )
    for call in (
        lambda: ll.cross_entropy(z, target), lambda: ll.cross_entropy(shard, target),
        lambda: ll.score(z, target), lambda: ll.capture_topk(z, 3), lambda: z.materialize(),
        lambda: torch.nn.functional.cross_entropy(z, target), lambda: z[0],
        lambda: ll.kl_div(other, z, direction="forward"), lambda: ll.capture_topk(shard, 3),
        lambda: ll.kl_div(ll.LinearLogits(hidden, torch.randn(20, 3)), z, direction="forward"),
        lambda: ll.row_loss(lambda stats: stats.lse, z),
    ):  # fmt: skip
        with refuses(ValueError, words):
            call()
