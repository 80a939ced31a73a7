"""What every computation here must satisfy, as helpers that tests on any device share."""

import contextlib
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

FLOOR = {  # of the error of one value relative to the largest: a few roundings of the accumulator
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    # Below, gradients are rounded to the logits' dtype once; values stay fp32.
    torch.bfloat16: 8 * torch.finfo(torch.float32).eps,
    torch.float16: 8 * torch.finfo(torch.float32).eps,
}


ROUNDING = 4e-6  # error allowed of an fp32 result against fp64, relative to the largest value


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
    computed_in: torch.dtype | None = None,
    terms: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Error against fp64, of value and gradient: at most `factor` times PyTorch's own.

    `naive` is the oracle's formula: in fp64 it is the truth, in the dtype of x, or in the one it is
    said to be computed in, it is PyTorch. If a value is a sum of terms of both signs, `terms` gives
    the sum of their magnitudes. The floor is relative to it, because roundings do not cancel where
    terms do, and PyTorch's own error may be small by luck.
    """
    assert_each_as_good_as_torch(
        lambda x: {"": ours(x)}, {"": naive}, x, factor=factor, computed_in=computed_in,
        terms=terms,
    )  # fmt: skip


def assert_each_as_good_as_torch(
    ours: Callable[[Tensor], dict[str, Tensor]],
    naive: dict[str, Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    factor: float = 2.0,
    computed_in: torch.dtype | None = None,
    terms: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """The same of several results of one call, each differentiated for itself."""
    leaf = x.detach().clone().requires_grad_()
    results = ours(leaf)
    assert results.keys() == naive.keys()
    rounding = torch.finfo(x.dtype).eps / 2  # of a gradient written in the dtype of x
    if computed_in is not None and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        rounding *= 2  # Triton's interpreter cuts bf16 off, which nothing else here allows for
    for which, f in naive.items():
        generator = torch.Generator().manual_seed(7)
        value = results[which]
        upstream = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(x.device)
        truth = value_and_grad(f, x.double(), upstream)
        same_dtype = value_and_grad(f, x.to(computed_in or x.dtype), upstream)
        (grad,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype), retain_graph=True)
        assert grad.dtype == x.dtype
        assert value.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        spread = 1.0 if terms is None else float(terms(x.double()).max() / truth[0].abs().max())
        for name, got, torch_got, want, floor in (
            ("value", value.detach(), same_dtype[0], truth[0], FLOOR[x.dtype] * max(1.0, spread)),
            ("gradient", grad, same_dtype[1], truth[1], FLOOR[x.dtype] + rounding),
        ):
            assert got.shape == want.shape
            bound = factor * error_or_inf(torch_got, want) + floor
            found = error(got, want)
            assert found <= bound, f"{which} {name}: error {found:.3g} > {bound:.3g}"


def error_or_inf(got: Tensor, want: Tensor) -> float:
    """PyTorch's own error, which says nothing where PyTorch is not finite."""
    keep = want.isfinite() & got.isfinite()
    if not keep.any():
        return 0.0
    return error(got[keep], want[keep])


READS = (  # what makes the host wait for a GPU, as tensors' methods, and functions of the same name
    "item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__index__", "__contains__",
)  # fmt: skip


@contextlib.contextmanager
def host_reads_nothing():
    """No value of a tensor is looked at in this block: a GPU's host waits for nothing.

    Without a GPU, whatever would look raises here.
    """
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    def refuse(name):
        def read(*_, **__):
            raise RuntimeError(f"the host reads a value: {name}")

        return read

    def by_positions(name, real):
        def index(t, where, *value):
            for i in where if isinstance(where, tuple) else (where,):
                if isinstance(i, Tensor) and i.dtype == torch.bool:
                    refuse(name)()
            return real(t, where, *value)

        return index

    with contextlib.ExitStack() as stack:
        for name in READS:
            for owner in (torch.Tensor, torch):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, refuse(name)))
        for name in ("__getitem__", "__setitem__"):
            index = by_positions(name, getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, index))
        yield


@contextlib.contextmanager
def poisoned_memory():
    """Every new tensor is NaN, or the largest int, until it is written."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int64) > 2**60).all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
