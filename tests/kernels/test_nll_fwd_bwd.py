"""The one-pass kernel computes the mean, and for a small head copies the hidden states."""

import pytest
import torch

from logitless import kernels
from logitless.contract import Reading, Total
from logitless.eager.stats_coefficients import of_one
from logitless.kernels import config
from tests.support.laws import poisoned_memory
from tests.support.sizes import sized

V = 37


MEAN = Total(True)
TOTALS = [MEAN, Total(False), Total(True, 0.1), Total(False, 0.0, 0.01), Total(True, 0.2, 0.1)]


def one_pass(x, target, **how):
    """The result of the kernel, and the gradient."""
    reading = Reading(x.shape[1], target, ignore_index=-100, wants=("nll",))
    coefficients, into = of_one["nll", x.device, torch.float32], torch.full_like(x, torch.nan)
    with poisoned_memory():
        return kernels.one_pass(x, reading, coefficients, None, into, **how), into


def total_of_head(x, target, hidden, *, total=MEAN, copies=True, ignore_index=-100):
    """The number, the hidden states or their copy, and the gradient of the kernel."""
    reading = Reading(x.shape[1], target, ignore_index=ignore_index, wants=("nll",))
    coefficients, into = of_one["nll", x.device, torch.float32], x.clone()
    stride = into.stride(0)
    launch = kernels.plan_total(total, len(x), stride, reading, coefficients, hidden, copies)
    with poisoned_memory():
        (value,), gradient, counted = launch(into, hidden, target)
    return value, counted, gradient


def make(rows, device, ignored=(), vocab=V):
    x, target = torch.randn(rows, vocab), torch.randint(0, vocab, (rows,))
    target[list(ignored)] = -100
    return x.to(device), target.to(device)


def assert_right(x, target, total, value, gradient):
    exact, live = x.double().requires_grad_(), target != -100
    want = torch.nn.functional.cross_entropy(
        exact, target, reduction="sum", label_smoothing=total.label_smoothing
    )
    want = want + total.z_loss * exact.logsumexp(-1).square()[live].sum()
    if total.mean:
        want = want / live.sum().clamp(min=1)
    (d_exact,) = torch.autograd.grad(want, exact)
    assert value.shape == ()
    torch.testing.assert_close(value.double(), want.detach(), rtol=1e-6, atol=1e-7)
    rtol = 1e-5 if x.dtype == torch.float32 else 2**-7  # Triton's interpreter truncates to bf16
    torch.testing.assert_close(gradient.double(), d_exact, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("total", TOTALS, ids=str)
@pytest.mark.parametrize(
    ("rows", "ignored"),
    [
        (1, ()),
        (1, (0,)),
        (2, (0,)),
        (2, (1,)),
        (9, (0, 4, 8)),
        (1030, (*range(1, 1023), *range(1026, 1029))),
    ],
)
def test_a_total_is_that_of_all_rows(rows, ignored, total, device):
    x, target = make(rows, device, ignored)
    assert_right(x, target, total, *one_pass(x, target, total=total))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_a_smoothed_loss_is_exact_under_any_offset(offset, device):
    x, target = make(5, device, (0,))
    x = (x * 64).round() / 64  # the offset changes no difference between logits
    total = Total(True, 0.1)
    value, gradient = one_pass(x + offset, target, total=total)
    assert_right(x, target, total, value, gradient)


@pytest.mark.parametrize("label", [-1, V])
def test_a_bad_label_in_any_row_makes_the_mean_nan(label, device):
    for row, total in zip((0, 1, 2, 0, 1), TOTALS, strict=True):
        x, target = make(3, device, (1,))
        target[row] = label
        assert one_pass(x, target, total=total)[0].isnan()


def hidden_states(rows, width, layout, dtype, device):
    """Sliced hidden states with NaN in row 3. "transposed" has rows that are not contiguous."""
    wide = torch.randn(rows, width + 3, device=device, dtype=dtype)
    wide[3] = torch.nan
    if layout == "transposed":
        wide = wide.t().contiguous().t()
    return wide[:, 2 : width + 2]


@pytest.mark.parametrize("width", [1, 16, 100, 2500])
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_states_of_ignored_rows_are_zero(width, layout, dtype, device):
    x, target = make(5, device, (0, 3))
    hidden = hidden_states(5, width, layout, dtype, device)
    x = x.to(dtype)
    alone, d_alone = one_pass(x, target, total=MEAN)
    for copies in (True, False):
        mean, counted, gradient = total_of_head(x, target, hidden, copies=copies)
        if copies:
            assert torch.equal(counted, hidden.masked_fill(target.eq(-100).unsqueeze(1), 0))
        else:
            assert counted is hidden
        assert torch.equal(mean, alone)
        assert torch.equal(gradient, d_alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
@pytest.mark.parametrize("total", TOTALS, ids=str)
def test_rows_that_several_programs_share(total, layout, dtype, device):
    """On a GPU, each program of a row copies some blocks of the hidden states."""
    rows, vocab, width = sized((300, 50257, 5000), (5, 300, 40))
    x, target = make(rows, device, (0, 3, rows - 1), vocab)
    x = x.to(dtype)
    hidden = hidden_states(rows, width, layout, dtype, device)
    value, counted, gradient = total_of_head(x, target, hidden, total=total)
    assert_right(x, target, total, value, gradient)
    assert torch.equal(counted, hidden.masked_fill(target.eq(-100).unsqueeze(1), 0))


def test_without_ignore_index_nothing_is_copied(device):
    x, target = make(3, device)
    hidden = torch.randn(3, 8, device=device)
    assert total_of_head(x, target, hidden, ignore_index=None)[1] is hidden


def test_a_plan_is_current_until_the_config_changes(device):
    x, target = make(3, device)
    reading = Reading(V, target, ignore_index=-100, wants=("nll",))
    coefficients = of_one["nll", x.device, torch.float32]
    launch = kernels.plan_total(MEAN, 3, V, reading, coefficients, x, False)
    assert launch.is_current
    with config.override(num_warps=1):
        assert not launch.is_current
