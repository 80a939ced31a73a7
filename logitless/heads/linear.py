"""`LinearLogits`, the logits of a linear head that are never materialised as a whole.

`LinearLogits(hidden, weight, bias)` represents hidden @ weight.T + bias. A loss is computed from
the logits of one chunk of rows at a time (chunks.py), or of one block of columns at a time
(blocks.py). The logits of a narrow head are never in memory (on_chip.py). plan.py chooses between
these ways. Logits that are few (plan.SMALL) are materialised, because chunks would take longer. A
mean or sum computes its gradients in forward, with three GEMMs, or with up to four GEMMs if the
head is split by columns (total.py). Results per row take four GEMMs (per_row.py).

No code in heads/ depends on a particular loss. A RowLoss (core/loss.py) computes values and
gradients from the logits of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import Reading
from ..core import call, checks
from ..core.evaluate import evaluate
from ..core.loss import RowLoss
from ..core.source import Logits, Source, TopK, is_dtensor
from . import checks as rules
from .as_tensor import AsTensor
from .head import Head, Rows, ScaledHead
from .on_chip import chunks_of
from .operators import evaluate_compiled
from .per_row import PerRowLoss
from .products import autocasts, cast_by_autocast, without_autocast
from .total import ReducedLoss


class LinearLogits(AsTensor, Logits):
    """Logits (..., V) = hidden (..., D) @ weight (V, D).T + bias (V,) for every loss of logitless.

    `workspace` limits the bytes of logits in memory at once. The logits of a teacher need
    additional memory. The default is 1 GiB on a GPU and 64 MiB on a CPU, and 1.5 times as much with
    logits_dtype. A smaller workspace saves memory and costs time. If many rows fit into the
    workspace, a GPU computes some whole rows at a time. Otherwise a GPU computes some columns of
    all rows at a time. The logits of a narrow head on an NVIDIA GPU are never in memory. Logits of
    at most 128 MiB on a GPU, or 1 MiB on a CPU, are materialised if two copies of them fit into the
    workspace, because then a step takes less time.

    `logits_dtype=torch.float32` keeps the fp32 sums of a 16-bit GEMM instead of rounding the logits
    to 16 bits. Log-probabilities are then hundreds of times more exact. The gradient of the logits
    is rounded to 16 bits, and the GEMMs of the backward run in 16 bits.

    `accumulate` selects the precision of the sum of a bf16 weight's gradient over chunks. "auto"
    sums up to two chunks in bf16. For more chunks, "auto" sums in block floating point on Hopper
    and data-center Blackwell, and in fp32 on other devices. Block floating point uses the memory of
    the gradient. Among 128 neighbouring numbers, which share one exponent, the largest keeps 14
    bits. "fp32" sums in fp32, which takes additional memory of the gradient's size. "weight" rounds
    to bf16 after every chunk. The gradient of an fp16 weight is always summed in fp32.

    `main_grad` is an fp32 tensor of the weight's shape. Every backward adds the weight's gradient
    to main_grad instead of weight.grad. For a mean or sum, the gradient is added once, rounded to
    the weight's dtype unless accumulate is "fp32". For results per row, the gradient of each chunk
    is added separately.

    Rows that a loss ignores are dropped before the GEMMs, unless the logits are materialised. The
    number of rows that count is on the GPU, and the host waits for this number once, after the
    first GEMM is queued. With `drop_ignored=False`, the host never waits, and ignored rows cost as
    much time as other rows. A CUDA graph requires that the host never waits.

    If weight is a DTensor sharded by rows, hidden must be a DTensor on the same mesh. Every loss is
    then computed as for a VocabShard.

    PyTorch's own functions, methods and indexing accept a LinearLogits as a tensor. The values of
    this tensor are computed when an operation reads them.

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
    ):
        if is_dtensor(weight):  # shard_of_head checks the local tensors later
            rules.head_placements(hidden, weight, bias)
        else:
            if isinstance(hidden, Tensor) and autocasts(hidden.device):
                hidden, weight, bias = map(cast_by_autocast, (hidden, weight, bias))
            call.check_once(
                rules.linear, hidden, weight, bias, main_grad, workspace, logits_dtype, accumulate,
                drop_ignored,
            )  # fmt: skip
        self.head = Head(
            hidden, weight, bias, None, workspace, logits_dtype, accumulate, main_grad, drop_ignored
        )
        self._source = HeadLogits(self.head)

    @property
    def hidden(self) -> Tensor:
        """The hidden states (..., D)."""
        return self.head.hidden

    @property
    def weight(self) -> Tensor:
        """The weight (V, D)."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias (V,), or None."""
        return self.head.bias

    def materialize(self) -> Tensor:
        """The logits as a tensor (..., V), differentiable."""
        return self.head.logits()


class HeadLogits(Source):
    """The logits of a head whose tensors and options are already checked."""

    def __init__(self, head: Head):
        self.head = head
        self.shape, self.dtype, self.device = head.shape, head.dtype, head.device
        self.requires_grad = any(t is not None and t.requires_grad for t in head.inputs)
        self.hidden, self.spread = head.hidden, is_dtensor(head.weight)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The weighted and reduced loss, computed from one chunk of logits at a time."""
        return evaluate_head(self.head, loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        return topk_of_head(self.head, k, temperature, softcap)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        """The logits, (..., V), differentiable.

        With `rows`, the result is the logits of these rows, (n, V), without a gradient.
        """
        return self.head.logits(rows)

    def as_teacher(self) -> ScaledHead:
        return ScaledHead(self.head)

    def in_columns(self, shard: Any) -> Source:
        """Returns a source of all ranks' logits. This head computes the columns of `shard`."""
        return HeadColumns(self.head, shard)

    def over_all_tokens(self, gather: Callable[[Tensor], Tensor]) -> "HeadLogits":
        """Returns the same head over the hidden states of all ranks, gathered by `gather`."""
        own = self.head.hidden
        hidden = gather(own.detach()).flatten(0, 1)
        return HeadLogits(self.head.replace(hidden=hidden, own_hidden=own))

    def describe(self) -> str:
        return f"a head of {self.head.describe()}"

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class HeadColumns(Source):
    """The logits of all ranks. This rank's head computes its own columns."""

    def __init__(self, head: Head, shard: Any):
        backend = shard.head_backend(head.hidden, head.own_hidden is not None)
        self.head, self.shard = head.replace(columns=backend), shard
        self.shape, self.dtype, self.device = shard.shape, shard.dtype, shard.device
        self.requires_grad = shard.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        loss = self.shard.checked(loss, reduction, row_weight)
        return evaluate_head(self.head, loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        return topk_of_head(self.head, k, temperature, softcap)


def evaluate_head(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """The weighted and reduced loss over a head."""
    if torch.compiler.is_compiling():
        if head.main_grad is None:
            return evaluate_compiled(head, loss, reduction, row_weight)
        # The backward adds to main_grad in place, which a compiled graph cannot express.
        return torch.compiler.disable(evaluate_head)(head, loss, reduction, row_weight)  # pyright: ignore
    if call.in_func():
        checks.no_head_in_func()
    if head.is_small(loss):
        with head.ready(loss):
            logits = head.logits()
        return evaluate(logits, loss, reduction, row_weight)
    call.check_values(loss)
    if reduction != "none":
        grad = torch.is_grad_enabled()
        return ReducedLoss.apply(
            *head.inputs, row_weight, head, loss, reduction, grad, *loss.row_inputs
        )
    outputs = PerRowLoss.apply(*head.inputs, head, loss, *loss.row_inputs)
    return outputs if loss.multiple_outputs else loss.reduce(outputs[0], reduction, row_weight)


def topk_of_head(head: Head, k: int, temperature: float, softcap: float | None) -> TopK:
    """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
    if call.mapped(head.hidden) or call.mapped(head.weight):
        checks.not_mapped()
    backend, width, lead = head.backend(), len(head.weight), head.lead
    no_rows = torch.empty((0, width), device=head.device, dtype=head.dtype)
    results = [backend.topk(no_rows, k, temperature, softcap)]  # gives shapes even without rows
    loss = RowLoss(Reading(head.vocab))  # a loss that ignores no rows
    with torch.no_grad(), without_autocast(head.device):
        for tile in chunks_of(head, loss, head.work()).tiles(loss):
            results.append(backend.topk(tile.logits, k, temperature, softcap))
    ids, logprobs, tail = (torch.cat(chunks) for chunks in zip(*results, strict=True))
    return ids.view((*lead, k)), logprobs.view((*lead, k)), tail.view(lead)
