"""Dense-teacher losses against their definitions in fp64, by each implementation."""

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless import jsd, kl_div, soft_cross_entropy, tvd
from tests.support.calls import TEACHER, leaves
from tests.support.dense_teachers import (
    OPTIONS,
    ROWS,
    V,
    every_divergence,
    every_loss,
    make,
    naive,
    ours,
)
from tests.support.inputs import on
from tests.support.laws import assert_as_good_as_torch, value_and_grad

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CASES = {name: (torch.float32, how) for name, how in OPTIONS.items()} | {
    f"all, {str(dtype)[6:]}": (dtype, OPTIONS["all"]) for dtype in DTYPES[1:]
}


@every_loss
@pytest.mark.parametrize(("dtype", "how"), CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("small_blocks")
def test_value_and_gradient(loss, dtype, how, device):
    x, t = make(loss, dtype=dtype, device=device)
    how = on(how, device)
    assert_as_good_as_torch(
        lambda x: ours(x, t, loss, **how, reduction="none"),
        lambda x: naive(x, t, loss, **how, reduction="none"),
        x,
        factor=factor_of(how),
    )


def factor_of(how):
    """We multiply by a row's 1/T, which is rounded itself, where PyTorch divides."""
    return 4.0 if isinstance(how.get("temperature"), torch.Tensor) else 2.0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_jsd_ends_in_the_kl_divergences(direction, impl, device):
    x, t = make(("jsd", 0.5), device=device)
    beta = {"forward": 0, "reverse": 1.0}[direction]
    upstream = torch.ones((), device=device)
    got = value_and_grad(lambda x: jsd(x, t, beta=beta), x, upstream)
    want = value_and_grad(lambda x: kl_div(x, t, direction=direction), x, upstream)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@every_divergence
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.usefixtures("small_blocks")
def test_a_student_that_is_the_teacher(loss, dtype, device):
    x, _ = make(loss, dtype=dtype, device=device)
    x[:, 3:9] = -torch.inf
    upstream = torch.ones(ROWS, device=device)
    value, grad = value_and_grad(
        lambda s: ours(s, x, loss, temperature=1.7, reduction="none"), x, upstream
    )
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(grad, torch.zeros_like(grad))


@every_divergence
def test_never_negative(loss, impl, device):
    t = torch.randn(8, V, device=device) * 2
    noise = torch.tensor([0, 1e-4, 1e-3, 1e-2], device=device).repeat(2)[:, None]
    x = (t + noise * torch.randn_like(t)).bfloat16()
    value = ours(x, t.bfloat16(), loss, reduction="none")
    assert (value >= 0).all()
    assert (value <= 1e-2).all()


@every_loss
@pytest.mark.usefixtures("small_blocks")
def test_offsets_cost_no_digits(loss, device):
    """A common 1e4 on either row is nothing to the loss."""
    x, t = make(loss, device=device)
    x, t = x.mul(8).round() / 8, t if loss[0] == "soft" else t.mul(8).round() / 8  # exact at 1e4
    upstream = torch.ones(ROWS, device=device)
    want = value_and_grad(lambda x: ours(x, t, loss, reduction="none"), x, upstream)
    moved = t if loss[0] == "soft" else t - 1e4
    got = value_and_grad(lambda x: ours(x, moved, loss, reduction="none"), x + 1e4, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


# soft_cross_entropy is PyTorch's


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("small_blocks")
def test_soft_cross_entropy_is_pytorchs(smoothing, weighted, reduction, device):
    x, probs = make(("soft", None), device=device)
    how = {
        "label_smoothing": smoothing,
        "weight": torch.linspace(0, 2, V, device=device) if weighted else None,
        "reduction": reduction,
    }
    upstream = torch.randn((ROWS,) if reduction == "none" else (), device=device)
    got = value_and_grad(lambda x: soft_cross_entropy(x, probs, **how), x, upstream)
    want = value_and_grad(lambda x: F.cross_entropy(x, probs, **how), x, upstream)
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


# What is refused


def test_a_teacher_that_wants_a_gradient_is_refused(device):
    x, t = make(("jsd", 0.5), device=device)
    t.requires_grad_()
    for loss in (jsd, tvd, lambda x, t: kl_div(x, t, direction="forward")):
        with pytest.raises(ValueError, match="teacher must not require grad, "):
            loss(x, t)
    with pytest.raises(ValueError, match="probs must not require grad, "):
        soft_cross_entropy(x, t)


def test_a_student_and_a_teacher_by_name():
    """ll.kl_div(student=a, teacher=b), as documented: "missing 'logits'"."""
    x = leaves("tensor")[0]
    for f, how in ((ll.kl_div, {"direction": "reverse"}), (ll.jsd, {}), (ll.tvd, {})):
        assert torch.equal(f(student=x, teacher=TEACHER, **how), f(x, TEACHER, **how))
