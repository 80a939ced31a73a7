"""slot_loss over every source of logits, against a tensor of logits."""

import pytest
import torch

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.laws import ROUNDING, error, value_and_grad
from tests.support.rank_threads import on_ranks
from tests.support.sources import SOURCES
from tests.support.sparse_teachers import ROWS, V, make, masked

D = 5


def blend(slots, share):
    """A mixture of forward and reverse KL over slots and tails, and a metric."""
    p = torch.cat((slots.teacher, slots.teacher_tail[:, None]), -1)
    q = torch.cat((slots.student, slots.student_tail[:, None]), -1)
    weight = share[:, None] * p.exp() - (1 - share[:, None]) * q.exp()
    return (weight * (p - q)).sum(-1), slots.student.exp().sum(-1)


def without_tail(slots, share):
    p, q = slots.teacher, slots.student
    return share * (p.exp() - q.exp()).square().sum(-1) - q.sum(-1), q.exp().sum(-1)


FORMULAS = {"tail": blend, "slots": without_tail}


def head(device):
    g = torch.Generator().manual_seed(5)
    h, w = (torch.randn(size, D, generator=g).to(device).requires_grad_() for size in (ROWS, V))
    share = torch.linspace(0.1, 0.9, ROWS, device=device).requires_grad_()
    _, targets = make(device=device)
    return h, w, share, masked(targets, "full")


def assert_as_tensor(logits, tensor, leaves, share, targets, name, reduction):
    how = {
        "rows": (share,), "temperature": torch.linspace(0.5, 2, ROWS, device=share.device),
        "softcap": 6.0, "tail": name == "tail", "reduction": reduction,
        "mask": torch.arange(ROWS, device=share.device) != 3,
    }  # fmt: skip
    found = [ll.slot_loss(FORMULAS[name], z, targets, **how) for z in (logits, tensor)]
    assert error(found[0][1], found[1][1]) < ROUNDING
    d = []
    for value, _ in found:
        upstream = torch.linspace(-1, 2, value.numel(), device=share.device).view(value.shape)
        assert error(value.detach(), found[1][0].detach()) < ROUNDING
        d.append(torch.autograd.grad(value, (*leaves, share), upstream))
    for a, b in zip(*d, strict=True):
        assert error(a, b) < ROUNDING


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("source", SOURCES)
def test_sources(source, name, reduction, impl, device):
    h, w, share, targets = head(device)
    tensor = h @ w.T * (0.5 if "scaled" in source else 1)
    assert_as_tensor(SOURCES[source](h, w), tensor, (h, w), share, targets, name, reduction)


CUTS = {
    "on chip": lambda work, *_: Cut(work.rows, on_chip=work.merges and work.narrow),
    "blocks": lambda work, *_: Cut(3, 16) if work.merges else Cut(3),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_of_a_head(cut, name, monkeypatch, device):
    """With a tail, a head has whole rows, because tails are not merged."""
    cuts = []
    monkeypatch.setattr(
        choose_cut, "forced", lambda *args: cuts.append(CUTS[cut](*args)) or cuts[-1]
    )
    h, w, share, targets = head(device)
    with ll.impl("triton"):
        z = ll.LinearLogits(h, w)
        assert_as_tensor(z, h @ w.T, (h, w), share, targets, name, "mean")
    assert cuts
    assert all((c.on_chip or c.columns is not None) == (name != "tail") for c in cuts)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_small_head(name, monkeypatch, device):
    monkeypatch.setattr(choose_cut, "is_small", lambda *_: True)
    h, w, share, targets = head(device)
    z = ll.LinearLogits(h, w)
    assert_as_tensor(z, h @ w.T, (h, w), share, targets, name, "mean")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("widths", [(20, 33), (5, 0, 48)])
def test_ranks(widths, name, device):
    h, w, share, targets = head(device)
    x, share = (h @ w.T).detach(), share.detach()
    upstream = torch.linspace(-1, 2, ROWS, device=device)

    def loss(z):
        return ll.slot_loss(
            FORMULAS[name], z, targets, rows=(share,), tail=name == "tail", reduction="none"
        )[0]

    want, d_want = value_and_grad(loss, x, upstream)
    parts = x.split(widths, -1)

    def work(ranks):
        part = parts[ranks.index]
        return value_and_grad(lambda x: loss(ll.VocabShard(x, ranks)), part, upstream)

    found = on_ranks(len(widths), work)
    for got, _ in found:
        assert error(got, want) < ROUNDING
    assert error(torch.cat([d for _, d in found], -1), d_want) < ROUNDING


@pytest.mark.parametrize("source", ["tensor", "head"])
@pytest.mark.parametrize("name", FORMULAS)
def test_compiled(source, name, device):
    h, w, share, targets = head(device)

    def loss(h, w, share):
        z = ll.LinearLogits(h, w) if source == "head" else h @ w.T
        return ll.slot_loss(FORMULAS[name], z, targets, rows=(share,), tail=name == "tail")

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = [f(h, w, share) for f in (compiled, loss)]
    assert error(found[0][1], found[1][1]) < ROUNDING
    d = [torch.autograd.grad(value, (h, w, share)) for value, _ in found]
    for a, b in zip(*d, strict=True):
        assert error(a, b) < ROUNDING


@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck(name):
    x, targets = make(rows=3, vocab=8)
    share = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)

    def loss(x, share):
        return ll.slot_loss(
            FORMULAS[name], x, targets, rows=(share,), temperature=1.5, reduction="none"
        )[0]

    assert torch.autograd.gradcheck(loss, (x.requires_grad_(), share.requires_grad_()), atol=1e-6)
