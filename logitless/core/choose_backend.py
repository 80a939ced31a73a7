"""Chooses the backend of a call: Triton kernels, or plain PyTorch."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import eager
from ..contract import has_values
from . import tensor_checks
from .backend import Backend
from .capture import Capture, Captured
from .environment import IMPL, variables
from .invariant import aligned, is_invariant

_chosen: str | None = None


@contextlib.contextmanager
def impl(name: str):
    """Selects the backend `"triton"` or `"eager"` for all losses inside a `with` block.

    Otherwise, Triton computes losses on a GPU, and plain PyTorch on a CPU and in fp64. The block
    applies to all threads of the process; the environment variable LOGITLESS_IMPL selects a backend
    without a block. Triton on CPU tensors needs Triton's interpreter (`TRITON_INTERPRET=1`).

    Even with "triton", plain PyTorch computes losses against a teacher with more than 4096 ids per
    row, and top-k with k > 256.

    >>> with impl("eager"):
    ...     loss = cross_entropy(logits, target)
    """
    global _chosen
    tensor_checks.one_of("impl", name, tuple(BACKENDS))
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def chosen() -> str | None:
    name = _chosen or os.environ.get("LOGITLESS_IMPL") or None
    if name is not None:
        tensor_checks.one_of("LOGITLESS_IMPL", name, tuple(BACKENDS))
    return name


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda or x.is_xpu  # six times as fast as reading x.device.type


def backend_of(x: Tensor) -> Backend:
    name = _chosen or (IMPL in variables and os.environ["LOGITLESS_IMPL"])
    if not name:
        triton = on_gpu(x) and x.dtype != torch.float64 and has_values(x)
        return _kernels() if triton else eager
    if name == "triton":
        tensor_checks.triton_can_run(x)
    tensor_checks.one_of("LOGITLESS_IMPL", name, tuple(BACKENDS))
    return BACKENDS[name]()


def captured(x: Tensor, capture: Capture, temperature: float, softcap: float | None) -> Captured:
    invariant = is_invariant()
    x = aligned(x) if invariant else x
    return capture.of(backend_of(x), x, temperature, softcap, invariant)


@functools.cache
def _kernels() -> Any:
    from .. import kernels  # imported late, because a machine without a GPU may have no Triton

    return kernels


BACKENDS: dict[str, Callable[[], Backend]] = {"triton": _kernels, "eager": lambda: eager}
