"""A head cut along its vocabulary gives what whole rows give."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.heads import V, leaves, make

N = 21


@pytest.fixture
def cut(monkeypatch):
    """Sets how every loss that can be is cut from here on."""

    def set_to(cut):
        monkeypatch.setattr(
            choose_cut, "forced", lambda work, *_: cut if work.merges else Cut(work.rows)
        )

    return set_to


def smoothed(z, target, ids):
    weight = torch.linspace(0.1, 2, V, device=target.device)
    how = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
    return ll.cross_entropy(z, target, weight=weight, **how)


def statistics(z, target, ids):
    stats = ll.row_stats(z, ids, entropy=True, total=True, argmax=True)
    return stats.entropy.sum() + stats.logprob.sum() + stats.total.sum() + 0 * stats.argmax.sum()


def by_row(z, target, ids):
    temperature = torch.linspace(0.5, 2, len(target), device=target.device)
    row = ll.cross_entropy(z, target, reduction="none", temperature=temperature)
    return (row * temperature).sum()


def distilled(z, target, ids):
    targets = ll.SparseTargets(ids, torch.full(ids.shape, -2.0, device=ids.device))
    how = {"divergence": "reverse_kl", "support": "truncate", "temperature": 2.0}
    return ll.topk_distill(z, targets, labels=target, ce_weight=0.3, **how)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("loss", "dtype", "how"),
    [
        (smoothed, FP32, Cut(3, 16)), (smoothed, BF16, Cut(5, 8, kept=True)),
        (smoothed, FP16, Cut(5, 8)), (statistics, FP32, Cut(5, 8)), (statistics, BF16, Cut(2, 8)),
        (by_row, FP32, Cut(5, 8)), (distilled, FP32, Cut(5, 8)),
    ],
)  # fmt: skip
def test_by_the_kernels(loss, dtype, how, cut, device):
    """Values and gradients as exact as those of whole rows."""
    cut(how)
    rows, width = 5, 16
    hidden, weight = (torch.randn(n, width, device=device).to(dtype) for n in (rows, V))
    bias, target = torch.randn(V, device=device).to(dtype), torch.arange(rows, device=device)
    ids = torch.randint(0, V, (rows, 3), device=device)
    target[4] = -100
    truth, plain, ours = (leaves(*(t.to(kind) for t in (hidden, weight, bias)))
                          for kind in (torch.float64, dtype, dtype))  # fmt: skip
    with ll.impl("triton"):
        found = [loss(F.linear(*plain), target, ids)]
        found.append(loss(ll.LinearLogits(*ours, workspace=1), target, ids))
    found.append(loss(F.linear(*truth), target, ids))
    torch.autograd.backward(found)
    a, b, c = found
    assert (b - c).abs() <= 2 * (a - c).abs() + 1e-5 * c.abs()
    for a, b, c in zip(plain, ours, truth, strict=True):
        error = (a.grad.double() - c.grad).norm()
        once = 0.5 * torch.finfo(dtype).eps * c.grad.norm()  # rounded
        assert (b.grad.double() - c.grad).norm() <= 1.5 * error + once


def test_many_blocks_are_no_less_exact(cut, device):
    """d_hidden summed over many blocks: error against fp64 at most 1.1 × the unfused."""
    hidden = torch.randn(40, 16, device=device).bfloat16()
    weight = (torch.randn(512, 16, device=device) * 0.3).bfloat16()
    target = torch.randint(0, 512, (40,), device=device)

    def gradients(dtype, columns):
        parts = leaves(hidden.to(dtype), weight.to(dtype), None)
        logits = F.linear(*parts)
        if columns is not None:
            cut(Cut(40, columns, kept=True))
            logits = ll.LinearLogits(*parts, workspace=1)
        ll.cross_entropy(logits, target).backward()
        return [t.grad.double() for t in parts[:2]]

    truth, plain = gradients(torch.float64, None), gradients(torch.bfloat16, None)
    ours = gradients(torch.bfloat16, 16)
    for a, b, c in zip(plain, ours, truth, strict=True):
        assert (b - c).norm() <= 1.1 * (a - c).norm()


@pytest.mark.usefixtures("nobody_looks")
def test_a_bad_target_is_nan_in_every_block(cut, device):
    cut(Cut(N, 8))
    hidden, weight, _, target = make(torch.float32, device, lead=(N,))
    target[2], target[3] = V, -5
    parts = leaves(hidden, weight, None)
    loss = ll.cross_entropy(ll.LinearLogits(*parts, workspace=1), target, reduction="none")
    good = torch.ones(N, dtype=torch.bool, device=device)
    good[2:4] = False
    assert loss[~good].isnan().all()
    assert loss[good].isfinite().all()
    loss.sum().backward()
    assert parts[0].grad[good].isfinite().all()
    assert parts[0].grad[~good].isnan().all()
