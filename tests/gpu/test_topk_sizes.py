"""The k largest and the tail at the vocabularies people train with, against a sort in fp64."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.sizes import sized


def compare(x, k):
    found = ll.capture_topk(x, k)
    ids, logprobs, tail = oracle.topk(x.double(), k)
    assert torch.equal(found.ids, ids)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.tail.double(), tail, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", sized([128256, 151936], [150]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", sized([1, 64, 256], [1, 40]))
@pytest.mark.parametrize("few", [True, False], ids=["few rows: split", "many rows"])
def test_against_a_stable_sort(V, dtype, k, few, device):
    x = torch.randn(3 if few else sized(300, 4), V, device=device).mul_(3).to(dtype)
    with config.override(**sized({}, {"splits": 3 if few else 1})):
        compare(x, k)


@pytest.mark.parametrize("k", sized([1, 64, 256], [3]))
def test_more_rows_than_programs(k, device):
    """A program takes one row after another, and starts each afresh."""
    rows, V = sized((10_000, 4099), (33, 35))  # where the interpreter has 32 programs
    compare(torch.randn(rows, V, device=device).to(torch.bfloat16), k)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_rows_in_order(order, device):
    rows, V = sized((64, 128256), (2, 150))
    x = torch.arange(V, device=device).mul(order / 4096).expand(rows, -1).contiguous()
    compare(x, sized(64, 20))
    compare(x.bfloat16(), sized(256, 70))
