"""Contrastive losses at the sizes people train, against fp64: in chunks, and never N² logits."""

import pytest
import torch

import logitless as ll
from tests.support.contrastive import FUNCTIONS, gradients
from tests.support.laws import host_reads_nothing
from tests.support.sizes import DEVICE, sized

# Triton's interpreter truncates to bf16 instead of rounding, so the kernels get fp32 there.
DTYPE = sized(torch.bfloat16, torch.float32)


def embeddings(rows, columns, width):
    a, b = (torch.randn(size, width, device=DEVICE) for size in (rows, columns))
    b[:rows] += a
    return ((t / t.norm(dim=-1, keepdim=True)).to(DTYPE) for t in (a, b))


@pytest.mark.parametrize("rows", sized([4096, 4095, 3001], [45]))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_exact_as_pytorch(name, rows):
    """In several chunks. Odd sizes have padded rows."""
    ours, naive = FUNCTIONS[name]
    a, b = embeddings(rows, rows, sized(512, 16))
    scale, upstream = torch.tensor(20.0, device=DEVICE), torch.randn((), device=DEVICE)
    got = gradients(ours, a, b, upstream, ("scale",), scale=scale, workspace=rows * rows)
    want = gradients(naive, a.double(), b.double(), upstream, ("scale",), scale=scale.double())
    theirs = gradients(naive, a, b, upstream.to(DTYPE), ("scale",), scale=scale.to(DTYPE))
    for i, (g, w, t) in enumerate(zip(got, want, theirs, strict=True)):
        found, allowed = ((x.double() - w).norm() / w.norm() for x in (g, t))
        floor = 1e-2 if i in (1, 2) else 3e-3  # gradients are rounded to bf16
        assert found <= 2 * allowed + floor


@pytest.mark.parametrize("everything", [True, False])
def test_masks_and_labels(everything):
    rows, columns = sized((2000, 3001), (21, 37))
    a, b = embeddings(rows, columns, sized(256, 16))
    how = {"symmetric": False, "scale": torch.tensor(10.0, device=DEVICE)}
    how["labels"] = tuple(torch.randint(0, 50, (size,), device=DEVICE) for size in (rows, columns))
    if everything:
        how["mask"] = torch.rand(rows, columns, device=DEVICE) < 0.2
        how["positives"] = torch.randint(0, columns, (rows,), device=DEVICE)
    upstream = torch.randn((), device=DEVICE)
    ours, naive = FUNCTIONS["contrastive"]
    got = gradients(ours, a, b, upstream, ("scale",), **how)
    exact = {**how, "scale": how["scale"].double()}
    want = gradients(naive, a.double(), b.double(), upstream, ("scale",), **exact)
    for g, w in zip(got, want, strict=True):
        assert (g.double() - w).norm() <= 1e-2 * w.norm()


@pytest.mark.gpu("memory")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_and_no_waiting(name):
    """65,536² similarities would take 8 GiB in bf16."""
    a, b = (t.requires_grad_() for t in embeddings(65536, 65536, 128))
    FUNCTIONS[name][0](a[:512], b[:512]).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with host_reads_nothing():
        FUNCTIONS[name][0](a, b, scale=10.0).backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()


@pytest.mark.gpu("more than 2**31 similarities in one chunk")
def test_a_large_workspace():
    a, b = (t.requires_grad_() for t in embeddings(50000, 50000, 64))
    whole, chunks = (
        torch.autograd.grad(ll.contrastive(a, b, scale=10.0, workspace=space), (a, b))
        for space in (8 << 30, 1 << 28)
    )
    for x, y in zip(whole, chunks, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-6)
