"""The kernel of one pass: the mean over rows, and the copy of hidden states, in the same launch."""

import pytest
import torch

from logitless import kernels
from logitless.contract import Reading
from logitless.eager.stats_coefficients import of_one
from tests.support.laws import poisoned_memory

V = 37


def one_pass(x, target, ignore_index=-100, **how):
    """The result of the kernel, and the gradient."""
    reading = Reading(V, target, ignore_index=ignore_index, wants=("nll",))
    coefficients, into = of_one["nll", x.device, torch.float32], torch.full_like(x, torch.nan)
    with poisoned_memory():
        return kernels.one_pass(x, reading, coefficients, None, into, **how), into


def make(rows, device, ignored=()):
    x, target = torch.randn(rows, V, device=device), torch.randint(0, V, (rows,), device=device)
    target[list(ignored)] = -100
    return x, target


@pytest.mark.parametrize(
    ("rows", "ignored"),
    [(1, ()), (1, (0,)), (2, (0,)), (2, (1,)), (9, (0, 4, 8)), (1100, (0, 1024, 1099))],
)
def test_the_mean_is_the_mean_of_all_rows(rows, ignored, device):
    x, target = make(rows, device, ignored)
    mean, gradient = one_pass(x, target, mean=True)
    exact = x.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact, target, reduction="sum") / max(
        rows - len(ignored), 1
    )
    (d_exact,) = torch.autograd.grad(want, exact)
    assert mean.shape == ()
    torch.testing.assert_close(mean.double(), want.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient.double(), d_exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("label", [-1, V])
def test_a_bad_label_in_any_row_makes_the_mean_nan(label, device):
    for row in range(3):
        x, target = make(3, device, (1,))
        target[row] = label
        assert one_pass(x, target, mean=True)[0].isnan()


@pytest.mark.parametrize("width", [1, 16, 100, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mean", [True, False])
def test_hidden_states_are_copied_but_for_ignored_rows(width, dtype, mean, device):
    x, target = make(5, device, (0, 3))
    hidden = torch.randn(5, width + 3, device=device, dtype=dtype)[:, 2 : width + 2]
    hidden[3] = torch.nan
    copy = torch.full((5, width), torch.nan, device=device, dtype=dtype)
    alone, _ = one_pass(x, target, mean=mean)
    result, _ = one_pass(x, target, mean=mean, copy=(hidden, copy))
    assert torch.equal(copy, hidden.masked_fill(target.eq(-100).unsqueeze(1), 0))
    assert torch.equal(result, alone)


def test_without_ignore_index_every_row_is_copied(device):
    x, target = make(3, device)
    hidden = torch.randn(3, 8, device=device)
    copy = torch.full_like(hidden, torch.nan)
    one_pass(x, target, None, mean=True, copy=(hidden, copy))
    assert torch.equal(copy, hidden)
