"""Dense teachers: -inf on either side, NaN, and rows that are masked."""

import pytest
import torch

from tests.support.dense_teachers import (
    LOSSES,
    ROWS,
    V,
    every_divergence,
    every_loss,
    make,
    naive,
    ours,
)
from tests.support.laws import value_and_grad


@every_loss
@pytest.mark.usefixtures("small_blocks")
def test_masked_rows_are_not_read(loss, device):
    x, t = make(loss, device=device)
    keep = torch.tensor([0.0, 1.0, 0.0], device=device)
    x[0], t[0], x[2], t[2] = torch.nan, torch.nan, torch.inf, -torch.inf
    weight = torch.tensor([torch.inf, 2.0, torch.nan], device=device).requires_grad_()
    leaf = x.clone().requires_grad_()
    value = ours(leaf, t, loss, mask=keep, row_weight=weight, reduction="none")
    value.sum().backward()
    assert value[0] == value[2] == weight.grad[0] == weight.grad[2] == 0
    assert torch.equal(leaf.grad[::2], torch.zeros_like(leaf.grad[::2]))
    assert leaf.grad.isfinite().all()
    torch.testing.assert_close(value[1], ours(x[1], t[1], loss) * weight[1])


@every_loss
@pytest.mark.usefixtures("small_blocks")
def test_both_minus_infinite(loss, device):
    """A class that neither has, a block of them first, is as if it weren't there."""
    x, t = make(loss, device=device)
    gone = torch.zeros(V, dtype=torch.bool, device=device)
    gone[:40], gone[50], gone[-1] = True, True, True
    x[:, gone], t[:, gone] = -torch.inf, 0.0 if loss[0] == "soft" else -torch.inf
    upstream = torch.randn(ROWS, device=device)
    got = value_and_grad(lambda x: ours(x, t, loss, reduction="none"), x, upstream)
    want = value_and_grad(
        lambda x: naive(x, t[:, ~gone].double(), loss, reduction="none"),
        x[:, ~gone].double(), upstream,
    )  # fmt: skip
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(got[1][:, ~gone].double(), want[1], rtol=2e-5, atol=1e-7)
    assert torch.equal(got[1][:, gone], torch.zeros_like(got[1][:, gone]))


@every_divergence
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.usefixtures("small_blocks")
def test_one_minus_infinite(loss, side, device):
    """Infinite only where the divergence is, and in no other row; JSD and TVD never."""
    x, t = make(loss, device=device)
    (x if side == "student" else t)[1, :40] = -torch.inf
    upstream = torch.ones(ROWS, device=device)
    value, grad = value_and_grad(lambda x: ours(x, t, loss, reduction="none"), x, upstream)
    infinite = (loss[0], side) in (("forward", "student"), ("reverse", "teacher"))
    assert value[1].isinf() == infinite
    if not infinite:
        want = value_and_grad(
            lambda x: naive(x, t.double(), loss, reduction="none"), x.double(), upstream
        )
        torch.testing.assert_close(value.double(), want[0], rtol=2e-6, atol=1e-7)
        wanted = want[1].nan_to_num()  # autograd's 0 · inf
        torch.testing.assert_close(grad.double(), wanted, rtol=2e-5, atol=2e-7)
    others = [0, 2]
    assert value[others].isfinite().all()
    assert grad[others].isfinite().all()


@every_divergence
@pytest.mark.usefixtures("small_blocks")
def test_a_teacher_masked_with_the_lowest_number(loss, device):
    """A block that no one will choose comes first: what it left in the sums goes, even infinity."""
    x, t = make(loss, device=device)
    t[:, :40] = torch.finfo(torch.float32).min
    x[:, :40] = torch.finfo(torch.float32).min if loss[0] == "reverse" else -torch.inf
    value = ours(x, t, loss, reduction="none")
    want = naive(x[:, 40:].double(), t[:, 40:].double(), loss, reduction="none")
    torch.testing.assert_close(value.double(), want, rtol=2e-6, atol=1e-7)


@every_loss
@pytest.mark.parametrize(
    ("bad", "side"), [(-torch.inf, "student"), (torch.inf, "student"), (torch.nan, "teacher")]
)
@pytest.mark.usefixtures("small_blocks")
def test_a_bad_row_keeps_to_itself(loss, bad, side, device):
    x, t = make(loss, device=device)
    (x if side == "student" else t)[1] = bad
    upstream = torch.ones(ROWS, device=device)
    value, grad = value_and_grad(lambda x: ours(x, t, loss, reduction="none"), x, upstream)
    others = [0, 2]
    assert not value[1].isfinite()
    assert value[others].isfinite().all()
    assert grad[others].isfinite().all()
    if bad == -torch.inf and side == "student":
        assert torch.equal(grad[1], torch.zeros_like(grad[1]))


def test_one_nan_makes_its_row_nan(impl, device):
    for loss in LOSSES.values():
        x, t = make(loss, device=device)
        x[1, 5] = torch.nan
        upstream = torch.ones(ROWS, device=device)
        value, grad = value_and_grad(
            lambda x, t=t, loss=loss: ours(x, t, loss, reduction="none"), x, upstream
        )
        assert value.isnan().nonzero().tolist() == [[1]]
        assert torch.equal(grad.isnan().all(1), value.isnan())
        assert torch.equal(grad.isnan().any(1), value.isnan())
