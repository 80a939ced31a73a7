"""The sigmoid loss against materialised logits: every option, both backends, all gradients."""

import pytest
import torch

import logitless as ll
from logitless.core.choose_backend import backend_of
from logitless.eager.contrastive import Block
from logitless.kernels import config
from tests.support.contrastive import assert_right, embeddings, gradients

N, M = 37, 45
BOTH = ("scale", "bias")


def numbers(device, dtype=torch.float32, scale=4.0, bias=-2.0):
    return {
        "scale": torch.tensor(scale, device=device, dtype=dtype),
        "bias": torch.tensor([bias], device=device, dtype=dtype),
    }


@pytest.fixture
def small_tiles():
    with config.override(block_v=32, block_n=8, span=16, num_warps=4):
        yield


@pytest.mark.usefixtures("impl")
def test_no_rows(device):
    a, b = embeddings(0, 0, torch.float32, device)
    found = gradients(ll.sigmoid_contrastive, a, b, torch.ones((), device=device), BOTH,
                      **numbers(device))  # fmt: skip
    assert not any(t.any() for t in found)
    assert found[1].shape == a.shape


def test_tiny_losses_are_exact(impl, device):
    """At the start of SigLIP, the loss of a negative is 5e-5, and 1 + 5e-5 has few digits."""
    x, bias = torch.zeros(16, 16, device=device), torch.tensor(-10.0, device=device)
    backend = backend_of(x)
    loss, sums = backend.sigmoid_contrastive(x, Block(torch.ones_like(bias)), bias, True)
    t = torch.tensor(-10.0, dtype=torch.float64)
    exact = 16 * torch.nn.functional.softplus(t)
    torch.testing.assert_close(loss.double().cpu(), exact.expand(16), rtol=5e-7, atol=0)
    torch.testing.assert_close(sums[1].double().cpu(), 256 * t.sigmoid(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("size", [-200.0, 200.0])
@pytest.mark.usefixtures("impl")
def test_large_logits(size, device):
    a, b = embeddings(N, N, torch.float32, device)
    assert_right("sigmoid_contrastive", a, b, numbers=BOTH, **numbers(device, scale=size))


@pytest.mark.usefixtures("impl", "small_tiles")
def test_nan_stays_in_its_row(device):
    a, b = embeddings(N, N, torch.float32, device)
    a[5] = torch.nan
    loss = ll.sigmoid_contrastive(a, b, reduction="none")
    assert loss.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.usefixtures("impl", "nobody_looks")
def test_positives_out_of_range(device):
    a, b = embeddings(3, 6, torch.float32, device)
    loss = ll.sigmoid_contrastive(
        a, b, positives=torch.tensor([0, 6, -1], device=device), reduction="none"
    )
    assert loss.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("impl", "nobody_looks")
def test_gradients_of_positives_out_of_range(reduction, device):
    """The row's gradient is NaN, like its loss. The gradients of b and scale contain every row."""
    a, b = embeddings(3, 6, torch.float32, device)
    how = {**numbers(device), "positives": torch.tensor([0, 6, 2], device=device)}
    upstream = torch.ones(3 if reduction == "none" else (), device=device)
    _, d_a, d_b, d_scale, d_bias = gradients(
        ll.sigmoid_contrastive, a, b, upstream, BOTH, reduction=reduction, **how
    )
    assert d_a.isnan().all(1).tolist() == [False, True, False]
    assert d_b.isnan().all()
    assert d_scale.isnan()
    assert d_bias.isnan()


def test_a_logit_of_minus_infinity_has_no_loss(impl, device):
    a = torch.tensor([[200.0, 0.0], [0.0, 1.0]], dtype=torch.float16, device=device)
    b = torch.tensor([[1.0, 0.0], [-400.0, 1.0]], dtype=torch.float16, device=device)
    loss = ll.sigmoid_contrastive(a, b, reduction="none")
    assert loss.isfinite().all()
    assert loss[0] == 0
