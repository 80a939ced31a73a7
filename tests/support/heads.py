"""Heads of a few classes, and every loss over them."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut

N, D, V = 7, 6, 23


@pytest.fixture(autouse=True, params=["chunks", "small"], name="in_chunks")
def both_ways(request, monkeypatch):
    """Runs a test with heads in chunks, and with small heads materialised."""
    if request.param == "chunks":
        monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 0))


def make(dtype=torch.float64, device="cpu", bias=True, lead=(N,), scale=1.0):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(device, dtype)

    hidden, weight, b = normal(*lead, D), normal(V, D), normal(V)
    target = torch.randint(0, V, lead, generator=g).to(device)
    target.view(-1)[1::3] = -100
    return hidden, weight, b if bias else None, target


def teacher(lead=(N,), device="cpu"):
    g = torch.Generator().manual_seed(6)
    return torch.randn(*lead, V, generator=g, dtype=torch.float64).to(device)


def targets(lead=(N,), device="cpu"):
    with ll.impl("eager"):  # the teacher is fp64
        return ll.capture_topk(teacher(lead, device), 4)


def rows(lead=(N,), device="cpu"):
    return (
        torch.linspace(0.5, 2, torch.Size(lead).numel(), dtype=torch.float64).view(lead).to(device)
    )


def mask(lead=(N,), device="cpu"):
    return (torch.arange(torch.Size(lead).numel(), device=device) % 3 > 0).view(lead)


LOSSES = {
    "cross_entropy": lambda z, t, **how: ll.cross_entropy(z, t, **how),
    "smoothed": lambda z, t, **how: ll.cross_entropy(z, t, label_smoothing=0.1, z_loss=0.01, **how),
    "weighted": lambda z, t, **how: ll.cross_entropy(
        z, t, weight=torch.linspace(0.1, 2, V, dtype=torch.float64, device=t.device), **how
    ),
    "by rows": lambda z, t, **how: ll.cross_entropy(
        z, t, row_weight=rows(t.shape, t.device), temperature=rows(t.shape, t.device), softcap=3.0,
        **how,
    ),
    "tail": lambda z, t, **how: ll.topk_distill(
        z, targets(t.shape, t.device), divergence="forward_kl", support="tail", **how
    ),
    "mixed": lambda z, t, **how: ll.topk_distill(
        z, targets(t.shape, t.device), divergence="jsd", support="renorm", temperature=2.0,
        labels=t, ce_weight=0.5, **how,
    ),
    "kl_div": lambda z, t, **how: ll.kl_div(
        z, teacher(t.shape, t.device), direction="forward", mask=mask(t.shape, t.device), **how
    ),
    "jsd": lambda z, t, **how: ll.jsd(z, teacher(t.shape, t.device), **how),
    "tvd": lambda z, t, **how: ll.tvd(z, teacher(t.shape, t.device), **how),
    "soft": lambda z, t, **how: ll.soft_cross_entropy(
        z, teacher(t.shape, t.device).softmax(-1), **how
    ),
}  # fmt: skip


def leaves(hidden, weight, bias, needs=(True, True, True)):
    return [
        None if t is None else t.clone().requires_grad_(need)
        for t, need in zip((hidden, weight, bias), needs, strict=True)
    ]


def result(loss, parts, target, chunk=None, **how):
    """A loss and the gradients of the head's tensors. Without `chunk`, logits are materialised."""
    if chunk is None:
        logits = F.linear(*parts)
    else:
        logits = ll.LinearLogits(*parts, workspace=chunk * V * parts[0].element_size())
    out = loss(logits, target, **how)
    upstream = torch.linspace(1.7, 0.6, out.numel(), dtype=out.dtype, device=out.device)
    out.backward(upstream.view(out.shape))
    return out.detach(), [None if t is None else t.grad for t in parts]


def assert_same(got, want, **tolerance):
    torch.testing.assert_close(got[0], want[0], **tolerance)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)
