"""Sums over the chunks of a head are as good as one product."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll


def test_fp16_is_rounded_after_the_upstream(device):
    """What a GradScaler multiplies must not have been lost before."""
    hidden, weight = torch.randn(1024, 8, device=device), torch.randn(64, 8, device=device)
    weight[:, 0], hidden[:, 0] = torch.linspace(0, -12, 64), 1.0  # rare classes
    target = torch.zeros(1024, dtype=torch.int64, device=device)
    grads = []
    for dtype in (torch.float64, torch.float16):
        W = weight.half().to(dtype).requires_grad_()
        source = ll.LinearLogits(hidden.half().to(dtype), W, workspace=64 * 256 * 8)
        (ll.cross_entropy(source, target) * 65536).backward()
        grads.append(W.grad.double())
    truth, ours = grads
    gap = (ours - truth).norm(dim=1) / truth.norm(dim=1)
    assert gap.max() < 5e-3


@pytest.mark.parametrize("how", ["auto", "weight", "fp32"])
def test_fp16_sums_do_not_overflow(how, device):
    hidden = torch.full((2000, 8), 60.0, device=device).half()
    weight = torch.zeros(16, 8, device=device).half().requires_grad_()
    target = torch.zeros(2000, dtype=torch.int64, device=device)
    source = ll.LinearLogits(hidden, weight, workspace=500 * 16 * 2, accumulate=how)
    ll.cross_entropy(source, target).backward()
    torch.testing.assert_close(weight.grad[0].float(), torch.full((8,), -56.25, device=device))


def test_main_grad_keeps_what_fp32_sums_have(device):
    hidden, weight = torch.randn(64, 8).bfloat16().to(device), torch.randn(30, 8).bfloat16()
    weight = weight.to(device).requires_grad_()
    target = torch.randint(30, (64,), device=device)
    total = torch.zeros(30, 8, device=device)
    source = ll.LinearLogits(
        hidden, weight, workspace=8 * 32 * 2, accumulate="fp32", main_grad=total
    )
    ll.cross_entropy(source, target).backward()
    assert not torch.equal(total, total.bfloat16().float())


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(30, 8).bfloat16(), "main_grad must be a tensor of torch.float32, got"),
        (torch.zeros(8, 30), r"main_grad must have the shape of weight \(30, 8\), got \(8, 30\)"),
        ([1.0], "main_grad must be a tensor of torch.float32, got list"),
    ],
)
def test_bad_main_grad(main_grad, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ll.LinearLogits(torch.zeros(2, 8), torch.zeros(30, 8), main_grad=main_grad)


def test_many_chunks_are_no_less_exact(device):
    """dW accumulated over many chunks in bf16: error against fp64 at most 1.5 × the unfused."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 16, generator=g).to(device)
    weight = (torch.randn(40, 16, generator=g) * 0.3).to(device)
    target = torch.randint(0, 40, (256,), generator=g).to(device)

    def d_weight(dtype, workspace):
        h, w = hidden.bfloat16().to(dtype), weight.bfloat16().to(dtype).requires_grad_()
        logits = F.linear(h, w)
        if workspace is not None:
            logits = ll.LinearLogits(h, w, workspace=workspace)
        ll.cross_entropy(logits, target).backward()
        return w.grad.double()

    truth = d_weight(torch.float64, None)
    unfused = (d_weight(torch.bfloat16, None) - truth).norm()
    for rows_at_once in (4, 32, 128, 256):
        ours = (d_weight(torch.bfloat16, rows_at_once * 40 * 2) - truth).norm()
        assert ours <= 1.5 * unfused, rows_at_once
