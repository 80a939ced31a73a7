"""Heads cut along the vocabulary, and logits in fp32, at the sizes people train: against fp64."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support import oracle
from tests.support.head_sizes import MIB, assert_as_exact, gradients, make, truth, unfused
from tests.support.sizes import DEVICE, sized

FP32 = torch.float32
ROWS, WIDTH, VOCAB = sized((640, 512, 50257), (4, 16, 75))  # rows that are not 16-byte aligned
COLUMNS = sized(4096, 40)


@pytest.mark.parametrize(
    ("cut", "bias"),
    [
        (Cut(ROWS, COLUMNS), False),
        (Cut(ROWS, COLUMNS, kept=True), True),
        (Cut(ROWS // 4, COLUMNS), False),
    ],
)
def test_as_exact_as_unfused(cut, bias, monkeypatch):
    """Over many blocks: d_hidden is summed over them, d_weight over groups of rows."""
    dtype = sized(torch.bfloat16, FP32)  # the interpreter cuts bf16 off
    monkeypatch.setattr(choose_cut, "forced", lambda *_: cut)
    hidden, weight, target = make(ROWS, WIDTH, VOCAB, dtype)
    target[::5] = -100
    b = torch.randn(VOCAB, device=DEVICE).to(dtype) if bias else None
    wide = None if b is None else b.double()

    def ours(h, W, target):
        return ll.cross_entropy(ll.LinearLogits(h, W, b, workspace=1), target)

    def plain(b):
        return lambda h, W, target: F.cross_entropy(F.linear(h, W, b).to(h.dtype), target)

    assert_as_exact(
        gradients(ours, hidden, weight, target),
        gradients(plain(b) if bias else unfused, hidden, weight, target),
        gradients(plain(wide), hidden.double(), weight.double(), target),
    )


def test_results_a_row_and_their_gradients(monkeypatch):
    monkeypatch.setattr(choose_cut, "forced", lambda *_: Cut(ROWS, COLUMNS))
    hidden, weight, target = make(ROWS, WIDTH, VOCAB, sized(torch.bfloat16, FP32))

    def loss(z):
        found = ll.score(z, target)
        return (found.logprob - 0.1 * found.entropy).mean()

    def naive(z):
        return (oracle.token_logprobs(z, target) - 0.1 * oracle.entropy(z)).mean()

    assert_as_exact(
        gradients(lambda h, W: loss(ll.LinearLogits(h, W, workspace=1)), hidden, weight),
        gradients(lambda h, W: loss(F.linear(h, W)), hidden, weight),
        gradients(lambda h, W: naive(F.linear(h, W)), hidden.double(), weight.double()),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_fp32_logits_are_the_sums_of_the_gemm(bias):
    """With logits of a standard deviation of 2 to 3; a GEMM's own sums, with a bias too."""
    hidden, weight, target = make(ROWS, WIDTH, VOCAB, torch.bfloat16)
    b = torch.randn(VOCAB, device=DEVICE).bfloat16() if bias else None
    parts = (hidden, weight, b)
    want = F.linear(*(None if t is None else t.double() for t in parts)).log_softmax(-1)
    want = want.gather(-1, target[:, None])[:, 0]
    room = sized(16 * MIB, 3 * (VOCAB + 5) * 6)
    exact = ll.token_logprobs(ll.LinearLogits(*parts, logits_dtype=FP32, workspace=room), target)
    rounded = ll.token_logprobs(ll.LinearLogits(*parts), target)
    assert (exact - want).abs().max() < 2e-4
    assert (rounded - want).abs().max() > 20 * (exact - want).abs().max()


def test_gradients_of_fp32_logits():
    hidden, weight, target = make(ROWS, WIDTH, VOCAB, torch.bfloat16)
    room = sized(16 * MIB, 3 * (VOCAB + 5) * 6)
    got = gradients(
        lambda h, W: ll.cross_entropy(
            ll.LinearLogits(h, W, logits_dtype=FP32, workspace=room), target
        ),
        hidden, weight,
    )  # fmt: skip
    want, plain = truth(hidden, weight, target), gradients(unfused, hidden, weight, target)
    if DEVICE == "cuda":
        assert_as_exact(got, plain, want)
    else:  # the interpreter cuts bf16 off
        for a, c in zip(got, want, strict=True):
            assert (a - c).norm() <= 0.01 * c.norm()


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize("how", [{}, {"logits_dtype": FP32}], ids=["bf16", "fp32"])
@pytest.mark.parametrize("mib", [32, 64, 256])
@pytest.mark.parametrize("loss", ["mean", "score", "no gradients"])
def test_extra_memory_is_the_workspace(loss, mib, how):
    hidden, weight, target = make(8192, 1024, 128256, torch.bfloat16)
    h, W = hidden.requires_grad_(), weight.requires_grad_()
    for _ in range(2):  # what libraries keep for themselves is there the second time
        h.grad = W.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        source = ll.LinearLogits(h, W, workspace=mib * MIB, **how)
        if loss == "no gradients":
            with torch.no_grad():
                ll.cross_entropy(source, target)
        elif loss == "mean":
            ll.cross_entropy(source, target).backward()
        else:
            ll.score(source, target).logprob.mean().backward()
        held = 0 if loss == "no gradients" else (h.numel() + W.numel()) * 2
        extra = torch.cuda.max_memory_allocated() - before - held
    assert extra <= (mib + 8) * MIB
