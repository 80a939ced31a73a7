"""Dense-teacher losses at the vocabularies people distil with, against fp64."""

import itertools

import pytest
import torch

from tests.support.dense_teachers import LOSSES, make, naive, ours
from tests.support.laws import assert_as_good_as_torch
from tests.support.sizes import DEVICE, sized

every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
ROWS = sized(
    list(itertools.product([50257, 128256, 151936], [torch.bfloat16, torch.float32])),
    [(75, torch.bfloat16), (96, torch.float32)],
)


@every_loss
@pytest.mark.parametrize(("V", "dtype"), ROWS)
def test_value_and_gradient(loss, V, dtype):
    rows = sized(12, 4)
    x, t = make(loss, rows=(rows,), vocab=V, dtype=dtype, device=DEVICE)
    how = {"temperature": torch.rand(rows, device=DEVICE) + 0.5, "reduction": "none"}
    # Of 1/T, exponentials and a logarithm, each is right to 2^-22, of which JSD makes the most.
    assert_as_good_as_torch(
        lambda x: ours(x, t, loss, **how), lambda x: naive(x, t, loss, **how), x, factor=4.0
    )


@every_loss
def test_strided_and_unaligned_rows(loss):
    """Shifted rows a column off, and a teacher of another type."""
    (batch, length), V = sized(((2, 5), 50257), ((1, 4), 70))
    x, t = make(
        loss, rows=(batch, length), vocab=V + 3, dtype=torch.bfloat16, teacher=torch.float32,
        device=DEVICE,
    )  # fmt: skip
    t = t[:, : length - 1, :V]
    assert_as_good_as_torch(
        lambda x: ours(x[:, 1:, 3:], t, loss, reduction="none"),
        lambda x: naive(x[:, 1:, 3:], t, loss, reduction="none"),
        x,
    )


@pytest.mark.gpu("8 GiB of logits are too many to interpret")
@pytest.mark.parametrize("kind", ["forward", "jsd 0.5", "tvd"])
def test_more_than_2_31_elements(kind):
    rows, V = 17000, 128256
    assert rows * V > 2**31
    x = torch.empty(rows, V, device="cuda", dtype=torch.bfloat16).normal_(0, 2)
    t = torch.empty_like(x).normal_(0, 2)
    last = x[-2:].double().requires_grad_()
    want = naive(last, t[-2:].double(), LOSSES[kind], reduction="none")
    want.sum().backward()
    leaf = x.requires_grad_()
    value = ours(leaf, t, LOSSES[kind], reduction="none")
    value.sum().backward()
    torch.testing.assert_close(value[-2:].double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad[-2:].double(), last.grad, rtol=1e-2, atol=1e-6)
