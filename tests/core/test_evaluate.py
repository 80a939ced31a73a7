"""The routes that a loss over a tensor may take give the same numbers."""

import pytest
import torch
import torch.utils.checkpoint

import logitless as ll
from logitless.core import evaluate
from tests.support.calls import CALLS, TARGET, N, leaves, made, outcome


@pytest.mark.parametrize("options", [
    {}, {"label_smoothing": 0.1}, {"weight": True}, {"reduction": "sum"}, {"row_weight": True},
])  # fmt: skip
@pytest.mark.parametrize("strided", [False, True])
def test_small_logits_have_their_gradient_made_in_forward(
    options, strided, impl, device, monkeypatch
):
    """The same gradient, rounded once, for any upstream; also a second time."""

    x = torch.randn(2, 3, 2, 37, device=device).bfloat16()
    x = x.permute(2, 1, 0, 3) if strided else x  # rows of three strides
    target = torch.randint(0, 37, x.shape[:-1], device=device)
    target[0, 1, 1] = -100
    tensors = {"weight": torch.rand(37, device=device), "row_weight": torch.rand_like(x[..., 0])}
    options = {name: tensors.get(name, value) for name, value in options.items()}
    grads = []
    for at_once, logits in ((False, x), (True, x), (True, x.contiguous())):
        monkeypatch.setattr(evaluate, "on_gpu", lambda x, at_once=at_once: at_once)
        leaf = logits.detach().requires_grad_()
        loss = ll.cross_entropy(leaf, target, **options)
        (once,) = torch.autograd.grad(loss * 0.3, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss * 0.3, leaf)
        assert torch.equal(once, again)
        grads.append(once)
    # One step of bf16: Triton's interpreter cuts it off where a GPU rounds.
    torch.testing.assert_close(*grads[:2], rtol=2**-7, atol=1e-6)
    assert torch.equal(*grads[1:])  # strides change nothing


@pytest.fixture
def restored_default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("restored_default_dtype")
def test_the_default_dtype_changes_nothing(name, impl):
    """jsd of topk_distill and the in-place path changed result or dtype, or crashed."""
    cases = [("head of two chunks", torch.bfloat16)]
    defaults = (torch.float64,)
    if impl == "eager":
        cases += [("tensor", torch.float32), ("tensor", torch.float64), ("head", torch.float32)]
        defaults += (torch.bfloat16, torch.float16)
    for source, dtype in cases:
        torch.set_default_dtype(torch.float32)
        want = outcome(name, source, dtype)
        for default in defaults:
            torch.set_default_dtype(default)
            got = outcome(name, source, dtype)
            assert [t.dtype for t in got] == [t.dtype for t in want]
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (source, dtype, default)


SOURCES = ["tensor", "head"]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("source", SOURCES)
def test_meta_tensors_have_shapes_on_every_source(source, reduction):
    """A head said "unknown device type for autocast"."""
    parts = [t.to("meta").requires_grad_() for t in leaves(source)]
    loss = ll.cross_entropy(made(source, parts), TARGET.to("meta"), reduction=reduction)
    assert (loss.device.type, loss.shape) == ("meta", () if reduction == "mean" else (N,))
    loss.sum().backward()
    assert [t.grad.shape for t in parts] == [t.shape for t in parts]
    scores = ll.score(made(source, parts), TARGET.to("meta"), rank=True)
    assert all(t.shape == (N,) for t in scores)
    assert ll.capture_topk(made(source, parts), 3).ids.shape == (N, 3)
