"""The skewed KL: its identities and bounds.

tests/losses/test_dense_teacher.py compares kl_div(skew=...) with its definition, as every loss
against a dense teacher, and tests/parallel/test_shard.py splits it over ranks.
"""

import math

import pytest
import torch

import logitless as ll
from tests.support.dense_teachers import ROWS, make
from tests.support.laws import error, value_and_grad

SKEWED = ("skewed_forward", 0.1)
both_directions = pytest.mark.parametrize("direction", ["forward", "reverse"])


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_jsd_is_the_sum_of_two_skewed_divergences(beta, impl, device):
    """JSD = β KL(p || βp + (1-β)q) + (1-β) KL(q || (1-β)q + βp), in values and gradients."""
    x, t = make(SKEWED, device=device)
    upstream = torch.randn(ROWS, device=device)

    def parts(x):
        of_p = ll.kl_div(x, t, direction="forward", skew=beta, reduction="none")
        of_q = ll.kl_div(x, t, direction="reverse", skew=1 - beta, reduction="none")
        return beta * of_p + (1 - beta) * of_q

    got = value_and_grad(parts, x, upstream)
    want = value_and_grad(lambda x: ll.jsd(x, t, beta=beta, reduction="none"), x, upstream)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 4e-6


@both_directions
@pytest.mark.parametrize("skew", [1e-6, 1e-3, 0.5, 0.999])
def test_disjoint_rows_reach_the_bound(direction, skew, impl, device):
    """Nothing in common: the divergence is -log α, the gradient is finite."""
    x = torch.tensor([[4.0, 1.0, -torch.inf, -torch.inf]], device=device)
    t = torch.tensor([[-torch.inf, -torch.inf, 2.0, 0.0]], device=device)
    value, grad = value_and_grad(lambda x: ll.kl_div(x, t, direction=direction, skew=skew), x)
    assert value.item() == pytest.approx(-math.log(skew), rel=3e-6, abs=1e-7)
    assert grad.isfinite().all()
