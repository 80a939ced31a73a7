"""Logits in fp32 of a head in 16 bits: the GEMM's own sums."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.heads import LOSSES, V, leaves, make
from tests.support.sources import SOURCES

FP32 = torch.float32


def head(dtype=torch.bfloat16, rows=40, width=64, vocab=300, device="cpu"):
    """Whose logits have a standard deviation of 3."""
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(vocab, width, device=device) * (3 / width**0.5)).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), device=device)


@pytest.mark.parametrize("columns", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_are_those_of_fp64(dtype, columns, monkeypatch, device):
    """Within 2e-4, where 16-bit logits are further off by far."""
    hidden, weight, target = head(dtype, device=device)
    monkeypatch.setattr(choose_cut, "forced", lambda work, *_: Cut(16, columns))
    want = ll.score(F.linear(hidden.double(), weight.double()), target)
    got = ll.score(ll.LinearLogits(hidden, weight, logits_dtype=FP32), target)
    rounded = ll.score(ll.LinearLogits(hidden, weight), target)
    assert (got.logprob - want.logprob).abs().max() < 2e-5
    assert (rounded.logprob - want.logprob).abs().max() > 1e-3
    assert (got.entropy - want.entropy).abs().max() < 2e-5


@pytest.mark.parametrize(("reduction", "chunk"), [("mean", 2), ("none", 7)])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_rounded_once(name, reduction, chunk, device):
    """Those of fp32 logits, whose own gradient is rounded to 16 bits; every loss has them."""
    hidden, weight, bias, target = make(torch.bfloat16, device)
    ours, plain = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    truth = leaves(*(t.double() for t in (hidden, weight, bias)))
    source = ll.LinearLogits(*ours, logits_dtype=FP32, workspace=chunk * V * 5)
    assert source.dtype == FP32
    found = [
        LOSSES[name](z, target, reduction=reduction).sum()
        for z in (source, F.linear(*plain), F.linear(*truth))
    ]
    torch.autograd.backward(found)
    torch.testing.assert_close(found[0].double(), found[2].double(), rtol=1e-5, atol=1e-5)
    for a, b, c in zip(ours, plain, truth, strict=True):
        assert a.grad.dtype == torch.bfloat16
        once = 2.0**-8 * c.grad.norm()
        assert (a.grad - c.grad).norm() <= 1.5 * (b.grad - c.grad).norm() + once


def at_ids(z, target):
    return ll.token_logprobs(z, torch.stack([target.clamp_min(0)] * 2, -1)).sum()


@pytest.mark.parametrize("name", ["cross_entropy", "smoothed", "kl_div", "ids"])
def test_by_the_kernels(name, device):
    """A gradient of another dtype than the logits, from each kernel that writes one."""
    hidden, weight, bias, target = make(torch.bfloat16, device)
    ours, wide = leaves(hidden, weight, bias), leaves(*(t.float() for t in (hidden, weight, bias)))
    loss = LOSSES.get(name, at_ids)
    loss(ll.LinearLogits(*wide), target).backward()
    with ll.impl("triton"):
        source = ll.LinearLogits(*ours, logits_dtype=FP32, workspace=5 * V * 5)
        loss(source, target).backward()
    for a, b in zip(ours, wide, strict=True):
        assert (a.grad - b.grad).norm() <= 2.0**-6 * b.grad.norm()  # the interpreter truncates


def test_a_fused_head_s_logits_are_the_same_with_and_without_gradients(device):
    module = ll.nn.FusedHead(16, 40, device=device, dtype=torch.bfloat16, logits_dtype=FP32)
    hidden = torch.randn(3, 16, device=device).bfloat16()
    parts = (hidden, module.weight, module.bias)
    want = F.linear(*(t.detach().double() for t in parts))
    lazy = module(hidden)
    with torch.no_grad():
        plain = module(hidden)
    for logits in (lazy, plain, lazy.materialize(), ll.LinearLogits(*parts, logits_dtype=FP32)):
        assert logits.dtype == FP32
    for logits in (plain, lazy.materialize()):
        torch.testing.assert_close(logits.detach().double(), want, rtol=1e-5, atol=1e-5)
    target = torch.tensor([1, 2, 3], device=device)
    loss = F.cross_entropy(lazy, target)
    torch.testing.assert_close(loss.double(), F.cross_entropy(want, target), rtol=1e-5, atol=1e-5)
    (loss + lazy.materialize().sum()).backward()
    assert module.weight.grad.dtype == torch.bfloat16


def test_materialised_it_is_differentiable(device):
    hidden, weight, target = head(device=device)
    parts = leaves(hidden, weight, None)
    source = ll.LinearLogits(*parts, logits_dtype=FP32)
    logits = source.materialize()
    assert logits.dtype == FP32
    F.cross_entropy(logits, target).backward()
    assert parts[0].grad.dtype == parts[1].grad.dtype == torch.bfloat16
    found = logits.gather(-1, ll.capture_topk(source, 4).ids)  # ids may differ where logits tie
    torch.testing.assert_close(found, logits.topk(4).values)


@pytest.mark.parametrize(
    ("dtype", "asked", "legal"),
    [
        (torch.bfloat16, torch.float64, "torch.float32"),
        (torch.float32, torch.bfloat16, "torch.float32"),
        (torch.float64, torch.float32, "torch.float64"),
    ],
)
def test_bad_dtypes(dtype, asked, legal):
    hidden, weight, _ = head(dtype)
    with pytest.raises(ValueError, match=f"logits_dtype must be {legal} or None for hidden of"):
        ll.LinearLogits(hidden, weight, logits_dtype=asked)


SMALL = 2.0**-20
ROW = torch.full((64,), SMALL)
SCALED = {  # a loss of PyTorch per row times a small number, and the same loss of ours
    "row_weight": (lambda z, y: F.cross_entropy(z, y, reduction="none") * SMALL,
                   lambda z, y, **how: ll.cross_entropy(z, y, row_weight=ROW.to(y.device), **how)),
    "weight": (lambda z, y: F.cross_entropy(z, y, reduction="none") * SMALL,
               lambda z, y, **how: ll.cross_entropy(z, y, weight=z_like(z, SMALL), **how)),
    "temperature": (lambda z, y: F.cross_entropy(z / 4096, y, reduction="none"),
                    lambda z, y, **how: ll.cross_entropy(z, y, temperature=4096.0, **how)),
    "temperature per row": (lambda z, y: F.cross_entropy(z / 4096, y, reduction="none"),
                            lambda z, y, **how: ll.cross_entropy(
                                z, y, temperature=1 / (ROW.to(y.device) * 256), **how)),
    "formula": (lambda z, y: F.cross_entropy(z, y, reduction="none") * SMALL,
                lambda z, y, reduction, **how: ll.row_loss(
                    lambda stats: -SMALL * stats.logprob, z, y, reduction=reduction)),
    "kd_weight": (lambda z, y: F.cross_entropy(z, y, reduction="none") * SMALL,
                  lambda z, y, reduction, **how: ll.topk_distill(
                      z, ll.SparseTargets(y[:, None], torch.zeros_like(y[:, None]).float()),
                      divergence="forward_kl", support="truncate", kd_weight=SMALL,
                      reduction=reduction)),
}  # fmt: skip


def z_like(z, number):
    return torch.full(z.shape[-1:], number, device=z.device)


@pytest.mark.parametrize("source", ["head", "lazy", "in place"])
@pytest.mark.parametrize("name", SCALED)
def test_fp16_gradients_do_not_underflow_before_the_scale_is_known(name, source, device):
    """Small numbers multiply the gradient after the scale of a GradScaler, as in PyTorch."""
    if source == "in place" and name in ("formula", "kd_weight"):
        pytest.skip("only cross_entropy overwrites its logits")
    h = torch.randn(64, 16, device=device).half()
    w = (torch.randn(20_000, 16, device=device) * 0.1).half()
    y = torch.randint(0, 20_000, (64,), device=device)
    theirs, ours = SCALED[name]

    def gradients(loss, dtype=torch.half):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (h, w)]
        (65536 * loss(*leaves)).backward()
        return [t.grad.double() for t in leaves]

    def ours_over(h, w):
        if source == "in place":
            return ours(h @ w.T, y, reduction="sum", inplace=True)
        return ours(SOURCES[source](h, w), y, reduction="sum")

    want = gradients(lambda h, w: theirs(h @ w.T, y).sum(), torch.double)
    plain = gradients(lambda h, w: theirs((h @ w.T).float(), y).sum())
    for a, b, c in zip(gradients(ours_over), plain, want, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-3 * c.norm()
