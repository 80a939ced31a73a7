"""The operators as PyTorch's compiler sees them: opcheck, whole graphs, dynamic shapes."""

import re
import shutil

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code

import logitless as ll
from tests.support import oracle
from tests.support.laws import ROUNDING, error, poisoned_memory, value_and_grad
from tests.support.operator_calls import Calls, detached

V = 37


def make(rows=(3,), vocab=V, dtype=torch.float32, device="cpu"):
    x = torch.randn(*rows, vocab, device=device).to(dtype)
    target = torch.randint(0, vocab, rows, device=device)
    target.view(-1)[0] = -100
    return x, target


# --- opcheck


def opcheck_calls_of(f, x):
    """Schema, fakes, autograd registration and AOT dispatch with dynamic shapes, of all operators.

    The arguments are those that f and its backward call them with.
    """
    with Calls() as forward:
        loss = f(x.requires_grad_()).sum()
    with Calls() as backward:
        loss.backward()
    assert forward.made
    assert backward.made
    for operator, args in forward.made.items():
        torch.library.opcheck(operator, detached(args, leaves=True))
    for operator, args in backward.made.items():
        torch.library.opcheck(operator, detached(args))


WANTS = {"entropy": True, "total": True, "argmax": True}


def sparse(ids):
    """A teacher at four ids or fewer, and of half of the mass outside them."""
    logprobs = torch.linspace(-4, -2.1, ids.numel(), device=ids.device).view(ids.shape)
    return ll.SparseTargets(ids, logprobs, logprobs[..., 0] * 0 - 0.7)


def some_temperature(x):
    """A temperature for each row of (1, 2, V)."""
    return torch.linspace(0.5, 1.5, 2, device=x.device).view(1, 2)


def some_rows(x):
    """True and False by turns, a row."""
    return torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1]) % 2 == 0


CALLS = {
    "logsumexp": lambda x, ids: ll.logsumexp(x),
    "cross_entropy": lambda x, ids: ll.cross_entropy(x, ids[..., 0]),
    "smoothing, weight": lambda x, ids: ll.cross_entropy(
        x, ids[..., 0], label_smoothing=0.1, weight=torch.rand(V).to(x), ignore_index=3
    ),
    "score": lambda x, ids: sum(ll.score(x, ids[..., 0], temperature=0.7, softcap=5.0)[:3]),
    "cross_entropy_and_scores": lambda x, ids: ll.cross_entropy_and_scores(
        x, ids[..., 0], label_smoothing=0.1, temperature=0.7
    )[0],
    "kept_scores": lambda x, ids: sum(
        ll.kept_scores(x, ids[..., 0], ids, temperature=0.7, softcap=5.0)[:2]
    ),
    "kept_scores, mass": lambda x, ids: sum(
        ll.kept_scores(x, ids[..., 0], ids.int(), temperature=some_temperature(x), mass=True)
    ),
    "K ids": lambda x, ids: ll.token_logprobs(x, ids, temperature=2.0),
    "K ids in int32, transposed": lambda x, ids: ll.token_logprobs(x, ids.int().mT.contiguous().mT),
    "row temperature": lambda x, ids: sum(
        ll.row_stats(
            x, ids[..., 0], temperature=torch.rand(1, 2).to(x.device) + 0.5, softcap=9.0, **WANTS
        )[:4]
    ),
    "tail": lambda x, ids: ll.topk_distill(
        x, sparse(ids), divergence="jsd", beta=0.4, support="tail", temperature=2.0,
        labels=ids[..., 0], ce_weight=0.5,
    ),
    "slot_loss": lambda x, ids: ll.slot_loss(
        lambda s: s.student.exp().sum(-1) * s.teacher_tail - s.student_tail, x, sparse(ids),
        temperature=2.0, labels=ids[..., 0], ignore_index=3,
    ),
    "renorm": lambda x, ids: ll.topk_distill(
        x, sparse(ids.mT.contiguous().mT), divergence="reverse_kl", support="renorm", softcap=4.0
    ),
    "gathered": lambda x, ids: ll.gathered_kl(
        x.gather(-1, ids).bfloat16(), sparse(ids).logprobs, ids % 3 > 0, reduction="none"
    ),
    **{
        direction: lambda x, ids, direction=direction: ll.kl_div(
            x, x.detach().flip(-1), direction=direction, softcap=4.0, mask=some_rows(x),
        )
        for direction in ("forward", "reverse")
    },
    "jsd": lambda x, ids: ll.jsd(
        x, x.detach().flip(-1), beta=0.3, temperature=torch.rand(1, 2).to(x.device) + 0.5
    ),
    "tvd": lambda x, ids: ll.tvd(x, x.detach().flip(-1), softcap=4.0, mask=some_rows(x)),
    "soft": lambda x, ids: ll.soft_cross_entropy(
        x, x.detach().softmax(-1), weight=torch.rand(V).to(x), label_smoothing=0.1
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_opcheck(call, impl, device):
    x, _ = make((1, 2), device=device)
    ids = torch.randint(0, V, (1, 2, 4), device=device)
    opcheck_calls_of(lambda x: call(x, ids), x)


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 1:], lambda x: x.mT, lambda x: x[:0]], ids=["slice", "mT", "empty"]
)
def test_opcheck_of_strided_half_logits(view, impl, device):
    x = view(torch.randn(2, 3, 4, device=device).bfloat16())
    opcheck_calls_of(ll.entropy, x)


# --- torch.compile(fullgraph=True): every public function, every option


def loss_and_scores(x, t):
    loss, scores = ll.cross_entropy_and_scores(x, t, z_loss=0.01)
    return torch.stack((loss, scores.logprob.sum(), scores.entropy.sum(), scores.argmax.sum()))


READS = {
    "logsumexp": lambda x, t: ll.logsumexp(x),
    "entropy": lambda x, t: ll.entropy(x, temperature=0.7),
    "token_logprobs": lambda x, t: ll.token_logprobs(x, t.clamp(min=0), softcap=4.0),
    "token_logprobs of K": lambda x, t: ll.token_logprobs(x, torch.stack((t, t + 1), -1).abs() % V),
    "score": lambda x, t: torch.stack(tuple(ll.score(x, t))[:3]),  # PyTorch 2.9 slices no other
    "kept_scores": lambda x, t: torch.stack(
        tuple(ll.kept_scores(x, t, torch.stack((t, t + 1), -1).abs() % V, softcap=4.0))[:2]
    ),
    "kept_scores, mass": lambda x, t: torch.stack(
        tuple(ll.kept_scores(x, t, torch.stack((t, t + 1), -1).abs() % V, mass=True))
    ),
    "cross_entropy_and_scores": lambda x, t: loss_and_scores(x, t),
    "row_stats": lambda x, t: sum(
        ll.row_stats(x, t.clamp(min=0), entropy=True, total=True, argmax=True, rank=True)
    ),
    "partial and merge": lambda x, t: (
        ll.merge(ll.partial(x[..., :20]), ll.partial(x[..., 20:])).lse
    ),
    "gathered_kl": lambda x, t: ll.gathered_kl(x, x.detach().flip(-1).log_softmax(-1)),
    "LogSumExp": lambda x, t: ll.nn.LogSumExp(softcap=3.0)(x),
    "CrossEntropyLoss": lambda x, t: ll.nn.CrossEntropyLoss(label_smoothing=0.1)(x, t),
}
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": torch.linspace(0.1, 2, V)},
    "ignore_index": {"ignore_index": 3},
    "smoothing": {"label_smoothing": 0.1, "weight": torch.linspace(0.1, 2, V)},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 5.0},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": torch.tensor([0.5, 1.0, 2.0])},
    "row_weight": {"row_weight": torch.tensor([1.0, -0.5, 2.0])},
    "inplace": {"inplace": True},
    "everything": {
        "weight": torch.linspace(0.1, 2, V), "label_smoothing": 0.2, "z_loss": 1e-3,
        "softcap": 6.0, "temperature": 1.3, "row_weight": torch.tensor([1.0, 0.5, -1.0]),
        "inplace": True,
    },
}  # fmt: skip


def assert_compiled_is_plain(f, x, *args, backend="aot_eager", compiled=None, **how):
    """Value and gradient of the compiled function are the function's, and x is left alone."""
    compiled = compiled or torch.compile(f, fullgraph=True, backend=backend, **how)
    shape = f(x, *args).shape
    upstream = torch.randn(shape).to(x.device)
    kept = x.clone()
    want = value_and_grad(lambda x: f(x, *args), x, upstream)
    got = value_and_grad(lambda x: compiled(x, *args), x, upstream)
    assert torch.equal(x, kept)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    return compiled


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("f", READS.values(), ids=READS.keys())
def test_reads(f, impl, device):
    assert_compiled_is_plain(f, *make(device=device))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_cross_entropy(options, impl, device):
    x, target = make(device=device)
    how = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if "ignore_index" in how:
        target[0] = how["ignore_index"]

    def f(x, target):
        return ll.cross_entropy(x * 1, target, **how)

    assert_compiled_is_plain(f, x, target)


def test_inplace_of_a_view_inside_a_model(impl, device):
    """The shape people write: a head, a view, the loss, all in one graph."""
    head = torch.randn(8, V, device=device)

    def f(hidden, target):
        logits = hidden @ head
        return ll.cross_entropy(logits.view(-1, V), target.view(-1), inplace=True)

    hidden = torch.randn(2, 3, 8, device=device)
    target = torch.randint(0, V, (2, 3), device=device)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    want, got = (
        value_and_grad(lambda h, g=g: g(h, target), hidden, torch.ones((), device=device))
        for g in (f, compiled)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, t: ll.cross_entropy(x, t, label_smoothing=0.1, temperature=0.7, softcap=5.0),
        lambda x, t: ll.cross_entropy(x * 1, t, reduction="none", inplace=True),
        lambda x, t: ll.score(x, t).logprob,
        lambda x, t: ll.kept_scores(x, t, t.clamp(min=0)[..., None].expand(*t.shape, 2)).logprob,
        lambda x, t: ll.token_logprobs(x, t.clamp(min=0)[..., None].expand(*t.shape, 2)),
        lambda x, t: ll.logsumexp(x),
    ],
    ids=["cross_entropy", "inplace", "score", "kept_scores", "token_logprobs", "logsumexp"],
)
def test_dynamic_shapes_compile_once(f, impl, device):
    """New rows and a new vocabulary run the graph that is there."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled, counts = None, []
    for rows, vocab in ((3, 37), (5, 37), (4, 50)):
        x, target = make((rows,), vocab, device=device)
        compiled = assert_compiled_is_plain(
            f, x, target, backend=counting, compiled=compiled, dynamic=True
        )
        counts.append(len(graphs))  # the first compilation may start over once
    assert counts[0] > 0
    assert counts == counts[:1] * 3


inductor = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)
# Vector instructions and precompiled headers would take most of a test's time.
QUICK = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}


@inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of Inductor, on a GPU
@pytest.mark.parametrize("used", [False, True], ids=["dead logits", "logits that are returned"])
def test_the_gradient_overwrites_logits_that_nothing_else_reads(used, device):
    """As that of F.cross_entropy, so the backward allocates no tensor of their size."""
    head, target = torch.randn(8, V, device=device), torch.tensor([3, -100, 36], device=device)
    hidden = torch.randn(3, 8, device=device, requires_grad=True)

    def f(hidden):
        z = hidden @ head
        loss = ll.cross_entropy(z, target, label_smoothing=0.1, z_loss=0.01, softcap=5.0)
        return (loss, z) if used else (loss,)

    def run(f):
        loss, *logits = f(hidden)
        return loss, *torch.autograd.grad(2 * loss, hidden), *logits

    compiled = torch.compile(f, fullgraph=True)
    with torch._inductor.config.patch(QUICK):
        got, (*_, code) = run_and_get_code(lambda: run(compiled))
    for a, b in zip(got, run(f), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    allocated = re.findall(r"empty_strided\w*\(\((\d+), (\d+)\)", code)
    assert allocated
    assert ((str(len(target)), str(V)) in allocated) is used


@inductor
def test_the_default_backend(device):
    """inductor, fusing what it likes around the operators, one of which overwrites its logits."""
    head = torch.randn(9, V, device=device)

    def f(x, target):
        x = torch.tanh(x) * 3
        how = {"label_smoothing": 0.1, "z_loss": 1e-3}
        kept = ll.cross_entropy(x, target, **how)
        kept = kept * ll.cross_entropy(x.cos() * 2, target, inplace=True, **how)
        return kept + ll.cross_entropy(ll.LinearLogits(x.sin(), head), target % 9)

    with torch._inductor.config.patch(QUICK):
        assert_compiled_is_plain(f, *make(device=device), backend="inductor")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_with_ignored_rows(reduction, inplace, impl, device):
    """torch.compile with ignored rows: output rows never written, silently wrong loss."""
    x = torch.randn(4, 37, device=device)
    target = torch.tensor([-100, 3, -100, 36], device=device)

    def f(x, target):
        return ll.cross_entropy(x * 1, target, reduction=reduction, inplace=inplace)

    upstream = torch.randn(() if reduction == "mean" else 4, device=device)
    want = value_and_grad(
        lambda x: oracle.cross_entropy(x, target, reduction=reduction),
        x.double(),
        upstream.double(),
    )
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with poisoned_memory():
        got = value_and_grad(lambda x: compiled(x, target), x, upstream)
    assert error(got[0], want[0]) <= ROUNDING
    assert error(got[1], want[1]) <= ROUNDING
    assert not got[1][target == -100].any()
