"""Total variation: the laws of the distance, equal probabilities, and exactness at the extremes.

tests/losses/test_dense_teacher.py compares `tvd` with its definition, as every loss against a dense
teacher.
"""

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.dense_teachers import ROWS, V, make
from tests.support.laws import value_and_grad

TVD = ("tvd", None)
INF = torch.inf


def naive(x, t, **how):
    return oracle.dense_divergence(x, t, "tvd", **how)


def relative(got, want) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def minus_log_rate(draft, target):
    """The formula of the documentation."""
    assert "-torch.log1p(-d.clamp(max=1 - 1e-6))" in ll.tvd.__doc__
    d = ll.tvd(draft, target, reduction="none")
    return -torch.log1p(-d.clamp(max=1 - 1e-6))


def test_the_acceptance_rate_of_speculative_sampling(impl, device):
    """The rate is Σ min(p, q). The gradient of -log(rate) is right, too."""
    draft, target = make(TVD, device=device)
    upstream = torch.randn(ROWS, device=device)
    got = value_and_grad(lambda x: minus_log_rate(x, target), draft, upstream)
    p = target.double().softmax(-1)
    want = value_and_grad(
        lambda x: -torch.minimum(x.softmax(-1), p).sum(-1).log(), draft.double(), upstream.double()
    )
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_disjoint_rows_are_exactly_one_apart(dtype, device):
    """A sum above 1 would make -log(1 - tvd) NaN, and a sum of 1 infinite."""
    x, t = make(TVD, rows=(4,), dtype=dtype, device=device)
    some = torch.arange(V, device=device) % 2 == 0
    x[:, some], t[:, ~some] = -INF, -INF
    value, grad = value_and_grad(lambda x: ll.tvd(x, t, reduction="none"), x)
    assert (value <= 1).all()
    assert (value > 1 - 1e-6).all()
    assert (-torch.log(1 - value) > 10).all()
    value, of_rate = value_and_grad(lambda x: minus_log_rate(x, t), x)
    assert value.isfinite().all()
    assert not of_rate.any()
    # Moving mass between classes that the teacher does not have changes nothing.
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.usefixtures("small_blocks")
def test_classes_of_equal_probability(device):
    """The derivative of |p - q| is 0 at p = q. Here p and q are exact, and each is 1/3."""
    x = torch.tensor([[0.0, 0.0, 0.0, -INF]], device=device)
    t = torch.tensor([[0.0, 0.0, -INF, 0.0]], device=device)
    value, grad = value_and_grad(lambda x: ll.tvd(x, t), x)
    torch.testing.assert_close(value, torch.tensor(1 / 3, device=device))
    want = torch.tensor([[-1 / 18, -1 / 18, 1 / 9, 0.0]], device=device)
    torch.testing.assert_close(grad, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.usefixtures("small_blocks")
def test_confident_rows_have_an_exact_gradient(side, device):
    """Σ q sign(q - p) is nearly ±1, and the gradient is the small rest.

    The gradient of the plain formula in fp32 is a thousand times less exact.
    """
    x, t = make(TVD, scale=1.0, device=device)
    x[:, 0], t[:, 0] = 17.0, 12.0 if side == "student" else 22.0
    upstream = torch.ones(ROWS, device=device)
    got = value_and_grad(lambda x: ll.tvd(x, t, reduction="none"), x, upstream)
    plain = value_and_grad(lambda x: naive(x, t, reduction="none"), x, upstream)
    exact = value_and_grad(
        lambda x: naive(x, t.double(), reduction="none"), x.double(), upstream.double()
    )
    assert exact[1].abs().max() < 1e-4
    assert relative(plain[1][:, 0], exact[1][:, 0]) > 3e-4
    torch.testing.assert_close(got[1].double(), exact[1], rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(got[0].double(), exact[0], rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("temperature", [1e-12, 0.2, 300.0])
@pytest.mark.usefixtures("small_blocks")
def test_extreme_temperatures(temperature, device):
    x, t = make(TVD, device=device)
    upstream = torch.randn(ROWS, device=device)
    how = {"temperature": temperature, "reduction": "none"}
    got = value_and_grad(lambda x: ll.tvd(x, t, **how), x, upstream)
    want = value_and_grad(lambda x: naive(x, t.double(), **how), x.double(), upstream.double())
    assert relative(got[0], want[0]) < 2e-5
    if temperature > 1e-6:
        assert relative(got[1], want[1]) < 5e-5
    else:  # both rows are one-hot, on two classes
        assert torch.equal(got[0], torch.ones_like(got[0]))
        assert torch.equal(got[1], torch.zeros_like(got[1]))


def test_a_high_temperature_keeps_its_digits(impl, device):
    """TVD is about 3e-4 here. The exponential of (logit - logsumexp) would lose a digit more."""
    x, t = make(TVD, rows=(4,), vocab=4096, device=device)
    how = {"temperature": 3000.0, "reduction": "none"}
    got, want = ll.tvd(x, t, **how), naive(x.double(), t.double(), **how)
    assert want.max() < 1e-3
    assert relative(got, want) < 3e-5
