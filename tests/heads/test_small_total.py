"""A mean over a small head repeats the plan of an earlier call, and gives the same results."""

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.core import call
from logitless.core.source import Logits
from logitless.heads import choose_cut, gemms, linear, small_total
from logitless.kernels import config
from logitless.losses import cross_entropy
from tests.support.heads import D, N, V, assert_same, leaves, make
from tests.support.laws import poisoned_memory

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}


@pytest.fixture
def in_chunks():
    """Overrides the fixture of all tests: small heads compute all logits at once."""


@pytest.fixture(autouse=True)
def kernels_alone():
    """All tests use Triton kernels, because the eager backend has no `one_pass`."""
    with ll.impl("triton"):
        yield


@pytest.fixture
def repeated(monkeypatch):
    """A list with one bool per call of `repeat`: whether a plan was repeated."""
    seen = []

    def record(*args):
        mean = small_total.repeat(*args)
        seen.append(mean is not None)
        return mean

    monkeypatch.setattr(cross_entropy, "repeat", record)
    return seen


def mean_of(parts, target, make_logits=ll.LinearLogits, **how):
    """The mean, and the gradients for an upstream gradient of 1.7."""
    mean = ll.cross_entropy(make_logits(*parts), target, **how)
    if mean.requires_grad:
        mean.backward(torch.full_like(mean, 1.7))
    return mean.detach(), [None if t is None else t.grad for t in parts]


def torch_mean(parts, target):
    exact = [None if t is None else t.detach().double().requires_grad_() for t in parts]
    mean = F.cross_entropy(F.linear(*exact).flatten(0, -2), target.flatten().long())
    mean.backward(torch.full_like(mean, 1.7))
    return mean.detach(), [
        None if t is None or not p.requires_grad else t.grad
        for t, p in zip(exact, parts, strict=True)
    ]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("lead", [(N,), (N, 1), (2, 3, 1)])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_repeated_call_is_right(needs, lead, padded, repeated, monkeypatch, device):
    if padded:
        monkeypatch.setattr(gemms, "reads_vectors", lambda t: True)
    for call_number in range(3):
        *tensors, target = make(torch.float32, device, lead=lead, scale=1 + call_number)
        target = target.roll(call_number, 0)
        parts = leaves(*tensors, needs=map(bool, needs))
        with poisoned_memory():
            got = mean_of(parts, target)
        assert_same(got, torch_mean(parts, target), **TOLERANCE)
    assert repeated == [True, True]


def test_both_ways_to_call_a_head(repeated, device):
    """linear_cross_entropy and LinearLogits do not share plans."""
    *tensors, target = make(torch.float32, device)

    def call_by_name(hidden, weight, bias):
        mean = ll.linear_cross_entropy(hidden, weight, target, bias=bias)
        mean.backward(torch.full_like(mean, 1.7))
        return mean.detach(), [hidden.grad, weight.grad, bias.grad]

    for _ in range(2):
        assert_same(call_by_name(*leaves(*tensors)), mean_of(leaves(*tensors), target))
    assert repeated == [True, True]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_second_backward_of_a_repeated_call(autocast, device):
    *tensors, target = make(torch.float32, device)
    for _ in range(2):
        parts = leaves(*tensors)
        loss = ll.cross_entropy(ll.LinearLogits(*parts), target)
        first = torch.autograd.grad(loss, parts, retain_graph=True)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            second = torch.autograd.grad(loss, parts, 2 * torch.ones_like(loss))
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(2 * a, b)


def test_a_repeated_call_checks_the_targets(device, monkeypatch):
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    *tensors, target = make(torch.float32, device)
    mean_of(leaves(*tensors), target)
    target = target.clone()
    target[1] = V
    with pytest.raises(IndexError, match=f"target must be in .* got {V} at row 1"):
        mean_of(leaves(*tensors), target)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


# Settings under which a kept plan must not be repeated.
SETTINGS = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "invariant": ll.invariant,
    "impl": lambda: ll.impl("eager"),
    "config": lambda: config.override(num_warps=1),
    "cut": lambda: choose_cut.override(lambda work: choose_cut.Cut(2)),
    "forward mode": fwAD.dual_level,
    "dispatch mode": Mode,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_under_another_setting_the_plan_is_not_repeated(name, repeated, device):
    """The head is made outside of the setting, so its Signature is that of the first call."""
    *tensors, target = make(torch.float32, device)
    parts = leaves(*tensors)
    want = mean_of(leaves(*tensors), target)
    head = ll.LinearLogits(*parts)
    with SETTINGS[name]():
        mean = ll.cross_entropy(head, target)
    assert repeated == [False]
    torch.testing.assert_close(mean.detach().clone(), want[0], **TOLERANCE)
    if mean.requires_grad:
        mean.backward(torch.full_like(mean, 1.7))
        assert_same((mean.detach(), [t.grad for t in parts]), want, **TOLERANCE)
    assert_same(mean_of(leaves(*tensors), target), want)


@pytest.mark.parametrize("cast", [False, True])
def test_autocast(cast, repeated, device):
    """Autocast casts the tensors when a head is made. Later, autocast has no effect."""
    *tensors, target = make(torch.float32, device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    for again in (False, True):
        parts = leaves(*tensors)
        with autocast if cast else contextlib.nullcontext():
            head = ll.LinearLogits(*parts)
        with autocast:
            mean = ll.cross_entropy(head, target)
        mean.backward(torch.full_like(mean, 1.7))
        assert repeated == ([True] if again else [])
        assert head.dtype == (torch.bfloat16 if cast else torch.float32)
        tolerance = TOLERANCE | ({"rtol": 0.05, "atol": 0.05} if cast else {})
        got = mean.detach(), [t.grad for t in parts]
        assert_same(got, torch_mean(parts, target), **tolerance)


def sliced(t):
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def moved(t):
    """The same numbers at an address that is not a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def test_plans_of_several_layouts_and_heads_are_kept(repeated, device):
    """The logits of all heads have the same shape, dtype and device."""
    hidden, weight, bias, target = make(torch.float32, device)
    others = (
        (sliced(hidden), weight, bias),
        (moved(hidden), weight, bias),
        (hidden.t().contiguous().t(), weight, bias),
        (hidden, weight, None),
        (hidden[:, 1:].contiguous(), weight[:, 1:].contiguous(), bias),
    )
    for again in (False, True):
        for tensors in ((hidden, weight, bias), *others):
            parts = [None if t is None else t.detach().requires_grad_() for t in tensors]
            assert_same(mean_of(parts, target), torch_mean(parts, target), **TOLERANCE)
            for t in parts:
                if t is not None:
                    t.grad = None
        assert set(repeated[-len(others) :]) == {again}


def test_the_number_of_plans_is_limited(monkeypatch, device):
    monkeypatch.setattr(small_total, "REMEMBERED", 2)
    hidden, weight, bias, target = make(torch.float32, device)
    for h in (hidden, sliced(hidden), moved(hidden)):
        mean_of([h.detach().requires_grad_(), *leaves(None, weight, bias)[1:]], target)
    kept = [s.kept for _, passed in call._passed.values() for s in passed.values()]
    assert [len(plans) for plans in kept if isinstance(plans, dict)] == [1]


@pytest.mark.parametrize("change", ["rows", "classes"])
def test_tensors_that_change_after_the_head_was_made(change, repeated, device):
    hidden, weight, bias, target = make(torch.float32, device)
    mean_of(leaves(hidden, weight, bias), target)
    parts = leaves(hidden, weight, bias)
    head = ll.LinearLogits(*parts)
    if change == "classes":
        parts[1].data, parts[2].data = weight.repeat(2, 1), bias.repeat(2)
    else:
        parts[0].data = hidden[:2].clone()
    with contextlib.suppress(RuntimeError, ValueError, IndexError):  # the sizes do not fit
        ll.cross_entropy(head, target)
    assert repeated == [False]


def test_requires_grad_that_changes_after_the_head_was_made(repeated, device):
    hidden, weight, _, target = make(torch.float32, device)
    for _ in range(2):
        mean_of((*leaves(hidden, weight, None, (True, False, False))[:2],), target)
    assert repeated == [True]
    parts = leaves(hidden, weight, None, (True, False, False))[:2]
    head = ll.LinearLogits(*parts)
    parts[1].requires_grad_()
    got = mean_of(parts, target, lambda *_: head)
    assert repeated == [True, False]
    assert_same(got, torch_mean(parts, target), **TOLERANCE)


OPTIONS = {
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore_index": {"ignore_index": 1},
    "temperature": {"temperature": 2.0},
    "softcap": {"softcap": 3.0},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.1},
    "weight": {"weight": torch.linspace(0.5, 2, V)},
    "row_weight": {"row_weight": torch.linspace(0.5, 2, N)},
    "mask": {"mask": torch.arange(N) % 2 == 0},
    "row temperature": {"temperature": torch.linspace(0.5, 2, N)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_has_its_own_plan(name, repeated, device):
    """The call without the option comes first and last, and the option is used twice."""
    *tensors, target = make(torch.float32, device)
    target = target.clamp(min=0)
    how = {k: v.to(device) if torch.is_tensor(v) else v for k, v in OPTIONS[name].items()}
    for options in ({}, how, how, {}):
        found = []
        for make_logits in (ll.LinearLogits, F.linear):
            parts = leaves(*tensors)
            loss = ll.cross_entropy(make_logits(*parts), target, **options)
            loss.backward(torch.full_like(loss, 1.7))
            found.append((loss.detach(), [t.grad for t in parts]))
        assert_same(*found, **TOLERANCE)
    assert repeated[-1]  # in the last call, without the option


def test_other_arguments_are_no_repetition(repeated, device):
    hidden, weight, bias, target = make(torch.float32, device)
    mean_of(leaves(hidden, weight, bias), target)
    for parts, labels in (
        (leaves(hidden, weight, None), target),
        (leaves(hidden[:-1], weight, bias), target[:-1]),
        (leaves(hidden, weight[:-1], bias[:-1]), target.clamp(max=V - 2)),
        (leaves(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16()), target),
        (leaves(hidden, weight, bias), target.int()),
        (leaves(hidden, weight, bias, (True, False, True)), target),
    ):
        coarse = {"rtol": 0.05, "atol": 0.05} if parts[0].dtype == torch.bfloat16 else {}
        assert_same(mean_of(parts, labels), torch_mean(parts, labels), **TOLERANCE | coarse)
    assert True not in repeated


def test_options_of_the_head(repeated, device):
    *tensors, target = make(torch.float32, device)
    want = mean_of(leaves(*tensors), target)
    main_grad, parts = torch.zeros(V, D, device=device), leaves(*tensors)
    got = mean_of(parts, target, lambda *t: ll.LinearLogits(*t, main_grad=main_grad))
    assert parts[1].grad is None
    assert_same((got[0], [parts[0].grad, main_grad, parts[2].grad]), want, **TOLERANCE)
    got = mean_of(leaves(*tensors), target, lambda *t: ll.LinearLogits(*t, workspace=1))
    assert_same(got, want, **TOLERANCE)
    assert True not in repeated


def test_heads_made_by_compiled_code_have_no_signature(repeated, device):
    """No plan is kept for a head without a Signature."""
    *tensors, target = make(torch.float32, device)
    made = torch.compile(lambda *t, **how: ll.LinearLogits(*t, **how), backend="eager")
    want = mean_of(leaves(*tensors), target, made)
    main_grad, parts = torch.zeros(V, D, device=device), leaves(*tensors)
    mean_of(parts, target, lambda *t: made(*t, main_grad=main_grad))
    assert parts[1].grad is None
    torch.testing.assert_close(main_grad, want[1][1], **TOLERANCE)
    assert repeated == []


def test_a_plan_made_while_a_graph_is_captured_is_not_kept(repeated, monkeypatch, device):
    """Constants that are made during the capture of a CUDA graph belong to the graph."""
    *tensors, target = make(torch.float32, device)
    monkeypatch.setattr(small_total, "is_capturing", lambda: True)
    for _ in range(2):
        mean_of(leaves(*tensors), target)
    assert repeated == []


def test_a_weight_that_fsdp_has_freed(repeated, device):
    *tensors, target = make(torch.float32, device)
    mean_of(leaves(*tensors), target)
    parts = leaves(*tensors)
    head = ll.LinearLogits(*parts)
    parts[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="weight"):
        ll.cross_entropy(head, target)
    assert repeated == [False]


def test_transforms_of_torch_func_raise(repeated, device):
    hidden, weight, _, target = make(torch.float32, device)
    mean_of((*leaves(hidden, weight, None)[:2],), target)
    weight.requires_grad_()
    with pytest.raises(RuntimeError, match="logits must be a Tensor under"):
        torch.func.grad(lambda h: ll.cross_entropy(ll.LinearLogits(h, weight), target))(hidden)
    assert True not in repeated


class Wrapper(Logits):
    """Logits whose source is a head, without the attribute `head`."""


class Doubled(linear.HeadLogits):
    """A head with its own losses."""

    def evaluate(self, loss, reduction, row_weight):
        return 2 * super().evaluate(loss, reduction, row_weight)


@pytest.mark.parametrize(
    ("make_logits", "factor"),
    [
        (lambda *t: Wrapper(linear.HeadLogits(linear.checked_head(*t))), 1),
        (lambda *t: Doubled(linear.checked_head(*t)), 2),
        (lambda *t: Wrapper(Doubled(linear.checked_head(*t))), 2),
    ],
)
def test_other_sources_keep_no_plan(make_logits, factor, repeated, device):
    *tensors, target = make(torch.float32, device)
    mean, _ = mean_of(leaves(*tensors), target)
    for _ in range(2):
        got, _ = mean_of(leaves(*tensors), target, make_logits)
        torch.testing.assert_close(got, factor * mean)
    assert repeated == []


def test_the_host_runs_few_functions(monkeypatch, device):
    """A repeated call neither builds a loss nor calls `evaluate_head`."""
    *tensors, target = make(torch.float32, device)
    want = mean_of(leaves(*tensors), target)

    def refuse(*_, **__):
        raise AssertionError("This call does not repeat a plan.")

    monkeypatch.setattr(linear, "evaluate_head", refuse)
    monkeypatch.setattr(call, "reading_of", refuse)
    assert_same(mean_of(leaves(*tensors), target), want)
    with pytest.raises(AssertionError, match="does not repeat a plan"):
        mean_of(leaves(*tensors), target, temperature=2.0)
