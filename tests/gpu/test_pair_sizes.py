"""Dense-teacher losses at the vocabularies people distil with, against fp64."""

import pytest
import torch
from laws import assert_as_good_as_torch
from test_pair import LOSSES, make, naive, ours

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@every_loss
@pytest.mark.parametrize("V", [50257, 128256, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_value_and_gradient(loss, V, dtype):
    x, t = make(loss, rows=(12,), vocab=V, dtype=dtype, device="cuda")
    how = {"temperature": torch.rand(12, device="cuda") + 0.5, "reduction": "none"}
    # Of 1/T, exponentials and a logarithm, each is right to 2^-22, of which JSD makes the most.
    assert_as_good_as_torch(
        lambda x: ours(x, t, loss, **how), lambda x: naive(x, t, loss, **how), x, factor=4.0
    )


@every_loss
def test_strided_and_unaligned_rows(loss):
    """Shifted rows a column off, and a teacher of another type."""
    x, t = make(
        loss, rows=(2, 5), vocab=50260, dtype=torch.bfloat16, teacher=torch.float32, device="cuda"
    )
    t = t[:, :4, :50257]
    assert_as_good_as_torch(
        lambda x: ours(x[:, 1:, 3:], t, loss, reduction="none"),
        lambda x: naive(x[:, 1:, 3:], t, loss, reduction="none"),
        x,
    )


@every_loss
def test_no_host_synchronisation(loss):
    x, t = make(loss, rows=(64,), vocab=32000, dtype=torch.bfloat16, device="cuda")
    mask = torch.arange(64, device="cuda") % 3 > 0
    leaf = x.requires_grad_()
    ours(leaf, t, loss, mask=mask).backward()  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(leaf, t, loss, mask=mask).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert leaf.grad.isfinite().all()


@every_loss
def test_extra_memory_is_the_gradient(loss):
    x, t = make(loss, rows=(64,), vocab=128256, dtype=torch.bfloat16, device="cuda")
    leaf = x.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(leaf, t, loss).backward()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= x.numel() * x.element_size() + 2**20


@every_loss
def test_bitwise_repeatable(loss):
    x, t = make(loss, rows=(32,), vocab=128256, dtype=torch.bfloat16, device="cuda")
    leaf = x.requires_grad_()
    runs = []
    for _ in range(3):
        value = ours(leaf, t, loss, reduction="none")
        runs.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for value, grad in runs[1:]:
        assert torch.equal(value, runs[0][0])
        assert torch.equal(grad, runs[0][1])


@pytest.mark.parametrize("kind", ["forward", "jsd 0.5"])
def test_more_than_2_31_elements(kind):
    rows, V = 17000, 128256
    assert rows * V > 2**31
    x = torch.empty(rows, V, device="cuda", dtype=torch.bfloat16).normal_(0, 2)
    t = torch.empty_like(x).normal_(0, 2)
    last = x[-2:].double().requires_grad_()
    want = naive(last, t[-2:].double(), LOSSES[kind], reduction="none")
    want.sum().backward()
    leaf = x.requires_grad_()
    value = ours(leaf, t, LOSSES[kind], reduction="none")
    value.sum().backward()
    torch.testing.assert_close(value[-2:].double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad[-2:].double(), last.grad, rtol=1e-2, atol=1e-6)
