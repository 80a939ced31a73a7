"""A small head computes all logits at once, and gives the same as a head in chunks."""

import contextlib
import functools

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.contract import Pair, Reading
from logitless.core.source import Logits
from logitless.heads import choose_cut, gemms, linear, run
from logitless.heads.chunks import Chunks
from logitless.heads.head import IN_PIECES, ScaledHead
from logitless.kernels import config
from logitless.kernels.launch import Launch
from logitless.losses.cross_entropy import CrossEntropy
from logitless.losses.dense_teacher import Dense
from tests.support.heads import LOSSES, D, N, V, assert_same, leaves, make, result
from tests.support.laws import poisoned_memory
from tests.support.sizes import DEVICE

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needed", [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_vmap_raises(needed, reduction, impl, no_chunks, device):
    """After the error, a backward without vmap is right."""
    *parts, target = make(torch.float32, device)
    parts = [t.requires_grad_(bool(need)) for t, need in zip(parts, needed, strict=True)]
    inputs = [t for t in parts if t.requires_grad]
    loss = ll.cross_entropy(ll.LinearLogits(*parts), target, reduction=reduction)
    upstream = torch.tensor([1.0, 2.0], device=device).view(2, *(1,) * loss.dim())
    upstream = upstream.expand(2, *loss.shape)

    def gradients(d, **options):
        return torch.autograd.grad(loss, inputs, d, retain_graph=True, **options)

    for mapped in (torch.func.vmap(gradients), lambda d: gradients(d, is_grads_batched=True)):
        with pytest.raises(RuntimeError, match="logits must not be mapped"):
            mapped(upstream)
    plain = F.cross_entropy(F.linear(*parts), target, reduction=reduction)
    want = torch.autograd.grad(2 * plain.sum(), inputs)
    torch.testing.assert_close(gradients(upstream[1]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["cross_entropy", "jsd"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_and_a_second_derivative(
    reduction, name, autocast, impl, no_chunks, device
):
    *tensors, target = make(torch.float32, device)
    parts = leaves(*tensors)
    loss = LOSSES[name](ll.LinearLogits(*parts), target, reduction=reduction).sum()
    first = torch.autograd.grad(loss, parts, retain_graph=True)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        second = torch.autograd.grad(loss * 2, parts, retain_graph=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    (d_hidden,) = torch.autograd.grad(loss, parts[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        d_hidden.sum().backward()


# --- which heads are small


def is_small(device, dtype=torch.float32, *, columns=None, teacher=None, reduction="mean", **how):
    hidden, weight, _, target = make(dtype, device)
    head = ll.LinearLogits(hidden, weight, **how).head.replace(columns=columns)
    loss = CrossEntropy(Reading(V, label=target))
    if teacher is not None:
        loss = Dense(Reading(V), Pair(teacher, "forward", 0.0))
    return run.is_straight(head, loss, reduction) and head.is_small()


def test_which_heads_are_small(device, monkeypatch):
    size = N * V * 4
    assert is_small(device)
    assert is_small(device, torch.bfloat16)
    assert is_small(device, workspace=4 * size)
    assert not is_small(device, workspace=4 * size - 1)
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


def test_which_heads_are_computed_in_pieces(device):
    hidden, weight, _, _ = make(torch.float32, device)
    pair = (hidden.new_zeros(N, 2), weight.new_zeros(V, 2))
    reasons = [
        not is_small(device, main_grad=torch.zeros(V, D, device=device)),
        not is_small(device, columns=object()),  # the columns of one rank
        not is_small(device, low_rank=pair),
        not is_small(device, torch.bfloat16, logits_dtype=torch.float32),
    ]
    assert reasons == [True] * (len(IN_PIECES) - 2)  # test_quantized.py and test_unshard.py have 2
    assert not is_small(device, torch.float16)
    assert is_small(device, torch.float16, reduction="none")
    teacher = ll.LinearLogits(hidden, weight)
    assert is_small(device, teacher=teacher.materialize())
    assert not is_small(device, teacher=ScaledHead(teacher.head))


# --- modes, and what autograd and the host see


def test_forward_mode_raises(no_chunks, device):
    hidden, weight, _, target = make(torch.float32, device)
    with fwAD.dual_level():
        dual = fwAD.make_dual(hidden, torch.ones_like(hidden))
        with pytest.raises((NotImplementedError, RuntimeError), match="reverse mode"):
            ll.cross_entropy(ll.LinearLogits(dual, weight), target)


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
    assert len(seen) == 1
    assert sorted(ran.names) == ["empty_strided", "mm", "mm"]


# --- a loss of one launch is repeated without building it


@pytest.fixture
def repeated(monkeypatch):
    """One bool per attempt: whether a loss was repeated. Triton alone, and labels are not read."""
    seen = []

    def record(*args):
        found = run.repeated(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(linear, "repeated", record)
    monkeypatch.setattr(run, "reads_values", lambda label: False)
    with ll.impl("triton"):
        yield seen


def loss_of(parts, target, make_logits=ll.LinearLogits, **how):
    """The loss, and the gradients for an upstream gradient of 1.7."""
    loss = ll.cross_entropy(make_logits(*parts), target, **how)
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, 1.7))
    return loss.detach().clone(), [None if t is None else t.grad for t in parts]


def plain(parts, target, **how):
    """The same from logits as a tensor, in fp64."""
    exact = [
        None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in parts
    ]
    with ll.impl("eager"):
        return loss_of(exact, target, F.linear, **how)


@pytest.mark.parametrize("lead", [(N,), (N, 1), (2, 3, 1)])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_repeated_loss_is_right(needs, lead, padded, repeated, device):
    for call_number in range(3):
        *tensors, target = make(torch.float32, device, lead=lead, scale=1 + call_number)
        parts, target = leaves(*tensors, needs=map(bool, needs)), target.roll(call_number, 0)
        assert_same(loss_of(parts, target), plain(parts, target), **TOLERANCE)
    assert repeated == [False, True, True]


OPTIONS = (
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 1},
    {"temperature": 2.0},
    {"softcap": 3.0},
    {"label_smoothing": 0.1},
    {"z_loss": 0.1},
    {"weight": torch.linspace(0.5, 2, V)},
    {"row_weight": torch.linspace(0.5, 2, N)},
    {"mask": torch.arange(N) % 2 == 0},
    {"temperature": torch.linspace(0.5, 2, N)},
)


def test_each_option_has_its_own_launch(repeated, device):
    """The call without any option comes first and last, and each option is used twice."""
    *tensors, target = make(torch.float32, device)
    target = target.clamp(min=0)
    for options in ({}, *OPTIONS, *OPTIONS, {}):
        how = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
        parts = leaves(*tensors)
        assert_same(loss_of(parts, target, **how), plain(parts, target, **how), **TOLERANCE)
    assert repeated[-1]  # in the last call, without an option


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


SETTINGS = {  # under which a launch must not be repeated
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "invariant": ll.invariant,
    "impl": lambda: ll.impl("eager"),
    "config": lambda: config.override(num_warps=1),
    "cut": lambda: choose_cut.override(lambda work: choose_cut.Cut(2)),
    "forward mode": fwAD.dual_level,
    "dispatch mode": Mode,
    "autocast": lambda: torch.autocast(torch.device(DEVICE).type, torch.bfloat16),
}


def test_settings(repeated, device):
    """The head is made outside of the setting, so its Signature is that of the first call."""
    *tensors, target = make(torch.float32, device)
    want = loss_of(leaves(*tensors), target)
    for name, setting in SETTINGS.items():
        parts = leaves(*tensors)
        head = ll.LinearLogits(*parts)
        with setting():
            loss = ll.cross_entropy(head, target)
        assert not repeated[-1], name
        torch.testing.assert_close(loss.detach().clone(), want[0], **TOLERANCE)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, 1.7))
            assert_same((loss.detach(), [t.grad for t in parts]), want, **TOLERANCE)
        assert_same(loss_of(leaves(*tensors), target), want)


def sliced(t):
    return torch.cat([t, t], 1)[:, : t.shape[1]]


def moved(t):
    """The same numbers at an address that is not a multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


def test_layouts_and_other_heads(repeated, device, monkeypatch):
    """Each has a plan of its own. The logits of all these heads have the same shape and dtype."""
    hidden, weight, bias, target = make(torch.float32, device)
    heads = (
        (hidden, weight, bias),
        (sliced(hidden), weight, bias),
        (moved(hidden), weight, bias),
        (hidden.t().contiguous().t(), weight, bias),
        (hidden, weight, None),
        (hidden[:, 1:].contiguous(), weight[:, 1:].contiguous(), bias),
    )
    for again in (False, True):
        for tensors in heads:
            parts = [None if t is None else t.detach().requires_grad_() for t in tensors]
            assert_same(loss_of(parts, target), plain(parts, target), **TOLERANCE)
        assert set(repeated[-len(heads) :]) == {again}
    monkeypatch.setattr(run, "REMEMBERED", 2)
    monkeypatch.setattr(run, "_plans", {})
    for tensors in heads[:3]:
        parts = [None if t is None else t.detach().requires_grad_() for t in tensors]
        loss_of(parts, target)
        assert len(run._plans) <= 2


@pytest.mark.parametrize("change", ["rows", "classes", "freed", "frozen before"])
def test_tensors_that_change_after_the_head_was_made(change, repeated, device):
    hidden, weight, bias, target = make(torch.float32, device)
    needs = (True, change != "frozen before", True)
    loss_of(leaves(hidden, weight, bias, needs), target)
    parts = leaves(hidden, weight, bias, needs)
    head = ll.LinearLogits(*parts)
    if change == "classes":
        parts[1].data, parts[2].data = weight.repeat(2, 1), bias.repeat(2)
    elif change == "rows":
        parts[0].data = hidden[:2].clone()
    elif change == "freed":
        parts[1].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="weight"):
            ll.cross_entropy(head, target)
    else:
        parts[1].requires_grad_()
        assert_same(loss_of(parts, target, lambda *_: head), plain(parts, target), **TOLERANCE)
    with contextlib.suppress(RuntimeError, ValueError, IndexError):  # the sizes do not fit
        ll.cross_entropy(head, target)
    assert repeated[:2] == [False, False]


def test_other_arguments_are_no_repetition(repeated, monkeypatch, device):
    hidden, weight, bias, target = make(torch.float32, device)
    loss_of(leaves(hidden, weight, bias), target)
    for parts, labels in (
        (leaves(hidden, weight, None), target),
        (leaves(hidden[:-1], weight, bias), target[:-1]),
        (leaves(hidden, weight[:-1], bias[:-1]), target.clamp(max=V - 2)),
        (leaves(hidden.bfloat16(), weight.bfloat16(), bias.bfloat16()), target),
        (leaves(hidden, weight, bias), target.int()),
        (leaves(hidden, weight, bias, (True, False, True)), target),
    ):
        coarse = {"rtol": 0.05, "atol": 0.05} if parts[0].dtype == torch.bfloat16 else {}
        assert_same(loss_of(parts, labels), plain(parts, labels), **TOLERANCE | coarse)
    want = loss_of(leaves(hidden, weight, bias), target)
    assert repeated.pop()
    # options of a head, and heads without a Signature, which compiled code makes
    main_grad, parts = torch.zeros(V, D, device=device), leaves(hidden, weight, bias)
    made = torch.compile(lambda *t, **how: ll.LinearLogits(*t, **how), backend="eager")
    for make_logits in (ll.LinearLogits, made):
        got = loss_of(parts, target, lambda *t, f=make_logits: f(*t, main_grad=main_grad.zero_()))
        assert parts[1].grad is None
        assert_same(
            (got[0], [None, main_grad, None]), (want[0], [None, want[1][1], None]), **TOLERANCE
        )
        got = loss_of(
            leaves(hidden, weight, bias), target, lambda *t: ll.LinearLogits(*t, workspace=1)
        )
        assert_same(got, want, **TOLERANCE)
    for _ in range(2):
        assert_same(loss_of(leaves(hidden, weight, bias), target, made), want, **TOLERANCE)
    # constants that are made during the capture of a CUDA graph belong to the graph
    monkeypatch.setattr(run, "is_capturing", lambda: True)
    for _ in range(2):
        loss_of(leaves(hidden, weight, bias), target, temperature=3.0)
    assert True not in repeated


def test_labels_are_checked(repeated, device, monkeypatch):
    *tensors, target = make(torch.float32, device)
    for _ in range(2):
        loss_of(leaves(*tensors), target)
    monkeypatch.undo()
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    target = target.index_fill(0, torch.tensor([1], device=device), V)
    with pytest.raises(IndexError, match=f"target must be in .* got {V} at row 1"):
        loss_of(leaves(*tensors), target)


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
def test_other_sources(make_logits, factor, repeated, device):
    *tensors, target = make(torch.float32, device)
    mean, _ = loss_of(leaves(*tensors), target)
    for _ in range(2):
        got, _ = loss_of(leaves(*tensors), target, make_logits)
        torch.testing.assert_close(got, factor * mean)


def test_the_host_runs_few_functions(repeated, monkeypatch, device):
    """A repeated call neither builds a loss nor calls `evaluate_head`."""
    *tensors, target = make(torch.float32, device)
    want = loss_of(leaves(*tensors), target)

    def refuse(*_, **__):
        raise AssertionError("This call is not repeated.")

    monkeypatch.setattr(linear, "evaluate_head", refuse)
    assert_same(loss_of(leaves(*tensors), target), want)
    with pytest.raises(AssertionError, match="is not repeated"):
        loss_of(leaves(*tensors), target, temperature=2.0)
