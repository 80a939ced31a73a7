"""Lazy logits: a tensor to everyone. What is absorbed, what is made, and that both are right."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.lazy import report
from logitless.lazy.logits import LazyLogits
from logitless.lazy.recipe import Recipe
from tests.support.laws import error
from tests.support.lazy_models import B, T, V, assert_same, model


def test_a_teacher_does_not_warn(x, monkeypatch):
    """Its logits are not those of a training forward."""
    monkeypatch.setattr(report, "_warned", set())
    with warnings.catch_warnings(), torch.no_grad(), ll.lazy_logits():
        warnings.simplefilter("error")
        model(True, x.device)(x).flip(-1)


def test_functions_of_the_shape_read_no_values(x):
    z = model(True, x.device)(x)
    made = [torch.rand_like(z), torch.zeros_like(z), torch.full_like(z, 2), z.new_ones(3)]
    made += [torch.empty_like(z, dtype=torch.int64), z.new_empty(z.shape), torch.ones_like(z[:1])]
    assert not z.known
    assert all(type(t) is torch.Tensor and t.is_contiguous() for t in made)
    assert torch.equal(made[2], torch.full(z.shape, 2.0).to(z))


def several(z, mask):
    """Several functions of the same logits that need all values."""
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.view(-1, V).view(z.shape)).cumsum(-1).sum()
    loss = entropy + torch.tanh(z / 2).sin().flip(-1).sum() + (z * mask).flip(-1).sum()
    return loss + z.softmax(-1).square().flip(-1).sum() + z.sin().flip(-1).sum()


def chained(z, mask):
    """Functions of functions, whose arguments no variable holds when the values are computed."""

    def entropy(z):
        return (z / 2).softmax(-1).square() * (z / 2).log_softmax(-1).sin()

    each = entropy(z)
    del z
    return each.flip(-1).exp().sum()


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
@pytest.mark.parametrize("loss", [several, chained])
def test_values_are_computed_once(loss, x, monkeypatch):
    """One product in forward, none in backward."""
    products, mask = [], torch.rand(B, T, 1).to(x)
    product = Recipe.product
    monkeypatch.setattr(Recipe, "product", lambda self: products.append(1) or product(self))
    loss(model(True, x.device)(x), mask).backward()
    assert len(products) == 1
    assert_same(x, lambda z: loss(z, mask))


def test_without_gradients_it_is_a_plain_tensor(x):
    m = model(True, x.device)
    assert type(m(x)) is LazyLogits
    with torch.no_grad():
        assert type(m(x)) is torch.Tensor
    for p in m.parameters():
        p.requires_grad_(False)
    assert type(m.eval()(x)) is torch.Tensor
    assert m(x).argmax(-1).shape == (B, T)


def test_a_second_backward_and_a_checkpoint(x, t):
    m = model(True, x.device)

    def loss(x):
        return F.cross_entropy(m(x).view(-1, V), t.view(-1))

    value = loss(x)
    first = torch.autograd.grad(value, list(m.parameters()), retain_graph=True)
    again = torch.autograd.grad(value, list(m.parameters()))
    kept = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), list(m.parameters()))
    for a, b, c in zip(first, again, kept, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    value = loss(x)
    (grad, *_) = torch.autograd.grad(value, list(m.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_materialised_one_can(x):
    assert_same(x, lambda z: getattr(z, "materialize", z.clone)().mul_(2).square().sum())
    z = model(True, x.device)(x)
    before = z.tolist()
    z.materialize().zero_()
    assert z.tolist() == before


def test_autocast_is_that_of_a_linear_layer(x, t):
    m, plain = (
        model(True, x.device, dtype=torch.float32),
        model(False, x.device, dtype=torch.float32),
    )
    x = x.float()
    with torch.autocast(x.device.type, torch.bfloat16):
        got = F.cross_entropy(m(x).view(-1, V), t.view(-1))
        want = F.cross_entropy(plain(x).view(-1, V), t.view(-1))
    assert m(x).dtype == plain(x).dtype
    got.backward()
    want.backward()
    for a, b in zip(m.parameters(), plain.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype
        assert error(a.grad, b.grad.double()) < 0.02
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


# --- found by a review: what a plain tensor does, or an error


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_a_move_to_where_it_is_keeps_the_graph(x, t):
    assert_same(x, lambda z: F.cross_entropy(z.to(x.device).view(-1, V), t.view(-1)))
    z = model(True, x.device)(x)
    assert z.to(torch.empty(1, device="meta", dtype=z.dtype)).device.type == "meta"
    if x.device.type == "cpu":
        assert_same(x, lambda z: F.cross_entropy(z.cpu().view(-1, V), t.view(-1)))


@pytest.mark.filterwarnings("ignore:logits of a fused head are materialised")
def test_inference_mode_leaves_nothing_behind(x):
    z = model(True, x.device)(x)
    with torch.inference_mode():
        z.max()
    assert z.materialize().exp().sum().requires_grad


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection(x, t):
    with torch.autograd.set_detect_anomaly(True):
        assert_same(x, lambda z: F.cross_entropy(z.view(-1, V), t.view(-1)))
        z = model(True, x.device)(x * torch.nan)
        with pytest.raises(RuntimeError, match="returned nan values"):
            F.cross_entropy(z.view(-1, V), t.view(-1)).backward()


def test_copies_are_those_of_plain_logits(x):
    """A deep copy of logits with a history raises. A copy of a leaf needs a gradient if it does."""
    for fused in (True, False):
        z = model(fused, x.device)(x)
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy(z)
        with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
            copy.deepcopy({"logits": z[1:]})
    want = model(False, x.device)(x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for needs in (True, False):
            leaf = model(True, x.device)(x).detach().requires_grad_(needs)
            file = io.BytesIO()
            torch.save(leaf, file)
            file.seek(0)
            for found in (copy.deepcopy(leaf), torch.load(file), copy.deepcopy([leaf])[0]):
                assert type(found) is torch.Tensor
                assert found.requires_grad == needs
                assert torch.equal(found.detach(), want)
