"""kept_scores: the softmax over the ids that a sampler kept, against fp64, and its errors."""

import math

import pytest
import torch

import logitless as ll
from logitless.core import call
from tests.support import oracle
from tests.support.laws import ROUNDING, assert_each_as_good_as_torch, gradients
from tests.support.pairwise import pairwise

N, V, K = 7, 37, 6
INF = math.inf
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("logprob", "entropy", "log_mass")


def make(dtype=torch.float32, device="cpu", scale=2.0):
    """Logits, targets and kept ids of rows that differ in the kind of their set."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(N, V, generator=g, dtype=torch.float64) * scale).to(dtype)
    kept = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(N)])
    target = kept[:, 2].clone()
    kept[0, 3:] = -1  # a set of three
    kept[1, [0, 4]] = target[1]  # the target three times
    kept[2, 3] = kept[2, 0].clone()  # another id twice
    kept[3] = target[3]  # only the target
    kept[4, [0, 5]] = -1  # empty slots first and last
    return x.to(device), target.to(device), kept.to(device)


OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "softcap": {"softcap": 3.0, "temperature": 1.7},
    "row temperature": {"temperature": torch.linspace(0.5, 2, N)},
}


@pairwise(how=OPTIONS, dtype=DTYPES, mass=[False, True])
@pytest.mark.usefixtures("small_blocks")
def test_definitions(how, dtype, mass, device):
    if "softcap" in how and device != "cpu":
        dtype = torch.float32  # the tanh of 16-bit logits is less exact (kernels/numerics.py)
    x, target, kept = make(dtype, device)
    how = {key: t.to(device) if isinstance(t, torch.Tensor) else t for key, t in how.items()}
    how["mass"] = mass
    wanted = NAMES if mass else NAMES[:2]

    def naive(i):
        return lambda x: oracle.kept_scores(x, target, kept, **how)[i]

    def ours(x):
        found = ll.kept_scores(x, target, kept, **how)
        assert isinstance(found, ll.KeptScores)
        assert mass or found.log_mass is None
        return {key: getattr(found, key) for key in wanted}

    assert_each_as_good_as_torch(
        ours, {key: naive(i) for i, key in enumerate(wanted)}, x, computed_in=torch.float32
    )


# --- meanings


def test_the_mass_is_what_the_ratio_lacks(impl, device):
    """log p[target] is the sampler's log-probability plus log_mass."""
    x, target, kept = make(device=device)
    got = ll.kept_scores(x, target, kept, mass=True)
    torch.testing.assert_close(got.logprob + got.log_mass, ll.token_logprobs(x, target))
    assert (got.log_mass < 0).all()


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
def test_sets_without_the_target_or_without_ids(mass, impl, device):
    x, target, kept = make(device=device)
    kept[0] = (target[0] + 1 + torch.arange(K, device=device)) % V  # without the target
    kept[1] = -1
    leaf = x.clone().requires_grad_()
    got = ll.kept_scores(leaf, target, kept, mass=mass)
    assert got.logprob[:2].tolist() == [-INF, -INF]
    assert got.entropy[0] > 0
    assert got.entropy[1] == 0
    if mass:
        assert got.log_mass[0].isfinite()
        assert got.log_mass[1] == -INF
        (d,) = torch.autograd.grad(got.log_mass.sum(), leaf, retain_graph=True)
        assert d[0].any()
        assert not d[1].any()
    # The gradient of the square of -inf is infinite.
    for f in (torch.square, torch.exp, torch.neg):
        (d,) = torch.autograd.grad(f(got.logprob).sum(), leaf, retain_graph=True)
        assert not d[:2].any()
        assert d.isfinite().all()
        assert d[2:].any(-1)[[0, 2, 3, 4]].all()  # row 3 keeps one id, so that its gradient is 0
    (d,) = torch.autograd.grad(got.entropy.sum(), leaf)
    assert d[0].any()
    assert not d[1].any()


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
def test_strange_logits(mass, impl, device):
    x, target, kept = make(device=device)
    x[0, kept[0, 0]] = -INF  # an id of probability 0
    x[1, target[1]] = -INF  # the target's
    x[2, kept[2]] = -INF  # all kept ids
    x[4, kept[4, 3]] = torch.nan
    leaf = x.requires_grad_()
    got = ll.kept_scores(leaf, target, kept, mass=mass)
    want = oracle.kept_scores(x.double(), target, kept, mass=True)
    for a, b in zip(got, want, strict=True):
        if a is not None:
            torch.testing.assert_close(a.double()[:4], b[:4], rtol=ROUNDING, atol=ROUNDING)
            assert a[4].isnan()
            assert a[5:].isfinite().all()
    assert got.logprob[1:3].tolist() == [-INF, -INF]
    assert got.entropy[2] == 0
    d = gradients(got, leaf)[0]
    exact = x.detach().double().requires_grad_()
    want = gradients(oracle.kept_scores(exact, target, kept, mass=mass), exact)[0]
    finite = [0, 1, 2, 3, 5, 6]
    torch.testing.assert_close(d.double()[finite], want[finite], rtol=ROUNDING, atol=ROUNDING)
    assert not d[2].any()
    assert d[4].isnan().any()


def test_without_mass_only_kept_logits_are_read(impl, device):
    x, target, kept = make(device=device)
    want = ll.kept_scores(x, target, kept)
    columns = torch.where(kept == -1, V, kept)
    inside = torch.zeros(N, V + 1, device=device).scatter(1, columns, 1)[:, :V].bool()
    leaf = torch.where(inside, x, torch.nan).requires_grad_()
    got = ll.kept_scores(leaf, target, kept)
    assert torch.equal(got.logprob, want.logprob)
    assert torch.equal(got.entropy, want.entropy)
    d = gradients(got, leaf)[0]
    assert d.isfinite().all()
    assert not d[~inside].any()


def test_improbable_sets_are_exact(impl, device):
    """The scores come from the kept logits, and not from their log-probabilities."""
    x, target, kept = make(device=device)
    x = x.clone()
    x[:, kept[0, 0]] = 0.0
    rest = torch.ones_like(x, dtype=torch.bool).scatter(1, kept.clamp(min=0), False)
    improbable = torch.where(rest, x + 5e4, x)
    for a, b in zip(
        ll.kept_scores(improbable, target, kept, mass=True)[:2],
        ll.kept_scores(x, target, kept)[:2],
        strict=True,
    ):
        torch.testing.assert_close(a, b)


# --- errors


@pytest.mark.parametrize("mass", [False, True], ids=["kept", "mass"])
@pytest.mark.parametrize("slots", [0, K])
def test_out_of_range_where_no_value_is_checked(slots, mass, impl, monkeypatch, device):
    """As on a GPU: a row with a target or an id out of range is NaN, and no other row."""
    monkeypatch.setattr(call, "reads_values", lambda _: False)
    x, target, kept = make(device=device)
    kept = kept[:, :slots]
    target[2] = V
    bad = [2]
    if slots:
        kept[4, 1], kept[6, 0] = V + 3, -2
        bad += [4, 6]
    leaf = x.clone().requires_grad_()
    got = ll.kept_scores(leaf, target, kept, mass=mass)
    for t in got:
        if t is not None:
            assert t.isnan().nonzero().flatten().tolist() == bad
    d = gradients(got, leaf)[0]
    assert d.isnan().all(-1).nonzero().flatten().tolist() == bad
    assert d.isnan().any(-1).nonzero().flatten().tolist() == bad
