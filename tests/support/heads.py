"""Heads of a few classes, with and without an adapter, and every loss over them."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut

N, D, V, R = 7, 6, 23, 3


SMALL = dict(choose_cut.SMALL)  # conftest.py replaces choose_cut.SMALL in each test
# All logits at once, chunks of rows, blocks of columns, some of them kept, and groups of rows.
CUTS = {
    "small": None,
    "rows": Cut(3),
    "columns": Cut(N, 8),
    "kept": Cut(N, 8, kept=True),
    "rows and columns": Cut(3, 8),
}


def cut_like(way, monkeypatch):
    """Heads are cut like CUTS[way] from here on, for every loss that can be."""
    how = CUTS[way]
    if how is None:
        monkeypatch.setattr(choose_cut, "SMALL", SMALL)
    else:
        choose = lambda work, *_: how if work.merges else Cut(3)  # noqa: E731
        monkeypatch.setattr(choose_cut, "forced", choose)


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


def tensors(dtype=torch.float64, device="cpu", lead=(N,), bias=True, needs=(True,) * 5, pair=True):
    """The leaves [hidden, weight, bias, *low_rank], without the last two if not `pair`; targets."""
    hidden, weight, b, target = make(dtype, device, bias, lead)
    g = torch.Generator().manual_seed(9)
    both = [torch.randn(*s, R, generator=g, dtype=torch.float64) for s in (lead, (V,))]
    found = (hidden, weight, b, *(t.to(device, dtype) for t in both if pair))
    pairs = zip(found, needs, strict=False)
    return [None if t is None else t.clone().requires_grad_(need) for t, need in pairs], target


def materialised(leaves):
    hidden, weight, bias, *pair = leaves
    z = F.linear(hidden, weight, bias)
    return z + F.linear(*pair) if pair else z


def lazily(leaves, **options):
    hidden, weight, bias, *pair = leaves
    return ll.LinearLogits(hidden, weight, bias, low_rank=tuple(pair) or None, **options)


def outcome(loss, z, leaves):
    """The loss and the gradients of all leaves, under a random upstream gradient."""
    value = loss(z)
    g = torch.Generator().manual_seed(3)
    upstream = torch.randn(value.shape, generator=g, dtype=torch.float64).to(value)
    value.backward(upstream)
    return value.detach(), [None if t is None else t.grad for t in leaves]


def assert_as_materialised(loss, **how):
    """`loss` of the logits and the targets has the values and gradients of plain logits."""
    (want, target), (got, _) = tensors(**how), tensors(**how)
    want, got = (
        outcome(lambda z: loss(z, target), f(t), t)
        for f, t in ((materialised, want), (lazily, got))
    )
    assert_same(got, want, rtol=1e-9, atol=1e-9)
