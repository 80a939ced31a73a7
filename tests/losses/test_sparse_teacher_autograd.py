"""Sparse teachers under autograd, torch.func and torch.compile."""

import pytest
import torch

import logitless as ll
from logitless.contract import COEFFICIENTS, STATE
from logitless.core import evaluate
from tests.support.laws import value_and_grad
from tests.support.pairwise import pairwise
from tests.support.sparse_teachers import ROWS, SUPPORTS, K, V, make, mix


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("ce", [False, True])
def test_compiles_whole(support, ce, impl, device):
    x, targets = make(torch.float32, device)
    how = {"divergence": "jsd", "support": support, "temperature": 2.0}
    how |= mix(device=device) if ce else {}

    def f(x, ids, logprobs, tail):
        return ll.topk_distill(x, ll.SparseTargets(ids, logprobs, tail), **how)

    given = (targets.ids, targets.logprobs, targets.tail)
    up = torch.ones((), device=device)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        value_and_grad(lambda x: compiled(x, *given), x, up),
        value_and_grad(lambda x: f(x, *given), x, up),
    )


def test_a_retained_graph_and_a_second_differentiation(impl, device):
    x, targets = make(torch.float32, device)
    for support in SUPPORTS:
        leaf = x.clone().requires_grad_()
        loss = ll.topk_distill(leaf, targets, divergence="jsd", support=support)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert torch.equal(first, again)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            grad.square().sum().backward()


@pairwise(
    reduction=["mean", "sum", "none"],
    options=["no labels", "labels", "mixed and weighed"],
    k=[1, K],
    support=["truncate", "tail"],
    temperature=[1.0, 2.0],
)
def test_torch_func_sees_the_same(reduction, options, k, support, temperature, impl, device):
    """What those who look on see, torch.func here, is the same loss and the same gradient."""
    x, targets = make(torch.float32, device, k=k)
    how = {
        "divergence": "reverse_kl", "support": support, "temperature": temperature,
        "t_squared": True, "kd_weight": 0.7, "reduction": reduction,
    }  # fmt: skip
    if options != "no labels":
        how["labels"] = torch.tensor([3, -100, 4, 5], device=device)
    if options == "mixed and weighed":  # a weight of inf is for a row that does not count
        how["ce_weight"] = 0.5
        how["row_weight"] = torch.tensor([1.0, torch.inf, 2.0, 3.0], device=device)

    def f(x):
        return (ll.topk_distill(x, targets, **how) * 1.5).sum()

    want, want_grad = value_and_grad(f, x, torch.ones((), device=device))
    grad, value = torch.func.grad_and_value(f)(x)
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(grad, want_grad)


def test_only_the_gradients_of_slots_are_kept(impl, device, monkeypatch):
    """Of what is as large as the ids, one tensor: at K = 512 each counts."""
    monkeypatch.setattr(evaluate, "on_gpu", lambda x: False)  # where a gradient waits for backward
    x, targets = make(torch.float32, device)
    x.requires_grad_()
    kept = []
    labels = torch.tensor([3, -100, 4, 5], device=device)
    for options in ({}, {"labels": labels, "ce_weight": 0.5, "temperature": 2.0}):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            ll.topk_distill(x, targets, divergence="jsd", support="tail", **options)
        wide = [t for t in kept if t.is_floating_point() and t.dim() == 2 and t.shape[1] < V]
        per_row = {(ROWS, STATE), (ROWS, COEFFICIENTS)}
        assert [tuple(t.shape) for t in wide if t.shape not in per_row] == [(ROWS, K)]
