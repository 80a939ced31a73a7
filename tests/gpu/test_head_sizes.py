"""Heads at the sizes people train, against fp64, however they are cut; and never N × V logits."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.heads import choose_cut
from logitless.heads.choose_cut import Cut
from tests.support import oracle
from tests.support.calls import beside, calls_of
from tests.support.laws import host_reads_nothing
from tests.support.meanings import meanings_of
from tests.support.sizes import DEVICE, sized

MIB, FP32 = 1 << 20, torch.float32
WIDTH = sized(256, 16)
# Triton's interpreter cuts bf16 off where others round: there the kernels are given fp32.
DTYPE = sized(torch.bfloat16, FP32)
KINDS = sized(
    {"bf16": (torch.bfloat16, "triton")},
    {"bf16, eager": (torch.bfloat16, "eager"), "fp32, interpreted": (FP32, "triton")},
)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def dtype(request):
    """Of a head, by what computes its losses."""
    dtype, impl = request.param
    with ll.impl(impl):
        yield dtype


def make(rows, width, vocab, dtype):
    hidden = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight = (torch.randn(vocab, width, device=DEVICE) * (2 / width**0.5)).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), device=DEVICE)


def workspace(mib, rows, weight):
    """On a GPU so many MiB; elsewhere so many rows of logits."""
    return sized(mib * MIB, rows * (len(weight) + 8) * weight.element_size())


def differentiated(f, hidden, weight):
    """f(hidden, weight) and both gradients, for an upstream gradient of 0.5: it rounds nothing."""
    h, W = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    out = f(h, W)
    out.backward(torch.full_like(out, 0.5))
    return out.detach().double(), h.grad.double(), W.grad.double()


def compare(head, losses, hidden, weight, bias=None):
    """A loss over a head is as exact as over its logits. `losses`: ours, PyTorch's, and exact."""
    ours, torchs, exact = losses
    wide = None if bias is None else bias.double()
    got = differentiated(lambda h, W: ours(head(h, W)), hidden, weight)
    plain = differentiated(lambda h, W: torchs(F.linear(h, W, bias)), hidden, weight)
    truth = differentiated(
        lambda h, W: exact(F.linear(h, W, wide)), hidden.double(), weight.double()
    )
    for a, b, c in zip(got, plain, truth, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm()
    return got


def cross_entropy(target):
    return (
        lambda z: ll.cross_entropy(z, target),
        lambda z: F.cross_entropy(z.float(), target),
        lambda z: oracle.cross_entropy(z, target),
    )


def scores(target, **how):
    def ours(z):
        found = ll.score(z, target, **how)
        return (found.logprob - 0.1 * found.entropy).mean()

    def exact(z):
        return (oracle.token_logprobs(z, target, **how) - 0.1 * oracle.entropy(z, **how)).mean()

    return ours, ours, exact


# --- in chunks of rows


@pytest.mark.parametrize("vocab", sized([50257, 128256, 151936], [75]))
@pytest.mark.parametrize("space", [None, 32, 8])  # MiB, or a quarter as many rows
@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
def test_chunks(vocab, space, accumulate, dtype):
    hidden, weight, target = make(*sized((640, 512), (20, 16)), vocab, dtype)
    target[::5] = -100
    how = {"accumulate": accumulate}
    how["workspace"] = space and workspace(space, space // 4, weight)
    compare(lambda h, W: ll.LinearLogits(h, W, **how), cross_entropy(target), hidden, weight)


@pytest.mark.parametrize("width", sized([512, 500], [16, 13]))  # 13 and 500: rows start anywhere
def test_odd_widths_and_expanded_hidden(width, dtype):
    rows, vocab = sized((300, 32000), (10, 75))
    hidden, weight, target = make(rows, width, vocab, dtype)
    room, hidden = workspace(8, 3, weight), hidden[:1].expand(rows, width)
    compare(
        lambda h, W: ll.LinearLogits(h, W, workspace=room), cross_entropy(target), hidden, weight
    )


NAMES = (
    "score", "cross_entropy, every option", "kl_div, reverse", "jsd", "topk_distill",
    "topk_distill, with labels", "topk_distill, tvd",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vocab", sized([50257, 128256], [75]))
@pytest.mark.parametrize("kind", sized(["bfloat16", "float16", "float32"], ["float32"]))
def test_other_losses(kind, vocab, name):
    rows = sized(256, 5)
    hidden, weight, _ = make(rows, WIDTH, vocab, getattr(torch, kind))
    given, room = beside(rows, vocab), workspace(16, 2, weight)

    def mean_of(call):
        return lambda z: sum(t.mean() for t in call(z) if t.requires_grad)

    ours, exact = (mean_of(calls[name]) for calls in (calls_of(ll, given), meanings_of(given)))
    head = lambda h, W: ll.LinearLogits(h, W, workspace=room)  # noqa: E731
    compare(head, (ours, ours, exact), hidden, weight)


# --- in blocks of columns, and in fp32

CUT_ROWS, CUT_WIDTH, ODD = sized((640, 512, 50257), (4, 16, 75))  # rows not aligned to 16 bytes
COLUMNS = sized(4096, 40)


@pytest.mark.parametrize(
    ("cut", "bias"),
    [
        (Cut(CUT_ROWS, COLUMNS), False),
        (Cut(CUT_ROWS, COLUMNS, kept=True), True),
        (Cut(CUT_ROWS // 4, COLUMNS), False),
    ],
)
def test_blocks_of_columns(cut, bias):
    """Over many blocks: d_hidden is summed over them, d_weight over groups of rows."""
    hidden, weight, target = make(CUT_ROWS, CUT_WIDTH, ODD, DTYPE)
    target[::5] = -100
    b = torch.randn(ODD, device=DEVICE).to(DTYPE) if bias else None
    with choose_cut.override(lambda work: cut):
        head = lambda h, W: ll.LinearLogits(h, W, b, workspace=1)  # noqa: E731
        compare(head, cross_entropy(target), hidden, weight, b)
        compare(head, scores(target.clamp(min=0)), hidden, weight, b)


@pytest.mark.parametrize("bias", [False, True])
def test_fp32_logits_are_the_sums_of_the_gemm(bias):
    """With logits of a standard deviation of 2 to 3; a GEMM's own sums, with a bias too."""
    hidden, weight, target = make(CUT_ROWS, CUT_WIDTH, ODD, torch.bfloat16)
    b = torch.randn(ODD, device=DEVICE).bfloat16() if bias else None
    parts = (hidden, weight, b)
    want = F.linear(*(None if t is None else t.double() for t in parts)).log_softmax(-1)
    want = want.gather(-1, target[:, None])[:, 0]
    room = sized(16 * MIB, 3 * (ODD + 5) * 6)
    exact = ll.token_logprobs(ll.LinearLogits(*parts, logits_dtype=FP32, workspace=room), target)
    rounded = ll.token_logprobs(ll.LinearLogits(*parts), target)
    assert (exact - want).abs().max() < 2e-4
    assert (rounded - want).abs().max() > 20 * (exact - want).abs().max()
    if DEVICE == "cuda" and not bias:  # the interpreter cuts the gradients of bf16 off
        head = lambda h, W: ll.LinearLogits(h, W, logits_dtype=FP32, workspace=room)  # noqa: E731
        compare(head, cross_entropy(target), hidden, weight)


# --- narrow heads, whose logits are never in memory


def on_chip(work) -> Cut:
    assert work.narrow
    return Cut(work.rows, on_chip=True)


@pytest.mark.parametrize("width", sized([16, 64, 72, 100, 128], [20]))
def test_on_chip(width):
    rows, vocab = sized((1000, 50257), (5, 75))
    hidden, weight, target = make(rows, width, vocab, DTYPE)
    target[::5] = -100
    with choose_cut.override(on_chip):
        runs = [compare(ll.LinearLogits, cross_entropy(target), hidden, weight) for _ in range(2)]
        compare(
            ll.LinearLogits, scores(target.clamp(min=0), softcap=20.0, temperature=1.5),
            hidden, weight,
        )  # fmt: skip
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)  # no sum depends on the order of programs


# --- waiting, graphs, memory


def make_step(dtype):
    """A step over a head whose rows are not dropped, and its hidden states."""
    rows, vocab = sized((512, 128256), (6, 75))
    hidden, weight, target = make(rows, WIDTH, vocab, dtype)
    target[::2] = -100
    h, W = hidden.requires_grad_(), weight.requires_grad_()
    teacher = torch.randn(rows, vocab, device=DEVICE).to(dtype)

    def step():
        room = workspace(32, 4, weight)
        source = ll.LinearLogits(h, W, workspace=room, drop_ignored=False)
        loss = ll.cross_entropy(source, target) + ll.kl_div(source, teacher, direction="forward")
        return torch.autograd.grad(loss, (h, W))

    return step, h


@pytest.mark.usefixtures("nobody_looks")
def test_no_synchronisation():
    """Where rows are not dropped, the host waits for nothing."""
    step, _ = make_step(DTYPE)
    want = step()  # compiles first
    with host_reads_nothing():
        got = step()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu("CUDA graphs")
def test_graphs():
    """Where rows are not dropped, a CUDA graph may hold it."""
    step, h = make_step(torch.bfloat16)
    hidden = h.detach().clone()
    want = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    with torch.no_grad():
        h.mul_(0)
    graph.replay()
    with torch.no_grad():
        h.copy_(hidden)
    graph.replay()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def extra_memory(loss_of, h, W) -> int:
    """The peak beyond what is there before, in the second of two steps.

    What libraries keep for themselves is there in the second.
    """
    before = 0
    for _ in range(2):
        h.grad = W.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = loss_of()
        if loss.requires_grad:
            loss.backward()
    return torch.cuda.max_memory_allocated() - before


MEMORY = [("mean", mib, dtype) for mib in (32, 64, 256) for dtype in (None, FP32)]
MEMORY += [(loss, 64, dtype) for loss in ("score", "no gradients") for dtype in (None, FP32)]
MEMORY += [("topk_distill", 64, None), ("kl_div", 64, None)]


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize(("loss", "mib", "logits_dtype"), MEMORY)
def test_extra_memory_is_the_workspace(loss, mib, logits_dtype):
    hidden, weight, target = make(8192, 1024, 128256, torch.bfloat16)
    targets = ll.capture_topk(ll.LinearLogits(hidden, weight), 16)
    teacher = ll.LinearLogits(hidden, weight)
    h, W = (t.clone().requires_grad_() for t in (hidden, weight))
    losses = {
        "mean": lambda z: ll.cross_entropy(z, target),
        "no gradients": lambda z: ll.cross_entropy(z, target),
        "score": lambda z: ll.score(z, target).logprob.mean(),
        "topk_distill": lambda z: ll.topk_distill(
            z, targets, divergence="forward_kl", support="tail"
        ),
        "kl_div": lambda z: ll.kl_div(z, teacher, direction="forward"),
    }

    def step():
        return losses[loss](ll.LinearLogits(h, W, workspace=mib * MIB, logits_dtype=logits_dtype))

    with torch.set_grad_enabled(loss != "no gradients"):
        extra = extra_memory(step, h, W)
    gradients = 0 if loss == "no gradients" else (h.numel() + W.numel()) * 2
    workspaces = 2 if loss == "kl_div" else 1  # the teacher's logits, too
    assert extra <= gradients + (workspaces * mib + 8) * MIB


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize(("rows", "width", "vocab"), [(8192, 128, 1 << 20), (2048, 64, 10**7)])
def test_extra_memory_on_chip(rows, width, vocab):
    """At most 64 MiB beyond the gradients."""
    hidden, weight, target = make(rows, width, vocab, torch.bfloat16)
    h, W = hidden.requires_grad_(), weight.requires_grad_()
    work = ll.LinearLogits(h, W).head.work(True, gemms=1, sums=True, keeps=True)
    with mock.patch.object(choose_cut, "ON_CHIP_VOCAB", {128: 1 << 31}):
        assert choose_cut.choose.__wrapped__(work, None, DEVICE).on_chip
    with choose_cut.override(on_chip):
        extra = extra_memory(lambda: ll.cross_entropy(ll.LinearLogits(h, W), target), h, W)
    assert extra <= 2 * (h.numel() + W.numel()) + 64 * MIB
