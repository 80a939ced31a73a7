"""Heads under torch.compile(fullgraph=True); test_every_function.py compiles every loss."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import grad

import logitless as ll
from logitless.heads import chunks as _chunks
from logitless.heads import linear, operators
from tests.support.operator_calls import Calls, detached

D, V = 4, 11


def parts(device, dtype=torch.float32):
    """Hidden, weight, bias and a number a row, as leaves; and targets, one of them ignored."""
    leaves = [torch.randn(size, device=device).to(dtype) for size in ((2, 3, D), (V, D), (V,))]
    leaves = [t.requires_grad_() for t in (*leaves, torch.rand(2, 3, device=device))]
    target = torch.randint(0, V, (2, 3), device=device)
    target[0, 1] = -100
    return *leaves, target


def head(h, w, b):
    return ll.LinearLogits(h, w, b, workspace=2 * V * 4)  # two rows at a time


def adapted(h, w, b):
    """Returns a head with `low_rank`. The pair of tensors is computed from h and w."""
    return ll.LinearLogits(
        h, w, b, low_rank=(h[..., :3].sin(), w[:, 1:].cos()), workspace=2 * V * 4
    )


def column_major(h, w, b):
    return head(h[1].t().contiguous().t(), w, b)


def teacher(h, *rest, **how):
    return ll.LinearLogits(h.detach().flip(0), *(t.detach() for t in rest), **how)


def scored(x, t, **how):
    """The loss plus a function of all scores, which has no gradient."""
    loss, scores = ll.cross_entropy_and_scores(x, t, label_smoothing=0.1, **how)
    return loss + sum(t.sum() for t in (scores.logprob, scores.entropy, scores.lse, scores.argmax))


LOSSES = {
    "mean": lambda h, w, b, r, t: ll.cross_entropy(head(h, w, b), t),
    "sum, weighted": lambda h, w, b, r, t: ll.cross_entropy(
        head(h, w, b), t, reduction="sum", row_weight=r, weight=torch.linspace(1, 2, V).to(h),
        label_smoothing=0.1, z_loss=1e-2, softcap=5.0,
    ),
    "mean, weighted": lambda h, w, b, r, t: ll.cross_entropy(
        head(h, w, b), t, row_weight=r, weight=torch.linspace(1, 2, V).to(h),
    ),
    "none": lambda h, w, b, r, t: ll.cross_entropy(
        head(h, w, b), t, reduction="none", row_weight=r
    ).square(),
    "score": lambda h, w, b, r, t: (
        ll.score(head(h, w, b), t).logprob * r - ll.score(head(h, w, b), t).entropy
    ),
    "mean and scores": lambda h, w, b, r, t: scored(head(h, w, b), t, row_weight=r),
    "none and scores": lambda h, w, b, r, t: scored(head(h, w, b), t, reduction="none") * r,
    "a teacher's head": lambda h, w, b, r, t: ll.kl_div(
        head(h, w, b), teacher(h, w, b), direction="forward", row_weight=r
    ),
    "a teacher's head, a row": lambda h, w, b, r, t: ll.jsd(
        head(h, w, b), teacher(h, w), reduction="none", mask=t != 3
    ) * r,
    "a teacher's head, tvd": lambda h, w, b, r, t: ll.tvd(
        head(h, w, b), teacher(h, w), temperature=2.0, mask=t != 3, row_weight=r
    ),
    "low rank": lambda h, w, b, r, t: ll.cross_entropy(adapted(h, w, b), t, row_weight=r) + (
        ll.score(adapted(h, w, b), t).logprob * r
    ),
    "a low-rank teacher": lambda h, w, b, r, t: ll.kl_div(
        head(h, w, b), adapted(h.detach(), w.detach(), b.detach()), direction="forward"
    ) * r,
    "column-major": lambda h, w, b, r, t: (
        ll.cross_entropy(column_major(h, w, b), t[1]) * r
        + ll.score(column_major(h, w, b), t[1]).logprob.sum()
    ),
}  # fmt: skip


def value_and_grads(f, leaves, target):
    value = f(*leaves, target)
    upstream = torch.linspace(-1, 2, value.numel(), device=value.device).view(value.shape)
    return [value.detach(), *grad(value, leaves, upstream, allow_unused=True)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.few(2)
def test_compiled_is_plain(name, device):
    assert_compiled_is_plain(name, device)


@pytest.mark.parametrize("name", ["mean, weighted", "score"])
@pytest.mark.few(1)
def test_compiled_with_kernels(name, device):
    with ll.impl("triton"):
        assert_compiled_is_plain(name, device)


def assert_compiled_is_plain(name, device):
    *leaves, target = parts(device)
    compiled = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    for got, want in zip(
        value_and_grads(compiled, leaves, target),
        value_and_grads(LOSSES[name], leaves, target),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "mean, weighted",
        "none",
        "score",
        "mean and scores",
        "none and scores",
        "a teacher's head",
        "column-major",
    ],
)
@pytest.mark.few(2)
def test_opcheck(name, device, monkeypatch):
    """Schema, fakes, autograd registration and AOT dispatch with dynamic shapes."""
    monkeypatch.setattr(linear, "evaluate_head", operators.evaluate_compiled)
    *leaves, target = parts(device)
    with Calls() as forward:
        value = LOSSES[name](*leaves, target)
    with Calls() as backward:
        value.sum().backward()
    assert forward.made
    for operator, args in forward.made.items():
        torch.library.opcheck(operator, detached(args, leaves=True))
    for operator, args in backward.made.items():
        torch.library.opcheck(operator, detached(args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.few(1)
def test_16_bits(dtype, device):
    """The mean of fp16 gets its share at the end, as it does without a compiler."""
    *leaves, target = parts(device, dtype)

    def f(h, w, b, r, t):
        exact = {"logits_dtype": torch.float32}
        student, beside = ll.LinearLogits(h, w, b, **exact), teacher(h, w, b, **exact)
        loss = 1e4 * ll.cross_entropy(head(h, w, b), t, row_weight=r)
        return loss + ll.kl_div(student, beside, direction="forward", reduction="none").sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = (value_and_grads(g, leaves, target) for g in (compiled, f))
    torch.testing.assert_close(got, want)


def test_new_lengths_run_the_same_graph_and_nobody_waits(device, monkeypatch):
    graphs = []

    def refuse(*_):
        raise AssertionError("the host waits for a number of the GPU's")

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def f(h, w, t):
        return ll.cross_entropy(head(h, w, None), t) + ll.score(head(h, w, None), t).logprob.sum()

    compiled, counts = torch.compile(f, fullgraph=True, backend=counting, dynamic=True), []
    for rows in (5, 7, 9):
        h = torch.randn(rows, D, device=device, requires_grad=True)
        w = torch.randn(V, D, device=device, requires_grad=True)
        t = torch.full((rows,), -100, device=device)
        t[::2] = 3
        want = grad(f(h, w, t), (h, w))
        with monkeypatch.context() as patch:
            patch.setattr(_chunks, "to_host", refuse)
            got = grad(compiled(h, w, t), (h, w))
        torch.testing.assert_close(got, want)
        counts.append(len(graphs))
    assert counts == counts[:1] * 3


def test_pytorchs_own_loss_sees_the_product(device):
    *leaves, target = parts(device)

    def f(h, w, b, r, t):
        return F.cross_entropy(ll.LinearLogits(h, w, b).flatten(0, 1), t.flatten()) * r.sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = (value_and_grads(g, leaves, target) for g in (compiled, f))
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


def test_main_grad_breaks_the_graph_and_is_right(device):
    h, w, _, _, target = parts(device)
    sums = [torch.zeros(V, D, device=device) for _ in range(2)]

    def f(h, w, t, main_grad):
        return ll.cross_entropy(ll.LinearLogits(h, w, main_grad=main_grad), t)

    for g, total in zip((f, torch.compile(f, backend="aot_eager")), sums, strict=True):
        g(h, w, target, total).backward()
    torch.testing.assert_close(*sums)
    assert sums[0].any()


def test_a_transposed_hidden_by_inductor(device):
    """Which relies on the strides that an operator promises."""
    h, w, t = torch.randn(D, 6), torch.randn(V, D), torch.randint(0, V, (6,))
    leaves = [x.to(device).requires_grad_() for x in (h, w)]

    def f(h, w, t):
        return ll.cross_entropy(ll.LinearLogits(h.t(), w), t)

    compiled = torch.compile(f, fullgraph=True)
    got, want = (value_and_grads(g, leaves, t.to(device)) for g in (compiled, f))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cap", [2.0, None])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.few(1)
def test_a_lazy_teacher(cap, reduction, device):
    """Made outside the graph: its scale and softcap come with it."""
    h, w, b, *_ = parts(device)
    with torch.no_grad():
        z = ll.LinearLogits(3 * h.flip(0), w, b)[:] / 0.7
        z = z if cap is None else cap * torch.tanh(z / cap)

    def f(h, w, b, z):
        return ll.kl_div(head(h, w, b), z, direction="forward", reduction=reduction)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    got, want = (value_and_grads(g, [h, w, b], z) for g in (compiled, f))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got[0], f(h, w, b, z.materialize()).detach())


def test_a_second_differentiation_raises(device):
    h, w, _, _, target = parts(device)
    for f in (LOSSES["mean"], LOSSES["none"]):
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        loss = compiled(h, w, None, torch.ones(2, 3, device=device), target).sum()
        (g,) = grad(loss, h, create_graph=True)
        with pytest.raises(
            RuntimeError,
            match="must not be differentiated twice, because its backward has no gradient",
        ):
            (loss + g.square().sum()).backward()


def test_torch_func_says_what_to_do(device):
    h, w, b, r, target = parts(device)
    of_hidden = torch.func.grad(lambda h: LOSSES["mean"](h, w, b, r, target))
    with pytest.raises(RuntimeError, match=r"must be a Tensor under torch\.func"):
        torch.compile(of_hidden, backend="eager")(h)
