"""cross_entropy(..., inplace=True): the gradient takes the logits' place, and autograd is told."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import logitless as ll
from tests.support.in_place import V, make, truth
from tests.support.laws import ROUNDING, error, value_and_grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("upstream", [1.0, -2.5, 0.0])
def test_gradient_for_a_scalar_upstream(reduction, upstream, impl, device):
    x, target = make(device=device)
    leaf = x.clone().requires_grad_()
    loss = ll.cross_entropy(leaf * 1, target, reduction=reduction, inplace=True)
    (loss * upstream).backward()
    want_loss, want = truth(x, target, upstream, reduction)
    assert error(loss.detach(), want_loss) <= ROUNDING
    assert error(leaf.grad, want) <= ROUNDING
    assert not leaf.grad[1].any()


@pytest.mark.parametrize(
    "upstream", [[1.0] * 5, [0.5, 9.0, -2.0, 0.0, 3.0]], ids=["ones", "different"]
)
def test_gradient_for_an_upstream_of_each_row(upstream, impl, device):
    x, target = make(device=device)
    leaf = x.clone().requires_grad_()
    loss = ll.cross_entropy(leaf * 1, target, reduction="none", inplace=True)
    loss.backward(torch.tensor(upstream, device=device))
    want_loss, want = truth(x, target, upstream, "none")
    assert error(loss.detach(), want_loss) <= ROUNDING
    assert error(leaf.grad, want) <= ROUNDING


OPTIONS = {
    "smoothing": {"label_smoothing": 0.2},
    "weight": {"weight": torch.linspace(0.1, 2, V)},
    "z_loss": {"z_loss": 0.1, "softcap": 5.0, "temperature": 0.7},
    "row temperature": {"temperature": torch.linspace(0.5, 2, 5)},
    "row_weight": {"row_weight": torch.tensor([1.0, 2.0, -1.0, 0.0, 3.0])},
    "mask": {"mask": torch.tensor([True, True, False, True, False])},
    "counts": {"row_weight": torch.tensor([1, 2, 0, 3, 1])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_option_agrees_with_inplace_false(options, reduction, impl, device):
    x, target = make(device=device)
    how = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    upstream = torch.randn(() if reduction == "mean" else 5, device=device)
    kept, replaced = (
        value_and_grad(
            lambda x, inplace=inplace: ll.cross_entropy(
                x * 1, target, reduction=reduction, inplace=inplace, **how
            ),
            x,
            upstream,
        )
        for inplace in (False, True)
    )
    if reduction == "none":
        assert torch.equal(replaced[0], kept[0])
    else:  # the two kernels add the same five losses in different orders
        torch.testing.assert_close(replaced[0], kept[0], rtol=4e-7, atol=0)
    torch.testing.assert_close(replaced[1], kept[1], rtol=1e-6, atol=1e-7)


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
    x, target = make(device=device)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1
    at = logits.data_ptr()
    ll.cross_entropy(logits, target, inplace=True)
    assert logits.data_ptr() == at
    assert error(logits.detach(), truth(x, target, 1.0)[1]) <= ROUNDING
    assert torch.equal(leaf, x)


def test_gradient_costs_no_second_tensor(impl, device):
    """What flows back is the memory of the logits."""
    x, target = make(device=device)
    logits = x.clone().requires_grad_() * 1
    flowing = []
    at = logits.data_ptr()
    logits.grad_fn.register_prehook(lambda grads: flowing.append(grads[0].data_ptr()))
    ll.cross_entropy(logits, target, inplace=True).backward()
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


def test_second_backward_in_place_raises(impl, device):
    """Second backward on a retained graph scaled twice: the logits are gone, so it raises."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    target = torch.randint(0, 37, (3,), device=device)
    loss = ll.cross_entropy(leaf * 1, target, inplace=True) * 3
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.equal(leaf.grad, first)


def test_autograd_is_told_of_inplace(impl, device):
    """Input logits overwritten without telling autograd: its count of writes goes up."""
    leaf = torch.randn(3, 37, device=device, requires_grad=True)
    logits = leaf * 1
    square = logits.square().sum()  # saves the logits
    before = logits._version
    loss = ll.cross_entropy(logits, torch.tensor([1, 2, 3], device=device), inplace=True)
    assert logits._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square + loss).backward()


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


def test_in_place_under_a_watching_mode(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, 50, device=device, requires_grad=True) * 1
        loss = ll.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=device), inplace=True)
        assert loss.shape == ()
