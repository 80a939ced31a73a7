"""A LinearLogits where PyTorch wants a tensor."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support.laws import error
from tests.support.lazy_models import D, V

AS_TENSOR = {
    "F.cross_entropy": lambda z, t: F.cross_entropy(z, t),
    "index": lambda z, t: F.cross_entropy(z[1:4], t[1:4]) + z[0].square().sum(),
    "methods": lambda z, t: F.cross_entropy(z.view(2, -1, V).mT.contiguous(), t.view(2, -1)),
    "operators": lambda z, t: (0.5 * z / 3).logsumexp(-1).sum() + (z + z).square().mean(),
    "torch": lambda z, t: torch.stack([z, 2 * z]).sum() + torch.logsumexp(z, -1).mean(),
    "rows": lambda z, t: sum(row.square().sum() for row in z) * len(z),
}


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("name", AS_TENSOR)
def test_a_linear_logits_is_a_tensor_to_pytorch(name, device):
    leaves = [torch.randn(s, device=device, dtype=torch.float64) for s in ((6, D), (V, D), (V,))]
    leaves = [t.requires_grad_() for t in leaves]
    t = torch.tensor([1, 2, -100, 4, 5, 6], device=device)
    heads = (ll.LinearLogits(*leaves, workspace=2 * V * 8), F.linear(*leaves))
    values = [AS_TENSOR[name](z, t) for z in heads]
    assert error(*values) < 1e-11
    for a, b in zip(*(torch.autograd.grad(value, leaves) for value in values), strict=True):
        assert error(a, b) < 1e-11


def test_a_linear_logits_is_no_tensor_where_it_must_not_be(device):
    h, w = torch.randn(6, D, device=device), torch.randn(V, D, device=device)
    z = ll.LinearLogits(h, w, main_grad=torch.zeros_like(w))
    with pytest.raises(ValueError, match="main_grad must be None if a LinearLogits is passed to"):
        F.cross_entropy(z, torch.zeros(6, dtype=torch.long, device=device))
    for name in ("shard", "__array__"):
        with pytest.raises(AttributeError, match=f"LinearLogits has no attribute {name!r}"):
            getattr(z, name)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda logits: pickle.loads(pickle.dumps(logits))]
)
def test_copies_have_the_same_loss(copied):
    hidden, weight, target = torch.randn(5, 8), torch.randn(12, 8), torch.arange(5)
    logits = ll.LinearLogits(hidden, torch.nn.Parameter(weight))
    assert torch.equal(ll.cross_entropy(copied(logits), target), ll.cross_entropy(logits, target))
