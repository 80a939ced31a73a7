"""What only a GPU can show: no synchronisation, CUDA graphs, memory, streams, bad targets."""

import pytest
import torch

import logitless as ll

MIB = 2**20


def make(rows=512, V=32000, dtype=torch.bfloat16):
    x = torch.randn(rows, V, device="cuda").mul_(2).to(dtype)
    target = torch.randint(0, V, (rows,), device="cuda")
    target[::7] = -100
    return x, target


OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "softcap": {"softcap": 20.0, "temperature": 0.8},
    "inplace": {"inplace": True},
}


@pytest.mark.parametrize("how", OPTIONS.values(), ids=OPTIONS.keys())
def test_no_host_synchronisation(how):
    """Bug 23."""
    x, target = make()
    weight = torch.rand(32000, device="cuda")
    leaf = x.clone().requires_grad_()
    ll.cross_entropy(leaf, target, weight=weight, **how).backward()  # compile first
    torch.cuda.synchronize()
    leaf = x.clone().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (ll.cross_entropy(leaf, target, weight=weight, **how) * 2).backward()
        ll.score(x, target)
        ll.token_logprobs(x, target.clamp(min=0)[:, None].expand(-1, 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert leaf.grad.isfinite().all()


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


def peak_of(f):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("inplace", "allowed"), [(False, 1.0), (True, 0.0)])
def test_extra_memory(inplace, allowed):
    x, target = make(2048, 128256)
    logits = x.requires_grad_()
    extra = peak_of(lambda: ll.cross_entropy(logits, target, inplace=inplace).backward())
    assert extra <= allowed * x.numel() * x.element_size() + 8 * MIB


def test_bad_target_is_nan_on_its_own_row(monkeypatch):
    """Bug 21: no out-of-bounds access, and no silence."""
    x, target = make(64)
    target[5], target[6], target[9] = 32000, -1, 2**40
    leaf = x.clone().requires_grad_()
    loss = ll.cross_entropy(leaf, target, reduction="none")
    bad = torch.zeros(64, dtype=torch.bool, device="cuda")
    bad[[5, 6, 9]] = True
    assert torch.equal(loss.isnan(), bad)
    loss[~bad].sum().backward()
    assert torch.equal(leaf.grad.isnan().all(1), bad)
    assert torch.equal(leaf.grad.isnan().any(1), bad)
    monkeypatch.setenv("LOGITLESS_CHECK", "1")
    with pytest.raises(IndexError, match=r"target must be in \[0, 32000\).*got 32000 at row 5"):
        ll.cross_entropy(leaf, target)


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


@pytest.mark.parametrize("function", ["cross_entropy", "score", "logsumexp", "entropy"])
def test_compiles_whole(function):
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


def test_no_recompilation_for_a_new_batch():
    """Bug 25: constexpr lengths that recompile for every new sequence length."""
    from logitless.kernels.stats_bwd import _stats_bwd_kernel
    from logitless.kernels.stats_fwd import _stats_fwd_kernel

    def compiled():
        device = torch.cuda.current_device()
        return [len(k.device_caches[device][0]) for k in (_stats_fwd_kernel, _stats_bwd_kernel)]

    def run(rows, V):
        x, target = make(rows, V)
        ll.cross_entropy(x.requires_grad_(), target).backward()

    run(1000, 32000)
    before = compiled()
    for rows, V in ((1001, 32000), (1024, 32000), (4099, 32000), (1000, 32016), (999, 64000)):
        run(rows, V)
    assert compiled() == before
