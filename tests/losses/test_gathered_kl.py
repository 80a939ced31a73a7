"""gathered_kl: a student's logits at K ids against a teacher's log-probabilities."""

import pytest
import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import assert_as_good_as_torch, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sparse_teachers import DTYPES


class TestGathered:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mask", [None, "bool", "float"])
    def test_against_the_definition(self, dtype, mask, impl, device):
        g = torch.Generator().manual_seed(1)
        z = torch.randn(2, 3, 7, generator=g).to(device, dtype)
        logp = torch.log_softmax(torch.randn(2, 3, 9, generator=g), -1)[..., :7].to(device)
        keep = torch.rand(2, 3, 7, generator=g).to(device) > 0.4
        keep[0, 0] = False
        given = {None: None, "bool": keep, "float": keep.float()}[mask]
        if mask is not None:
            logp = logp.masked_fill(~keep, -torch.inf)
        for how in (
            {}, {"temperature": 3.0, "t_squared": True, "reduction": "mean"},
            {"renormalise": True}, {"renormalise": True, "temperature": 0.5},
        ):  # fmt: skip
            assert_as_good_as_torch(
                lambda z, how=how: ll.gathered_kl(z, logp, given, **how),
                lambda z, how=how: oracle.gathered_kl(z, logp, given, **how),
                z,
                computed_in=torch.float32,
                terms=lambda z, how=how: oracle.gathered_kl(z, logp, given, **how, kind="terms"),
            )

    def test_bad_input(self):
        with pytest.raises(ValueError, match="teacher_logprobs must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 4))
        with pytest.raises(ValueError, match="mask must have shape"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2).bool())
        with pytest.raises(TypeError, match="renormalise must be True or False, got 'yes'"):
            ll.gathered_kl(torch.zeros(2, 3), torch.zeros(2, 3), renormalise="yes")


def test_gathered_kl_divides_in_full_precision(impl, device):
    z = torch.randn(3, 9, device=device).bfloat16()
    logp = torch.log_softmax(torch.randn(3, 9, device=device), -1)
    got = ll.gathered_kl(z, logp, temperature=3.0)
    torch.testing.assert_close(got, ll.gathered_kl(z.float(), logp, temperature=3.0))


@pairwise(dtype=DTYPES, temperature=[1.0, 2.0], t_squared=[False, True])
def test_gathered_sums_are_the_sum_of_rows(dtype, temperature, t_squared, impl, device):
    z = torch.randn(2, 3, 9, device=device).to(dtype)
    logp = torch.log_softmax(torch.randn(2, 3, 9, device=device), -1)
    how = {"temperature": temperature, "t_squared": t_squared}
    up = torch.tensor(1.5, device=device)
    rows = value_and_grad(lambda z: ll.gathered_kl(z, logp, reduction="none", **how).sum(), z, up)
    total = value_and_grad(lambda z: ll.gathered_kl(z, logp, **how), z, up)
    mean = value_and_grad(lambda z: ll.gathered_kl(z, logp, reduction="mean", **how), z, 6 * up)
    eps = torch.finfo(dtype).eps
    for got in (total, (6 * mean[0], mean[1])):
        assert error(got[0], rows[0].double()) < 1e-6
        assert error(got[1], rows[1].double()) < 1e-6 + eps
    leaf = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ll.gathered_kl(leaf, logp), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.float().square().sum().backward()
