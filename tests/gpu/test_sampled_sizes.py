"""Draws at the vocabularies people train with, against an inversion in fp64."""

import pytest
import torch

import logitless as ll
from logitless.core.capture import Sampled, uniforms_of
from logitless.core.choose_backend import captured
from tests.support.sizes import sized


def draws_of(x, n, **how):
    """The captured weights (rows, V), and the weights of an inversion in fp64."""
    seed = torch.Generator(x.device).manual_seed(1)
    numbers = uniforms_of(x, n, seed)
    found = ll.capture_sampled(x, n, generator=seed.manual_seed(1), **how)
    ends = torch.softmax(x.double(), -1).cumsum(-1)
    drawn = torch.searchsorted(ends, numbers, right=True)
    drawn = drawn.clamp_max(x.shape[1] - 1)
    want = torch.zeros_like(ends).scatter_add_(1, drawn, torch.full_like(numbers, 1 / n))
    weights = torch.where(found.mask, found.logprobs.double().exp(), 0.0)
    return torch.zeros_like(ends).scatter_add_(1, found.ids, weights), want


@pytest.mark.parametrize("V", sized([128256, 151936, 50257], [150]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", sized([3, 300], [2]))
def test_against_an_inversion_in_fp64(V, dtype, rows, device):
    """A draw may differ only within rounding of a boundary: at most 1 of 200, at the largest V."""
    n = sized(50, 5)
    x = torch.randn(rows, V, device=device).mul_(3).to(dtype)
    got, want = draws_of(x, n)
    differ = (got - want).abs().sum().item() * n / 2
    assert differ <= 1 + rows * n / 200
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[:, 0]), rtol=1e-6, atol=0)


def test_more_than_31_bits(device):
    """Rows beyond 2^31 elements are found; the same row in another place draws the same ids."""
    rows, V = sized((20_000, 128256), (6, 700))
    x = torch.zeros(rows, V, device=device, dtype=torch.bfloat16)
    row = torch.randn(V, device=device).mul_(3).bfloat16()
    x[0] = x[-1] = row
    numbers = torch.rand(1, 8, device=device, dtype=torch.float64).sort(-1).values
    ids, logprobs, mask = captured(x, Sampled(numbers.repeat(rows, 1), 1.0), 1.0, None)
    for t in (ids, logprobs, mask):
        assert torch.equal(t[0], t[-1])
    alone = captured(row[None], Sampled(numbers, 1.0), 1.0, None)
    assert torch.equal(alone[0][0], ids[-1])


def test_a_head_draws_as_its_logits(device):
    rows, width, V = sized((512, 1024, 128256), (9, 16, 150))
    hidden = torch.randn(rows, width, device=device).bfloat16()
    weight = (torch.randn(V, width, device=device) * (3 / width**0.5)).bfloat16()
    n = sized(50, 5)
    head = ll.LinearLogits(hidden, weight, workspace=sized(1 << 26, 2000))
    with ll.invariant():  # the GEMM of a chunk rounds as the GEMM of all rows
        found = ll.capture_sampled(head, n, generator=torch.Generator(device).manual_seed(1))
        whole = ll.LinearLogits(hidden, weight)
        want = ll.capture_sampled(whole, n, generator=torch.Generator(device).manual_seed(1))
    assert torch.equal(found.ids, want.ids)
    assert torch.equal(found.logprobs, want.logprobs)
