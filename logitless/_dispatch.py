"""Which code runs: Triton kernels on a GPU, plain PyTorch on a CPU, or what the user says."""

import contextlib
import os
from types import ModuleType

import torch
from torch import Tensor

from . import _checks

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
    name = chosen()
    if name is None:
        on_gpu = x.device.type in ("cuda", "xpu")
        name = "triton" if on_gpu and x.dtype != torch.float64 else "eager"
    elif name == "triton":
        _checks.triton_can_run(x)
    if name == "triton":
        from . import kernels

        return kernels
    from . import eager

    return eager
