"""The kernels of narrow heads against the kernels that read logits, with every option at once."""

import pytest
import torch

from logitless import kernels
from logitless.contract import COEFFICIENTS, G_LABEL, NO_ID, A, Coefficients, Reading
from logitless.kernels import config
from logitless.kernels.narrow.tile import is_narrow

N, D, V, K = 18, 9, 37, 3
WANTS = ("lse", "picked", "logprob", "nll", "entropy", "total", "log_total", "argmax", "logprob_t1")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reading(device):
    """Ids that repeat, are empty (row 1) or outside the vocabulary (row 2), and an ignored row."""
    label = torch.arange(N, device=device) % V
    ids = (torch.arange(N * K, device=device).view(N, K) * 7) % V
    label[4], ids[:, 2] = -100, ids[:, 0]
    ids[5, 1], ids[1, 0], ids[2, 1] = label[5], NO_ID, V
    weight = torch.linspace(0.0, 2.0, V, device=device)
    temperature = torch.linspace(0.5, 2.0, N, device=device)
    return Reading(V, label, ids, weight, temperature, None, 4.0, -100, WANTS)


@pytest.mark.parametrize("splits", [2, 1])
@pytest.mark.few(1)
def test_all_statistics_and_all_coefficients(splits, device):
    how = reading(device)
    h, w = normal(N, D).to(device), normal(V, D, seed=1).to(device)
    b = normal(V, seed=2).to(device)
    z = (h.double() @ w.double().T + b.double()).float()
    rows, g = normal(N, COEFFICIENTS, seed=3).to(device), normal(N, K, seed=4).to(device)
    rows[:, 4] = 0
    coefficients = Coefficients(rows, ("a", "b", "label", "total", "logprob_t1"), g)
    upstream, factor = normal(N, seed=5).to(device), normal(N, seed=6).to(device)
    d_hidden, d_weight = torch.full_like(h, torch.nan), torch.full_like(w, torch.nan)
    d_bias = torch.full_like(b, torch.nan)
    with config.override(block_v=16, block_n=16, splits=splits):
        found = kernels.finish(kernels.narrow_partial(h, w, b, how)[0], how)
        kernels.narrow_gradients(
            h, w, b, how, found.state, coefficients, upstream, factor, d_hidden, d_weight, d_bias
        )
    want = kernels.read(z, how)
    for name in WANTS:
        a, c = getattr(found, name), getattr(want, name)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4, equal_nan=True, msg=name)
    dz = kernels.gradient(z, how, want.state, coefficients, upstream, factor)
    assert dz[2].isnan().all()
    assert not dz[4].any()
    torch.testing.assert_close(d_hidden, dz @ w, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert d_weight.isnan().all()  # the row with an invalid id has a gradient in every column


@pytest.mark.parametrize("splits", [1, 2])
def test_gradient_of_hidden_from_the_sums_of_forward(splits, device):
    """In row 0, p of the label is almost 1, so that the gradient could lose digits by cancellation.

    Row 1 has a label outside the vocabulary. Row 4 is ignored. One column has a bias of -inf, so
    that p is 0.
    """
    label = torch.arange(N, device=device) % V
    label[1], label[4] = V, -100
    temperature = torch.linspace(0.5, 2.0, N, device=device)
    how = Reading(V, label, None, None, temperature, None, None, -100, ("nll",))
    h, w = normal(N, D).to(device), normal(V, D, seed=1).to(device)
    b = normal(V, seed=2).to(device)
    b[0], b[7] = 0.0, -torch.inf
    others = (h[0] @ w.T + b)[1:]
    b[0] = -(h[0] @ w[0]) + others.logsumexp(0) + 4.0
    rows = normal(N, COEFFICIENTS, seed=3).to(device)
    coefficients = Coefficients(rows, ("a", "label"))
    rows[0, A], rows[0, G_LABEL] = 1.0, -1.0
    one, factor = torch.ones((), device=device), normal(N, seed=6).to(device)
    d_hidden, d_weight = torch.full_like(h, torch.nan), torch.full_like(w, torch.nan)
    with config.override(block_v=16, block_n=16, splits=splits):
        partials, expected = kernels.narrow_partial(h, w, b, how, True)
        assert expected is not None
        assert expected.sums.shape == (splits, N, D)
        found = kernels.finish(partials, how)
        kernels.narrow_gradients(
            h, w, b, how, found.state, coefficients, one, factor, d_hidden, d_weight, None, False,
            expected,
        )  # fmt: skip
        alone = torch.full_like(h, torch.nan)
        kernels.narrow_gradients(
            h, w, b, how, found.state, coefficients, one, factor, alone, None, None, False, expected
        )
    z = (h.double() @ w.double().T + b.double()) / temperature.double()[:, None]
    p, live = z.softmax(1), label.clamp(0, V - 1)
    dz = rows[:, A, None].double() * p
    dz[torch.arange(N), live] += rows[:, G_LABEL].double()
    dz[0, 0] = -p[0, 1:].sum()  # 1 - p would lose digits
    dz *= (factor.double() / temperature.double())[:, None]
    want = dz @ w.double()
    want[4] = 0
    assert 1e-5 < p[0, 1:].sum() < 1e-3
    assert d_hidden[1].isnan().all()
    assert torch.equal(alone[2:], d_hidden[2:])
    keep = torch.arange(N, device=device) != 1
    error = (d_hidden.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    torch.testing.assert_close(d_hidden[keep][1:].double(), want[keep][1:], rtol=1e-4, atol=1e-5)
    assert error[0] < 1e-2


def test_which_losses_need_only_the_sums_of_forward(device):
    h, w = normal(N, D).to(device), normal(V, D, seed=1).to(device)
    label = torch.zeros(N, dtype=torch.int64, device=device)
    plain = Reading(V, label, wants=("nll",))
    for change, expects in (
        ({}, True),
        ({"label": None, "wants": ("lse",)}, False),
        ({"wants": ("lse",)}, False),  # the labels are only a mask
        ({"wants": ("lse", "logprob")}, True),
        ({"ids": label[:, None], "wants": ("picked",)}, False),
        ({"softcap": 3.0}, False),
        ({"wants": ("nll", "entropy")}, False),
        ({"wants": ("nll", "total")}, False),
    ):
        _, expected = kernels.narrow_partial(h, w, None, plain._replace(**change), True)
        assert (expected is not None) == expects, change
    assert kernels.narrow_partial(h, w, None, plain)[1] is None


def test_gradients_of_weight_and_bias_alone(device):
    """They are added to what is there, with a stride, and the loss has no label and no ids."""
    h, w = normal(N, D).to(device), normal(V, D, seed=1).to(device)
    how = Reading(V, temperature=0.5, wants=("entropy",))
    rows = normal(1, COEFFICIENTS).to(device)
    coefficients = Coefficients(rows, ("a", "b"))
    one = torch.ones((), device=device)
    total, d_bias = torch.ones(V, 2 * D, device=device)[:, :D], torch.empty(V, device=device)
    with config.override(block_v=16, block_n=16):
        state = kernels.finish(kernels.narrow_partial(h, w, None, how)[0], how).state
        kernels.narrow_gradients(
            h, w, None, how, state, coefficients, one, None, None, total, d_bias, True
        )
        alone = torch.empty_like(d_bias)
        kernels.narrow_gradients(h, w, None, how, state, coefficients, one, None, None, None, alone)
    z = h @ w.T
    dz = kernels.gradient(z, how, kernels.read(z, how).state, coefficients, one)
    torch.testing.assert_close(total, 1 + dz.T @ h, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(d_bias, dz.sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, dz.sum(0), rtol=1e-4, atol=1e-5)


def test_which_heads_are_narrow(device):
    def head(width, dtype=torch.bfloat16, vocab=8):
        h = torch.empty(4, width, device=device, dtype=dtype)
        return h, torch.empty(vocab, width, device=device, dtype=dtype)

    assert is_narrow(*head(128))
    assert is_narrow(*head(64, torch.float32))
    for h, w in (head(129), head(65, torch.float32), head(64, torch.float64), head(8, vocab=0)):
        assert not is_narrow(h, w)
    h, w = head(16, vocab=16)
    assert not is_narrow(h, w.t())
    assert not is_narrow(h.half(), w)


@pytest.mark.parametrize("kernel", ["fwd", "d_hidden", "d_weight"])
@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_into_shared_memory(kernel, memory):
    """Those of heads that choose_cut.py may choose, on consumer GPUs, A100 and Hopper."""
    for width in (64, 128):
        cut = config.narrow(kernel, width, 2, memory, 0)
        held, streamed = cut.block_n, cut.block_v
        if kernel == "d_weight":
            held, streamed = streamed, held
        assert (held + cut.stages * streamed) * width * 2 <= memory
        assert cut.block_v >= 16
        assert cut.block_n >= 16


def test_partial_sums_take_little_memory():
    """One split if the rows alone fill the GPU or their sums take the memory of one split."""
    cut = config.narrow("d_hidden", 128, 2, 227 << 10, 0)
    for rows in (1, 100, 2048, 8192, 65536, 1 << 20):
        splits = config.narrow_splits(cut, rows, 1 << 20, 128, 132, config.NARROW_SUMS).splits
        assert splits == 1 or splits * rows * 128 * 4 <= config.NARROW_SUMS
        assert splits * -(-rows // cut.block_n) >= 128
