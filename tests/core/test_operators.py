"""The operators as PyTorch's compiler sees them: opcheck, whole graphs, dynamic shapes."""

import re

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import run_and_get_code

import logitless as ll
from tests.support import inductor, oracle
from tests.support.calls import GIVEN, NOT_DIFFERENTIABLE, calls_of, leaves
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


def gathered(x):
    teacher = x.detach().flip(-1).log_softmax(-1)
    return (ll.gathered_kl(x.bfloat16(), teacher, teacher < -2, reduction="none"),)


# Of an empty slot, kept_scores makes a NaN inside, which opcheck takes for a difference.
CALLS = calls_of(ll, GIVEN._replace(kept=GIVEN.ids)) | {"gathered_kl": gathered}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_DIFFERENTIABLE])
@pytest.mark.few(5)
def test_opcheck(name, impl):
    def total(x):
        found = CALLS[name](x * 1)  # no leaf, for losses in place
        return sum(t.sum() for t in found if t.requires_grad)

    opcheck_calls_of(total, leaves("tensor")[0])


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 1:], lambda x: x.mT, lambda x: x[:0]], ids=["slice", "mT", "empty"]
)
@pytest.mark.few(2)
def test_opcheck_of_strided_half_logits(view, impl, device):
    x = view(torch.randn(2, 3, 4, device=device).bfloat16())
    opcheck_calls_of(ll.entropy, x)


# --- torch.compile(fullgraph=True); test_every_function.py compiles every function


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.few(3)
def test_cross_entropy(options, impl, device):
    x, target = make(device=device)
    how = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    if "ignore_index" in how:
        target[0] = how["ignore_index"]

    def f(x, target):
        return ll.cross_entropy(x * 1, target, **how)

    assert_compiled_is_plain(f, x, target)


@pytest.mark.few(1)
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
@pytest.mark.few(1)
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


@inductor.needs_compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of Inductor, on a GPU
@pytest.mark.parametrize("used", [False, True], ids=["dead logits", "logits that are returned"])
@pytest.mark.few(1)
def test_the_gradient_overwrites_logits_that_nothing_else_reads(used, device):
    """As that of F.cross_entropy, so the backward allocates no tensor of their size."""
    head, target = torch.randn(8, V, device=device), torch.tensor([3, -100, 36], device=device)
    hidden = torch.randn(3, 8, device=device, requires_grad=True)

    def f(hidden):
        z = hidden @ head
        loss = ll.cross_entropy(z, target, label_smoothing=0.1, z_loss=0.01, softcap=5.0)
        if not used:
            return (loss,)
        return loss + ll.cross_entropy(z.cos() * 2, target, inplace=True), z

    def run(f):
        loss, *logits = f(hidden)
        return loss, *torch.autograd.grad(2 * loss, hidden), *logits

    compiled = torch.compile(f, fullgraph=True)
    # A graph that another process has compiled would show no code.
    with torch._inductor.config.patch(inductor.QUICK | {"fx_graph_cache": False}):
        got, (*_, code) = run_and_get_code(lambda: run(compiled))
    for a, b in zip(got, run(f), strict=True):
        assert error(a.detach(), b.detach()) <= ROUNDING
    allocated = re.findall(r"empty_strided\w*\(\((\d+), (\d+)\)", code)
    assert allocated
    assert ((str(len(target)), str(V)) in allocated) is used


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_with_ignored_rows(reduction, inplace, impl, device):
    """torch.compile with ignored rows: output rows never written, silently wrong loss."""
    x = torch.randn(2, 2, 37, device=device)
    target = torch.tensor([[0, -100, 3], [0, -100, 36]], device=device)[:, 1:]  # not contiguous

    def f(x, target):
        return ll.cross_entropy(x * 1, target, reduction=reduction, inplace=inplace)

    upstream = torch.randn(() if reduction == "mean" else (2, 2), device=device)
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
