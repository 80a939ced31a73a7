"""A head that is never materialised gives what the materialised one gives."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import logitless as ll

N, D, V = 7, 6, 23
CHUNKS = [1, 3, 7, 100]  # rows at once


def make(dtype=torch.float64, device="cpu", bias=True, lead=(N,), scale=1.0):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(device, dtype)

    hidden, weight, b = normal(*lead, D), normal(V, D), normal(V)
    target = torch.randint(0, V, lead, generator=g).to(device)
    target.view(-1)[1::3] = -100
    return hidden, weight, b if bias else None, target


def teacher(lead=(N,), device="cpu"):
    g = torch.Generator().manual_seed(6)
    return torch.randn(*lead, V, generator=g, dtype=torch.float64).to(device)


def targets(lead=(N,), device="cpu"):
    return ll.capture_topk(teacher(lead, device), 4)


def rows(lead=(N,), device="cpu"):
    return (
        torch.linspace(0.5, 2, torch.Size(lead).numel(), dtype=torch.float64).view(lead).to(device)
    )


def mask(lead=(N,), device="cpu"):
    return (torch.arange(torch.Size(lead).numel(), device=device) % 3 > 0).view(lead)


LOSSES = {
    "cross_entropy": lambda z, t, **how: ll.cross_entropy(z, t, **how),
    "smoothed": lambda z, t, **how: ll.cross_entropy(z, t, label_smoothing=0.1, z_loss=0.01, **how),
    "weighted": lambda z, t, **how: ll.cross_entropy(
        z, t, weight=torch.linspace(0.1, 2, V, dtype=torch.float64, device=t.device), **how
    ),
    "by rows": lambda z, t, **how: ll.cross_entropy(
        z, t, row_weight=rows(t.shape, t.device), temperature=rows(t.shape, t.device), softcap=3.0,
        **how,
    ),
    "tail": lambda z, t, **how: ll.topk_distill(
        z, targets(t.shape, t.device), divergence="forward_kl", support="tail", **how
    ),
    "mixed": lambda z, t, **how: ll.topk_distill(
        z, targets(t.shape, t.device), divergence="jsd", support="renorm", temperature=2.0,
        labels=t, ce_weight=0.5, **how,
    ),
    "kl_div": lambda z, t, **how: ll.kl_div(
        z, teacher(t.shape, t.device), direction="forward", mask=mask(t.shape, t.device), **how
    ),
    "jsd": lambda z, t, **how: ll.jsd(z, teacher(t.shape, t.device), **how),
    "soft": lambda z, t, **how: ll.soft_cross_entropy(
        z, teacher(t.shape, t.device).softmax(-1), **how
    ),
}  # fmt: skip


def leaves(hidden, weight, bias, needs=(True, True, True)):
    return [
        None if t is None else t.clone().requires_grad_(need)
        for t, need in zip((hidden, weight, bias), needs, strict=True)
    ]


def result(loss, parts, target, chunk=None, **how):
    """A loss, with what it gave each part; materialised where no chunk is named."""
    if chunk is None:
        logits = F.linear(*parts)
    else:
        logits = ll.LinearLogits(*parts, workspace=chunk * V * parts[0].element_size())
    out = loss(logits, target, **how)
    upstream = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype, device=out.device)
    out.backward(upstream.view(out.shape))
    return out.detach(), [None if t is None else t.grad for t in parts]


def assert_same(got, want, **tolerance):
    torch.testing.assert_close(got[0], want[0], **tolerance)
    for a, b in zip(got[1], want[1], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_as_if_materialised(name, reduction, chunk, device):
    for bias, lead in ((True, (N,)), (False, (N, 1))):
        hidden, weight, b, target = make(bias=bias, lead=lead, device=device)
        parts = leaves(hidden, weight, b)
        want = result(LOSSES[name], leaves(hidden, weight, b), target, reduction=reduction)
        got = result(LOSSES[name], parts, target, chunk, reduction=reduction)
        assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:])
def test_bug_12_exactly_what_requires_a_gradient_gets_one(needs, reduction, device):
    """A frozen input with a trainable head, and every other subset."""
    hidden, weight, bias, target = make(device=device)
    loss = LOSSES["cross_entropy"]
    want = result(loss, leaves(hidden, weight, bias, needs), target, reduction=reduction)
    got = result(loss, leaves(hidden, weight, bias, needs), target, 3, reduction=reduction)
    assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("chunk", [2, 100])
class TestReads:
    """What gives numbers a row."""

    def test_score(self, chunk, device):
        hidden, weight, bias, target = make(device=device)
        parts, again = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        got = ll.score(ll.LinearLogits(*parts, workspace=chunk * V * 8), target)
        want = ll.score(F.linear(*again), target)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
        (got.logprob * 2 - got.entropy * got.lse).sum().backward()
        (want.logprob * 2 - want.entropy * want.lse).sum().backward()
        for a, b in zip(parts, again, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_row_stats_and_the_rest(self, chunk, device):
        hidden, weight, bias, _ = make(device=device)
        ids = torch.randint(0, V, (N, 3), device=device)
        parts, again = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        source, logits = ll.LinearLogits(*parts, workspace=chunk * V * 8), F.linear(*again)
        outs = []
        for z in (source, logits):
            stats = ll.row_stats(z, ids, entropy=True, total=True, argmax=True)
            numbers = [*stats[:4], ll.token_logprobs(z, ids), ll.entropy(z), ll.logsumexp(z)]
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


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of a CPU that has no bf16
def test_bug_08_many_chunks_are_no_less_exact(device):
    """dW accumulated over many chunks in bf16: error against fp64 at most 1.5 × the unfused."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(256, 16, generator=g).to(device)
    weight = (torch.randn(40, 16, generator=g) * 0.3).to(device)
    target = torch.randint(0, 40, (256,), generator=g).to(device)

    def d_weight(dtype, workspace):
        h, w = hidden.bfloat16().to(dtype), weight.bfloat16().to(dtype).requires_grad_()
        logits = F.linear(h, w)
        if workspace is not None:
            logits = ll.LinearLogits(h, w, workspace=workspace)
        ll.cross_entropy(logits, target).backward()
        return w.grad.double()

    truth = d_weight(torch.float64, None)
    unfused = (d_weight(torch.bfloat16, None) - truth).norm()
    for rows_at_once in (4, 32, 128, 256):
        ours = (d_weight(torch.bfloat16, rows_at_once * 40 * 2) - truth).norm()
        assert ours <= 1.5 * unfused, rows_at_once


def test_bug_09_every_upstream_gradient_is_used(device):
    """reduction="none" with per-token weights: right dW and dbias."""
    hidden, weight, bias, target = make(device=device)
    per_token = torch.randn(N, dtype=torch.float64, device=device)
    got, want = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    source = ll.LinearLogits(*got, workspace=2 * V * 8)
    (ll.cross_entropy(source, target, reduction="none") * per_token).sum().backward()
    (ll.cross_entropy(F.linear(*want), target, reduction="none") * per_token).sum().backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_bug_11_a_second_backward_is_right(device):
    hidden, weight, bias, target = make(device=device)
    for reduction in ("mean", "none"):
        parts = leaves(hidden, weight, bias)
        source = ll.LinearLogits(*parts, workspace=3 * V * 8)
        loss = ll.cross_entropy(source, target, reduction=reduction).sum() * 3
        first = torch.autograd.grad(loss, parts, retain_graph=True)
        kept = [t.clone() for t in first]
        second = torch.autograd.grad(
            loss, parts, torch.tensor(2.0, dtype=torch.float64, device=device)
        )
        for a, b, c in zip(first, kept, second, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(c, 2 * b)


def test_bug_21_targets_that_do_not_fit(device):
    hidden, weight, _, target = make(device=device)
    source = ll.LinearLogits(hidden, weight)
    with pytest.raises(
        ValueError, match=r"target must have shape \(7,\) to match logits \(7, 23\), got \(6,\)"
    ):
        ll.cross_entropy(source, target[:6])
    with pytest.raises(ValueError, match="reduction must be one of"):
        ll.cross_entropy(source, target, reduction="avg")
    if device == "cpu":
        with pytest.raises(IndexError, match="target must be in"):
            ll.cross_entropy(source, torch.full((N,), V))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_bug_24_all_ignored_or_no_rows(reduction, device):
    hidden, weight, bias, target = make(device=device)
    for n, to in ((N, -100), (0, 0)):
        parts = leaves(hidden[:n], weight, bias)
        loss = ll.cross_entropy(
            ll.LinearLogits(*parts), torch.full_like(target[:n], to), reduction=reduction
        )
        assert loss.shape == ((n,) if reduction == "none" else ())
        loss.sum().backward()
        assert not loss.any()
        for t in parts:
            assert t.grad is not None
            assert not t.grad.any()


def test_ignored_rows_are_read_by_no_one(device):
    hidden, weight, bias, target = make(device=device)
    hidden[target == -100] = torch.nan
    parts = leaves(hidden, weight, bias)
    loss = ll.cross_entropy(ll.LinearLogits(*parts, workspace=2 * V * 8), target)
    loss.backward()
    live = target != -100
    want = leaves(hidden[live], weight, bias)
    ll.cross_entropy(F.linear(*want), target[live]).backward()
    assert not parts[0].grad[~live].any()
    torch.testing.assert_close(parts[0].grad[live], want[0].grad)
    torch.testing.assert_close(parts[1].grad, want[1].grad)


def test_without_dropping_rows(device):
    hidden, weight, bias, target = make(device=device)
    got, want = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    source = ll.LinearLogits(*got, workspace=2 * V * 8, drop_ignored=False)
    ll.cross_entropy(source, target).backward()
    ll.cross_entropy(F.linear(*want), target).backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_row_weights_get_gradients(device):
    hidden, weight, bias, target = make(device=device)
    for reduction in ("mean", "none"):
        grads = []
        for chunk in (None, 3):
            own = rows(device=device).requires_grad_()
            parts = leaves(hidden, weight, bias)
            z = (
                F.linear(*parts)
                if chunk is None
                else ll.LinearLogits(*parts, workspace=chunk * V * 8)
            )
            ll.cross_entropy(z, target, row_weight=own, reduction=reduction).sum().backward()
            grads.append(own.grad)
        torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, device):
    hidden, weight, bias, target = make(dtype, device)
    want = result(
        LOSSES["cross_entropy"], leaves(hidden.float(), weight.float(), bias.float()), target
    )
    got = result(LOSSES["cross_entropy"], leaves(hidden, weight, bias), target, 3)
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0], want[0], rtol=2e-2, atol=2e-2)
    for a, b in zip(got[1], want[1], strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=2e-2)


def test_weights_of_any_strides(device):
    hidden, weight, bias, target = make(device=device)
    for view in (weight.t().contiguous().t(), weight[:1].expand(V, D)):
        want = result(LOSSES["cross_entropy"], leaves(hidden, view.contiguous(), bias), target)
        parts = leaves(hidden, view.contiguous(), bias)
        base = view.detach().requires_grad_()
        loss = ll.cross_entropy(
            ll.LinearLogits(parts[0], base, parts[2], workspace=3 * V * 8), target
        )
        torch.testing.assert_close(loss.detach(), want[0])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_tied_embeddings_and_autocast(device):
    embedding = nn.Embedding(V, D, device=device)
    target = torch.randint(0, V, (N,), device=device)
    grads = []
    for fused in (False, True):
        embedding.weight.grad = None
        h = embedding(target.flip(0)).tanh()
        z = (
            ll.LinearLogits(h, embedding.weight, workspace=3 * V * 4)
            if fused
            else F.linear(h, embedding.weight)
        )
        ll.cross_entropy(z, target).backward()
        grads.append(embedding.weight.grad.clone())
    torch.testing.assert_close(*grads)
    with torch.autocast(device, dtype=torch.bfloat16):
        source = ll.LinearLogits(h.detach(), embedding.weight)
        assert source.dtype == torch.bfloat16
        ll.cross_entropy(source, target).backward()


def test_linear_cross_entropy(device):
    hidden, weight, bias, target = make(device=device)
    got = ll.linear_cross_entropy(hidden, weight, target, bias=bias, label_smoothing=0.1)
    want = F.cross_entropy(F.linear(hidden, weight, bias), target, label_smoothing=0.1)
    torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own look at a local
def test_under_torch_compile(device):
    hidden, weight, bias, target = make(torch.float32, device)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(h, w, b):
        return ll.cross_entropy(ll.LinearLogits(h.tanh(), w, b, workspace=3 * V * 4), target) * 2

    got, want = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    f(*got).backward()
    (ll.cross_entropy(F.linear(want[0].tanh(), *want[1:]), target) * 2).backward()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_modules(device):
    hidden, weight, bias, target = make(torch.float32, device)
    want = F.cross_entropy(F.linear(hidden, weight, bias), target, label_smoothing=0.1)
    module = ll.nn.LinearCrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(module(hidden, weight, target, bias), want)
    head = ll.nn.FusedHead(D, V, workspace=3 * V * 4, device=device)
    head.load_state_dict({"weight": weight, "bias": bias})
    loss = ll.cross_entropy(head(hidden), target, label_smoothing=0.1)
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert head.weight.grad.abs().sum() > 0


def test_without_gradients_none_is_made(device):
    hidden, weight, bias, target = make(device=device)
    source = ll.LinearLogits(hidden, weight, bias)
    assert not ll.cross_entropy(source, target).requires_grad
    with torch.no_grad():
        parts = leaves(hidden, weight, bias)
        assert not ll.cross_entropy(ll.LinearLogits(*parts), target).requires_grad
    assert source.shape == (N, V)
    assert source.dtype == torch.float64
    assert source.dim() == 2
    assert repr(source).startswith("LinearLogits(shape=(7, 23)")
    torch.testing.assert_close(source.materialize(), F.linear(hidden, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.zeros(5, 4)},
            r"weight must have shape \(V, 6\) to match hidden \(7, 6\)",
        ),
        ({"weight": torch.zeros(V, D).half()}, "weight must be torch.float32 like hidden"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \(23,\) to match weight"),
        ({"bias": torch.zeros(V).long()}, "bias must hold floating-point numbers, got"),
        ({"hidden": [1.0]}, "hidden must be a Tensor"),
        ({"workspace": 0}, "workspace must be positive, got 0"),
        ({"workspace": 1.5}, "workspace must be an int, in bytes, got 1.5"),
        ({"accumulate": "bf16"}, "accumulate must be one of"),
    ],
)
def test_bad_heads(change, message):
    good = {"hidden": torch.zeros(N, D), "weight": torch.zeros(V, D)}
    with pytest.raises((TypeError, ValueError), match=message):
        ll.LinearLogits(**{**good, **change})


def test_a_hidden_state_alone(device):
    """1-D hidden: one row."""
    h, w = torch.randn(5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    target = torch.tensor(3, device=device)
    for reduction in ("none", "sum"):
        got = ll.cross_entropy(ll.LinearLogits(h, w), target, reduction=reduction)
        want = F.cross_entropy(h @ w.T, target)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(t, h)[0] for t in (got, want)))
    assert ll.row_stats(ll.LinearLogits(h, w)).lse.shape == ()


def test_an_undefined_upstream_gradient_is_none(device):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d_x):
            return None

    h, w = torch.randn(4, 5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    target = torch.tensor([1, 2, 0, 3], device=device)
    loss = ll.cross_entropy(ll.LinearLogits(h, w), target, reduction="none")
    Nothing.apply(loss).sum().backward()
    assert h.grad is None or not h.grad.any()


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_target_changed_before_backward_raises(reduction, device):
    """As over a tensor: what backward reads is saved as autograd saves it."""
    h, w = torch.randn(4, 5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    for source in (lambda: h @ w.T, lambda: ll.LinearLogits(h, w)):
        target = torch.tensor([1, 2, 0, 3], device=device)
        loss = ll.cross_entropy(source(), target, reduction=reduction).sum()
        target.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("loss", ["jsd", "cross_entropy"])
def test_the_implementation_may_change_before_backward(loss, head, device):
    h, w = torch.randn(4, 5, device=device, requires_grad=True), torch.randn(9, 5, device=device)
    teacher, target = torch.randn(4, 9, device=device), torch.tensor([1, 2, 0, 3], device=device)

    def f():
        x = ll.LinearLogits(h, w) if head else h @ w.T
        found = ll.jsd(x, teacher) if loss == "jsd" else ll.cross_entropy(x, target)
        return found * 1.5

    with ll.impl("triton"):
        value = f()
    (got,) = torch.autograd.grad(value, h)
    (want,) = torch.autograd.grad(f(), h)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
