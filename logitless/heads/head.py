"""The tensors and the options of a head. linear.py evaluates losses over a head.

`Head` represents the logits hidden @ weight.T + bias. LinearLogits and lazy logits hold a Head. A
VocabShard can also hold a Head. `ScaledHead` represents a teacher's logits, without gradients. A
ScaledHead can apply a scale and a softcap to the logits. The method `flatten` separates the options
from the tensors, because autograd saves the tensors.

A head can have a second weight, `low_rank`, such as the matrix B of a LoRA adapter. The two weights
act like one weight of shape (V, D + R), but are stored as two tensors. The hidden states are one
tensor of shape (..., D + R). So code that views, splits or gathers the rows of `hidden` needs no
special case for adapters.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..contract import PRECISION, has_values
from ..core.backend import Backend
from ..core.call import Signature
from ..core.choose_backend import backend_of
from ..core.invariant import computes_single_rows, is_invariant
from ..core.loss import RowLoss
from . import choose_cut
from .choose_cut import Cut, Work
from .gemms import (
    dense_logits,
    hidden_gradient,
    padded_logits,
    padded_memory,
    product,
    steady_hidden_gradient,
    steady_product,
    without_autocast,
)
from .quantized import is_freed, is_quantized
from .unshard import in_memory

Rows = slice | Tensor  # some rows, as a slice or as a tensor of indices
HeadTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # in the order of Head.tensors


@dataclass  # not frozen, because the constructor of a frozen dataclass takes five times as long
class Head:
    """Logits (..., V) = hidden (..., D) @ weight (V, D).T + bias (V,).

    With `low_rank`, `hidden` has at least D + R columns. The first D columns of `hidden` are
    multiplied by `weight`, the next R columns by `low_rank`, and all other columns are padding.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    own_hidden: Tensor | None = None  # the local hidden states, if `hidden` is gathered over ranks
    workspace: int | None = None
    logits_dtype: torch.dtype | None = None
    accumulate: str = "auto"
    main_grad: Tensor | None = None
    drop_ignored: bool = True
    module: nn.Module | None = None  # the module that owns the weight, if FSDP can free the weight
    columns: Any = None  # the ColumnBackend, if the weight is one rank's shard of the vocabulary
    invariant: bool = False  # whether rows have the same bits in every batch (core/invariant.py)
    low_rank: Tensor | None = None  # (V, R), a second weight; fp32 or the dtype of `hidden`
    skips_first: bool = False  # whether the first D columns of `hidden` need no gradient
    # Whether a mean or sum leaves the gradients of its last chunk to backward, so that a GPU has
    # work while the host waits for something else.
    late: bool = False
    # The Signature of the tensors and options (core/call.py). None if the head is a copy with
    # changed fields, or was made by compiled code.
    signature: Signature | None = field(default=None, compare=False, repr=False)

    @property
    def tensors(self) -> "HeadTensors":
        return self.hidden, self.weight, self.bias, self.low_rank

    @property
    def inputs(self) -> "HeadTensors":
        """The tensors that get gradients."""
        hidden = self.hidden if self.own_hidden is None else self.own_hidden
        return hidden, self.weight, self.bias, self.low_rank

    @property
    def lead(self) -> torch.Size:
        """The shape of the logits without the dimension V."""
        return self.hidden.shape[:-1]

    @property
    def rows(self) -> int:
        return math.prod(self.hidden.shape[:-1])

    @property
    def vocab(self) -> int:
        """The size V of the whole vocabulary, over all ranks."""
        return self.weight.shape[0] if self.columns is None else self.columns.vocab

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocab))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.logits_dtype or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def describe(self) -> str:
        """Describes the shapes and options in one line. The line must be equal on all ranks."""
        needs = tuple(t is not None and t.requires_grad for t in self.inputs)
        options = (self.workspace, self.logits_dtype, self.accumulate, self.drop_ignored)
        hidden = (*self.hidden.shape, str(self.hidden.dtype))
        return f"hidden {hidden}, {needs}, {options}"

    def replace(self, **changed) -> "Head":
        """Returns a copy of the head with changed fields."""
        if torch.compiler.is_compiling():
            return replace(self, signature=None, **changed)
        copy = object.__new__(type(self))  # several times as fast as dataclasses.replace
        copy.__dict__.update(self.__dict__, signature=None, **changed)
        return copy

    def flatten(self) -> tuple[tuple[Tensor | None, ...], "Head"]:
        """Returns the tensors that backward reads, and the same head without tensors."""
        return (*self.tensors, self.own_hidden), self.blank()

    def blank(self) -> "Head":
        """Returns the same head without tensors."""
        blank: Any = None
        return self.replace(
            hidden=blank, weight=blank, bias=None, low_rank=None, own_hidden=None
        )  # fmt: skip

    def rebuild(self, tensors: Sequence[Any]) -> "Head":
        hidden, weight, bias, low_rank, own_hidden = tensors
        return self.replace(
            hidden=hidden, weight=weight, bias=bias, low_rank=low_rank, own_hidden=own_hidden
        )

    def backend(self) -> Backend:
        return backend_of(self.hidden) if self.columns is None else self.columns

    def logits(self, rows: Rows | None = None) -> Tensor:
        """Returns differentiable logits, with one column per row of the weight.

        With `rows`, the result holds only the logits of these rows, without a gradient.
        """
        if rows is None:
            return dense_logits(*self.tensors, self.dtype)
        with torch.no_grad(), without_autocast(self.device):
            hidden = self.hidden.reshape(-1, self.hidden.shape[-1])[rows]
            if not (self.invariant or is_invariant()):
                return padded_logits(hidden, self.weight, self.bias, self.low_rank, self.dtype)
            out = padded_memory(len(hidden), len(self.weight), hidden, self.dtype)
            return self.product(hidden, out, steady=True)

    def product(self, h: Tensor, out: Tensor, steady: bool = False) -> Tensor:
        """Writes the logits (n, V) of h (n, D) to `out`.

        If the head is invariant or `steady` is True, a row of `out` has the same bits for every n.
        """
        weight, bias, low_rank = (None if t is None else t.detach() for t in self.tensors[1:])
        assert weight is not None
        if self.invariant or steady:
            return steady_product(backend_of(self.hidden), h, weight, bias, low_rank, out)
        return product(h, weight, bias, low_rank, out)

    def d_hidden(self, dz: Tensor, out: Tensor) -> Tensor:
        """Writes the gradient of `hidden` to `out`. dz (n, V) is the gradient of the logits."""
        weight = self.weight.detach()
        low_rank = None if self.low_rank is None else self.low_rank.detach()
        if self.invariant:
            backend = backend_of(self.hidden)
            return steady_hidden_gradient(backend, dz, weight, low_rank, self.skips_first, out)
        return hidden_gradient(dz, weight, low_rank, self.skips_first, out)

    def work(self, merges: bool = False, *, gemms=0, sums=False, keeps=False, ids=0) -> Work:
        """Returns a `Work`, which holds the sizes and properties of a loss over this head.

        The arguments are fields of `Work`.
        """
        own, wide = self.hidden.dtype, self.dtype
        keeps = keeps and own == wide and own != torch.float16 and self.accumulate != "fp32"
        sums = sums and self.accumulate != "weight"
        vocab, width = self.weight.shape
        if self.columns is not None:  # all ranks must use chunks of the same size
            vocab = self.columns.widest
        rows = self.hidden.shape[:-1].numel()  # type: ignore
        plain = self.columns is None and self.low_rank is None and not is_quantized(self.weight)
        narrow = plain and backend_of(self.hidden).is_narrow(self.hidden, self.weight)
        return Work(
            rows, vocab, width, own.itemsize, own != wide, merges, gemms, sums, keeps, narrow, ids
        )

    def cut(self, work: Work) -> Cut:
        """Returns the numbers of rows and columns of logits to compute at once.

        An invariant head is computed in chunks of whole rows. With the eager backend, each chunk of
        an invariant head is one row.
        """
        if self.invariant:
            if computes_single_rows(self.backend()):
                return Cut(1)
            work = work._replace(merges=False, narrow=False)
        choose = choose_cut.forced or choose_cut.choose
        cut = choose(work, self.workspace, self.hidden.device.type)
        return Cut(cut.rows) if self.invariant else cut

    def is_small(self) -> bool:
        """Whether all logits are computed at once: they are few, and IN_PIECES has no reason."""
        hidden, weight = self.hidden, self.weight
        if choose_cut.forced is not None or any(holds(self) for holds in IN_PIECES.values()):
            return False
        vocab, width = weight.shape
        rows = hidden.numel() // width if width else 0
        device = "cpu" if hidden.is_cpu else "cuda"  # all other devices have the limits of a GPU
        size = self.hidden.dtype.itemsize
        return choose_cut.is_small(rows, vocab, width, size, self.workspace, device)

    def reduces(self, loss: RowLoss) -> bool:
        """Whether a mean or sum computes its gradient in forward.

        Otherwise, results per row are reduced: in fp16, a gradient of unknown size can underflow
        before the upstream gradient is known, and a unit (core/evaluate.py) depends on the batch.
        """
        known = loss.has_gain and not loss.reading.invariant
        return self.hidden.dtype != torch.float16 or known

    def cut_of_groups(self, work: Work) -> Cut:
        """Returns the Cut for a loss over groups of rows: all rows on chip, or chunks of rows."""
        cut = self.cut(work)
        if cut.on_chip:
            return cut
        rows = self.cut(work._replace(merges=False, narrow=False)).rows
        # Beside fp32 logits, their 16-bit gradient needs memory too.
        return Cut(max(rows // 3, 1) if work.wide else rows, whole=True)

    def holds_groups(self, loss: Any) -> bool:
        """Whether the formula of a loss can see the logits of every group at once."""
        if loss.reading.invariant or not self.reduces(loss):
            return False
        work = self.work(loss.merges, sums=True, ids=loss.reading.ids_per_row)
        return max(loss.groups.sizes, default=0) <= self.cut_of_groups(work).rows

    def keeps_logits(self) -> bool:
        """Whether the caller's own workspace holds all logits from forward to backward."""
        if self.workspace is None or self.invariant or choose_cut.forced is not None:
            return False
        work = self.work()  # equal on all ranks
        size = work.itemsize + (4 if work.wide else 0)
        return (
            self.rows * -(-work.vocab // choose_cut.PACK) * choose_cut.PACK * size <= self.workspace
        )

    def rows_that_count(self, loss: RowLoss) -> Tensor | None:
        """Returns a bool mask (N,) that is False in ignored rows. The GEMMs leave out ignored rows.

        The result is None if the GEMMs compute all rows.
        """
        hidden, reading = self.hidden, loss.reading
        if not self.drop_ignored or reading.ignore_index is None or not has_values(hidden):
            return None
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        return (reading.label != reading.ignore_index).reshape(-1)

    @contextlib.contextmanager
    def ready(self, loss: RowLoss):
        """Disables autocast, and keeps the weights of this head and of teacher heads in memory."""
        heads = (self, *(t.head for t in loss.teachers if isinstance(t, ScaledHead)))
        with without_autocast(self.hidden.device), contextlib.ExitStack() as stack:
            # FSDP gathers a weight once per call, and not once per chunk. All ranks must gather the
            # weight equally often, but the number of chunks can differ between ranks.
            for head in heads:
                if is_freed(head.weight):
                    stack.enter_context(in_memory(head.weight, head.module))
            yield


# Why a head is computed in pieces even if it has few logits. The straight body of a small head
# (run.py) has one GEMM of plain tensors per result; the loop can do more.
IN_PIECES: dict[str, Callable[[Head], bool]] = {
    "the gradient is added to main_grad": lambda h: h.main_grad is not None,
    "all ranks must choose alike": lambda h: h.columns is not None,
    "a second weight": lambda h: h.low_rank is not None,
    "the gradient has another dtype than the logits": lambda h: h.dtype != h.hidden.dtype,
    "the weight is dequantised in blocks": lambda h: is_quantized(h.weight),
    "FSDP has freed the weight": lambda h: not h.weight.untyped_storage().nbytes(),
}


@dataclass(frozen=True)
class ScaledHead:
    """A teacher's logits without gradients, computed from the logits z of a head.

    The logits are scale · z, or cap · tanh(scale · z) if `cap` is not None.
    """

    head: Head
    scale: float = 1.0
    cap: float | None = None

    requires_grad: ClassVar[bool] = False
    exists: ClassVar[bool] = False

    @property
    def shape(self) -> torch.Size:
        return self.head.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    def materialize(self, rows: Rows) -> Tensor:
        """Returns the logits of these rows as a tensor (n, V)."""
        z = self.head.logits(rows)
        if self.scale == 1 and self.cap is None:
            return z
        z = z.to(PRECISION[z.dtype]) * self.scale  # fp32 avoids a second rounding to 16 bits
        return z if self.cap is None else self.cap * torch.tanh(z)

    def times(self, factor: float) -> "ScaledHead":
        """Returns a ScaledHead whose logits are these logits times `factor`."""
        if self.cap is None:
            return self.replace(scale=self.scale * factor)
        return self.replace(cap=self.cap * factor)

    def narrow(self, dim: int, start: int, width: int) -> "ScaledHead":
        """Returns the columns [start, start + width), like Tensor.narrow(-1, start, width)."""
        assert dim == -1
        columns = slice(start, start + width)
        weight, bias, low_rank = (None if t is None else t[columns] for t in self.head.tensors[1:])
        head = self.head.replace(weight=weight, bias=bias, low_rank=low_rank)
        return self.replace(head=head)

    def as_teacher(self) -> "ScaledHead":
        return self

    def replace(self, **changed) -> "ScaledHead":
        """Returns a copy of the ScaledHead with changed fields."""
        return replace(self, **changed)

    def flatten(self) -> tuple[tuple[Tensor | None, ...], "ScaledHead"]:
        tensors, head = self.head.flatten()
        return tensors, self.replace(head=head)

    def rebuild(self, tensors: Sequence[Any]) -> "ScaledHead":
        return self.replace(head=self.head.rebuild(tensors))


def steady_teacher(teacher: Any) -> Any:
    """Returns a ScaledHead whose logits have the same bits in every batch.

    All other teachers are returned unchanged.
    """
    if not isinstance(teacher, ScaledHead):
        return teacher
    return teacher.replace(head=teacher.head.replace(invariant=True))
