"""The gradient of lazy logits: hooks see it, scale it and add it up."""

import pytest
import torch
import torch.nn.functional as F

from logitless.lazy.gradient import LazyGradient
from tests.support.laws import error
from tests.support.lazy_models import V, model


def test_hooks_see_the_logits_and_the_head(x, t):
    m, seen = model(True, x.device), []
    m[1].register_full_backward_hook(lambda *_: seen.append("head"))
    z = m(x)
    z.register_hook(lambda g: seen.append(type(g)))
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
    assert seen == [LazyGradient, "head"]


def test_the_graph_keeps_no_hidden_states(x, t):
    """Beyond what autograd saves, and frees in backward: a layer's worth of memory."""
    target = t[:, 1:].flatten()
    z = model(True, x.device)(x)[:, 1:].reshape(-1, V)
    loss = F.cross_entropy(z[target > 2] / 2, target[target > 2])
    node, kept = loss.grad_fn, []
    while "LazyHead" not in node.name():
        cells = getattr(getattr(node, "back", None), "__closure__", None) or ()
        kept += [cell.cell_contents for cell in cells]
        node = next(f for f, _ in node.next_functions if f is not None)
    tensors = [found for found in kept if isinstance(found, torch.Tensor)]
    assert len(tensors) == 3
    assert all(found.untyped_storage().nbytes() <= 8 for found in tensors)


def test_a_hook_may_scale_the_gradient(x, t):
    got, want = [], []
    for fused, found in ((True, got), (False, want)):
        m = model(fused, x.device)
        z = m(x)
        z.register_hook(lambda g: g * 3)
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()
        found.extend(p.grad for p in m.parameters())
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-11


def test_other_arithmetic_on_a_gradient_says_what_to_do(x, t):
    z = model(True, x.device)(x)
    z.register_hook(lambda g: g.abs())
    with pytest.raises(RuntimeError, match=r"must not be computed with, by aten.abs.*materialize"):
        F.cross_entropy(z.view(-1, V), t.view(-1)).backward()


def test_gradients_may_be_added_up(x, t):
    m = model(True, x.device)
    z = m(x)
    z.retain_grad()
    F.cross_entropy(z.view(-1, V), t.view(-1)).backward(inputs=[z])
    twice = z.grad
    twice += z.grad.clone()
    m.zero_grad()
    m(x).backward(twice)
    other = model(False, x.device)
    (2 * F.cross_entropy(other(x).view(-1, V), t.view(-1))).backward()
    for a, b in zip(m.parameters(), other.parameters(), strict=True):
        assert error(a.grad, b.grad) < 1e-11


def test_a_loss_of_constants_makes_no_gradients(x, t, monkeypatch):
    from logitless.heads.gradient_sums import GradientSums

    def refuse(*_):
        raise AssertionError("a gradient nobody asked for")

    monkeypatch.setattr(GradientSums, "add", refuse)
    z = model(True, x.device)(x).detach()
    assert not F.cross_entropy(z.view(-1, V), t.view(-1)).requires_grad
