"""Assertions that every result of the library must satisfy, for tests on any device."""

import contextlib
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

# Errors that are always allowed, relative to the largest value: a few roundings of the accumulator.
FLOOR = {
    torch.float64: 8 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    # For 16-bit logits, values are fp32. The rounding of gradients is allowed for elsewhere.
    torch.bfloat16: 8 * torch.finfo(torch.float32).eps,
    torch.float16: 8 * torch.finfo(torch.float32).eps,
}


ROUNDING = 4e-6  # allowed error of an fp32 result, relative to the largest value


def value_and_grad(
    f: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """f(x), and the gradient of (f(x) · upstream).sum() with respect to a new leaf."""
    leaf = x.detach().clone().requires_grad_()
    out = f(leaf)
    upstream = torch.ones_like(out) if upstream is None else upstream
    (grad,) = torch.autograd.grad(out, leaf, upstream.to(out.dtype).view(out.shape))
    return out.detach(), grad


def gradients(results: Tensor | Sequence[Tensor | None], leaves) -> list[Tensor]:
    """Gradients of the leaves, dense, for random upstream gradients of the results."""
    results = [results] if isinstance(results, Tensor) else [t for t in results if t is not None]
    g = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t) for t in results]
    found = torch.autograd.grad(results, leaves, upstream, retain_graph=True)
    return [t.to_dense() if t.is_sparse else t for t in found]


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference relative to the largest value. NaN and inf must agree exactly."""
    got, want = got.double(), want.double()
    strange = ~want.isfinite()
    torch.testing.assert_close(got[strange], want[strange], rtol=0, atol=0, equal_nan=True)
    assert got[~strange].isfinite().all(), "not finite where the oracle is"
    if strange.all():
        return 0.0
    scale = want[~strange].abs().max().clamp_min(1e-30)
    return ((got - want)[~strange].abs().max() / scale).item()


def assert_as_good_as_torch(
    ours: Callable[[Tensor], Tensor], naive: Callable[[Tensor], Tensor], x: Tensor, **how
) -> None:
    """assert_each_as_good_as_torch for a function with one result."""
    assert_each_as_good_as_torch(lambda x: {"": ours(x)}, {"": naive}, x, **how)


def assert_each_as_good_as_torch(
    ours: Callable[[Tensor], dict[str, Tensor]],
    naive: dict[str, Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    factor: float = 2.0,
    computed_in: torch.dtype | None = None,
    terms: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Asserts that our errors are at most `factor` times PyTorch's errors, plus a floor.

    `naive` has the oracle's formula of each result. Its results in fp64 are exact. Its results in
    the dtype of x, or in `computed_in`, have PyTorch's errors. If a value is a sum of terms of both
    signs, `terms` returns the sum of their magnitudes, and the floor is relative to this sum:
    rounding errors do not cancel where the terms cancel, and PyTorch's own error may be small by
    chance.
    """
    leaf = x.detach().clone().requires_grad_()
    results = ours(leaf)
    assert results.keys() == naive.keys()
    rounding = torch.finfo(x.dtype).eps / 2  # error of a gradient rounded to the dtype of x
    if computed_in is not None and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        rounding *= 2  # Triton's interpreter truncates to bf16 instead of rounding
    for which, f in naive.items():
        generator = torch.Generator().manual_seed(7)
        value = results[which]
        upstream = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(x.device)
        truth = value_and_grad(f, x.double(), upstream)
        theirs = value_and_grad(f, x.to(computed_in or x.dtype), upstream)
        of_torch = [error_or_inf(*pair) for pair in zip(theirs, truth, strict=True)]
        (grad,) = torch.autograd.grad(value, leaf, upstream.to(value.dtype), retain_graph=True)
        assert grad.dtype == x.dtype
        assert value.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        spread = 1.0 if terms is None else float(terms(x.double()).max() / truth[0].abs().max())
        for name, got, torch_error, want, floor in (
            ("value", value.detach(), of_torch[0], truth[0], FLOOR[x.dtype] * max(1.0, spread)),
            ("gradient", grad, of_torch[1], truth[1], FLOOR[x.dtype] + rounding),
        ):
            assert got.shape == want.shape
            bound = factor * torch_error + floor
            found = error(got, want)
            assert found <= bound, f"{which} {name}: error {found:.3g} > {bound:.3g}"


def error_or_inf(got: Tensor, want: Tensor) -> float:
    """PyTorch's own error. Elements where PyTorch is not finite do not count."""
    keep = want.isfinite() & got.isfinite()
    if not keep.any():
        return 0.0
    return error(got[keep], want[keep])


READS = (  # methods of tensors, and functions of torch, that make the host wait for a GPU
    "item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__index__", "__contains__",
)  # fmt: skip


@contextlib.contextmanager
def host_reads_nothing():
    """Raises if the host reads a value of a tensor in this block.

    On a GPU, such a read makes the host wait. Without a GPU, the functions that read values are
    patched to raise.
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
    """Fills new tensors in this block with NaN or with the largest integer."""
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
