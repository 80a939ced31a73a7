"""The context manager `invariant`, and the memory layout that invariant results need.

Inside `with invariant():`, the results and the gradient of a row have the same bits in every batch.
Usually, the number of rows in a batch determines how a kernel splits a row, and which kernel a GEMM
uses. Inside `invariant`, every split depends only on the vocabulary, the dtype and the options:

- Triton kernels compute every row in one program (kernels/stats_split_fwd.py, `cut_of`).
- Inside a program, the blocks of a row start on 16-byte boundaries. So logits are copied if at
  least one row does not start on a 16-byte boundary (`aligned`).
- The eager backend computes one row at a time (core/evaluate.py), because PyTorch's operations on a
  CPU can round the same row differently if the row is at another position in the tensor.
- The GEMMs of a head add the terms of each sum in a fixed order (kernels/row_gemm.py,
  eager/row_gemm.py).

Every loss stores whether `invariant` is active (`Reading.invariant` in contract.py). Autograd nodes
keep the loss. So backward uses the setting that was active in forward.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import eager

_lock = threading.Lock()
depth = 0  # the number of `with invariant():` blocks that are active


@contextlib.contextmanager
def invariant():
    """Inside a `with` block, results and gradients of a row have the same bits in every batch.

    The bits do not depend on the other rows of the batch, on the number and the order of the rows,
    on `workspace`, or on ignored rows. This rule applies to all results per row, and to the
    gradients of logits and hidden states. The gradients of the weight and the bias are sums over
    the batch, so their bits do depend on the batch. Backward can run outside of the block.
    `invariant` applies to all threads of the process.

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
    """Whether a `with invariant():` block is active."""
    return depth > 0


def uncompiled(function: Callable) -> Callable:
    """Returns a function that torch.compile does not compile.

    If compiled code calls the returned function, torch.compile breaks the graph.
    """
    return torch.compiler.disable(function, reason="ll.invariant() is active")  # pyright: ignore


def refuse_operator() -> None:
    raise RuntimeError(
        "ll.invariant() must not be active under torch.func or inside a dispatch mode, because the"
        " operators of logitless do not support ll.invariant(); compute the loss outside of"
        " torch.func and outside of the dispatch mode."
    )


def computes_single_rows(backend: Any) -> bool:
    """Whether this backend must compute one row at a time to be invariant."""
    return backend is eager or getattr(backend, "backend", None) is eager


def aligned(x: Tensor) -> Tensor:
    """Returns a tensor equal to x (..., V), in which every row starts on a 16-byte boundary.

    The result is x, or a differentiable copy of x. The copy has padding between rows if needed.
    """
    if starts_aligned(x):
        return x
    vocab, pad = x.shape[-1], -x.shape[-1] % (16 // x.element_size())
    flat = x.reshape(-1, vocab)
    if not pad:
        return flat.clone(memory_format=torch.contiguous_format).view(x.shape)
    return torch.nn.functional.pad(flat, (0, pad))[:, :vocab].view(x.shape)


def starts_aligned(x: Tensor) -> bool:
    """Whether all rows of x start on 16-byte boundaries. If so, kernels read x without a copy."""
    *sizes, vocab = x.shape
    *steps, last = x.stride()
    if x.dim() > 3 or (last != 1 and vocab > 1) or x.data_ptr() % 16:
        return False
    pack = 16 // x.element_size()
    return not any(step % pack for size, step in zip(sizes, steps, strict=True) if size > 1)


def aligned_memory(x: Tensor) -> Tensor | None:
    """Allocates memory (N, V) for the gradient of x, with rows that start on 16-byte boundaries.

    If the size of a row is a multiple of 16 bytes, no padding is needed, and the result is None.
    """
    vocab, pad = x.shape[-1], -x.shape[-1] % (16 // x.element_size())
    if not pad:
        return None
    return x.new_empty((x.shape[:-1].numel(), vocab + pad))[:, :vocab]
