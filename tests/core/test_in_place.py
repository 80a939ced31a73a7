"""cross_entropy(..., inplace=True): the gradient takes the logits' place, and autograd is told.

Leaves, views, other uses of the logits, and what is refused.
"""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from tests.support import oracle
from tests.support.calls import TARGET, N, leaves
from tests.support.laws import ROUNDING, error, value_and_grad
from tests.support.pairwise import pairwise
from tests.support.refusals import T, refusal, refuses

V = 37
CHANGED = "modified by an inplace operation"


def make(rows=5, device="cpu"):
    target = torch.randint(0, V, (rows,), device=device)
    target[1] = -100
    return torch.randn(rows, V, device=device), target


def truth(x, target, upstream, reduction="mean"):
    """Cross-entropy and its gradient, in fp64."""
    upstream = torch.as_tensor(upstream, dtype=torch.float64).to(x.device)
    return value_and_grad(
        lambda x: oracle.cross_entropy(x, target, reduction=reduction), x.double(), upstream
    )


class TestHalf:
    """fp16 holds 6e-8 to 65504: gradients of a mean over many rows, scaled or not, stay inside."""

    def test_a_large_loss_scale_finds_a_gradient_to_scale(self, impl, device):
        """A gradient p / rows that fp16 can hold to 5 bits has all of them after scaling."""
        rows, scale = 24, 2.0**14
        x = torch.full((rows, V), -11.0, dtype=torch.float16, device=device)
        x[:, 0] = 0.0
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        want = x.double().softmax(1)[0, 1].item() / rows
        assert abs(torch.tensor(want).half().item() / want - 1) > 0.02, "fp16 would do"
        leaf = x.clone().requires_grad_()
        (ll.cross_entropy(leaf * 1, target, inplace=True) * scale).backward()
        torch.testing.assert_close(leaf.grad[0, 1].item(), want * scale, rtol=5e-3, atol=0)

    def test_many_rows_do_not_underflow(self, device):
        rows, scale = 20000, 2.0**13
        x = torch.full((rows, 8), -6.0, dtype=torch.float16, device=device)
        x[:, 0] = 0.0
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        p = x[0].double().softmax(0)[1].item()
        assert torch.tensor(p / rows * 0.1).half() == 0, "smaller would vanish"
        leaf = x.clone().requires_grad_()
        with ll.impl("eager"):
            (ll.cross_entropy(leaf * 1, target, inplace=True) * scale).backward()
        torch.testing.assert_close(leaf.grad[7, 1].item(), p / rows * scale, rtol=5e-3, atol=0)

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("live", [1, 70000], ids=["one row counts", "all count"])
    def test_many_rows_do_not_overflow(self, reduction, live, device):
        """More rows than fp16 can count: no gradient of at most 1 may come back as inf."""
        rows = 70000
        x = torch.tensor([9.0, -9.0], dtype=torch.float16, device=device).expand(rows, 2)
        target = torch.full((rows,), -100, device=device)
        target[:live] = 1
        leaf = x.clone().requires_grad_()
        with ll.impl("eager"):
            loss = ll.cross_entropy(leaf * 1, target, reduction=reduction, inplace=True)
            loss.sum().backward()
        each = 1 / live if reduction == "mean" else 1.0
        want = torch.tensor([each, -each], dtype=torch.float16, device=device).expand(live, 2)
        torch.testing.assert_close(leaf.grad[:live], want, rtol=2e-3, atol=1e-7)
        assert not leaf.grad[live:].any()


def test_logits_hold_their_gradient_at_once(impl, device):
    """What flows back is their memory, and no second tensor."""
    x, target = make(device=device)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    at, flowing = logits.data_ptr(), []
    logits.grad_fn.register_prehook(lambda grads: flowing.append(grads[0].data_ptr()))
    loss = ll.cross_entropy(logits, target, inplace=True)
    assert logits.data_ptr() == at
    assert error(logits.detach(), truth(x, target, 1.0)[1]) <= ROUNDING
    assert torch.equal(leaf, x)
    loss.backward()
    assert flowing == [at]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("grad_enabled", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_change_only_when_their_gradient_is_wanted(
    requires_grad, grad_enabled, inplace, impl, device
):
    x, target = make(device=device)
    logits = x.clone().requires_grad_(requires_grad)
    with torch.set_grad_enabled(grad_enabled):
        loss = ll.cross_entropy(logits, target, inplace=inplace)
    overwritten = requires_grad and grad_enabled and inplace
    assert torch.equal(logits.detach(), x) is not overwritten
    assert (logits._version > 0) is overwritten
    assert error(loss.detach(), truth(x, target, 1.0)[0]) <= ROUNDING


def test_row_weight_alone_may_want_a_gradient(impl, device):
    x, target = make(device=device)
    row_weight = torch.rand(5, device=device, requires_grad=True)
    ll.cross_entropy(x, target, row_weight=row_weight, reduction="sum", inplace=True).backward()
    want = F.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(row_weight.grad, want)


@pytest.mark.parametrize("inplace", [False, True])
def test_other_inputs_are_left_alone(inplace, impl, device):
    x, target = make(device=device)
    given = {
        "weight": torch.rand(V, device=device),
        "row_weight": torch.rand(5, device=device),
        "temperature": torch.rand(5, device=device) + 0.5,
    }
    kept = {name: t.clone() for name, t in given.items()}
    kept_target = target.clone()
    leaf = x.clone().requires_grad_()
    (ll.cross_entropy(leaf * 1, target, inplace=inplace, **given) * 2).backward()
    assert torch.equal(leaf, x)
    assert torch.equal(target, kept_target)
    for name, t in given.items():
        assert torch.equal(t, kept[name]), name


def test_an_infinite_upstream_gradient_of_an_ignored_row(impl, device):
    """The gradient of sqrt(0) is infinite, and 0 · inf is not 0."""
    x = torch.randn(3, 37, device=device, requires_grad=True)
    target = torch.tensor([3, -100, 5], device=device)
    for inplace in (False, True):
        loss = ll.cross_entropy(x * 1, target, reduction="none", inplace=inplace)
        (grad,) = torch.autograd.grad(loss.sqrt().sum(), x)
        assert grad.isfinite().all()
        assert not grad[1].any()


def test_wide_rows_in_place_under_the_interpreter(device):
    """Programs that run one after another cannot wait for each other."""
    x = torch.randn(1, 9000, device=device)
    target = torch.tensor([17], device=device)
    leaf = x.clone().requires_grad_()
    with ll.impl("triton"):
        ll.cross_entropy(leaf * 1, target, inplace=True).backward()
    want = x.clone().requires_grad_()
    F.cross_entropy(want, target).backward()
    torch.testing.assert_close(leaf.grad, want.grad)


# --- leaves, views, and other uses


@pytest.mark.parametrize("use", [lambda x: x.sum(), lambda x: x.square().sum()], ids=["+", "²"])
@pytest.mark.parametrize("through", ["itself", "a view of it", "its base"])
def test_a_later_use_raises(use, through, impl, device):
    x, target = make(6, device=device)
    base = x.view(2, 3, V).clone().requires_grad_() * 1
    logits = base.view(6, V) if through == "its base" else x.requires_grad_() * 1
    loss = ll.cross_entropy(logits, target, inplace=True)
    later = use({"itself": logits, "a view of it": logits.view(-1), "its base": base}[through])
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
