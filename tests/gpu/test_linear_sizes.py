"""Heads at the sizes people train, against fp64: in chunks, and never N × V logits."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll

MIB = 1 << 20


def make(rows, width, vocab, dtype=torch.bfloat16):
    hidden = torch.randn(rows, width, device="cuda").to(dtype)
    weight = (torch.randn(vocab, width, device="cuda") * (2 / width**0.5)).to(dtype)
    return hidden, weight, torch.randint(vocab, (rows,), device="cuda")


def gradients(f, hidden, weight, *others):
    """f's value, and the gradients of hidden and weight, for an upstream that rounds nothing."""
    h, W = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    out = f(h, W, *others)
    out.backward(torch.full_like(out, 0.5))
    return out.detach().double(), h.grad.double(), W.grad.double()


def unfused(h, W, target):
    return F.cross_entropy(F.linear(h, W).float(), target)


def assert_as_exact(got, plain, truth, name=""):
    for a, b, c in zip(got, plain, truth, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm(), name


@pytest.mark.parametrize("vocab", [50257, 128256, 151936])
@pytest.mark.parametrize("space", [None, 32, 8])  # MiB
@pytest.mark.parametrize("accumulate", ["auto", "fp32"])
def test_as_exact_as_unfused(vocab, space, accumulate):
    hidden, weight, target = make(640, 512, vocab)
    target[::5] = -100

    def ours(h, W, target):
        source = ll.LinearLogits(h, W, workspace=space and space * MIB, accumulate=accumulate)
        return ll.cross_entropy(source, target)

    double = gradients(
        lambda h, W, t: F.cross_entropy(F.linear(h, W), t), hidden.double(), weight.double(), target
    )
    assert_as_exact(
        gradients(ours, hidden, weight, target), gradients(unfused, hidden, weight, target), double
    )


@pytest.mark.parametrize("width", [512, 500])  # rows of 500 start anywhere: summed in fp32
def test_odd_widths_and_expanded_hidden(width):
    hidden, weight, target = make(300, width, 32000)
    hidden = hidden[:1].expand(300, width)

    def ours(h, W, target):
        return ll.cross_entropy(ll.LinearLogits(h, W, workspace=8 * MIB), target)

    double = gradients(
        lambda h, W, t: F.cross_entropy(F.linear(h, W), t), hidden.double(), weight.double(), target
    )
    assert_as_exact(
        gradients(ours, hidden, weight, target), gradients(unfused, hidden, weight, target), double
    )


@pytest.mark.parametrize("vocab", [50257, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_losses(dtype, vocab):
    hidden, weight, target = make(256, 256, vocab, dtype)
    teacher = torch.randn(256, vocab, device="cuda")
    targets = ll.capture_topk(teacher, 32)
    losses = {
        "score": lambda z: (s := ll.score(z, target)).logprob.exp().mean() + s.entropy.mean(),
        "tail": lambda z: ll.topk_distill(z, targets, divergence="forward_kl", support="tail"),
        "mixed": lambda z: ll.topk_distill(
            z, targets, divergence="jsd", support="renorm_teacher", temperature=2.0, labels=target,
            ce_weight=0.5,
        ),
        "renorm": lambda z: ll.topk_distill(z, targets, divergence="tvd", support="renorm"),
        "kl": lambda z: ll.kl_div(z, teacher, direction="reverse"),
        "jsd": lambda z: ll.jsd(z, teacher),
        "smoothed": lambda z: ll.cross_entropy(z, target, label_smoothing=0.1, z_loss=1e-3),
    }  # fmt: skip
    for name, loss in losses.items():
        got = gradients(
            lambda h, W: loss(ll.LinearLogits(h, W, workspace=16 * MIB)),  # noqa: B023
            hidden,
            weight,
        )
        plain = gradients(lambda h, W: loss(F.linear(h, W)), hidden, weight)  # noqa: B023
        truth = gradients(
            lambda h, W: loss(F.linear(h, W)),  # noqa: B023
            hidden.double(),
            weight.double(),
        )
        assert_as_exact(got, plain, truth, name)


def test_a_bad_target_makes_the_loss_nan_and_reads_nothing_else():
    hidden, weight, target = make(256, 128, 32000)
    target[7] = 32000
    loss, d_hidden, _ = gradients(
        lambda h, W, t: ll.cross_entropy(ll.LinearLogits(h, W, workspace=4 * MIB), t),
        hidden, weight, target,
    )  # fmt: skip
    assert loss.isnan()
    assert d_hidden[7].isnan().all()
    good = torch.arange(256, device="cuda") != 7
    assert d_hidden[good].isfinite().all()


def test_main_grad_is_added_to():
    hidden, weight, target = make(600, 256, 32000)
    _, _, plain = gradients(unfused, hidden, weight, target)
    main_grad = torch.ones(32000, 256, device="cuda")
    W = weight.requires_grad_()
    for f in (
        lambda s: ll.cross_entropy(s, target),
        lambda s: ll.cross_entropy(s, target, reduction="none").mean(),
    ):
        source = ll.LinearLogits(hidden, W, workspace=8 * MIB, main_grad=main_grad)
        (f(source) * 0.5).backward()
    assert W.grad is None
    gap = (main_grad - 1 - 2 * plain).norm() / (2 * plain).norm()
    assert gap < 1e-2


def test_graphs_and_no_synchronisation():
    """Where rows are not dropped, the host waits for nothing, and a CUDA graph may hold it."""
    hidden, weight, target = make(512, 256, 128256)
    target[::2] = -100
    h, W = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    teacher = torch.randn(512, 128256, device="cuda").bfloat16()

    def step():
        source = ll.LinearLogits(h, W, workspace=32 * MIB, drop_ignored=False)
        loss = ll.cross_entropy(source, target) + ll.kl_div(source, teacher, direction="forward")
        return torch.autograd.grad(loss, (h, W))

    want = step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
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


@pytest.mark.parametrize("loss", ["cross_entropy", "score", "topk_distill", "kl_div"])
def test_extra_memory_is_the_workspace(loss):
    rows, width, vocab, space = 2048, 256, 128256, 64 * MIB
    hidden, weight, target = make(rows, width, vocab)
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
