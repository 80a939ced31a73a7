"""`LinearLogits`, the logits of a linear head, for losses of logitless and functions of PyTorch.

A loss is computed from chunks of the logits (heads/linear.py). A function of PyTorch gets lazy
logits (logits.py) instead of the LinearLogits.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core import call, option_checks
from ..core.source import Logits
from ..heads import checks
from ..heads.explain import Explanation, explain
from ..heads.gemms import two_parts
from ..heads.head import Head
from ..heads.linear import HeadLogits, checked_head
from . import torch_functions  # noqa: F401 - registers the functions that keep logits lazy
from .logits import lazy_logits_of

_FIELDS = frozenset(field.name for field in fields(Head)) - {"signature"}


class AsTensor:
    """Base class of heads that support functions, methods, operators and indexing like a tensor."""

    head: Head

    def lazy(self) -> Tensor:
        """Returns the same logits as a lazy tensor, or as a plain tensor under a compiler."""
        if torch.compiler.is_compiling():
            return self.head.logits()
        checks.no_main_grad(self.head.main_grad)
        return lazy_logits_of(self.head)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = _lazily((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns a field of the head, or a public attribute or method of the lazy logits."""
        if name in _FIELDS:
            return getattr(self.head, name)
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.lazy(), name)


def _lazily(tree: Any) -> Any:
    return pytree.tree_map_only(AsTensor, AsTensor.lazy, tree)


def _operator(name: str):
    def operator(self, *args):
        return getattr(self.lazy(), name)(*_lazily(args))

    operator.__name__ = name
    return operator


for _name in ("getitem", "len", "iter", "neg", "mul", "rmul", "truediv", "add", "radd", "sub"):
    setattr(AsTensor, f"__{_name}__", _operator(f"__{_name}__"))


class LinearLogits(AsTensor, Logits):
    """Logits (..., V) = hidden (..., D) @ weight (V, D).T + bias (V,) for every loss of logitless.

    `low_rank` is a pair of tensors a (..., R) and b (V, R). The product a @ b.T is added to the
    logits. For a LoRA adapter with matrices A and B, the pair is (scaling · x @ A.T, B), where x is
    the adapter's input. The sum of `weight` and B @ A is never computed. The gradient of `weight`
    is computed only if `weight` requires a gradient.

    `workspace` limits the number of bytes of logits that are in memory at the same time. The logits
    of a teacher need memory in addition to the workspace. The default workspace is 64 MiB on a CPU.
    On a GPU, the default workspace holds 1,024 rows of logits, but is at least 1 GiB and at most 2
    GiB. For fp32 logits of 16-bit hidden states, the default workspace is multiplied by 1.5. A
    smaller workspace saves memory and costs time. If many rows fit into the workspace, a GPU
    computes the logits of several whole rows at a time. If only few rows fit into the workspace, a
    GPU computes some columns of all rows at a time. A small head computes all logits at once. On an
    NVIDIA GPU, most losses over a 16-bit head with D ≤ 128 write no logits to memory
    (docs/heads.md). Small heads are an exception.

    `logits_dtype=torch.float32` keeps the fp32 sums of a 16-bit GEMM instead of rounding the logits
    to 16 bits. Log-probabilities from fp32 logits are hundreds of times more exact than
    log-probabilities from 16-bit logits. The gradient of fp32 logits is rounded to 16 bits, and the
    GEMMs of the backward run in 16 bits.

    `accumulate` selects the precision in which the gradient of a bf16 weight is summed over chunks.
    With at most two chunks, accumulate="auto" sums in bf16. With more chunks, accumulate="auto"
    sums in block floating point on Hopper and data-center Blackwell, and in fp32 on other devices.
    Block floating point needs no memory besides the gradient. In block floating point, each number
    is a 16-bit integer of magnitude at most 2^14, and 128 neighbouring numbers share one exponent.
    With accumulate="fp32", the sum is in fp32. The fp32 sum takes additional memory of the
    gradient's size. With accumulate="weight", the sum is in bf16, and is rounded after every chunk.
    The gradient of an fp16 weight is always summed in fp32.

    `main_grad` is an fp32 tensor of the weight's shape. Every backward adds the weight's gradient
    to `main_grad` instead of `weight.grad`. For a loss with reduction="mean" or "sum", the gradient
    is added to `main_grad` once, after the sum over chunks. With bf16 or block floating point, the
    finished sum is rounded to bf16, and then added to `main_grad`. For a loss with one value per
    row, the gradient of each chunk is added to `main_grad` separately.

    Rows that a loss ignores are dropped before the GEMMs, unless the logits are materialised. The
    number of rows that are not ignored is computed on the GPU. The host waits once for this number.
    If chunks consist of whole rows, the first GEMM is queued before the host waits. With
    `drop_ignored=False`, the host never waits, and ignored rows cost as much time as other rows. In
    a CUDA graph, ignored rows are not dropped, because the host must not wait.

    If `weight` is a DTensor sharded by rows, `hidden` must be a DTensor on the same mesh. In a
    loss, each rank then computes only the logits that belong to its own rows of the weight, as with
    a VocabShard.

    PyTorch's own functions, methods and indexing accept a LinearLogits like a tensor. The logits
    are computed when an operation reads their values.

    >>> loss = cross_entropy(LinearLogits(hidden, head.weight), target)
    """

    @call.named()
    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        workspace: int | None = None,
        logits_dtype: torch.dtype | None = None,
        accumulate: str = "auto",
        main_grad: Tensor | None = None,
        drop_ignored: bool = True,
        low_rank: tuple[Tensor, Tensor] | None = None,
    ):
        self.head = checked_head(
            hidden, weight, bias, low_rank=low_rank, workspace=workspace, logits_dtype=logits_dtype,
            accumulate=accumulate, main_grad=main_grad, drop_ignored=drop_ignored,
        )  # fmt: skip
        self.shape, self.dtype, self.device, self.requires_grad = self.head.describe_logits()

    @property
    def _source(self) -> HeadLogits:
        return HeadLogits(self.head)

    @property
    def hidden(self) -> Tensor:
        """The hidden states (..., D)."""
        head = self.head
        return head.hidden if head.low_rank is None else head.hidden[..., : head.weight.shape[1]]

    @property
    def weight(self) -> Tensor:
        """The weight (V, D)."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias (V,), or None."""
        return self.head.bias

    @property
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """The pair of tensors a (..., R) and b (V, R), or None."""
        hidden, weight, _, low_rank = self.head.tensors
        return None if low_rank is None else (two_parts(hidden, weight, low_rank)[1], low_rank)

    def explain(self, reduction: str = "mean", *, gradient: bool = True) -> Explanation:
        """Explains how a loss such as cross_entropy over these logits is computed.

        The explanation names the split of the logits, the memory that the logits take, and the
        number of GEMMs. For tensors on the device "meta", the explanation describes the computation
        on a GPU.

        >>> print(LinearLogits(hidden, weight, workspace=64 << 20).explain())
        """
        option_checks.check(reduction=reduction, gradient=gradient)
        return explain(self.head, reduction, gradient)

    def materialize(self) -> Tensor:
        """Returns the logits as a differentiable tensor of shape (..., V)."""
        return self.head.logits()
