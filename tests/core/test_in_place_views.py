"""Logits that are overwritten: views, leaves, other uses of them, and what is refused."""

import pytest
import torch
import torch.utils.checkpoint

import logitless as ll
from tests.support import oracle
from tests.support.calls import TARGET, N, leaves
from tests.support.in_place import CHANGED, V, make, truth
from tests.support.laws import ROUNDING, error
from tests.support.pairwise import pairwise
from tests.support.refusals import T, refusal, refuses


@pytest.mark.parametrize("use", [lambda x: x.sum(), lambda x: x.square().sum()], ids=["+", "²"])
@pytest.mark.parametrize("through", ["itself", "a view of it"])
def test_a_later_use_raises(use, through, impl, device):
    x, target = make(device=device)
    logits = x.clone().requires_grad_() * 1
    loss = ll.cross_entropy(logits, target, inplace=True)
    later = use(logits if through == "itself" else logits.view(-1))
    with pytest.raises(RuntimeError, match=r"logits must not be used after .*inplace=True"):
        (loss + later).backward()


@pytest.mark.parametrize("leaf_given", [False, True], ids=["made", "leaf"])
def test_an_earlier_saved_use_raises(leaf_given, impl, device):
    x, target = make(device=device)
    logits = x.clone().requires_grad_()
    if not leaf_given:
        logits = logits * 1
    earlier = logits.square().sum()
    loss = ll.cross_entropy(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match=CHANGED):
        (loss + earlier).backward()


def test_an_earlier_use_that_saved_nothing_is_fine(impl, device):
    x, target = make(device=device)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    earlier = logits.sum()
    (ll.cross_entropy(logits, target, inplace=True) + earlier).backward()
    assert error(leaf.grad, truth(x, target, 1.0)[1] + 1) <= ROUNDING


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("leaf_given", [False, True], ids=["made", "leaf"])
def test_a_second_backward_raises(retain, leaf_given, impl, device):
    x, target = make(device=device)
    logits = x.clone().requires_grad_()
    loss = ll.cross_entropy(logits if leaf_given else logits * 1, target, inplace=True) * 2
    loss.backward(retain_graph=retain)
    first = logits.grad.clone()
    with pytest.raises(RuntimeError, match=CHANGED if retain else "second time"):
        loss.backward()
    assert torch.equal(logits.grad, first)


SHAPES = {  # of the tensor that the logits (6, V) are a view of
    "itself": (6, V),
    "rows in two dimensions": (2, 3, V),
    "rows in three dimensions": (1, 6, 1, V),
    "flat": (6 * V,),
    "two rows in one": (3, 2 * V),
}


@pairwise(shape=SHAPES, reduction=["mean", "none"], leaf_given={"made": False, "leaf": True})
def test_views(shape, reduction, leaf_given, impl, device):
    """logits.view(-1, V) of anything: the gradient is that of a copy."""
    x = torch.randn(6, V, device=device)
    target = torch.randint(0, V, (6,), device=device)
    upstream = torch.tensor([1.0, 2.0, -3.0, 0.5, 0.0, 4.0], device=device)
    if reduction == "mean":
        upstream = upstream[1]
    leaf = x.view(shape).clone().requires_grad_()
    base = leaf if leaf_given else leaf * 1
    ll.cross_entropy(base.view(6, V), target, reduction=reduction, inplace=True).backward(upstream)
    assert error(leaf.grad.view(6, V), truth(x, target, upstream, reduction)[1]) <= ROUNDING


def test_a_later_use_of_the_base_raises(impl, device):
    x, target = make(6, device=device)
    base = x.view(2, 3, V).clone().requires_grad_() * 1
    loss = ll.cross_entropy(base.view(6, V), target, inplace=True)
    with pytest.raises(RuntimeError, match=r"logits must not be used after .*inplace=True"):
        (loss + base.sum()).backward()


PARTS = {
    "all but the last": lambda h: h[:, :-1],
    "columns": lambda h: h[..., 2:],
    "one of a batch": lambda h: h[1],
    "every other": lambda h: h[:, ::2],
    "transposed rows": lambda h: h.transpose(0, 1),
    "transposed vocabulary": lambda h: h[..., :4].transpose(1, 2),
    "chunk": lambda h: h.chunk(2, 1)[1],
    "unbound": lambda h: h.unbind(0)[1],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("leaf_given", [False, True], ids=["made", "leaf"])
def test_parts_of_a_larger_tensor(part, leaf_given, impl, device):
    """The part is overwritten, the rest is not, and the gradient is that of a copy."""
    h = torch.randn(2, 4, V, device=device)
    x = part(h).contiguous()
    target = torch.randint(0, x.shape[-1], x.shape[:-1], device=device)
    upstream = torch.randn(x.shape[:-1], device=device)
    leaf = h.clone().requires_grad_()
    base = leaf if leaf_given else leaf * 1
    logits = part(base)
    loss = ll.cross_entropy(logits, target, reduction="none", inplace=True)
    rest = torch.ones_like(h, dtype=torch.bool)
    part(rest).fill_(False)
    assert torch.equal(base.detach()[rest], h[rest])
    loss.backward(upstream)
    copy = h.double().requires_grad_()
    oracle.cross_entropy(part(copy), target, reduction="none").backward(upstream.double())
    assert error(leaf.grad, copy.grad) <= ROUNDING


@pytest.mark.parametrize(
    "cut",
    [lambda h: h.detach(), lambda h: h.detach().view(6, V).view(6, V), lambda h: h.data],
    ids=["detach", "view of detach", "data"],
)
def test_a_detached_leaf_keeps_its_gradient_to_itself(cut, impl, device):
    x, target = make(6, device=device)
    source = x.clone().requires_grad_()
    leaf = cut(source * 1).requires_grad_()
    ll.cross_entropy(leaf, target, inplace=True).backward()
    assert error(leaf.grad, truth(x, target, 1.0)[1]) <= ROUNDING
    assert source.grad is None


def test_a_view_made_without_gradients_sends_none_to_its_base(impl, device):
    """It is a leaf although what it looks at isn't; PyTorch may refuse to have it overwritten."""
    x, target = make(6, device=device)
    source = x.view(2, 3, V).clone().requires_grad_()
    hidden = source * 1
    with torch.no_grad():
        leaf = hidden.view(6, V)
    leaf.requires_grad_()
    refused = False
    try:
        ll.cross_entropy(leaf, target, inplace=True).backward()
    except RuntimeError as refusal:
        refused = "view was created in no_grad mode" in str(refusal)
    assert source.grad is None
    assert refused or error(leaf.grad, truth(x, target, 1.0)[1]) <= ROUNDING


def test_expanded_logits_cannot_be_overwritten():
    x = torch.zeros(1, 5, requires_grad=True).expand(3, 5)
    with refuses(
        ValueError,
        "logits must not have elements that share memory if inplace=True, "
        "got shape (3, 5) with strides (0, 1).",
    ):
        ll.cross_entropy(x, T[0], inplace=True)
    with torch.no_grad():  # nothing is overwritten
        ll.cross_entropy(x, T[0], inplace=True)


def test_in_place_refuses_create_graph(impl, device):
    x, target = make(device=device)
    logits = x.requires_grad_() * 1
    loss = ll.cross_entropy(logits, target, inplace=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_overlapping_logits_cannot_be_overwritten(device):
    base = torch.randn(20, device=device).requires_grad_() * 1
    logits = base.unfold(0, 7, 1)
    target = torch.zeros(14, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="must not have elements that share memory"):
        ll.cross_entropy(logits, target, inplace=True)


def test_no_rows_share_no_memory(device):
    """Whatever their strides."""
    logits = torch.empty_strided((2, 0, 1), (0, 1, 0), device=device).requires_grad_()
    target = torch.empty((2, 0), dtype=torch.int64, device=device)
    assert ll.cross_entropy(logits, target, inplace=True) == 0


@pytest.mark.parametrize("of", ["the logits", "their base", "a view"])
def test_logits_that_retain_their_gradient_cannot_be_overwritten(of, impl):
    """It was an INTERNAL ASSERT of PyTorch's, or a gradient that never came."""
    base = leaves("tensor")[0].requires_grad_() * 1
    logits = base if of == "the logits" else base.view(2, N // 2, V)
    (logits if of == "a view" else base).retain_grad()
    words = refusal(lambda: ll.cross_entropy(logits, TARGET.view(logits.shape[:-1]), inplace=True))
    assert words.startswith("logits must not retain grad (retain_grad was called) if inplace=True")
    with torch.no_grad():
        ll.cross_entropy(logits, TARGET.view(logits.shape[:-1]), inplace=True)
