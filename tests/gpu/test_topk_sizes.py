"""The k largest and the tail at the vocabularies people train with, against a sort in fp64."""

import pytest
import torch

from logitless import kernels


def compare(x, k):
    ids, logprobs, tail = kernels.topk(x, k, 1.0, None)
    want = x.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    logp = torch.log_softmax(x.double(), -1)
    assert torch.equal(ids, want)
    torch.testing.assert_close(logprobs.double(), logp.gather(1, want), rtol=1e-5, atol=1e-5)
    rest = logp.scatter(1, want, -torch.inf).logsumexp(1)
    torch.testing.assert_close(tail.double(), rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("V", [128256, 151936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 64, 256])
@pytest.mark.parametrize("rows", [3, 300], ids=["few rows: split", "many rows"])
def test_against_a_stable_sort(V, dtype, k, rows):
    compare(torch.randn(rows, V, device="cuda").mul_(3).to(dtype), k)


@pytest.mark.parametrize("k", [1, 64, 256])
def test_more_rows_than_programs(k):
    compare(torch.randn(10_000, 4099, device="cuda").to(torch.bfloat16), k)


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_rows_in_order(order):
    x = torch.arange(128256, device="cuda").mul(order / 4096).expand(64, -1).contiguous()
    compare(x, 64)
    compare(x.bfloat16(), 256)
