"""A narrow head that never writes logits gives what materialised logits give."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.contract import NO_ID
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from logitless.kernels import config
from tests.support import heads
from tests.support.heads import LOSSES, leaves

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 19  # two tiles of 16 rows, and the second is not whole


@pytest.fixture(autouse=True)
def on_chip(monkeypatch):
    """Every loss that can be is computed on the chip, in tiles of 16 rows and 16 columns."""
    seen = []

    def forced(work, *_):
        seen.append(work.narrow and work.merges)
        return Cut(work.rows, on_chip=seen[-1])

    monkeypatch.setattr(choose_cut, "forced", forced)
    with ll.impl("triton"), config.override(block_v=16, block_n=16, splits=2):
        yield
    assert all(seen)


def run(loss, parts, head):
    """A loss and its gradients under a random upstream gradient."""
    out = loss(ll.LinearLogits(*parts) if head else F.linear(*parts))
    g = torch.Generator().manual_seed(7)
    upstream = torch.rand(out.shape, generator=g, dtype=torch.float64) + 0.5
    out.backward(upstream.to(out.device, out.dtype))
    return [out.detach(), *(t.grad for t in parts if t is not None)]


def assert_as_exact(ours, plain, truth, dtype):
    """An error of at most twice PyTorch's error and two roundings, of a row and of the result."""
    twice = torch.finfo(dtype).eps
    for a, b, c in zip(ours, plain, truth, strict=True):
        error = (b.double() - c).norm()
        assert (a.double() - c).norm() <= 2 * error + twice * c.norm()


@pytest.mark.parametrize(
    ("name", "reduction", "splits"),
    [
        ("cross_entropy", "mean", 2),
        ("smoothed", "none", 1),
        ("weighted", "mean", 1),
        ("by rows", "none", 2),
        ("mixed", "mean", 2),
    ],
)
def test_losses(name, reduction, splits, monkeypatch, device):
    lead = (1, ROWS)
    with ll.impl("eager"):
        targets = heads.targets(lead, device)
    monkeypatch.setattr(heads, "targets", lambda *_: targets)
    hidden, weight, bias, target = heads.make(FP32, device, lead=lead, bias=name != "weighted")

    def loss(z):
        return LOSSES[name](z, target, reduction=reduction)

    def parts(dtype):
        return leaves(*(None if t is None else t.to(dtype) for t in (hidden, weight, bias)))

    with config.override(splits=splits):
        ours = run(loss, parts(FP32), True)
    with ll.impl("eager"):
        plain, truth = run(loss, parts(FP32), False), run(loss, parts(torch.float64), False)
    assert_as_exact(ours, plain, truth, FP32)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.few(1)
def test_16_bits(dtype, device):
    """Both by kernels, because Triton's interpreter truncates to bf16 instead of rounding."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 20, generator=g).to(device, dtype) for n in (ROWS, 45))
    target = torch.arange(ROWS, device=device)
    target[3] = -100

    def loss(z):
        return ll.cross_entropy(z, target, label_smoothing=0.1, softcap=4.0)

    ours = run(loss, leaves(hidden, weight, None), True)
    plain = run(loss, leaves(hidden, weight, None), False)
    with ll.impl("eager"):
        truth = run(loss, leaves(hidden.double(), weight.double(), None), False)
    assert_as_exact(ours, plain, truth, dtype)


def test_a_confident_row_keeps_its_gradient(device):
    """At p = 0.9995, p - 1 is below the rounding of p to 16 bits."""
    hidden = torch.zeros(2, 16, device=device, dtype=FP16)
    hidden[:, 0], hidden[1, 1] = 1.0, 1.0
    weight = torch.zeros(40, 16, device=device, dtype=FP16)
    weight[5, 0] = 11.25
    target = torch.full((2,), 5, device=device)
    parts = leaves(hidden, weight, None)
    ll.cross_entropy(ll.LinearLogits(*parts), target, reduction="sum").backward()
    p = torch.softmax(hidden.double() @ weight.double().T, -1)
    p[:, 5] -= 1
    for got, want in zip(parts, (p @ weight.double(), p.T @ hidden.double()), strict=False):
        torch.testing.assert_close(got.grad.double(), want, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("drop_ignored", [True, False])
def test_ignored_rows_may_hold_nan(drop_ignored, device):
    hidden, weight, bias, target = heads.make(FP32, device, lead=(ROWS,))
    live = target != -100
    hidden[~live] = torch.nan
    got, want = leaves(hidden, weight, bias), leaves(hidden[live], weight, bias)
    source = ll.LinearLogits(*got, drop_ignored=drop_ignored)
    loss = ll.cross_entropy(source, target)
    with ll.impl("eager"):
        plain = ll.cross_entropy(F.linear(*want), target[live])
    (loss + plain).backward()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got[0].grad[live], want[0].grad)
    assert not got[0].grad[~live].any()
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.usefixtures("nobody_looks")
def test_statistics_with_empty_and_repeated_ids(device):
    """Several results per row: entropy, sum of all logits, argmax, and log p at ids."""
    hidden, weight, bias, _ = heads.make(FP32, device, lead=(ROWS,))
    ids = torch.arange(3 * ROWS, device=device).view(ROWS, 3) % heads.V
    ids[:, 1] = ids[:, 0]
    ids[2, 2] = NO_ID

    def read(z):
        stats = ll.row_stats(z, ids, entropy=True, total=True, argmax=True, temperature=2.0)
        seen = torch.where(ids == NO_ID, 0.0, stats.logprob)
        return stats, stats.entropy.sum() + 0.1 * stats.total.sum() + seen.square().sum()

    parts, plain = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    stats, loss = read(ll.LinearLogits(*parts))
    with ll.impl("eager"):
        want, whole = read(F.linear(*plain))
    (loss + whole).backward()
    for name in ("lse", "entropy", "total", "argmax", "logprob"):
        a, b = getattr(stats, name), getattr(want, name)
        torch.testing.assert_close(a, b, equal_nan=True, msg=name)
    for a, b in zip(parts, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_what_needs_no_gradient_main_grad_and_a_second_backward(device):
    hidden, weight, _, target = heads.make(FP32, device, lead=(5,))
    plain = leaves(hidden, weight, None)
    with ll.impl("eager"):
        ll.cross_entropy(F.linear(*plain), target).backward()
    for needs in ((True, False, True), (False, True, True)):
        parts = leaves(hidden, weight, None, needs)
        loss = ll.cross_entropy(ll.LinearLogits(*parts), target)
        loss.backward(retain_graph=True)
        loss.backward()
        for part, need, want in zip(parts[:2], needs, plain, strict=False):
            assert (part.grad is not None) == need
            if need:
                torch.testing.assert_close(part.grad, 2 * want.grad)
    for reduction in ("mean", "none"):
        W, main_grad = weight.clone().requires_grad_(), torch.ones_like(weight.t()).t()
        source = ll.LinearLogits(hidden, W, main_grad=main_grad)
        loss = ll.cross_entropy(source, target, reduction=reduction).sum()
        (loss if reduction == "mean" else loss / (target != -100).sum()).backward()
        assert W.grad is None
        torch.testing.assert_close(main_grad, 1 + plain[1].grad)


@pytest.mark.parametrize(("rows", "width", "vocab"), [(0, 3, 5), (1, 17, 1), (16, 16, 32)])
def test_sizes(rows, width, vocab, device):
    """No rows, one class, and sizes of whole tiles."""
    hidden, weight = torch.randn(rows, width, device=device), torch.randn(vocab, width)
    weight = torch.cat((weight, weight), 1).to(device)[:, :width]  # rows are not contiguous
    target = torch.zeros(rows, device=device, dtype=torch.int64)
    ours, plain = leaves(hidden, weight, None), leaves(hidden, weight, None)
    loss = ll.cross_entropy(ll.LinearLogits(*ours), target, reduction="sum")
    with ll.impl("eager"):
        whole = ll.cross_entropy(F.linear(*plain), target, reduction="sum")
    (loss + whole).backward()
    torch.testing.assert_close(loss, whole, rtol=1e-5, atol=2e-6)
    for a, b in zip(ours[:2], plain[:2], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_columns_beyond_the_vocabulary_do_not_overflow(reduction, device):
    """e^(y - max y) of a column that does not exist is infinite if all logits are near -300."""
    hidden, weight, bias, target = heads.make(FP32, device, lead=(5,))
    ours, plain = leaves(hidden, weight, bias - 300), leaves(hidden, weight, bias - 300)
    loss = ll.cross_entropy(ll.LinearLogits(*ours), target, reduction=reduction)
    with ll.impl("eager"):
        whole = ll.cross_entropy(F.linear(*plain), target, reduction=reduction)
    (loss + whole).sum().backward()
    torch.testing.assert_close(loss, whole, rtol=1e-4, atol=1e-4)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("nobody_looks")
def test_a_bad_target_is_nan(device):
    hidden, weight, _, target = heads.make(FP32, device, lead=(5,))
    target[:] = 1
    target[2], target[3] = heads.V, -5
    parts = leaves(hidden, weight, None)
    loss = ll.cross_entropy(ll.LinearLogits(*parts), target, reduction="none")
    loss.sum().backward()
    bad = torch.tensor([0, 0, 1, 1, 0], device=device).bool()
    assert torch.equal(loss.isnan(), bad)
    assert torch.equal(parts[0].grad.isnan().all(1), bad)
    assert parts[1].grad.isnan().all()
