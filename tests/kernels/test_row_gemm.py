"""The GEMM whose rows have the same bits for every number of rows."""

import pytest
import torch

from logitless import eager, kernels
from logitless.kernels import config

BACKENDS = pytest.mark.parametrize("backend", [eager, kernels], ids=["eager", "kernels"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32])


@pytest.fixture(autouse=True)
def small_tiles():
    with config.override(block_n=16, block_v=32, span=16):
        yield


def matrices(rows, inner, columns, dtype, transposed, device):
    a = torch.randn(rows, inner).to(device, dtype)
    b = torch.randn(columns, inner).to(device, dtype)
    return a, b if transposed else b.t().contiguous()


@BACKENDS
@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "columns"), [(32, 64), (40, 75), (7, 5), (1, 1)])
def test_as_exact_as_pytorch(backend, dtype, transposed, inner, columns, device):
    """The sizes include some that are no multiples of a tile or of 16 bytes. `out` is poisoned."""
    a, b = matrices(19, inner, columns, dtype, transposed, device)
    bias = torch.randn(columns).to(device, dtype)
    right = b.t() if transposed else b
    truth = a.double() @ right.double() + bias.double()
    out = torch.full((19, columns), torch.nan, device=device, dtype=dtype)
    assert backend.row_gemm(a, b, out, bias, transposed) is out
    theirs = (torch.addmm(bias, a, right) - truth).norm()
    assert (out - truth).norm() <= 2 * theirs + 1e-6 * truth.norm()
    backend.row_gemm(a, b, out, None, transposed)
    assert (out - (truth - bias)).norm() <= 2 * theirs + 1e-6 * truth.norm()


@BACKENDS
@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_do_not_depend_on_the_batch(backend, dtype, transposed, device):
    """Tests parts of a batch, slices of larger tensors, and rows next to a row that is NaN."""
    a, b = matrices(21, 40, 75, dtype, transposed, device)
    together = backend.row_gemm(
        a, b, torch.empty(21, 75, device=device, dtype=dtype), None, transposed
    )
    for rows in (slice(0, 1), slice(3, 5), slice(4, 21), slice(2, 21, 3)):
        some = a[rows]
        wide = torch.full((len(some) + 2, 43), torch.nan, device=device, dtype=dtype)
        wide[1:-1, 3:] = some
        for part in (some, wide[1:-1, 3:]):
            out = torch.empty(len(some), 75, device=device, dtype=dtype)
            assert torch.equal(backend.row_gemm(part, b, out, None, transposed), together[rows])
    a[5] = torch.nan
    out = torch.empty(21, 75, device=device, dtype=dtype)
    backend.row_gemm(a, b, out, None, transposed)
    assert bool(out[5].isnan().all())
    assert torch.equal(out[6:], together[6:])
    assert torch.equal(out[:5], together[:5])


@BACKENDS
def test_fp32_sums_of_16_bit_matrices(backend, device):
    a, b = matrices(5, 40, 75, torch.float16, True, device)
    bias = torch.randn(75).to(device).half()
    truth = a.double() @ b.double().t() + bias.double()
    out = torch.empty(5, 80, device=device)[:, :75]
    backend.row_gemm(a, b, out, bias, True)
    assert (out - truth).norm() <= 1e-6 * truth.norm()


@BACKENDS
def test_empty_matrices(backend, device):
    a, b, bias = torch.zeros(3, 0), torch.zeros(0, 4), torch.arange(4.0)
    a, b, bias = a.to(device), b.to(device), bias.to(device)
    out = torch.full((3, 4), torch.nan, device=device)
    assert torch.equal(backend.row_gemm(a, b, out, bias), bias.expand(3, 4))
    assert backend.row_gemm(a[:0], b, out[:0]).shape == (0, 4)
    assert bool((backend.row_gemm(a, b, out) == 0).all())
