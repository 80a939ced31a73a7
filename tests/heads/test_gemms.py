"""GEMMs over an odd vocabulary are split into an aligned GEMM and a small one."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut, gemms
from logitless.heads.choose_cut import Cut

N, D = 24, 16


@pytest.fixture
def shapes(monkeypatch):
    """Splits GEMMs on a CPU too. The fixture is a list of the shapes (M, K, N) of all GEMMs."""
    seen, plain = [], gemms.plain_gemm

    def record(a, b, out, add):
        seen.append((a, b, out))
        return plain(a, b, out, add)

    monkeypatch.setattr(gemms, "reads_vectors", lambda t: True)
    monkeypatch.setattr(gemms, "plain_gemm", record)
    return seen


def is_aligned(t: torch.Tensor) -> bool:
    """Whether every row of t has a multiple of 16 bytes."""
    return t.shape[1] * t.element_size() % 16 == 0


def results(source, target, reduction):
    leaves = [t for t in (source.hidden, source.weight, source.bias) if t is not None]
    loss = ll.cross_entropy(source, target, label_smoothing=0.1, reduction=reduction)
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss.device))


@pytest.mark.parametrize("cut", [Cut(N), Cut(5), Cut(N, 72), Cut(8, 72)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [65, 127, 150, 191])
def test_odd_vocabularies(vocab, reduction, cut, shapes):
    hidden = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((vocab, D), (vocab,)))
    weight.requires_grad_()
    bias.requires_grad_()
    target = torch.randint(0, vocab, (N,))
    target[::5] = -100
    with choose_cut.override(lambda work: cut if work.merges else Cut(cut.rows)):
        got = results(ll.LinearLogits(hidden, weight, bias), target, reduction)
    logits = F.linear(hidden, weight, bias)
    want = F.cross_entropy(logits, target, label_smoothing=0.1, reduction=reduction)
    upstream = torch.linspace(0.5, 2, want.numel(), dtype=want.dtype).view(want.shape)
    want = (want.detach(), *torch.autograd.grad(want, (hidden, weight, bias), upstream))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    rows = [t if t.stride(1) == 1 else t.t() for tensors in shapes for t in tensors]
    assert any(t.shape[1] >= gemms.UNIT for t in rows)
    assert all(is_aligned(t) for t in rows if t.shape[1] >= gemms.UNIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_over_an_odd_vocabulary_is_rounded_once(dtype, shapes):
    """d_hidden sums over the vocabulary: the sum of the small GEMM must not add a large error."""
    dz = torch.randn(N, 1032).to(dtype)[:, :1031]
    weight = torch.randn(1031, D).to(dtype)
    want = dz.double() @ weight.double()
    got = gemms.gemm(dz, weight, torch.empty(N, D, dtype=dtype))
    assert len(shapes) == 2
    error, theirs = ((t - want).abs().max() for t in (got, dz @ weight))
    assert error <= 1.2 * theirs


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.usefixtures("shapes")
def test_materialised_logits_are_contiguous(dtype):
    """Lazy logits have the strides of contiguous memory, which kernels may read by address."""
    hidden, weight = torch.randn(2, 3, 8).bfloat16(), torch.randn(73, 8).bfloat16()
    source = ll.LinearLogits(hidden, weight, logits_dtype=dtype)
    plain = source.materialize()
    assert plain.is_contiguous()
    z = source.lazy()
    assert z.stride() == plain.stride()
    assert torch.equal(z.view(-1), plain.view(-1))
    assert torch.equal(torch.as_strided(z, (6 * 73,), (1,)), plain.view(-1))
    rows = source.head.logits(slice(0, 4))
    assert torch.equal(rows, plain.view(-1, 73)[:4])
    assert rows.stride(0) * rows.element_size() % 16 == 0
