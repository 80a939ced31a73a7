"""Results per row over a head, and checkpoints around one."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.heads import choose_cut
from tests.support import calls
from tests.support.calls import CALLS, made, outcome
from tests.support.heads import D, N, V, both_ways, leaves, make  # noqa: F401 - a fixture
from tests.support.sizes import DEVICE


@pytest.mark.parametrize("chunk", [2, 100])
class TestReads:
    """What gives numbers a row."""

    def test_row_stats_and_the_rest(self, chunk, device):
        hidden, weight, bias, target = make(device=device)
        ids = torch.randint(0, V, (N, 3), device=device)
        parts, again = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        source, logits = ll.LinearLogits(*parts, workspace=chunk * V * 8), F.linear(*again)
        outs = []
        for z in (source, logits):
            stats = ll.row_stats(z, ids, entropy=True, total=True, argmax=True)
            numbers = [*stats[:4], ll.token_logprobs(z, ids), ll.entropy(z), ll.logsumexp(z)]
            numbers += ll.score(z, target)[:3]
            outs.append([*numbers, stats.argmax])
            sum((t.sin()).sum() for t in numbers).backward()
        for a, b in zip(*outs, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(parts, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_capture_topk(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        got = ll.capture_topk(ll.LinearLogits(hidden, weight, bias, workspace=chunk * V * 8), 4)
        want = ll.capture_topk(F.linear(hidden, weight, bias), 4)
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.logprobs, want.logprobs)
        torch.testing.assert_close(got.tail, want.tail)

    def test_a_teacher_s_head(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        other = make(device=device, scale=0.5)[:3]
        source = ll.LinearLogits(hidden, weight, bias, workspace=chunk * V * 8)
        got = ll.kl_div(source, ll.LinearLogits(*other), direction="reverse")
        want = ll.kl_div(source.materialize(), F.linear(*other), direction="reverse")
        torch.testing.assert_close(got, want)


def test_every_upstream_gradient_is_used(device):
    """reduction="none" with per-token weights: right dW and dbias."""
    hidden, weight, bias, target = make(device=device)
    per_token = torch.randn(N, dtype=torch.float64, device=device)
    got, want = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    source = ll.LinearLogits(*got, workspace=2 * V * 8)
    (ll.cross_entropy(source, target, reduction="none") * per_token).sum().backward()
    (ll.cross_entropy(F.linear(*want), target, reduction="none") * per_token).sum().backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "name", ["score", "cross_entropy", "cross_entropy, none", "row_stats", "row_loss"]
)
def test_checkpointing_over_a_head(name):
    """Results a row over a head raised CheckpointError."""
    want = outcome(name, "head")
    parts = [t.requires_grad_() for t in calls.leaves("head")]
    found = checkpoint(lambda *p: CALLS[name](made("head", p)), *parts, use_reentrant=False)
    real = [t for t in found if t.is_floating_point()]
    sum((t.double() * (i + 1)).sum() for i, t in enumerate(real)).backward()
    for part, grad in zip(parts, want[len(found) :], strict=True):
        torch.testing.assert_close(part.grad, grad)


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
    rows, saved = 600, []  # no multiple of a tile
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
