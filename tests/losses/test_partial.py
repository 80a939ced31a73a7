"""Parts of a row merge in any order, and to the statistics of the whole."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import logitless as ll
from logitless import Partial, merge, partial
from tests.support import oracle

INF = math.inf


logit = st.one_of(
    st.floats(-50, 50),
    st.floats(-1e6, 1e6),
    st.sampled_from([-INF, torch.finfo(torch.float32).min, -0.0]),
)
columns = st.lists(logit, max_size=6).map(lambda z: torch.tensor(z, dtype=torch.float64))
quick = settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
EMPTY = partial(torch.zeros(0, dtype=torch.float64))


def same(left: Partial, right: Partial) -> None:
    """Equal to fp64 rounding; w to that of the terms it is a sum of, each d e^d < 1."""
    torch.testing.assert_close(left.m, right.m, rtol=0, atol=0)
    torch.testing.assert_close(left.s, right.s, rtol=1e-12, atol=0)
    torch.testing.assert_close(left.w, right.w, rtol=1e-12, atol=1e-12)


@quick
@given(columns, columns)
def test_merge_is_the_partial_of_the_whole(a, b):
    same(merge(partial(a), partial(b)), partial(torch.cat((a, b))))


@quick
@given(columns, columns)
def test_merge_is_commutative(a, b):
    a, b = partial(a), partial(b)
    same(merge(a, b), merge(b, a))


@quick
@given(columns, columns, columns)
def test_merge_is_associative(a, b, c):
    a, b, c = partial(a), partial(b), partial(c)
    same(merge(merge(a, b), c), merge(a, merge(b, c)))


@quick
@given(columns)
def test_the_empty_part_is_the_identity(a):
    a = partial(a)
    for whole in (merge(a, EMPTY), merge(EMPTY, a)):
        for got, want in zip(whole, a, strict=True):
            assert torch.equal(got, want)


@quick
@given(columns, columns)
def test_partial_gives_logsumexp_and_entropy(a, b):
    z = torch.cat((a, b))
    got = merge(partial(a), partial(b))
    if (z == -INF).all():
        assert got.lse == -INF
        assert got.entropy == 0
        return
    torch.testing.assert_close(got.lse, torch.logsumexp(z, 0))
    torch.testing.assert_close(got.entropy, oracle.entropy(z), rtol=1e-10, atol=1e-10)


def test_the_empty_part_says_so():
    assert [t.item() for t in EMPTY] == [-INF, 0.0, 0.0]
    assert EMPTY.lse == -INF
    assert EMPTY.entropy == 0
    both = merge(EMPTY, EMPTY)
    assert [t.item() for t in both] == [-INF, 0.0, 0.0]


def test_a_nan_stays_in_its_row():
    z = torch.randn(3, 8)
    z[1, 5] = torch.nan
    whole = merge(partial(z[:, :4]), partial(z[:, 4:]))
    for value in (whole.lse, whole.entropy):
        assert value.isnan().tolist() == [False, True, False]


def test_a_plus_inf_logit_gives_lse_plus_inf():
    z = torch.tensor([[1.0, INF, 2.0, 3.0], [INF, 1.0, INF, 2.0]])
    want = torch.logsumexp(z, 1)
    assert torch.equal(partial(z).lse, want)
    assert torch.equal(merge(partial(z[:, :2]), partial(z[:, 2:])).lse, want)


@pytest.mark.parametrize("size", [1, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_at_the_lowest_float_vanishes(size, dtype):
    """The value that masks are made of: d · s overflows long before e^d forgets it."""
    low = torch.full((size,), torch.finfo(dtype).min, dtype=dtype)
    z = torch.randn(5, dtype=dtype)
    for whole in (merge(partial(low), partial(z)), merge(partial(z), partial(low))):
        for got, want in zip(whole, partial(z), strict=True):
            assert torch.equal(got, want)


def test_merge_of_equal_maxima_has_the_gradient_of_the_whole():
    """The max of both parts, once in one and twice in the other: a tie is no reason to be off."""
    x = torch.tensor([[2.0, 0.0, 1.0, 2.0, 2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    for split in range(1, 6):
        whole = ll.merge(ll.partial(x[:, :split]), ll.partial(x[:, split:]))
        (got,) = torch.autograd.grad(whole.lse.sum(), x)
        torch.testing.assert_close(got, x.detach().softmax(-1))
    torch.autograd.gradcheck(
        lambda a: ll.merge(ll.partial(a[:, :2]), ll.partial(a[:, 2:])).entropy,
        torch.randn(2, 5, dtype=torch.float64, requires_grad=True),
    )
