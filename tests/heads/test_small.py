"""A small head computes all logits at once, and gives the same as a head in chunks."""

import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.contract import Pair, Reading
from logitless.heads import choose_cut, gemms, small, small_total
from logitless.heads.chunks import Chunks
from logitless.heads.head import ScaledHead
from logitless.kernels.launch import Launch
from logitless.losses.cross_entropy import CrossEntropy
from logitless.losses.dense_teacher import Dense
from tests.support.heads import LOSSES, D, N, V, assert_same, leaves, make, result
from tests.support.laws import poisoned_memory


@pytest.fixture
def in_chunks():
    """Overrides the fixture of all tests: small heads compute all logits at once."""


@pytest.fixture
def no_chunks(monkeypatch):
    def refuse(*_):
        raise AssertionError("This head is computed in chunks.")

    monkeypatch.setattr(Chunks, "__init__", refuse)


@pytest.fixture(params=[False, True], ids=["dense", "padded"])
def padded(request, monkeypatch):
    """Pads the rows of logits on a CPU too, as on a GPU, in memory that is NaN at first."""
    if request.param:
        monkeypatch.setattr(gemms, "reads_vectors", lambda t: True)
        with poisoned_memory():
            yield
    else:
        yield


@pytest.mark.parametrize("name", LOSSES)
def test_padded_rows(name, impl, no_chunks, monkeypatch, device):
    """test_linear.py has small heads whose rows are dense."""
    monkeypatch.setattr(gemms, "reads_vectors", lambda t: True)
    dtype = torch.float64 if impl == "eager" else torch.float32
    exact = {"rtol": 1e-9, "atol": 1e-9} if impl == "eager" else {"rtol": 1e-4, "atol": 1e-5}
    for reduction in ("mean", "sum", "none"):
        for bias, lead in ((True, (N,)), (False, (N, 1)), (True, (1, N))):
            *parts, target = make(dtype, device, bias=bias, lead=lead)
            with ll.impl("eager"):
                truth = leaves(*(None if t is None else t.double() for t in parts))
                want = result(LOSSES[name], truth, target, reduction=reduction)
            with poisoned_memory():
                got = result(LOSSES[name], leaves(*parts), target, 100, reduction=reduction)
            assert_same(got, want, **exact, check_dtype=False)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_errors_of_bf16_are_those_of_pytorch(reduction, impl, padded, no_chunks, device):
    hidden, weight, b, target = make(torch.bfloat16, device)
    exact = [t.double() for t in (hidden, weight, b)]
    torch_loss = functools.partial(F.cross_entropy, reduction=reduction)
    _, want = result(torch_loss, leaves(*exact), target)
    _, theirs = result(torch_loss, leaves(hidden, weight, b), target)
    loss = LOSSES["cross_entropy"]
    _, ours = result(loss, leaves(hidden, weight, b), target, 100, reduction=reduction)
    # Triton's interpreter truncates to bf16 instead of rounding.
    factor = 4 if impl == "triton" and device == "cpu" else 2
    for a, b, truth in zip(ours, theirs, want, strict=True):
        assert (a - truth).abs().max() <= factor * (b - truth).abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_slice_of_hidden_is_as_exact_as_its_copy(reduction, impl, padded, no_chunks, device):
    """F.linear of a slice with three dimensions would round twice, after the GEMM and the bias."""
    hidden, weight, bias, target = make(torch.bfloat16, device, lead=(3, 5))
    part, target = hidden[:, :-1], target[:, :-1]
    loss = functools.partial(LOSSES["cross_entropy"], reduction=reduction)
    assert not part.is_contiguous()
    weight.requires_grad_()
    got = loss(ll.LinearLogits(part, weight, bias), target)
    want = loss(ll.LinearLogits(part.contiguous(), weight, bias), target)
    assert torch.equal(got, want)


@pytest.mark.parametrize("needed", [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_vmap_of_a_mean_raises(needed, impl, no_chunks, device):
    """After the error, a backward without vmap is right."""
    *parts, target = make(torch.float32, device)
    parts = [t.requires_grad_(bool(need)) for t, need in zip(parts, needed, strict=True)]
    inputs = [t for t in parts if t.requires_grad]
    loss = ll.cross_entropy(ll.LinearLogits(*parts), target)
    upstream = torch.tensor([1.0, 2.0], device=device)

    def gradients(d, **options):
        return torch.autograd.grad(loss, inputs, d, retain_graph=True, **options)

    for mapped in (torch.func.vmap(gradients), lambda d: gradients(d, is_grads_batched=True)):
        with pytest.raises(RuntimeError, match="logits must not be mapped"):
            mapped(upstream)
    want = torch.autograd.grad(2 * F.cross_entropy(F.linear(*parts), target), inputs)
    torch.testing.assert_close(gradients(upstream[1]), want, rtol=1e-4, atol=1e-5)


def test_a_second_backward_and_a_second_derivative(no_chunks, device):
    hidden, weight, bias, target = make(device=device)
    parts = leaves(hidden, weight, bias)
    loss = ll.cross_entropy(ll.LinearLogits(*parts), target)
    first = torch.autograd.grad(loss, parts, retain_graph=True)
    second = torch.autograd.grad(loss * 2, parts, retain_graph=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    (d_hidden,) = torch.autograd.grad(loss, parts[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        d_hidden.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hidden_states_of_ignored_rows_do_not_matter(value, reduction, impl, no_chunks, device):
    hidden, weight, bias, target = make(torch.float32, device)
    spoilt = hidden.masked_fill((target == -100).unsqueeze(-1), value)
    loss = LOSSES["cross_entropy"]
    want = result(loss, leaves(hidden, weight, bias), target, 100, reduction=reduction)
    got = result(loss, leaves(spoilt, weight, bias), target, 100, reduction=reduction)
    assert_same(got, want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_frozen_weight_has_no_gradient(reduction, impl, no_chunks, device, monkeypatch):
    hidden, weight, _, target = make(torch.float32, device)
    gemm, calls = gemms.gemm, []
    monkeypatch.setattr(small_total, "gemm", lambda *tensors: calls.append(1) or gemm(*tensors))
    for module in (small, small_total):  # otherwise, torch.mm is called
        monkeypatch.setattr(module, "is_aligned", lambda *_: False)
    hidden.requires_grad_()
    loss = ll.cross_entropy(ll.LinearLogits(hidden, weight), target, reduction=reduction)
    loss.sum().backward()
    assert len(calls) == 1  # only for the gradient of `hidden`
    assert weight.grad is None


def is_small(device, dtype=torch.float32, *, columns=None, teacher=None, **how):
    hidden, weight, _, target = make(dtype, device)
    small = ll.LinearLogits(hidden, weight, **how).head.replace(columns=columns)
    loss = CrossEntropy(Reading(V, label=target))
    if teacher is not None:
        loss = Dense(Reading(V), Pair(teacher, "forward", 0.0))
    return small.is_small(loss)


def test_which_heads_are_small(device, monkeypatch):
    size = N * V * 4
    assert is_small(device)
    assert is_small(device, torch.bfloat16)
    assert is_small(device, workspace=4 * size)
    assert not is_small(device, workspace=4 * size - 1)
    assert not is_small(device, torch.float16)
    assert not is_small(device, torch.bfloat16, logits_dtype=torch.float32)
    assert not is_small(device, main_grad=torch.zeros(V, D, device=device))
    assert not is_small(device, columns=object())  # the columns of one rank
    with choose_cut.override(lambda work: choose_cut.Cut(2)):
        assert not is_small(device)
    for most in (size, size - 1):
        monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, most))
        assert is_small(device) == (most == size)
    monkeypatch.setattr(choose_cut, "SMALL", dict.fromkeys(choose_cut.SMALL, size))
    work = N * V * (D + choose_cut.READ_WIDTH)
    for most in (work, work - 1):
        monkeypatch.setattr(choose_cut, "SMALL_WORK", dict.fromkeys(choose_cut.SMALL, most))
        assert is_small(device) == (most == work)


def test_a_head_beside_a_teacher_is_small_if_the_teacher_is_a_tensor(device):
    hidden, weight, _, _ = make(torch.float32, device)
    teacher = ll.LinearLogits(hidden, weight)
    assert is_small(device, teacher=teacher.materialize())
    assert not is_small(device, teacher=ScaledHead(teacher.head))


def test_forward_mode_raises(no_chunks, device):
    hidden, weight, _, target = make(torch.float32, device)
    with fwAD.dual_level():
        dual = fwAD.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises((NotImplementedError, RuntimeError), match="reverse mode"):
            ll.cross_entropy(ll.LinearLogits(dual, weight), target)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fake_tensors(reduction, no_chunks, device):
    hidden, weight, b, target = make(torch.float32, device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parts = [mode.from_tensor(t).requires_grad_() for t in (hidden, weight, b)]
        loss = ll.cross_entropy(
            ll.LinearLogits(*parts), mode.from_tensor(target), reduction=reduction
        )
        loss.sum().backward()
    assert loss.shape == (() if reduction == "mean" else target.shape)
    assert parts[1].grad.shape == weight.shape


def test_results_per_row_are_saved_by_autograd(no_chunks, device):
    """Hooks for saved tensors can move or drop the logits."""
    hidden, weight, b, target = make(torch.float32, device)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        ll.cross_entropy(
            ll.LinearLogits(*leaves(hidden, weight, b)), target, reduction="none"
        ).sum().backward()
    assert (N, V) in seen


def test_a_formula_gets_fp32_numbers_under_autocast(no_chunks, device):
    hidden, weight, _, target = make(torch.float32, device)
    seen = []

    def formula(stats):
        seen.append((stats.logprob @ stats.logprob).dtype)
        return stats.logprob

    with torch.autocast(torch.device(device).type, torch.bfloat16):
        ll.row_loss(formula, ll.LinearLogits(hidden, weight), target)
    assert seen == [torch.float32] * len(seen)


class Operations(TorchDispatchMode):
    """Records the operations of PyTorch that run inside the block, except views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("used", [("logprob",), ("entropy",), ("logprob", "entropy", "lse")])
def test_the_host_does_little_in_a_backward(used, no_chunks, monkeypatch, device):
    """Backward runs few operations, because a small head takes more host time than GPU time."""
    if device != "cpu":
        pytest.skip("a backward on a GPU runs in another thread, where no operation is seen")
    hidden, weight, _, target = make(torch.float32, device)
    g = torch.randn(target.shape)
    seen = []
    with ll.impl("triton"):
        parts = leaves(hidden, weight, None)[:2]
        scores = ll.score(ll.LinearLogits(*parts), target)
        outputs, d = [getattr(scores, name) for name in used], [g] * len(used)
        torch.autograd.grad(outputs, parts, d, retain_graph=True)  # creates constants
        monkeypatch.setattr(
            Launch, "__call__", lambda self, *_: seen.append(self.kernel.fn.__name__)
        )
        with Operations() as ran:
            torch.autograd.grad(outputs, parts, d)
    assert seen == ["_stats_bwd_kernel"]
    assert sorted(ran.names) == ["empty_strided", "mm", "mm"]


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("lead", [(6,), (2, 3), (6, 1), (1, 6)])
def test_results_per_row_of_other_losses(lead, backend, no_chunks, monkeypatch, device):
    """The gradient of the logits gets memory of shape (N, V) for every shape of hidden."""
    monkeypatch.setattr(gemms, "reads_vectors", lambda t: True)
    hidden, weight, bias, target = make(torch.float32, device, lead=lead)
    teacher = torch.randn(*lead, V, device=device).log_softmax(-1)
    kept = torch.arange(4, device=device).expand(*lead, 4)
    losses = {
        "gathered_kl": lambda z: ll.gathered_kl(z, teacher, reduction="none"),
        "row_loss": lambda z: ll.row_loss(lambda s: s.logprob * s.lse, z, target, reduction="none"),
        "row_stats": lambda z: ll.row_stats(z, target, entropy=True).entropy,
        "kept_scores": lambda z: ll.kept_scores(z, target, kept, mass=True).entropy,
    }
    for name, loss in losses.items():
        found = []
        for source in (F.linear, ll.LinearLogits):
            parts = leaves(hidden, weight, bias)
            with ll.impl(backend), poisoned_memory():
                out = loss(source(*parts))
                out.backward(torch.linspace(1.7, 0.6, out.numel(), device=device).view(out.shape))
            found.append((out.detach(), [t.grad for t in parts]))
        assert_same(
            found[1], found[0], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
