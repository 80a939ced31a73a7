"""`LinearLogits`: the logits of a head, which are never materialised as a whole.

`LinearLogits(hidden, weight, bias)` stands for hidden @ weight.T + bias. A loss over it is the same
loss over the logits of one chunk of rows after another (chunks.py), or of one block of columns
after another (blocks.py); plan.py decides. A mean or sum computes its gradients on the way: three
GEMMs, or up to four by columns (total.py). Results per row take four GEMMs (per_row.py).

Nothing in this room depends on the loss: a RowLoss (core/loss.py) says what is computed from the
logits of a chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract import Reading
from ..core import call, checks
from ..core.loss import RowLoss
from ..core.source import Source, TopK, is_dtensor
from . import checks as rules
from .as_tensor import AsTensor
from .blocks import chunks_of
from .head import Head, Rows, ScaledHead
from .operators import evaluate_compiled
from .per_row import PerRowLoss
from .products import autocasts, cast_by_autocast, without_autocast
from .total import ReducedLoss


class LinearLogits(AsTensor, Source):
    """hidden (..., D) @ weight (V, D).T + bias (V,), as logits (..., V) of any loss here.

    workspace bounds the bytes of logits in memory at once (a teacher's logits come on top). None is
    1 GiB on a GPU, 64 MiB on a CPU, and half as much again with logits_dtype. A smaller workspace
    saves memory and costs time. A GPU computes whole rows at a time if many fit, and otherwise some
    columns of all rows.

    logits_dtype=torch.float32 keeps the fp32 sums of a 16-bit GEMM instead of rounding the logits
    to 16 bits. Log-probabilities are then hundreds of times more exact. The gradient of the logits
    is rounded to 16 bits, and its GEMMs run in 16 bits.

    accumulate says how the gradient of a bf16 weight is summed over chunks. "auto" rounds to bf16
    after each of two chunks. More chunks are summed in the gradient's own memory on Hopper and
    data-center Blackwell, exact to 14 bits of the largest of 128 neighbours, and in fp32 elsewhere.
    "fp32" sums in fp32, which takes twice the gradient's memory on top. "weight" rounds to bf16
    after every chunk. fp16 is always summed in fp32.

    main_grad, fp32 and of the weight's shape: every backward adds the weight's gradient to it
    instead of to weight.grad. A mean or sum is added once, rounded to the weight's dtype unless
    accumulate is "fp32"; results per row are added chunk by chunk.

    Rows that a loss ignores are dropped before the GEMMs. The number of rows that count is on the
    GPU, and the host waits for it once, after the first GEMM is queued. With drop_ignored=False the
    host never waits, as a CUDA graph requires, and ignored rows cost as much as the others.

    If weight is a DTensor sharded by rows, hidden must be a DTensor on the same mesh, and every
    loss is that of a VocabShard.

    PyTorch's own functions, methods and indexing take a LinearLogits as a tensor that is computed
    when needed.

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
        if is_dtensor(weight):  # shard_of_head checks this rank's tensors
            rules.head_placements(hidden, weight, bias)
            self.spread = True
        else:
            if isinstance(hidden, Tensor) and autocasts(hidden.device):
                hidden, weight, bias = map(cast_by_autocast, (hidden, weight, bias))
            call.check_once(
                rules.linear, hidden, weight, bias, main_grad, workspace, logits_dtype, accumulate
            )
        self.head = Head(
            hidden, weight, bias, None, workspace, logits_dtype, accumulate, main_grad, drop_ignored
        )
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self.dtype, self.device = logits_dtype or hidden.dtype, hidden.device
        tensors = (hidden, weight, bias)
        self.requires_grad = any(t is not None and t.requires_grad for t in tensors)

    @property
    def hidden(self) -> Tensor:
        return self.head.hidden

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        return self.head.bias

    def dim(self) -> int:
        return len(self.shape)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, a chunk of their logits at a time."""
        return evaluate_head(self.head, loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        return topk_of_head(self.head, k, temperature, softcap)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        """The logits, (..., V), differentiable; or those of some rows, (n, V), as constants."""
        return self.head.logits(rows)

    def as_teacher(self) -> ScaledHead:
        return ScaledHead(self.head)

    def in_columns(self, shard: Any) -> Source:
        """The logits of all ranks of a VocabShard, where this head has one rank's columns."""
        return HeadColumns(self.head, shard)

    def over_all_tokens(self, gather: Callable[[Tensor], Tensor]) -> "LinearLogits":
        """The same head over the hidden states of all ranks' tokens, gathered by `gather`."""
        own = self.head.hidden
        hidden = gather(own.detach()).flatten(0, 1)
        return of_head(self.head._replace(hidden=hidden, own_hidden=own))

    def describe(self) -> str:
        return f"a head of {self.head.describe()}"

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class HeadColumns(Source):
    """The logits of all ranks, where this rank has a head over its columns."""

    def __init__(self, head: Head, shard: Any):
        backend = shard.head_backend(head.hidden, head.own_hidden is not None)
        self.head, self.shard = head._replace(columns=backend), shard
        self.shape, self.dtype, self.device = shard.shape, shard.dtype, shard.device
        self.requires_grad = shard.requires_grad

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        loss = self.shard.checked(loss, reduction, row_weight)
        return evaluate_head(self.head, loss, reduction, row_weight)

    def capture_topk(self, k: int, temperature: float, softcap: float | None) -> TopK:
        return topk_of_head(self.head, k, temperature, softcap)


def of_head(head: Head) -> LinearLogits:
    """The LinearLogits of a head whose tensors and options are already checked."""
    logits = object.__new__(LinearLogits)
    logits.head = head
    logits.shape, logits.dtype, logits.device = head.shape, head.dtype, head.device
    logits.requires_grad = any(t is not None and t.requires_grad for t in head.inputs)
    return logits


def evaluate_head(head: Head, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    """The loss of the rows of a head, weighted and reduced."""
    if torch.compiler.is_compiling():
        if head.main_grad is None:
            return evaluate_compiled(head, loss, reduction, row_weight)
        # Backward adds to main_grad, which a graph cannot express.
        return torch.compiler.disable(evaluate_head)(head, loss, reduction, row_weight)  # pyright: ignore
    if call.in_func():
        checks.no_head_in_func()
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
    results = [backend.topk(no_rows, k, temperature, softcap)]  # so that no rows have shapes too
    loss = RowLoss(Reading(head.vocab))  # which ignores no row
    with torch.no_grad(), without_autocast(head.device):
        for tile in chunks_of(head, loss, head.work()).tiles(loss):
            results.append(backend.topk(tile.logits, k, temperature, softcap))
    ids, logprobs, tail = (torch.cat(chunks) for chunks in zip(*results, strict=True))
    return ids.view((*lead, k)), logprobs.view((*lead, k)), tail.view(lead)
