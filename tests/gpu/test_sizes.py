"""The vocabularies people train with, at sizes that fill a GPU, against the fp64 oracle."""

import itertools

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support import oracle
from tests.support.laws import assert_as_good_as_torch, assert_each_as_good_as_torch
from tests.support.sizes import DEVICE, sized

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = sized(  # vocabularies by dtype; small, rows that start on 16 bytes and rows that do not
    list(itertools.product([32000, 50257, 128256, 151936, 262144], DTYPES)),
    [(75, torch.float32), (96, torch.bfloat16), (67, torch.float16)],
)


def make(rows, V, dtype, scale=2.0):
    x = torch.randn(rows, V, device=DEVICE, dtype=torch.float32).mul_(scale).to(dtype)
    target = torch.randint(0, V, (rows,), device=DEVICE)
    target[1 % rows] = -100
    return x, target


@pytest.fixture(params=[3, sized(600, 4)], ids=["few rows: split", "many rows"])
def rows(request):
    """Few rows are split where there are processors for the parts, or where we say so."""
    with config.override(**sized({}, {"splits": 3 if request.param == 3 else 1})):
        yield request.param


@pytest.mark.parametrize(("V", "dtype"), ROWS)
class TestOracle:
    def test_cross_entropy(self, V, dtype, rows):
        x, target = make(rows, V, dtype)
        assert_as_good_as_torch(
            lambda x: ll.cross_entropy(x, target), lambda x: oracle.cross_entropy(x, target), x
        )

    def test_every_option(self, V, dtype, rows):
        x, target = make(rows, V, dtype)
        how = {
            "weight": torch.rand(V, device=DEVICE) + 0.5,
            "label_smoothing": 0.1,
            "z_loss": 1e-4,
            "softcap": 30.0,
            "temperature": torch.rand(rows, device=DEVICE) + 0.5,
            "row_weight": torch.rand(rows, device=DEVICE),
            "reduction": "none",
        }
        assert_as_good_as_torch(
            lambda x: ll.cross_entropy(x, target, **how),
            lambda x: oracle.cross_entropy(x, target, **how),
            x,
        )

    def test_score(self, V, dtype, rows):
        x, target = make(rows, V, dtype)
        target = target.clamp(min=0)

        def ours(x):
            found = ll.score(x, target, rank=True)._asdict()
            own = x.gather(1, target[:, None])
            assert torch.equal(found.pop("rank"), (x > own).sum(1))
            best = found.pop("argmax")
            assert torch.equal(x.gather(1, best[:, None])[:, 0], x.amax(1))
            return found

        assert_each_as_good_as_torch(
            ours,
            {
                "logprob": lambda x: oracle.token_logprobs(x, target),
                "entropy": oracle.entropy,
                "lse": oracle.logsumexp,
            },
            x,
        )

    def test_many_ids(self, V, dtype, rows):
        x, _ = make(rows, V, dtype)
        ids = torch.randint(0, V, (rows, 70), device=DEVICE)
        ids[:, 5] = ids[:, 60]
        assert_as_good_as_torch(
            lambda x: ll.token_logprobs(x, ids), lambda x: oracle.token_logprobs(x, ids), x
        )


@pytest.mark.gpu("4 GiB of logits are too many to interpret")
@pytest.mark.parametrize("inplace", [False, True])
def test_more_than_2_31_elements(inplace):
    """Bug 22: int32 offsets overflow past 2^31 elements."""
    rows, V = 17000, 128256
    assert rows * V > 2**31
    x = torch.empty(rows, V, device="cuda", dtype=torch.bfloat16).normal_(0, 2)
    target = torch.randint(0, V, (rows,), device="cuda")
    last = x[-2:].double().requires_grad_()
    want = oracle.cross_entropy(last, target[-2:], reduction="none")
    want.sum().backward()
    leaf = x.requires_grad_()
    loss = ll.cross_entropy(leaf, target, reduction="none", inplace=inplace)
    loss.sum().backward()
    torch.testing.assert_close(loss[-2:].double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad[-2:].double(), last.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.gpu("70,000 rows are too many to interpret: see tests/kernels/test_launch.py")
def test_more_rows_than_a_grid_dimension():
    """Bug 22: 65,535 rows is the limit of the second grid dimension, not of ours."""
    x, target = make(70000, 64, torch.float32)
    want = oracle.cross_entropy(x.double(), target)
    torch.testing.assert_close(ll.cross_entropy(x, target).double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("splits", sized([1, 2, 7, 64, 128], [1, 7]))
def test_splits_do_not_change_the_result(splits):
    x, target = make(4, sized(128256, 150), torch.float32)
    target = target.clamp(min=0)
    with config.override(splits=splits):
        got = ll.score(x, target)
    assert torch.equal(got.argmax, x.argmax(1))
    for name, want in {
        "logprob": oracle.token_logprobs(x.double(), target),
        "entropy": oracle.entropy(x.double()),
        "lse": oracle.logsumexp(x.double()),
    }.items():
        torch.testing.assert_close(getattr(got, name).double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_unaligned_rows(dtype, offset):
    """Rows that start anywhere: a view into a larger tensor, shifted logits, odd strides."""
    batch, length, wide, V = sized((4, 9, 5003, 4097), (1, 3, 83, 67))
    big = torch.randn(batch, length, wide, device=DEVICE).to(dtype)
    target = torch.randint(0, V, (batch, length - 1), device=DEVICE)
    before = big.clone()

    def part(big):
        return big[:, :-1, offset : offset + V]

    assert_as_good_as_torch(
        lambda big: ll.cross_entropy(part(big), target),
        lambda big: oracle.cross_entropy(part(big), target),
        big,
    )
    leaf = part(big).detach().requires_grad_()
    ll.cross_entropy(leaf, target).backward()
    assert torch.equal(big, before)
