"""No synchronisation, CUDA graphs, memory, streams, bad targets, compilation: as a GPU is used."""

import contextlib

import pytest
import torch
import triton

import logitless as ll
from logitless.kernels import config
from tests.support.calls import beside, calls_of
from tests.support.laws import error, host_reads_nothing
from tests.support.sizes import DEVICE, sized

MIB = 2**20
ROWS, VOCAB = sized((512, 32000), (5, 75))


def make(rows=ROWS, V=VOCAB, dtype=torch.bfloat16):
    x = torch.randn(rows, V, device=DEVICE).mul_(2).to(dtype)
    target = torch.randint(0, V, (rows,), device=DEVICE)
    target[:: sized(7, 2)] = -100
    return x, target


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "softcap": {"softcap": 20.0, "temperature": 0.8},
    "inplace": {"inplace": True},
}


SIZE = sized((512, 32000), (6, 75))
CALLS = calls_of(ll, beside(*SIZE))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("nobody_looks")
def test_the_host_does_not_wait_and_every_run_has_the_same_bits(name):
    """Bug 23, for every function of logits."""
    x = torch.randn(*SIZE, device=DEVICE).mul_(2).bfloat16()

    def run():
        leaf = x.clone().requires_grad_()
        found = CALLS[name](leaf * 1)
        real = [t for t in found if t.requires_grad]
        return [
            *found,
            *(torch.autograd.grad(real, leaf, [*map(torch.ones_like, real)]) if real else ()),
        ]

    first = run()  # compiles, too
    with host_reads_nothing():
        again = run()
    for a, b in zip(first, again, strict=True):
        assert a.dtype == torch.bool or a.isfinite().all()
        if name != "group_loss, packed":  # whose formula adds in any order
            assert torch.equal(a, b)


def test_a_synchronisation_would_be_seen(monkeypatch):
    """Looking at targets is what a CPU may do, and a GPU on request."""
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    x, target = make()
    with pytest.raises(RuntimeError, match=r"synchroniz|reads a value"), host_reads_nothing():
        ll.cross_entropy(x, target)


@pytest.mark.gpu("CUDA graphs")
@pytest.mark.parametrize("rows", [4, 512], ids=["split", "many"])
@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS.keys())
def test_cuda_graph(rows, how):
    x, target = make(rows)
    leaf = x.clone().requires_grad_()

    def step():
        loss = ll.cross_entropy(leaf, target, **how)
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
            leaf.data.copy_(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step()
    for _ in range(2):
        fresh = torch.randn_like(x) * 2
        leaf.data.copy_(fresh)
        graph.replay()
        got = loss.clone(), grad.clone()
        leaf.data.copy_(fresh)
        want_loss = ll.cross_entropy(leaf, target, **(how | {"inplace": False}))
        (want,) = torch.autograd.grad(want_loss, leaf)
        torch.testing.assert_close(got[0], want_loss.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(got[1], want, rtol=1e-2, atol=1e-7)


@pytest.mark.gpu("a peak of GPU memory")
@pytest.mark.parametrize(("name", "allowed"), [
    ("cross_entropy", 1.0), ("cross_entropy, in place", 0.0), ("kl_div", 1.0), ("jsd", 1.0),
    ("tvd", 1.0),
])  # fmt: skip
def test_extra_memory(name, allowed):
    """Beyond the logits: their gradient alone, or nothing in place."""
    rows, vocab = 1024, 128256
    call = calls_of(ll, beside(rows, vocab))[name]
    logits = torch.randn(rows, vocab, device=DEVICE).bfloat16().requires_grad_()
    for _ in range(2):  # what libraries keep for themselves is there the second time
        logits.grad, x = None, logits * 1
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        edge = torch.autograd.graph.get_gradient_edge(x)  # of x before a loss overwrites it
        (loss,) = call(x)
        (d,) = torch.autograd.grad(loss.sum(), edge)
        extra = torch.cuda.max_memory_allocated() - before
        del loss, d, x
    assert extra <= allowed * logits.numel() * logits.element_size() + 8 * MIB


@pytest.mark.gpu("several streams")
def test_current_stream_is_used():
    x, target = make()
    want = ll.cross_entropy(x, target)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = x * 1
        got = ll.cross_entropy(y, target)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, want)


@pytest.mark.gpu("Inductor's code for it; tests/losses/test_every_function.py compiles for a CPU")
@pytest.mark.parametrize("function", ["cross_entropy", "score", "logsumexp", "entropy"])
def test_compiles_whole(function):
    torch._dynamo.reset()
    x, target = make(128)
    arguments = (target,) if function in ("cross_entropy", "score") else ()
    plain = getattr(ll, function)
    compiled = torch.compile(plain, fullgraph=True)

    def scalar(f, leaf):
        out = f(leaf, *arguments)
        return out.logprob.sum() if function == "score" else out.sum()

    results = []
    for f in (plain, compiled):
        leaf = x.clone().requires_grad_()
        scalar(f, leaf).backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-6)


@pytest.mark.gpu("Inductor's code for it; tests/heads/test_operators.py compiles for a CPU")
def test_a_head_compiles_whole_and_nobody_waits():
    """Ignored rows and all: how many there are is not asked."""
    hidden = torch.randn(ROWS, 64, device=DEVICE).bfloat16()
    weight = (torch.randn(VOCAB, 64, device=DEVICE) / 4).bfloat16()
    _, target = make()

    def f(h, w, t):
        head = ll.LinearLogits(h.tanh(), w, workspace=ROWS * VOCAB)  # in two chunks
        return ll.cross_entropy(head, t)

    compiled = torch.compile(f, fullgraph=True)
    found = []
    for g in (f, compiled):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        torch.autograd.grad(g(*leaves, target), leaves)  # compiled first
        with host_reads_nothing() if g is compiled else contextlib.nullcontext():
            value = g(*leaves, target)
            found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for a, b in zip(*found, strict=True):
        assert error(a, b.double()) < 1e-2


@pytest.mark.gpu(
    "the interpreter compiles nothing; tests/kernels/test_launch.py asks what would be"
)
def test_no_recompilation_for_a_new_batch(monkeypatch):
    """Bug 25: constexpr lengths that recompile for every new sequence length."""
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda src, **_: compiled.append(src.name)
    )

    def run(rows, V):
        x, target = make(rows, V)
        ll.cross_entropy(x.requires_grad_(), target).backward()

    run(1000, 31936)  # compiled here, if nowhere else before
    compiled.clear()
    for rows, V in ((1001, 32000), (1024, 32000), (4099, 32000), (1000, 32016), (999, 64000)):
        run(rows, V)
    assert compiled == []
    with config.override(block_v=256):
        run(1000, 32000)
    assert compiled, "another kernel would be seen"
