"""The faster interpreter finds the same errors as Triton's own."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.sizes import ON_GPU

pytestmark = pytest.mark.skipif(ON_GPU, reason="the kernels are compiled")


@triton.jit
def _times_kernel(X, Y, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(Y + offs, tl.load(X + offs) * factor)


@triton.jit
def _two_shapes_kernel(X, Y):
    tl.store(Y + tl.arange(0, 4), tl.load(X + tl.arange(0, 4)) + tl.load(X + tl.arange(0, 8)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.int32])
def test_dtypes_of_one_shape_are_not_mixed_up(dtype):
    x = torch.tensor([1, 2, 3, 4]).to(dtype)
    y = torch.empty_like(x)
    _times_kernel[(1,)](x, y, 3, BLOCK=4)
    assert torch.equal(y, x * 3)


def test_shapes_that_do_not_broadcast_are_an_error():
    x = torch.ones(8)
    for _ in range(2):  # the second call finds all types in the tables
        with pytest.raises(Exception, match="incompatible dimensions"):
            _two_shapes_kernel[(1,)](x, torch.empty(4))


def test_a_length_must_be_a_power_of_two():
    x = torch.ones(8)
    for _ in range(2):
        with pytest.raises(Exception, match="power of 2"):
            _times_kernel[(1,)](x, torch.empty(8), 3, BLOCK=6)
