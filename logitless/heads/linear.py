"""Logits that are never materialised: a head, computed a part at a time.

`LinearLogits(hidden, weight, bias)` stands for hidden @ weight.T + bias, and a loss over it is the
same loss over the logits of one chunk of rows after another (heads/chunks.py), or of one block of
their columns (heads/blocks.py); heads/plan.py says which. A mean or sum (`Total`) makes its
gradients on the way: three GEMMs, or up to four by columns. Results a row (heads/per_row.py) take
four.

Nothing here knows a loss: a RowLoss (core/loss.py) says what is done with the logits of a chunk.
"""

import contextlib
import inspect
from types import ModuleType

import torch
from torch import Tensor

from ..contract import PRECISION, Reading
from ..core import call as _call
from ..core import checks as _checks
from ..core.autograd import Node, refuse_second
from ..core.call import backend, in_func, mapped
from ..core.later import later
from ..core.loss import RowLoss, reduced
from ..parallel.columns import Columns
from .as_tensor import AsTensor
from .blocks import ColumnChunks
from .chunks import Chunks, RowGradients, Rows, as_parts, product
from .per_row import Each
from .plan import Cut, Work, choose
from .unshard import in_memory


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
        # Of a teacher, whose logits are scale · z, or with a cap, cap · tanh(scale · z).
        self.scale: float = 1.0
        self.cap: float | None = None
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self.dtype, self.device = logits_dtype or hidden.dtype, hidden.device
        self.requires_grad = any(t is not None and t.requires_grad for t in self.parts)

    def with_parts(
        self, parts: tuple = (None, None, None), own_hidden: Tensor | None = None
    ) -> "LinearLogits":
        """The same head with these tensors, of the same shapes, and no others; or with none."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, parts=parts, own_hidden=own_hidden)
        copy.hidden, copy.weight, copy.bias = parts
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
            z = plain_logits(*self.parts, self.dtype)
        else:
            with torch.no_grad(), dtypes_as_given(self.device):
                hidden = self.hidden.reshape(-1, self.hidden.shape[-1])[rows]
                z = plain_logits(hidden, self.weight, self.bias, self.dtype)
        if self.scale == 1 and self.cap is None:
            return z
        z = z.to(PRECISION[z.dtype]) * self.scale  # which must not round them again
        return z if self.cap is None else self.cap * torch.tanh(z)

    def as_teacher(self) -> "LinearLogits":
        """Itself: some rows of it are made as constants."""
        return self

    def times(self, factor: float) -> "LinearLogits":
        """Of a teacher: its logits times a factor."""
        copy = self.with_parts(self.parts, self.own_hidden)
        if self.cap is None:
            copy.scale *= factor
        else:
            copy.cap *= factor
        return copy

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, a part of their logits at a time."""
        assert (self.scale, self.cap) == (1, None)  # which only a teacher has
        if torch.compiler.is_compiling():
            return later.evaluate_compiled(self, loss, reduction, row_weight)
        if in_func():
            _checks.no_head_in_func()
        _call.values(loss, self.shape[-1])
        if reduction != "none":
            return Total.apply(
                *self.inputs, row_weight, self, loss, reduction, torch.is_grad_enabled(),
                *loss.others,
            )  # fmt: skip
        outputs = Each.apply(*self.inputs, self, loss, *loss.others)
        if loss.several:
            return outputs
        return reduced(outputs[0], loss.reading, row_weight, None, reduction)

    def capture_topk(
        self, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        assert (self.scale, self.cap) == (1, None)  # which only a teacher has
        if mapped(self.hidden) or mapped(self.weight):
            _checks.not_mapped()
        run = self.backend()
        empty = torch.empty((0, self.shape[-1]), device=self.device, dtype=self.dtype)
        found = [run.topk(empty, k, temperature, softcap)]  # their shapes, where there are no rows
        loss = RowLoss(Reading(self.shape[-1]))  # which ignores no row

        def visit(_loss, _saved, _rows, z, _into):
            found.append(run.topk(z, k, temperature, softcap))

        with torch.no_grad(), dtypes_as_given(self.device):
            self.chunks(loss, self.work()).walk(loss, visit)
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

    def cut(self, work: Work) -> Cut:
        """How much of the logits is made at once."""
        return choose(work, self.workspace, self.device.type)

    def chunks(self, loss: RowLoss, work: Work) -> Chunks:
        """The rows to be computed."""
        kind, reading, live = self.device.type, loss.reading, None
        unknown = kind == "meta" or (kind == "cuda" and torch.cuda.is_current_stream_capturing())
        if self.drop_ignored and reading.ignore_index is not None and not unknown:
            live = (reading.label != reading.ignore_index).reshape(-1)
        cut = self.cut(work)
        return (Chunks if cut.columns is None else ColumnChunks)(self, cut, live)

    @contextlib.contextmanager
    def ready(self, loss: RowLoss):
        """Autocast off, and the weights of this head and of a teacher's in memory."""
        heads = (self, *(t for t in loss.tensors if isinstance(t, LinearLogits)))
        with dtypes_as_given(self.device), contextlib.ExitStack() as stack:
            for head in heads:  # once, not for each chunk: ranks may have other numbers of them
                if not head.weight.untyped_storage().size():  # which FSDP frees
                    stack.enter_context(in_memory(head.weight, head.module))
            yield

    def save(self, ctx, loss: RowLoss, row_weight: Tensor | None) -> None:
        """Saves all that a backward reads as autograd does, and nowhere else.

        A teacher's head too.
        """
        tensors, ctx.heads = [], []
        for t in loss.tensors:
            of_head = isinstance(t, LinearLogits)
            tensors += t.parts if of_head else (t,)
            ctx.heads.append(t.with_parts() if of_head else None)
        ctx.save_for_backward(*self.parts, self.own_hidden, row_weight, *tensors)
        ctx.source, ctx.loss = self.with_parts(), loss.with_tensors((None,) * len(ctx.heads))

    def saved(self, ctx) -> "tuple[LinearLogits, Tensor | None, RowLoss]":
        """The head, of which this is the copy without parts, the rows' weights and the loss."""
        # Asked for once: activation checkpointing unpacks them only once.
        hidden, weight, bias, own_hidden, row_weight, *rest = ctx.saved_tensors
        source, rest = self.with_parts((hidden, weight, bias), own_hidden), iter(rest)
        tensors = [
            next(rest) if head is None else head.with_parts((next(rest), next(rest), next(rest)))
            for head in ctx.heads
        ]
        return source, row_weight, ctx.loss.with_tensors(tensors)

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


# Which help() and editors show: to Python, __new__ says what a class takes.
LinearLogits.__signature__ = inspect.signature(object.__new__(LinearLogits).__init__)  # pyright: ignore


class Total(Node):
    """Loss and gradients of a mean or sum over rows, made in forward for an upstream gradient of 1.

    Three GEMMs: logits, d_hidden, d_weight; by columns most logits are made twice. Backward scales
    what it finds.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, source, loss, reduction, grad, *others):
        parts = (hidden, weight, bias)
        ctx.needs = [grad and t is not None and t.requires_grad for t in (*parts, row_weight)]
        ctx.others = [grad and t.requires_grad for t in others]
        ctx.mean = reduction == "mean"
        # fp16 cannot hold the gradient of a mean: it gets its share at the end.
        ctx.late = ctx.mean and hidden.dtype == torch.float16
        source.save(ctx, loss, row_weight)
        with source.ready(loss):
            total, ctx.share, ctx.gradients = Total.compute(ctx, source, row_weight, loss)
        if not (ctx.late or source.main_grad is not None):
            ctx.gradients[:3] = as_parts(ctx.gradients[:3], parts)
        return total

    @staticmethod
    def compute(ctx, source, row_weight, loss):
        """The loss, the share of a row in its mean, and all gradients at an upstream of 1."""
        run, reading, lead = source.backend(), loss.reading, source.shape[:-1]
        full, count = PRECISION[source.hidden.dtype], lead.numel()
        mass = share = factor = None
        if ctx.mean:
            if reading.class_weight is not None:
                mass = loss.mass(run, source.hidden.dtype)
            share = run.share(reading, mass, count, source.hidden)
        if row_weight is not None:
            factor = row_weight.detach().reshape(-1).to(full)
        if share is not None and not ctx.late:
            factor = share if factor is None else factor * share
        values = torch.zeros(count, device=source.device, dtype=full)
        others = RowGradients(loss, ctx.others) if loss.others else None
        found = Total.gradients(ctx, source, loss, factor, values, others)
        total, _ = run.reduce(values, reading, row_weight, mass, ctx.mean)
        d_rows = None
        if ctx.needs[3]:
            d_rows = values if share is None else values * share
            d_rows = d_rows.view(lead).to(row_weight.dtype)
        return total, share, [*found, d_rows, *(others.found if others else ())]

    @staticmethod
    def gradients(ctx, source, loss, factor, values, others) -> list:
        """Gradients of the parts, while values and others are filled.

        On return the memory of the logits is free.
        """
        needs, wanted = ctx.needs[:3], any(ctx.needs[:3])
        work = source.work(loss.merges, gemms=int(wanted), sums=needs[1], keeps=needs[1])
        chunks = source.chunks(loss, work)
        sums = chunks.gradients(needs, source.accumulate) if wanted else None

        def visit(some, _saved, rows, z, into):
            own = factor if factor is None or factor.dim() == 0 else factor[rows]
            dz = None
            if wanted:
                values[rows], dz, saved = some.at_once(chunks.run, z, own, into)
            else:
                (values[rows],), saved = some.forward(chunks.run, z)
            if any(ctx.others):
                others.add(rows, some, saved, torch.ones_like(values[0]) if own is None else own)
            return dz

        chunks.walk(loss, visit, sums)
        return [None] * 3 if sums is None else sums.found()

    @staticmethod
    def backward(ctx, upstream):
        Node.each_by_itself((upstream,))
        source, row_weight, loss = ctx.source.saved(ctx)
        parts = source.inputs
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            if gradients is None:  # a second backward: the first handed its gradients to autograd
                with source.ready(loss):
                    _, _, gradients = Total.compute(ctx, source, row_weight, loss)
            scale = upstream if not ctx.late else upstream * ctx.share
            run, main_grad = backend(parts[0]), source.main_grad
            if main_grad is not None and gradients[1] is not None:
                main_grad.addcmul_(gradients[1], scale)
                gradients[1] = None
            for t in gradients[:3]:
                if t is not None:
                    run.scale_(t.view(1, -1) if t.dim() < 2 else t, scale)
            gradients[:3] = as_parts(gradients[:3], parts)
            gradients[3] = None if gradients[3] is None else gradients[3] * upstream
            gradients[4:] = [None if t is None else t * scale.to(t.dtype) for t in gradients[4:]]
        if torch.is_grad_enabled():
            inputs = (*parts, row_weight, *loss.tensors, upstream)
            gradients = refuse_second(tuple(gradients), inputs)
        return *gradients[:4], None, None, None, None, *gradients[4:]


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


def autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def dtypes_as_given(device: torch.device):
    """Autocast off: dtypes stay as they are given."""
    if not autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def as_autocast(t: Tensor) -> Tensor:
    """As F.linear is cast under autocast: fp64 is left as it is."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))
