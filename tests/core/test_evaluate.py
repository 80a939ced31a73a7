"""The routes that a loss over a tensor may take give the same numbers."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import logitless as ll
from logitless import SparseTargets
from logitless.core import evaluate
from tests.support import calls
from tests.support.calls import CALLS, leaves, outcome
from tests.support.sources import SOURCES


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
        cases += [("tensor", torch.float32), ("tensor", torch.float64)]
        defaults += (torch.float16,)
    for source, dtype in cases:
        torch.set_default_dtype(torch.float32)
        want = outcome(name, source, dtype)
        for default in defaults:
            torch.set_default_dtype(default)
            got = outcome(name, source, dtype)
            assert [t.dtype for t in got] == [t.dtype for t in want]
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (source, dtype, default)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("source", ["tensor", "head", "lazy"])
def test_tensors_without_values_have_shapes_on_every_source(source, kind):
    """Every result and gradient has the shape and dtype that it has with values."""
    mode = FakeTensorMode() if kind == "fake" else contextlib.nullcontext()
    fields = ("ids", "logprobs", "tail", "mask")
    pairs = {
        "sampled": lambda h, w, g: ll.sampled_softmax(h, w, g.target, g.ids[0]),
        "sampled, own": lambda h, w, g: ll.sampled_softmax(h, w, g.target, g.ids),
        "sampled, sparse": lambda h, w, g: ll.sampled_softmax(
            h, w, g.target, g.ids[0], sparse_grad=True, workspace=16
        ),
        "contrastive": lambda h, w, g: ll.contrastive(
            h, w, positives=g.target, symmetric=False, ignore_index=-100
        ),
        "sigmoid": lambda h, w, g: ll.sigmoid_contrastive(h, w[: calls.N]),
    }

    def empty(t):
        if isinstance(t, SparseTargets):
            return SparseTargets(*(empty(getattr(t, name)) for name in fields))
        if not isinstance(t, torch.Tensor):
            return t
        return t.to("meta") if kind == "meta" else mode.from_tensor(t)

    def results(name, made=lambda t: t):
        given = calls.Beside(*map(made, calls.GIVEN))
        parts = [made(t).requires_grad_() for t in leaves("head")[:2]]
        if name in pairs:
            found = (pairs[name](*parts, given),)
        else:
            read = (lambda h, w: h @ w.T) if source == "tensor" else SOURCES[source]
            found = calls.calls_of(ll, given)[name](read(*parts))
        real = [t for t in found if t.requires_grad]
        grads = torch.autograd.grad([t.double().sum() for t in real], parts) if real else ()
        return [(t.shape, t.dtype, t.layout) for t in (*found, *grads)]

    names = [*CALLS, *(pairs if source == "tensor" else ())]
    want = {name: results(name) for name in names}
    with mode:
        assert {name: results(name, empty) for name in names} == want
    assert results("cross_entropy") == want["cross_entropy"]  # no constant of the mode is kept
