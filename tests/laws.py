"""What every computation here must satisfy, as helpers that tests on any device share."""

from collections.abc import Callable

import torch
from torch import Tensor

FLOOR = {  # of the error of one value relative to the largest: a few roundings of the accumulator
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    # Below, gradients are rounded to the logits' dtype once; values stay fp32.
    torch.bfloat16: 8 * torch.finfo(torch.float32).eps,
    torch.float16: 8 * torch.finfo(torch.float32).eps,
}


def value_and_grad(
    f: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """f(x) and the gradient of (f(x) · upstream).sum() on a fresh leaf."""
    leaf = x.detach().clone().requires_grad_()
    out = f(leaf)
    (grad,) = torch.autograd.grad(out, leaf, upstream.to(out.dtype).view(out.shape))
    return out.detach(), grad


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value; NaN and inf must agree exactly."""
    got, want = got.double(), want.double()
    strange = ~want.isfinite()
    torch.testing.assert_close(got[strange], want[strange], rtol=0, atol=0, equal_nan=True)
    assert got[~strange].isfinite().all(), "not finite where the oracle is"
    if strange.all():
        return 0.0
    scale = want[~strange].abs().max().clamp_min(1e-30)
    return ((got - want)[~strange].abs().max() / scale).item()


def assert_as_good_as_torch(
    ours: Callable[[Tensor], Tensor],
    naive: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    factor: float = 2.0,
) -> None:
    """Error against fp64, of value and gradient: at most `factor` times PyTorch's own.

    `naive` is the oracle's formula: in fp64 it is the truth, in the dtype of x it is PyTorch.
    """
    generator = torch.Generator().manual_seed(7)
    shape = naive(x.double()).shape
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device)
    truth = value_and_grad(naive, x.double(), upstream)
    same_dtype = value_and_grad(naive, x, upstream)
    result = value_and_grad(ours, x, upstream)
    assert result[1].dtype == x.dtype
    assert result[0].dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    rounding = torch.finfo(x.dtype).eps / 2  # of a gradient written in the dtype of x
    for name, got, torch_got, want, floor in (
        ("value", result[0], same_dtype[0], truth[0], FLOOR[x.dtype]),
        ("gradient", result[1], same_dtype[1], truth[1], FLOOR[x.dtype] + rounding),
    ):
        bound = factor * error_or_inf(torch_got, want) + floor
        assert error(got, want) <= bound, f"{name}: error {error(got, want):.3g} > {bound:.3g}"


def error_or_inf(got: Tensor, want: Tensor) -> float:
    """PyTorch's own error, which says nothing where PyTorch is not finite."""
    keep = want.isfinite() & got.isfinite()
    if not keep.any():
        return 0.0
    return error(got[keep], want[keep])
