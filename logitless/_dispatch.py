"""Which code runs: Triton kernels on a GPU, plain PyTorch on a CPU, or what the user says."""

import contextlib
import functools
import os
from types import ModuleType

import torch
from torch import Tensor

from . import _checks, eager


def under_transform() -> bool:
    """Whether a compiler, a dispatch mode or torch.func looks on."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    )


def in_func() -> bool:
    """Whether a transform of torch.func is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def mapped(*tensors: Tensor | None) -> bool:
    """Whether torch.func.vmap, or what autograd has instead, maps over one of them."""
    if torch.compiler.is_compiling():
        return False
    of = torch._C._functorch  # pyright: ignore
    some = [t for t in tensors if t is not None]
    return any(of.is_batchedtensor(t) or of.is_legacy_batchedtensor(t) for t in some)


CHOICES = ("triton", "eager")
_chosen: str | None = None


@contextlib.contextmanager
def impl(name: str):
    """Run every loss in this block by `"triton"` or `"eager"`; a choice never falls back,
    but for more slots (4096) or a larger k (256) than a kernel sorts, which PyTorch serves.

    Triton on CPU tensors runs under Triton's interpreter (`TRITON_INTERPRET=1`). The environment
    variable LOGITLESS_IMPL makes the same choice. Both are for the whole process, threads and all.
    """
    global _chosen
    _checks.one_of("impl", name, CHOICES)
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def chosen() -> str | None:
    """The explicit choice in force, if any."""
    name = _chosen or os.environ.get("LOGITLESS_IMPL") or None
    if name is not None:
        _checks.one_of("LOGITLESS_IMPL", name, CHOICES)
    return name


def backend(x: Tensor) -> ModuleType:
    """The module whose functions serve this tensor: `kernels` or `eager`."""
    if _chosen is None and not os.environ.get("LOGITLESS_IMPL"):
        on_gpu = x.device.type in ("cuda", "xpu") and x.dtype != torch.float64
        return _kernels() if on_gpu else eager
    if chosen() == "eager":
        return eager
    _checks.triton_can_run(x)
    return _kernels()


@functools.cache
def _kernels() -> ModuleType:
    from . import kernels  # late, for a CPU need not have Triton

    return kernels
