"""Eager reads a few rows at a time."""

import pytest
import torch

import logitless as ll
from tests.support.statistics import WANTS


@pytest.mark.parametrize(("rows", "V"), [(80, 60_000), (3, 2_200_000)], ids=["many", "long"])
def test_result_does_not_depend_on_eager_chunks(rows, V, device):
    """More than eager has in work at once, 8 MiB of fp32: many rows, or more than that in each."""
    # A GPU adds the fp32 numbers of a row in an order that depends on the number of rows.
    dtype = torch.float32 if device == "cpu" else torch.float64
    x = torch.randn(rows, V, device=device, dtype=dtype)
    x[1, :64] = -torch.inf
    ids = torch.randint(64, 100, (rows, 4), device=device)
    upstream = torch.randn(rows, device=device, dtype=dtype)

    def found(some):
        leaf = x[some].requires_grad_()
        stats = ll.row_stats(leaf, ids[some], **WANTS)
        loss = stats.lse + stats.picked.sin().sum(-1) + stats.entropy + 0.1 * stats.total
        return *stats, *torch.autograd.grad(loss, leaf, upstream[some])

    with ll.impl("eager"):
        whole = found(slice(None))
        step = max(rows // 9, 1)
        parts = [found(slice(i, i + step)) for i in range(0, rows, step)]
    for value, part in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(value, torch.cat(part), rtol=1e-6, atol=1e-6, equal_nan=True)
