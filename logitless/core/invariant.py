"""`invariant`: results and gradient of a row have the same bits in every batch.

Usually the number of rows determines how a kernel splits a row, and which kernel a GEMM uses.
Inside `invariant`, every split depends only on the vocabulary, the dtype and the options:

- A kernel computes a row in one program (kernels/statistics/forward.py, `cut_of`), whose blocks
  start on 16-byte boundaries, so logits with other rows are copied (`aligned`).
- `eager` computes one row at a time (core/evaluate.py): on a CPU, PyTorch can round a row
  differently at another position of the tensor.
- The GEMMs of a head add in a fixed order (kernels/gemms/row_gemm.py, eager/row_gemm.py).

A loss keeps the setting of its forward for backward (`Reading.invariant`).
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_lock = threading.Lock()
depth = 0  # the number of `with invariant():` blocks that are active


@contextlib.contextmanager
def invariant():
    """Inside a `with` block, results and gradients of a row have the same bits in every batch.

    The bits do not depend on the number and the order of the rows, on the other or ignored rows, or
    on `workspace`. This holds for all results per row, and for the gradients of logits and hidden
    states. The gradients of weight and bias are sums over the batch, so their bits do depend on it.
    Backward can run outside of the block. `invariant` applies to all threads of the process.

    >>> import logitless as ll
    >>> z = torch.randn(8, 1000)
    >>> with ll.invariant():
    ...     together, alone = ll.logsumexp(z), ll.logsumexp(z[3:4])
    >>> bool(together[3] == alone[0])
    True
    """
    global depth
    with _lock:
        depth += 1
    try:
        yield
    finally:
        with _lock:
            depth -= 1


def is_invariant() -> bool:
    return depth > 0


def uncompiled(function: Callable) -> Callable:
    """Returns a function at which torch.compile breaks the graph."""
    return torch.compiler.disable(function, reason="ll.invariant() is active")


def refuse_operator() -> None:
    raise RuntimeError(
        "ll.invariant() must not be active under torch.func or inside a dispatch mode, because the"
        " operators of logitless do not support ll.invariant(); compute the loss outside of"
        " torch.func and outside of the dispatch mode."
    )


def computes_single_rows(backend: Any) -> bool:
    return getattr(backend, "backend", backend).single_rows


def aligned(x: Tensor) -> Tensor:
    """Returns x, or a differentiable copy in which every row starts on a 16-byte boundary."""
    if starts_aligned(x):
        return x
    vocab, pad = x.shape[-1], -x.shape[-1] % (16 // x.element_size())
    flat = x.reshape(-1, vocab)
    if not pad:
        return flat.clone(memory_format=torch.contiguous_format).view(x.shape)
    return torch.nn.functional.pad(flat, (0, pad))[:, :vocab].view(x.shape)


def starts_aligned(x: Tensor) -> bool:
    *sizes, vocab = x.shape
    *steps, last = x.stride()
    if x.dim() > 3 or (last != 1 and vocab > 1) or x.data_ptr() % 16:
        return False
    pack = 16 // x.element_size()
    return not any(step % pack for size, step in zip(sizes, steps, strict=True) if size > 1)


def aligned_memory(x: Tensor) -> Tensor | None:
    """Memory (N, V) for the gradient of x, with rows on 16-byte boundaries; None if all are so."""
    vocab, pad = x.shape[-1], -x.shape[-1] % (16 // x.element_size())
    if not pad:
        return None
    return x.new_empty((x.shape[:-1].numel(), vocab + pad))[:, :vocab]  # type: ignore
