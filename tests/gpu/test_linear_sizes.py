"""Heads at the sizes people train, against fp64: in chunks, and never N × V logits."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.calls import beside, calls_of
from tests.support.head_sizes import MIB, assert_as_exact, gradients, make, truth, unfused
from tests.support.laws import host_reads_nothing
from tests.support.meanings import meanings_of
from tests.support.sizes import DEVICE, sized

WIDTH = sized(256, 16)


# Triton's interpreter cuts bf16 off where others round: there the kernels are given fp32.
KINDS = sized(
    {"bf16": (torch.bfloat16, "triton")},
    {"bf16, eager": (torch.bfloat16, "eager"), "fp32, interpreted": (torch.float32, "triton")},
)


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def dtype(request):
    """Of a head, by what computes its losses."""
    dtype, impl = request.param
    with ll.impl(impl):
        yield dtype


def workspace(mib, rows, weight):
    """On a GPU so many MiB; elsewhere so many rows of logits."""
    return sized(mib * MIB, rows * (len(weight) + 8) * weight.element_size())


@pytest.mark.parametrize("vocab", sized([50257, 128256, 151936], [75]))
@pytest.mark.parametrize("space", [None, 32, 8])  # MiB, or a quarter as many rows
@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
def test_as_exact_as_unfused(vocab, space, accumulate, dtype):
    hidden, weight, target = make(*sized((640, 512), (20, 16)), vocab, dtype)
    target[::5] = -100

    def ours(h, W, target):
        room = space and workspace(space, space // 4, weight)
        return ll.cross_entropy(
            ll.LinearLogits(h, W, workspace=room, accumulate=accumulate), target
        )

    assert_as_exact(
        gradients(ours, hidden, weight, target),
        gradients(unfused, hidden, weight, target),
        truth(hidden, weight, target),
    )


@pytest.mark.parametrize("width", sized([512, 500], [16, 13]))  # 13 and 500: rows start anywhere
def test_odd_widths_and_expanded_hidden(width, dtype):
    rows, vocab = sized((300, 32000), (10, 75))
    hidden, weight, target = make(rows, width, vocab, dtype)
    hidden = hidden[:1].expand(rows, width)

    def ours(h, W, target):
        return ll.cross_entropy(ll.LinearLogits(h, W, workspace=workspace(8, 3, weight)), target)

    assert_as_exact(
        gradients(ours, hidden, weight, target),
        gradients(unfused, hidden, weight, target),
        truth(hidden, weight, target),
    )


NAMES = (
    "score", "cross_entropy, every option", "kl_div, reverse", "jsd", "topk_distill",
    "topk_distill, with labels", "topk_distill, tvd",
)  # fmt: skip


@pytest.mark.parametrize("vocab", sized([50257, 128256], [75]))
@pytest.mark.parametrize("kind", sized(["bfloat16", "float16", "float32"], ["float32"]))
def test_other_losses(kind, vocab):
    rows = sized(256, 5)
    hidden, weight, _ = make(rows, WIDTH, vocab, getattr(torch, kind))
    given = beside(rows, vocab)
    ours, naive, room = calls_of(ll, given), meanings_of(given), workspace(16, 2, weight)

    def mean(call, logits):
        return sum(t.mean() for t in call(logits) if t.requires_grad)

    for name in NAMES:
        assert_as_exact(
            gradients(
                lambda h, W: mean(ours[name], ll.LinearLogits(h, W, workspace=room)),  # noqa: B023
                hidden, weight,
            ),
            gradients(lambda h, W: mean(ours[name], F.linear(h, W)), hidden, weight),  # noqa: B023
            gradients(
                lambda h, W: mean(naive[name], F.linear(h, W)),  # noqa: B023
                hidden.double(), weight.double(),
            ),
            name,
        )  # fmt: skip


@pytest.mark.usefixtures("nobody_looks")
def test_a_bad_target_makes_the_loss_nan_and_reads_nothing_else(dtype):
    rows, vocab = sized((256, 32000), (9, 75))
    hidden, weight, target = make(rows, WIDTH, vocab, dtype)
    target[7] = vocab
    loss, d_hidden, _ = gradients(
        lambda h, W: ll.cross_entropy(
            ll.LinearLogits(h, W, workspace=workspace(4, 2, weight)), target
        ),
        hidden,
        weight,
    )
    assert loss.isnan()
    assert d_hidden[7].isnan().all()
    good = torch.arange(rows, device=DEVICE) != 7
    assert d_hidden[good].isfinite().all()


def test_main_grad_is_added_to(dtype):
    rows, vocab = sized((600, 32000), (10, 75))
    hidden, weight, target = make(rows, WIDTH, vocab, dtype)
    _, _, plain = gradients(unfused, hidden, weight, target)
    main_grad = torch.ones(vocab, WIDTH, device=DEVICE)
    W = weight.requires_grad_()
    for f in (
        lambda s: ll.cross_entropy(s, target),
        lambda s: ll.cross_entropy(s, target, reduction="none").mean(),
    ):
        room = workspace(8, 3, weight)
        source = ll.LinearLogits(hidden, W, workspace=room, main_grad=main_grad)
        (f(source) * 0.5).backward()
    assert W.grad is None
    gap = (main_grad - 1 - 2 * plain).norm() / (2 * plain).norm()
    assert gap < 1e-2


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
    step, _ = make_step(sized(torch.bfloat16, torch.float32))
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


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize("loss", ["cross_entropy", "score", "topk_distill", "kl_div"])
def test_extra_memory_is_the_workspace(loss):
    rows, width, vocab, space = 2048, 256, 128256, 64 * MIB
    hidden, weight, target = make(rows, width, vocab, torch.bfloat16)
    h, W = hidden.requires_grad_(), weight.requires_grad_()
    wide = torch.randn(rows, 64, device="cuda") @ torch.randn(64, vocab, device="cuda")
    targets = ll.capture_topk(wide, 16)
    teacher = ll.LinearLogits(hidden.detach(), weight.detach())
    del wide
    f = {
        "cross_entropy": lambda z: ll.cross_entropy(z, target),
        "score": lambda z: ll.score(z, target).logprob.mean(),
        "topk_distill": lambda z: ll.topk_distill(
            z, targets, divergence="forward_kl", support="tail"
        ),
        "kl_div": lambda z: ll.kl_div(z, teacher, direction="forward"),
    }[loss]
    workspaces = 2 if loss == "kl_div" else 1  # the teacher's logits, too
    for _ in range(2):  # what libraries keep for themselves is there the second time
        h.grad = W.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f(ll.LinearLogits(h, W, workspace=space)).backward()
        extra = torch.cuda.max_memory_allocated() - before - (h.numel() + W.numel()) * 2
    assert extra <= workspaces * space + 8 * MIB
