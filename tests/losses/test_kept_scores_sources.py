"""kept_scores over every source of logits, against a tensor of logits."""

import pytest
import torch

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support.kept_scores import N, V, gradients, make
from tests.support.laws import ROUNDING, error
from tests.support.rank_threads import on_ranks
from tests.support.sources import SOURCES

D = 5


def head(device):
    g = torch.Generator().manual_seed(5)
    h, w = (torch.randn(size, D, generator=g).to(device).requires_grad_() for size in (N, V))
    _, target, kept = make(device=device)
    target[5] = -100
    kept[6] = -1
    return h, w, target, kept


def assert_as_tensor(logits, tensor, leaves, target, kept, mass):
    how = {"temperature": torch.linspace(0.5, 2, N, device=kept.device), "softcap": 6.0}
    got = ll.kept_scores(logits, target, kept, mass=mass, **how)
    want = ll.kept_scores(tensor, target, kept, mass=mass, **how)
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=ROUNDING, atol=ROUNDING)
    for a, b in zip(gradients(got, *leaves), gradients(want, *leaves), strict=True):
        assert error(a, b) < ROUNDING


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
@pytest.mark.parametrize("source", SOURCES)
def test_sources(source, mass, device):
    h, w, target, kept = head(device)
    tensor = h @ w.T * (0.5 if "scaled" in source else 1)
    assert_as_tensor(SOURCES[source](h, w), tensor, (h, w), target, kept, mass)


CUTS = {
    "on chip": lambda work, *_: Cut(work.rows, on_chip=work.merges and work.narrow),
    "blocks": lambda work, *_: Cut(3, 16) if work.merges else Cut(3),
}


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_of_a_head(cut, mass, monkeypatch, device):
    """Without the mass, a head has whole rows, because the logits at K ids are not merged."""
    cuts = []
    monkeypatch.setattr(
        choose_cut, "forced", lambda *args: cuts.append(CUTS[cut](*args)) or cuts[-1]
    )
    h, w, target, kept = head(device)
    with ll.impl("triton"):
        assert_as_tensor(ll.LinearLogits(h, w), h @ w.T, (h, w), target, kept, mass)
    assert cuts
    assert all((c.on_chip or c.columns is not None) == mass for c in cuts)


def test_a_small_head(monkeypatch, device):
    monkeypatch.setattr(choose_cut, "is_small", lambda *_: True)
    h, w, target, kept = head(device)
    for mass in (False, True):
        assert_as_tensor(ll.LinearLogits(h, w), h @ w.T, (h, w), target, kept, mass)


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
@pytest.mark.parametrize("widths", [(20, 17), (5, 0, 32)])
def test_ranks(widths, mass, device):
    """Each id is read on the rank that owns it, and the scores have the same bits on all ranks."""
    x, target, kept = make(device=device)
    target[5], kept[6] = -100, -1

    def work(ranks):
        part = x.split(widths, -1)[ranks.index].clone().requires_grad_()
        scores = ll.kept_scores(ll.VocabShard(part, ranks), target, kept, softcap=5.0, mass=mass)
        return [t.detach() for t in scores if t is not None], *gradients(scores, part)

    found = on_ranks(len(widths), work)
    leaf = x.clone().requires_grad_()
    want = ll.kept_scores(leaf, target, kept, softcap=5.0, mass=mass)
    for scores, _ in found:
        for a, b, c in zip(scores, found[0][0], want, strict=False):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c.detach(), rtol=ROUNDING, atol=ROUNDING)
    d = torch.cat([part for _, part in found], -1)
    assert error(d, gradients(want, leaf)[0]) < ROUNDING


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
@pytest.mark.parametrize("source", ["tensor", "head"])
def test_compiled(source, mass, device):
    h, w, target, kept = head(device)

    def f(h, w):
        logits = ll.LinearLogits(h, w) if source == "head" else h @ w.T
        return ll.kept_scores(logits, target, kept, temperature=0.7, mass=mass)

    torch._dynamo.reset()
    got = torch.compile(f, fullgraph=True, backend="aot_eager")(h, w)
    want = f(h, w)
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)
    for a, b in zip(gradients(got, h, w), gradients(want, h, w), strict=True):
        assert error(a, b) < ROUNDING
