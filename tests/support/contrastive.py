"""Cases of contrastive losses, and the comparison of values and gradients with the oracle."""

import torch

import logitless as ll
from tests.support import oracle
from tests.support.laws import FLOOR, error, poisoned_memory

FUNCTIONS = {
    "contrastive": (ll.contrastive, oracle.contrastive),
    "sigmoid_contrastive": (ll.sigmoid_contrastive, oracle.sigmoid_contrastive),
}
D = 24
SMALL = 20 * 80 * 4  # bytes of a workspace with a few rows of similarities


def embeddings(n, m, dtype=torch.float64, device="cpu", width=D):
    """a, b: related pairs, so that the positives matter."""
    a, b = torch.randn(n, width), torch.randn(m, width)
    b[:n] += a[:m]
    return ((t / width**0.5).to(device, dtype) for t in (a, b))


def gradients(function, a, b, upstream, numbers=(), **how):
    """The value, and the gradients of a, b and of the tensors that `numbers` names."""
    leaves = {name: how[name].detach().clone().requires_grad_() for name in numbers}
    a, b = (t.detach().clone().requires_grad_() for t in (a, b))
    value = function(a, b, **{**how, **leaves})
    upstream = upstream.to(value.dtype).expand(value.shape)
    return value.detach(), *torch.autograd.grad(value, (a, b, *leaves.values()), upstream)


def assert_right(name, a, b, *, numbers=("scale",), workspace=SMALL, **how):
    """Asserts that value and gradients are as good as PyTorch's in the same dtype.

    In fp64, the errors are at most 1e-9. The upstream gradient is random. Memory that no kernel
    writes is NaN. The inputs do not change.
    """
    ours, naive = FUNCTIONS[name]
    rows = len(a) if how.get("reduction") == "none" else ()
    upstream = torch.randn(rows, dtype=torch.float64, device=a.device)
    before = a.clone(), b.clone()
    with poisoned_memory():
        got = gradients(ours, a, b, upstream, numbers, workspace=workspace, **how)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    exact = {k: t.double() if k in numbers else t for k, t in how.items()}
    want = gradients(naive, a.double(), b.double(), upstream, numbers, **exact)
    same = {k: t.to(a.dtype) if k in numbers else t for k, t in how.items()}
    theirs = gradients(naive, a, b, upstream.to(a.dtype), numbers, **same)
    dtypes = (got[0].dtype, a.dtype, b.dtype, *(how[name].dtype for name in numbers))
    assert got[0].dtype == (a.dtype if a.dtype == torch.float64 else torch.float32)
    spread = magnitude(naive, a, b, upstream, **exact) if numbers else 0.0
    for i, (g, w, t, dtype) in enumerate(zip(got, want, theirs, dtypes, strict=True)):
        assert g.shape == w.shape
        assert g.dtype == dtype
        if w.numel() == 0:
            continue
        if a.dtype == torch.float64:
            assert error(g, w) <= 1e-9, f"output {i}: {error(g, w):.3g}"
            continue
        largest = max(float(w.abs().max()), spread if i > 2 else 0.0, 1e-30)
        # Similarities are rounded to 16 bits, and PyTorch's sum can be right by chance.
        rounding = torch.finfo(a.dtype).eps
        floor = FLOOR[a.dtype] + (rounding if i in (1, 2) else rounding / 8)
        found, allowed = (float((x.double() - w).abs().max()) / largest for x in (g, t))
        bound = 2 * allowed + floor
        assert found <= bound, f"output {i}: {found:.3g} > {bound:.3g}"


def magnitude(naive, a, b, upstream, **exact) -> float:
    """Σ |d_logits · logits|. The gradients of scale and bias are sums of terms of both signs."""
    x, one = a.double() @ b.double().T, torch.eye(len(b), device=a.device, dtype=torch.float64)
    _, d_x, _ = gradients(naive, x, one, upstream, **exact)
    return float((d_x * (x.abs() + 1)).abs().sum())
