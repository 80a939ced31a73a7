"""The laws of losses over a head; results per row, frozen heads, and kept logits."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.head import Head
from logitless.heads.linear import HeadLogits
from tests.support.heads import (
    CUTS,
    LOSSES,
    D,
    N,
    V,
    assert_as_materialised,
    cut_like,
    lazily,
    leaves,
    make,
    materialised,
    outcome,
    tensors,
)
from tests.support.sizes import DEVICE


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    """Runs a test with each way to cut a head."""
    cut_like(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "adapter"])
def pair(request):
    """Runs a test with a plain head, and with a second weight."""
    return request.param


class TestLaws:
    """What holds for every head, however it is cut."""

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("name", LOSSES)
    def test_as_if_materialised(self, name, reduction, cut, pair, device):
        loss = functools.partial(LOSSES[name], reduction=reduction)
        for bias, lead in ((True, (N,)), (False, (N, 1)), (True, (1, N))):
            assert_as_materialised(loss, device=device, bias=bias, lead=lead, pair=pair)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("needs", [*itertools.product([False, True], repeat=3)][1:])
    @pytest.mark.parametrize("of_pair", [(True, True), (False, True)])
    def test_exactly_what_requires_a_gradient_gets_one(
        self, of_pair, needs, reduction, cut, pair, device
    ):
        loss = functools.partial(ll.cross_entropy, reduction=reduction)
        assert_as_materialised(loss, device=device, needs=(*needs, *of_pair), pair=pair)

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_a_second_backward(self, reduction, cut, pair, device):
        leaves, target = tensors(device=device, pair=pair)
        loss = ll.cross_entropy(lazily(leaves), target, reduction=reduction).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        kept = [t.clone() for t in first]
        second = torch.autograd.grad(3 * loss, leaves)
        for a, b, c in zip(first, kept, second, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(c, 3 * b)

    @pytest.mark.parametrize("drop_ignored", [True, False])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_ignored_rows_may_hold_nan(self, reduction, drop_ignored, cut, pair, device):
        leaves, target = tensors(device=device, pair=pair)
        live, of_rows = target != -100, (leaves[0], *leaves[3:4])
        with torch.no_grad():
            for t in of_rows:
                t[~live] = torch.nan
        loss = ll.cross_entropy(
            lazily(leaves, drop_ignored=drop_ignored), target, reduction=reduction
        )
        found = torch.autograd.grad(loss.sum(), leaves)
        plain = materialised([t[live] if len(t) == N else t for t in leaves])
        want = torch.autograd.grad(
            ll.cross_entropy(plain, target[live], reduction=reduction).sum(), leaves
        )
        torch.testing.assert_close(found, want)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_all_ignored_or_no_rows(self, reduction, cut, pair, device):
        for n, to in ((N, -100), (0, 0)):
            leaves, target = tensors(device=device, pair=pair)
            z = lazily([t[:n] if len(t) == N else t for t in leaves])
            loss = ll.cross_entropy(z, torch.full_like(target[:n], to), reduction=reduction)
            assert loss.shape == ((n,) if reduction == "none" else ())
            assert not loss.any()
            loss.sum().backward()
            for t in leaves:
                assert not t.grad.any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("wide", [False, True])
    def test_other_dtypes(self, dtype, wide, cut, pair, device):
        """The error against fp64 is at most twice the error of plain logits."""
        options = {"logits_dtype": torch.float32} if wide and dtype != torch.float32 else {}
        truth, target = tensors(dtype, device, pair=pair)
        truth = [t.detach().double().requires_grad_() for t in truth]
        plain, got = (tensors(dtype, device, pair=pair)[0] for _ in range(2))
        loss = lambda z: ll.cross_entropy(z, target)  # noqa: E731
        exact = outcome(loss, materialised(truth), truth)
        near = outcome(loss, materialised(plain), plain)
        ours = outcome(loss, lazily(got, **options), got)
        assert [t.dtype for t in ours[1]] == [dtype] * len(got)
        for e, p, o in zip(
            (exact[0], *exact[1]), (near[0], *near[1]), (ours[0], *ours[1]), strict=True
        ):
            floor = torch.finfo(dtype).eps * e.abs().max()
            assert (o - e).abs().max() <= 2 * (p - e).abs().max() + floor

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_main_grad(self, reduction, cut, pair, device):
        """Only the gradient of the weight goes to main_grad, by every backward."""
        (want, target), (got, _) = (tensors(torch.float32, device, pair=pair) for _ in range(2))
        main_grad = torch.ones_like(want[1])
        z = lazily(got, main_grad=main_grad)
        loss = ll.cross_entropy(z, target, reduction=reduction).sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
        ll.cross_entropy(materialised(want), target, reduction=reduction).sum().backward()
        assert got[1].grad is None
        torch.testing.assert_close(main_grad - 1, 2 * want[1].grad)
        for i in {*range(len(got))} - {1}:
            torch.testing.assert_close(got[i].grad, 2 * want[i].grad)

    def test_a_teacher(self, cut, pair, device):
        teacher = [t.detach() * 1.5 for t in tensors(device=device, pair=pair)[0]]
        for given in (lazily(teacher), materialised(teacher)):
            assert_as_materialised(
                lambda z, _, given=given: ll.kl_div(z, given, direction="reverse"),
                device=device, pair=pair,
            )  # fmt: skip

    def test_statistics_and_topk(self, cut, pair, device):
        leaves, target = tensors(device=device, pair=pair)
        how, found = {"entropy": True, "total": True, "argmax": True}, []
        ids = torch.randint(0, V, (N, 3), device=device)
        for z in (lazily(leaves), materialised(leaves)):
            stats = ll.row_stats(z, ids, **how)
            numbers = [*stats[:4], ll.token_logprobs(z, ids), ll.entropy(z), ll.logsumexp(z)]
            numbers += ll.score(z, target)[:3]
            d = torch.autograd.grad(sum(t.sin().sum() for t in numbers), leaves)
            topk = ll.capture_topk(z, 4)
            found.append([*numbers, *d, stats.argmax, topk.ids, topk.logprobs, topk.tail])
        torch.testing.assert_close(*found)


ONE_RESULT = {  # losses with one differentiable result per row, of logits and targets
    "cross_entropy": lambda x, t: ll.cross_entropy(
        x, t, reduction="none", label_smoothing=0.1, z_loss=0.01, softcap=5.0
    ),
    "token_logprobs": lambda x, t: ll.token_logprobs(x, t.clamp(0), temperature=0.7),
    "entropy": lambda x, t: ll.entropy(x),
    "logsumexp": lambda x, t: ll.logsumexp(x),
    "score": lambda x, t: ll.score(x, t, gradient=("logprob",)).logprob,
    "score, entropy": lambda x, t: ll.score(x, t, gradient=("entropy",)).entropy,
    "row_loss": lambda x, t: ll.row_loss(
        lambda s, b: s.logprob.exp() * b - s.entropy, x, t, rows=(ROWS,), reduction="none",
        entropy=True,
    ),
    "kl_div": lambda x, t: ll.kl_div(
        x, TEACHER, direction="forward", reduction="none", mask=t != -100
    ),
    "jsd": lambda x, t: ll.jsd(x, TEACHER, beta=0.3, reduction="none", mask=t != -100),
    "topk_distill": lambda x, t: ll.topk_distill(
        x, SPARSE, divergence="jsd", support="tail", reduction="none", labels=t, ce_weight=0.0
    ),
}  # fmt: skip
ROWS = torch.linspace(0.5, 2, N, dtype=torch.float64, device=DEVICE).requires_grad_()
TEACHER = torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TEACHER = TEACHER.to(DEVICE)
SPARSE = ll.capture_topk(TEACHER.float(), 4)


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("name", ONE_RESULT)
def test_a_frozen_head_takes_two_gemms(name, low_rank, monkeypatch):
    """Its backward scales rows, for any upstream gradient, as often as it is called."""
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 0))
    hidden, weight, bias, target = make(device=DEVICE)
    pair = (torch.randn(n, 2, dtype=torch.float64, device=DEVICE) for n in (N, V))
    pair = [t.requires_grad_(t.shape[0] == N) for t in pair]
    pair = pair if low_rank else None
    inputs = [hidden.requires_grad_(), *([pair[0]] if pair else [])]
    inputs += [ROWS] if name == "row_loss" else []
    logits = ll.LinearLogits(hidden, weight, bias, workspace=3 * V * 8, low_rank=pair)
    plain = F.linear(hidden, weight, bias) + (pair[0] @ pair[1].T if pair else 0)
    ignored = torch.zeros(N, dtype=torch.bool, device=DEVICE)
    if name not in ("token_logprobs", "entropy", "logsumexp"):
        ignored = target == -100
    got, want = ONE_RESULT[name](logits, target), ONE_RESULT[name](plain, target)
    torch.testing.assert_close(got, want)
    for _ in range(3):
        upstream = torch.randn_like(got)
        wanted = torch.autograd.grad(want, inputs, upstream.where(~ignored, 0), retain_graph=True)
        with FlopCounterMode(display=False) as counter:
            upstream[ignored] = torch.nan
            found = torch.autograd.grad(got, inputs, upstream, retain_graph=True)
        assert counter.get_total_flops() == 0
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_names_of_gradients():
    for bad in ("logprob", ("argmax",), [["entropy"]], 3):
        with pytest.raises(ValueError, match="tuple of names out of 'entropy', 'logprob', 'lse'"):
            ll.score(torch.randn(2, 5), torch.zeros(2, dtype=torch.long), gradient=bad)
    found = ll.score(torch.randn(2, 5, requires_grad=True), torch.tensor([0, 1]), gradient=())
    assert not any(t.requires_grad for t in found if t is not None)


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_fit_into_the_workspace_are_kept(dtype, logits_dtype, monkeypatch):
    """Three GEMMs; autograd's hooks see the logits; a second backward computes them again."""
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, 0))
    if dtype not in (torch.bfloat16, torch.float16):
        logits_dtype = None
    rows, saved = 100, []  # no multiple of a tile
    hidden, target = torch.randn(rows, D).to(DEVICE, dtype), torch.randint(V, (rows,)).to(DEVICE)
    target[::3] = -100
    parts = leaves(hidden, *(torch.randn(*s).to(DEVICE, dtype) for s in ((V, D), (V,))))
    counted = int((target != -100).sum())

    def run(workspace, upstream, gemms):
        logits = ll.LinearLogits(*parts, workspace=workspace, logits_dtype=logits_dtype)
        counter = FlopCounterMode(display=False)
        counts = dtype.itemsize > 2  # of GEMMs with fp32 sums, PyTorch 2.11 counts no FLOPs
        with counter if counts else contextlib.nullcontext():
            found = ll.score(logits, target)
            total = sum((t * u).sum() for t, u in zip(found[:3], upstream, strict=True))
            d = torch.autograd.grad(total, parts, retain_graph=True)
        flops = gemms * 2 * counted * D * V
        assert not counts or counter.get_total_flops() == pytest.approx(flops, rel=0.01)
        return [*(t.detach() for t in found[:3]), *d], torch.autograd.grad(total, parts)

    upstream = torch.randn(3, rows, device=DEVICE)
    size = 6 if logits_dtype else dtype.itemsize
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        found, again = run(rows * 24 * size, upstream, 3)
    assert (counted, 24) in saved
    want, _ = run(4 * 24 * 4, upstream, 4)
    eps = torch.finfo(dtype).eps
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=8 * eps, atol=float(8 * eps * b.abs().max()))
    for a, b in zip(found[3:], again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(4 * eps * b.abs().max()))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_late_head_leaves_the_last_chunk_to_backward(reduction, dtype, frozen, monkeypatch):
    """All bits stay the same, in a second backward too."""
    cut_like("rows", monkeypatch)
    hidden, weight, bias, target = (
        t.to(dtype) if t.is_floating_point() else t for t in make(device=DEVICE)
    )
    hidden, weight, bias = leaves(hidden, weight, bias)
    inputs = [hidden] if frozen else [hidden, weight, bias]
    weight.requires_grad_(not frozen), bias.requires_grad_(not frozen)
    found, backward = [], []
    for late in (False, True):
        logits = HeadLogits(Head(hidden, weight, bias, late=late))
        loss = ll.cross_entropy(logits, target, reduction=reduction)
        counter = FlopCounterMode(display=False)  # which fails on torch.addmm with out_dtype
        with counter if dtype == torch.float64 else contextlib.nullcontext():
            first = torch.autograd.grad(loss, inputs, torch.ones_like(loss), retain_graph=True)
        backward.append(counter.get_total_flops())
        again = torch.autograd.grad(loss, inputs, torch.ones_like(loss))
        found.append([loss, *first, *again])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    if reduction != "none" and dtype == torch.float64:
        assert backward[1] > backward[0] == 0
