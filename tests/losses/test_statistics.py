"""The statistics of a row against the fp64 oracle, and the laws of their formulas."""

import math

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.inputs import V, make, on
from tests.support.laws import assert_each_as_good_as_torch
from tests.support.pairwise import pairwise
from tests.support.statistics import WANTS, grads

INF = math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
READS = {
    "loss": lambda x, t: ll.cross_entropy(x, t, reduction="none"),
    "smoothed": lambda x, t: ll.cross_entropy(x, t, reduction="none", label_smoothing=0.4),
    "entropy": lambda x, t: ll.entropy(x),
    "logprob": lambda x, t: ll.token_logprobs(x, t),
    "kept_scores": lambda x, t: sum(
        ll.kept_scores(x, t, torch.stack((t, t // 2), -1), temperature=0.7, mass=True)
    ),
    "cold": lambda x, t: ll.score(x, t, temperature=0.5).logprob,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.usefixtures("small_blocks")
def test_a_common_offset_changes_nothing(name, offset, device):
    """z + const: the same numbers to fp32 rounding, where the addition itself is exact."""
    x = (torch.randn(3, 70, device=device) * 512).round() / 512  # 1e4 + x needs no more digits
    assert torch.equal((x + offset) - offset, x)
    target = torch.randint(0, 70, (3,), device=device)
    results = []
    for shifted in (x, x + offset):
        leaf = shifted.requires_grad_()
        value = READS[name](leaf, target)
        results.append((value.detach(), *torch.autograd.grad(value.sum(), leaf)))
    for plain, moved in zip(*results, strict=True):
        torch.testing.assert_close(moved, plain, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("small_blocks")
def test_entropy_is_between_0_and_log_V(scale, dtype, device):
    V = 100
    x = (torch.randn(4, V, device=device) * scale).to(dtype)
    x[0] = 0
    x[1, 1:] = -INF
    h = ll.entropy(x)
    assert (h >= 0).all()
    assert (h <= math.log(V) * (1 + 1e-6)).all()
    assert h[1] == 0
    torch.testing.assert_close(h[0].item(), math.log(V), rtol=1e-6, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.usefixtures("small_blocks")
def test_the_gradient_of_a_row_sums_to_what_the_formula_says(temperature, device):
    """Σ_i dz_i = a - b H + Σ_k g_k + V g_c: 1 of lse, 0 of entropy, K of picked, V of total."""
    x = torch.randn(3, 70, device=device) * 2
    ids = torch.randint(0, 70, (3, 4), device=device)
    got = grads(ll.row_stats, x, ids, temperature=temperature, **WANTS)
    sums = {
        name: got[f"d_{name}"].double().sum(-1) for name in ("lse", "picked", "entropy", "total")
    }
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(3, generator=generator).to(device)
    generator.manual_seed(3)
    each_id = torch.randn(3, 4, generator=generator).to(device)
    wants = {
        "lse": upstream,
        "picked": each_id.sum(-1),
        "entropy": torch.zeros_like(upstream),
        "total": 70 * upstream,
    }
    for name, want in wants.items():
        torch.testing.assert_close(
            sums[name], want.double() / temperature, rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("place", [0, 40, 69])
@pytest.mark.usefixtures("small_blocks")
def test_a_strange_logit_stays_in_its_row(place, device):
    """NaN makes its row NaN, +inf its lse +inf, and a row of -inf is -inf without gradient."""
    x = torch.randn(5, 70, device=device)
    ids = torch.randint(0, 70, (5,), device=device)
    want = ll.row_stats(x, ids, **WANTS)
    odd = x.clone()
    odd[1, place], odd[2, place], odd[3] = torch.nan, INF, -INF
    leaf = odd.requires_grad_()
    got = ll.row_stats(leaf, ids, **WANTS)
    for name in ("lse", "picked", "entropy", "total", "argmax"):
        for row in (0, 4):
            assert torch.equal(getattr(got, name)[row], getattr(want, name)[row]), name
    assert got.lse[1].isnan()
    assert got.entropy[1].isnan()
    assert got.lse[2] == INF
    assert got.lse[3] == -INF
    assert got.entropy[3] == 0
    assert got.argmax[3] == 0
    (got.lse + got.picked + got.entropy).sum().backward()
    assert leaf.grad[1].isnan().any()
    assert not leaf.grad[3].any()
    assert leaf.grad[[0, 4]].isfinite().all()


@pytest.mark.usefixtures("small_blocks")
def test_argmax_is_the_lowest_of_equals(device):
    x = torch.zeros(4, 101, device=device)
    x[1, [33, 70]] = 2
    x[2, [0, 100]] = 2
    x[3, 64:] = 1
    for splits in (1, 3):
        with config.override(splits=splits):
            assert ll.row_stats(x, argmax=True).argmax.tolist() == [0, 33, 0, 64]


@pytest.mark.usefixtures("small_blocks")
def test_ids_may_repeat_and_there_may_be_none(device):
    x = torch.randn(2, 70, device=device, requires_grad=True)
    ids = torch.tensor([[5, 5, 5], [0, 69, 0]], device=device)
    (got,) = torch.autograd.grad(ll.row_stats(x, ids).picked.sum(), x)
    want = torch.zeros_like(x).scatter_add_(1, ids, torch.ones(2, 3, device=device))
    assert torch.equal(got, want)
    nothing = ll.token_logprobs(x, ids[:, :0])
    assert nothing.shape == (2, 0)
    (got,) = torch.autograd.grad(nothing.sum(), x)
    assert not got.any()


@pytest.mark.usefixtures("small_blocks")
def test_what_is_not_asked_for_is_none(device):
    x = torch.randn(2, 5, device=device)
    assert ll.row_stats(x)[1:] == (None,) * 6
    stats = ll.row_stats(x, torch.zeros(2, dtype=torch.int64, device=device), **WANTS)
    assert all(value is not None for value in stats)
    assert stats.argmax.dtype == torch.int64


@pytest.mark.usefixtures("impl")
def test_an_id_past_63_bits_is_out_of_range(device, monkeypatch):
    """2**64 - 100 is not -100."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    x = torch.randn(3, 300, device=device)
    ids = torch.tensor([2**64 - 100, 2**63, 2], dtype=torch.uint64, device=device)
    head = ll.LinearLogits(torch.randn(3, 4, device=device), torch.randn(300, 4, device=device))
    for source in (x, head):
        with pytest.raises(IndexError, match=r"target must be in \[0, 300\) or ignore_index"):
            ll.cross_entropy(source, ids)
        with pytest.raises(IndexError, match=r"ids must be in \[0, 300\), got 9223372036854775807"):
            ll.row_stats(source, ids[:, None], ignore_index=-100)


def test_the_gradient_of_an_infinite_logit_is_torchs(impl, device):
    """NaN at +inf, 0 elsewhere in its row, and other rows as ever."""
    x = torch.tensor([[1.0, torch.inf, 2.0], [1.0, 2.0, 3.0]], device=device, requires_grad=True)
    (want,) = torch.autograd.grad(x.logsumexp(-1).sum(), x)
    for splits in (1, 3):
        with config.override(block_v=16, splits=splits):
            (got,) = torch.autograd.grad(ll.logsumexp(x).sum(), x)
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0])
def test_entropy_beside_minus_infinity_when_cold(temperature, impl, device):
    """At a low temperature the coefficients are large, and 0 times them times -inf was NaN."""
    x = torch.tensor([[1.0, -INF, 1.0, 0.5], [0.0, 0.0, -INF, -INF]], device=device)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    (got,) = torch.autograd.grad(ll.entropy(leaf, temperature=temperature).sum(), leaf)
    logp = (wide / temperature).log_softmax(-1)
    terms = torch.where(logp == -INF, 0.0, logp.exp() * logp.clamp(min=-1e6))
    (want,) = torch.autograd.grad(-terms.sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 5.0},
    "both": {"temperature": 1.7, "softcap": 4.0},
    "rows": {"temperature": torch.tensor([0.5, 1.0, 1.5])},
}


@pairwise(how=OPTIONS, dtype=DTYPES, K=[1, 5, 70])
@pytest.mark.usefixtures("small_blocks")
def test_definitions(dtype, how, K, device):
    """Every function that only reads, for every temperature and softcap."""
    x, target = make((3,), dtype=dtype, device=device)
    how = on(how, device)
    ids = torch.randint(0, V, (3, K), device=device)
    ids[:, -1] = ids[:, 0]  # ids may repeat

    def ours(x):
        score = ll.score(x, target, **how)._asdict()
        stats = ll.row_stats(x, ids, **how, entropy=True, total=True, argmax=True)._asdict()
        for found in (score, stats):
            assert torch.equal(found.pop("argmax"), x.argmax(-1))
            assert found.pop("rank") is None
        return {
            "logsumexp": ll.logsumexp(x, **how),
            "entropy": ll.entropy(x, **how),
            "token_logprobs": ll.token_logprobs(x, target, **how),
            "token_logprobs, K ids": ll.token_logprobs(x, ids, **how),
            **{f"score.{name}": t for name, t in score.items()},
            **{f"row_stats.{name}": t for name, t in stats.items()},
        }

    def naive(name):
        function, _, field = name.rpartition(".")
        function = {"lse": "logsumexp", "logprob": "token_logprobs"}.get(field, field)
        function, _, several = function.partition(", ")
        if function in ("logsumexp", "entropy", "total"):
            return lambda x: getattr(oracle, function)(x, **how)
        at = ids if several or name.startswith("row_stats") else target
        return lambda x: getattr(oracle, function)(x, at, **how)

    names = ["logsumexp", "entropy", "token_logprobs", "token_logprobs, K ids"]
    names += [f"score.{name}" for name in ("logprob", "entropy", "lse")]
    names += [f"row_stats.{name}" for name in ("lse", "picked", "logprob", "entropy", "total")]
    assert_each_as_good_as_torch(ours, {name: naive(name) for name in names}, x)


@pytest.mark.parametrize("K", [1, 3])
def test_a_row_of_minus_inf_has_no_gradient_for_its_ids(K, impl, device):
    x, _ = make(device=device)
    x[1] = -torch.inf
    leaf = x.requires_grad_()
    ids = torch.tensor([[0, 5, 0]] * 4, device=device)[:, :K]
    ll.token_logprobs(leaf, ids)[[0, 2, 3]].sum().backward()
    assert torch.equal(leaf.grad[1], torch.zeros(V, device=device))
    leaf.grad = None
    ll.token_logprobs(leaf, ids).sum().backward()
    assert torch.equal(leaf.grad[1], torch.zeros(V, device=device))
    assert leaf.grad.isfinite().all()


def test_logprob_is_exact_under_an_offset(impl, device):
    x = torch.randn(4, V, device=device) + 1e4
    ids = torch.randint(0, V, (4,), device=device)
    want = torch.log_softmax(x.double(), -1).gather(1, ids[:, None])[:, 0]
    stats = ll.row_stats(x, ids)
    torch.testing.assert_close(stats.logprob.double(), want, rtol=2e-6, atol=1e-6)
    assert (stats.picked - stats.lse - want).abs().max() > 1e-4
