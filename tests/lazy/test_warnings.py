"""Warnings name the function that the caller wrote, and point at the caller's line."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.lazy import report
from tests.support.lazy_models import V, model


@pytest.fixture(autouse=True)
def warns_anew(monkeypatch):
    monkeypatch.setattr(report, "_warned", set())


NAMES = {
    "Tensor.cumsum": lambda z: z.cumsum(-1),
    "Tensor.matmul": lambda z: z @ torch.ones(V),
    "torch.sort": lambda z: torch.sort(z),
    "torch.linalg.vector_norm": lambda z: torch.linalg.vector_norm(z),
    "F.cosine_similarity": lambda z: F.cosine_similarity(z, torch.ones(z.shape), -1),
    "F.pad": lambda z: F.pad(z, (1, 1)),
    "torch.einsum": lambda z: torch.einsum("btv,v->bt", z, torch.ones(V)),
    "Tensor.numpy": lambda z: z.detach().numpy(),
    "Tensor.tolist": lambda z: z.tolist(),
    "torch.msort": lambda z: torch.msort(z.log_softmax(-1)),
    "Tensor.flip": lambda z: z.softmax(-1).flip(-1),
    "Tensor.roll": lambda z: torch.where(z > 0, z, 0.0).roll(1),
    "Tensor.var": lambda z: z.var(-1),
    "Tensor.data_ptr": lambda z: z.detach().data_ptr(),
    "F.layer_norm": lambda z: F.layer_norm(z, z.shape[-1:]),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_function_and_the_line_of_the_caller(name, grad):
    """Not aten.sub.Tensor, in a file of PyTorch. Also under no_grad, if the forward was not."""
    z = model(True, dtype=torch.float32)(torch.randn(2, 5, 4))
    with torch.set_grad_enabled(grad):
        with pytest.warns(UserWarning, match=f"materialised by {name}, at ") as seen:
            NAMES[name](z)
        NAMES[name](model(True, dtype=torch.float32)(torch.randn(2, 5, 4)))  # warns once
    (at,) = [(w.filename, w.lineno) for w in seen if "materialised" in str(w.message)]
    assert at == (__file__, inspect.getsourcelines(NAMES[name])[1])


def fused():
    torch.manual_seed(0)
    return ll.fuse(torch.nn.Sequential(torch.nn.Embedding(V, 6), torch.nn.Linear(6, V)), head="1")


REFUSED = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="PyTorch 2.9 exports no fused model in strict mode"
)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=REFUSED)])
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_export(strict):
    """The advice is not how to use torch.compile."""
    torch._dynamo.reset()
    m, ids = fused(), torch.arange(8).view(2, 4)
    with pytest.warns(UserWarning, match="torch.export records the head .* torch.no_grad") as seen:
        program = torch.export.export(m, (ids,), strict=strict).module()
    said = [w for w in seen if "fused" in str(w.message)]
    assert [w.filename for w in said] == [__file__]
    assert "compile" not in str(said[0].message)
    with torch.no_grad(), warnings.catch_warnings():
        assert torch.equal(program(ids), m(ids))
        warnings.filterwarnings("error", message="torch.export records")
        report._warned.clear()
        torch.export.export(m, (ids,), strict=strict)  # as the warning advises
