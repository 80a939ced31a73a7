"""Logits that are never materialised: a head, computed a part at a time.

`LinearLogits(hidden, weight, bias)` stands for hidden @ weight.T + bias, and a loss over it is the
same loss over the logits of one chunk of rows after another, or of one block of columns. _head.py
has the two autograd nodes that do the work, and _cut.py says what is computed at once.

Nothing here knows a loss: a RowLoss (_loss.py) says what is done with the logits of a chunk.
"""

import inspect
from types import ModuleType

import torch
from torch import Tensor

from . import _call, _checks
from ._as_tensor import AsTensor
from ._call import backend, in_func, mapped
from ._chunks import Chunks, Rows, product
from ._contract import PRECISION
from ._cut import Work, choose
from ._head import Each, Total, autocasts, dtypes_as_given
from ._joined import Columns
from ._later import later
from ._loss import RowLoss, reduced


class LinearLogits(AsTensor):
    """hidden (..., D) @ weight (V, D).T + bias (V,), as logits (..., V) of any loss here.

    workspace bounds the bytes of logits alive at once (a teacher's come on top); None is 1 GiB on a
    GPU, 64 MiB on a CPU, half as much again with logits_dtype. A smaller one saves memory, and
    costs time: a GPU computes whole rows where many fit, and where few do, some columns of all.

    logits_dtype=torch.float32 keeps the sums of a GEMM over 16-bit numbers as they are, where
    logits would be rounded to 16 bits: log-probabilities are hundreds of times more exact. Their
    gradient is rounded, and its GEMMs are those of 16 bits.

    accumulate says how the gradient of a bf16 weight is summed over chunks. "auto" rounds after
    each of two chunks; more are summed in the gradient's own memory, exact to 14 bits of the
    largest of 128 neighbours, on Hopper and data-center Blackwell, and elsewhere as "fp32" does: in
    fp32, which takes twice the gradient's memory on top. "weight" rounds after every chunk. fp16 is
    always summed in fp32.

    main_grad, fp32 and of the weight's shape: a backward adds the weight's gradient to it, whoever
    asked, and weight.grad is left alone. A mean or sum is added once, rounded to the weight's dtype
    unless accumulate is "fp32"; results a row are added chunk by chunk.

    Rows that a loss ignores are dropped before the GEMMs. To know how many there are, the host
    waits for the GPU once, with the first GEMM already queued. With drop_ignored=False it never
    waits, as a CUDA graph must not, and ignored rows cost as much as the others.

    A weight that is a DTensor, sharded by rows, makes it a VocabShard, with hidden states that are
    a DTensor on the same mesh.

    PyTorch's own functions, methods and indexing take it as a tensor that is made when needed.

    >>> loss = cross_entropy(LinearLogits(hidden, head.weight), target)
    """

    def __new__(cls, *args, **how) -> "LinearLogits":
        weight = args[1] if len(args) > 1 else how.get("weight")
        if weight.__class__ is not Tensor and hasattr(weight, "placements"):
            return later.head_of_dtensor(*args, **how)
        return object.__new__(cls)

    @_call.named()
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
        if isinstance(hidden, Tensor) and autocasts(hidden.device):
            hidden, weight, bias = map(as_autocast, (hidden, weight, bias))
        _call.once(
            _call.linear, hidden, weight, bias, main_grad, workspace, logits_dtype, accumulate,
            drop_ignored,
        )  # fmt: skip
        self.hidden, self.weight, self.bias = self.parts = (hidden, weight, bias)
        self.workspace, self.accumulate, self.drop_ignored = workspace, accumulate, drop_ignored
        self.main_grad, self.logits_dtype = main_grad, logits_dtype
        self.module: torch.nn.Module | None = None  # whose weight it is, where that may be freed
        self.columns: Columns | None = None  # which of a vocabulary's, where ranks share one
        self.own_hidden: Tensor | None = None  # this rank's, where hidden is gathered from ranks
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self.dtype, self.device = logits_dtype or hidden.dtype, hidden.device
        self.requires_grad = any(t is not None and t.requires_grad for t in self.parts)

    def with_parts(self, parts: tuple) -> "LinearLogits":
        """The same head with other tensors of the same shapes, or without any."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, parts=parts)
        copy.hidden, copy.weight, copy.bias = parts
        return copy

    def without_parts(self) -> "LinearLogits":
        """For a node, which saves them as autograd saves."""
        copy = self.with_parts((None, None, None))
        copy.own_hidden = None
        return copy

    @property
    def inputs(self) -> tuple:
        """The parts as autograd knows them."""
        return self.parts if self.own_hidden is None else (self.own_hidden, *self.parts[1:])

    def dim(self) -> int:
        return len(self.shape)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        """The logits themselves, (..., V); or of some rows, (n, V), as constants."""
        if rows is None:
            return plain_logits(*self.parts, self.dtype)
        with torch.no_grad(), dtypes_as_given(self.device):
            hidden = self.hidden.reshape(-1, self.hidden.shape[-1])[rows]
            return plain_logits(hidden, self.weight, self.bias, self.dtype)

    def as_teacher(self) -> "Teacher":
        """The same logits as constants, which those of a teacher are."""
        return Teacher(self)

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, a part of their logits at a time."""
        if not torch.compiler.is_compiling():
            return _evaluate(self, loss, reduction, row_weight)
        return later.evaluate_compiled(self, loss, reduction, row_weight)

    def capture_topk(
        self, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        if mapped(self.hidden) or mapped(self.weight):
            _checks.not_mapped()
        run = self.backend()
        empty = torch.empty((0, self.shape[-1]), device=self.device, dtype=self.dtype)
        found = [run.topk(empty, k, temperature, softcap)]  # their shapes, where there are no rows
        with torch.no_grad(), dtypes_as_given(self.device):
            rows = self.hidden.detach().reshape(-1, self.hidden.shape[-1])
            made = self.chunks(None, self.work()).logits(rows, self.weight, self.bias, self.dtype)
            for part in (part for chunk in made for part in chunk.parts):
                found.append(run.topk(part.logits, k, temperature, softcap))
        ids, logprobs, tail = (torch.cat(parts) for parts in zip(*found, strict=True))
        shape = self.shape[:-1]
        return ids.view((*shape, k)), logprobs.view((*shape, k)), tail.view(shape)

    def work(
        self, merges: bool = False, *, gemms: int = 0, sums: bool = False, keeps: bool = False
    ) -> Work:
        """What is to be done, for `chunks`; see Work."""
        own, wide = self.hidden.dtype, self.dtype
        keeps = keeps and own == wide and own != torch.float16 and self.accumulate != "fp32"
        sums = sums and self.accumulate != "weight"
        vocab, width = self.weight.shape
        if self.columns is not None:  # ranks cut alike
            vocab = self.columns.widest
        rows = self.shape[:-1].numel()
        return Work(rows, vocab, width, own.itemsize, own != wide, merges, gemms, sums, keeps)

    def backend(self) -> "ModuleType | Columns":
        return backend(self.hidden) if self.columns is None else self.columns

    def chunks(self, live: Tensor | None, work: Work) -> Chunks:
        kind = self.device.type
        unknown = kind == "meta" or (kind == "cuda" and torch.cuda.is_current_stream_capturing())
        if not self.drop_ignored or unknown:
            live = None
        return Chunks(choose(work, self.workspace, kind), work.rows, live)

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


# Which help() and editors show: to Python, __new__ says what a class takes.
LinearLogits.__signature__ = inspect.signature(object.__new__(LinearLogits).__init__)  # pyright: ignore


ATTRIBUTES = (
    "parts", "hidden", "weight", "bias", "workspace", "accumulate", "drop_ignored", "main_grad",
    "logits_dtype", "module", "columns", "own_hidden", "shape", "dtype", "device", "requires_grad",
)  # fmt: skip


class Teacher(LinearLogits):
    """The head of a teacher, z: its logits are scale · z, or with a cap, cap · tanh(scale · z)."""

    scale: float
    cap: float | None

    def __init__(self, head: LinearLogits, scale: float = 1.0, cap: float | None = None):
        for name in ATTRIBUTES:  # not by __dict__, which torch.compile does not follow everywhere
            setattr(self, name, getattr(head, name))
        self.scale, self.cap = scale, cap

    def as_teacher(self) -> "Teacher":
        return self

    def times(self, factor: float) -> "Teacher":
        if self.cap is None:
            return Teacher(self, self.scale * factor)
        return Teacher(self, self.scale, self.cap * factor)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        z = super().materialize(rows)
        if self.scale == 1 and self.cap is None:
            return z
        z = z.to(PRECISION[z.dtype]) * self.scale  # which must not round them again
        return z if self.cap is None else self.cap * torch.tanh(z)


def plain_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The logits themselves, (..., V), differentiable."""
    if dtype == hidden.dtype:
        return torch.nn.functional.linear(hidden, weight, bias)
    wanted = any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    differentiable = torch.compiler.is_compiling() or (torch.is_grad_enabled() and wanted)
    if differentiable or hasattr(weight, "placements"):  # DTensors have no product into memory
        parts = (None if t is None else t.to(dtype) for t in (hidden, weight, bias))
        with dtypes_as_given(hidden.device):
            return torch.nn.functional.linear(*parts)  # pyright: ignore[reportArgumentType]
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = torch.empty((len(flat), len(weight)), device=flat.device, dtype=dtype)
    with dtypes_as_given(hidden.device):
        return product(flat, weight, bias, out).view(*hidden.shape[:-1], len(weight))


def as_autocast(t: Tensor) -> Tensor:
    """As F.linear is cast under autocast: fp64 is left as it is."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _evaluate(source: LinearLogits, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    if in_func():
        _checks.no_head_in_func()
    _call.values(loss, source.shape[-1])
    if reduction != "none":
        return Total.apply(
            *source.inputs, row_weight, source, loss, reduction, torch.is_grad_enabled(),
            *loss.others,
        )  # fmt: skip
    outputs = Each.apply(*source.inputs, source, loss, *loss.others)
    if loss.several:
        return outputs
    return reduced(outputs[0], loss.reading, row_weight, None, reduction)
