"""Logits that are never materialised: a head, computed a few rows at a time.

`LinearLogits(hidden, weight, bias)` stands for hidden @ weight.T + bias, and a loss over it is the
same loss over the logits of one chunk of rows after another. There are two ways to go:

- A mean or sum: loss and gradients of each chunk in forward, for an upstream gradient of 1. Three
  GEMMs: logits, d_hidden, d_weight. Backward scales what it finds.
- Anything a row: forward keeps the results alone, and backward makes the logits of a chunk again.
  Four GEMMs.

Nothing here knows a loss: a RowLoss (_loss.py) says what is done with the logits of a chunk.
"""

import contextlib

import torch
from torch import Tensor

from . import _call, _checks
from ._call import backend, in_func, mapped
from ._chunks import Chunks, HeadGradients, RowGradients, Rows
from ._contract import PRECISION
from ._loss import Node, RowLoss, reduced, refuse_second


class LinearLogits:
    """hidden (..., D) @ weight (V, D).T + bias (V,), as logits (..., V) of any loss here.

    workspace bounds the bytes of logits alive at once (a teacher's come on top); None is 1 GiB on a
    GPU, 64 MiB on a CPU. A smaller one saves memory, and costs time.

    accumulate says how the gradient of a bf16 weight is summed over chunks. "auto" rounds after
    each of two chunks; more are summed in the gradient's own memory, exact to 14 bits of the
    largest of 128 neighbours, on Hopper and data-center Blackwell, and elsewhere as "fp32" does: in
    fp32, which takes twice the gradient's memory on top. "weight" rounds after every chunk. fp16 is
    always summed in fp32.

    main_grad, fp32 and of the weight's shape: a backward adds the weight's gradient to it, whoever
    asked, and weight.grad is left alone. A mean or sum is added once, rounded to the weight's dtype
    unless accumulate is "fp32"; results a row are added chunk by chunk.

    Rows that a loss ignores are dropped before the GEMMs. To know how many there are, the host
    waits for the GPU once, while the GPU goes on; drop_ignored=False never waits, as a CUDA graph
    must not, and they cost as much as the others.

    >>> loss = cross_entropy(LinearLogits(hidden, head.weight), target)
    """

    @_call.named()
    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        workspace: int | None = None,
        accumulate: str = "auto",
        main_grad: Tensor | None = None,
        drop_ignored: bool = True,
    ):
        if isinstance(hidden, Tensor) and _autocasts(hidden.device):
            hidden, weight, bias = map(_autocast, (hidden, weight, bias))
        _call.once(
            _call.linear, hidden, weight, bias, main_grad, workspace, accumulate, drop_ignored
        )
        self.hidden, self.weight, self.bias = self.parts = (hidden, weight, bias)
        self.workspace, self.accumulate, self.drop_ignored = workspace, accumulate, drop_ignored
        self.main_grad = main_grad
        self.module: torch.nn.Module | None = None  # whose weight it is, where that may be freed
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self.dtype, self.device = hidden.dtype, hidden.device
        self.requires_grad = any(t is not None and t.requires_grad for t in self.parts)

    def with_parts(self, parts: tuple) -> "LinearLogits":
        """The same head with other tensors of the same shapes, or without any."""
        copy = object.__new__(LinearLogits)
        copy.__dict__.update(self.__dict__, parts=parts)
        copy.hidden, copy.weight, copy.bias = parts
        return copy

    def dim(self) -> int:
        return len(self.shape)

    def materialize(self, rows: Rows | None = None) -> Tensor:
        """The logits themselves, (..., V); or of some rows, (n, V), as constants."""
        if rows is None:
            return torch.nn.functional.linear(self.hidden, self.weight, self.bias)
        with torch.no_grad(), _dtypes_as_given(self.device):
            hidden = self.hidden.reshape(-1, self.hidden.shape[-1])[rows]
            return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def as_teacher(self) -> "LinearLogits":
        """The same logits as constants, which those of a teacher are."""
        return self

    def evaluate(self, loss: RowLoss, reduction: str, row_weight: Tensor | None):
        """The loss of the rows, a chunk of them at a time."""
        if not torch.compiler.is_compiling():
            return _evaluate(self, loss, reduction, row_weight)
        if self.main_grad is not None:  # what backward writes to is in no graph
            return torch.compiler.disable(_evaluate)(self, loss, reduction, row_weight)  # pyright: ignore[reportCallIssue]
        from . import _head_ops  # late: it is built on this file

        return _head_ops.evaluate(self, loss, reduction, row_weight)

    def traced(self, loss: RowLoss) -> tuple[Tensor, ...]:
        """The results of the rows through an operator, for a compiler."""
        from . import _head_ops

        return _head_ops.traced(self, loss)

    def capture_topk(
        self, k: int, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable ids of each row, their log-probabilities, and the log tail mass."""
        if mapped(self.hidden) or mapped(self.weight):
            _checks.not_mapped()
        run = backend(self.hidden)
        empty = self.hidden.detach().new_empty((0, self.shape[-1]))
        found = [run.topk(empty, k, temperature, softcap)]  # their form, were there no rows
        with torch.no_grad(), _dtypes_as_given(self.device):
            for _, _, z in self._chunks(None).logits(self._rows(), self.weight, self.bias):
                found.append(run.topk(z, k, temperature, softcap))
        ids, logprobs, tail = (torch.cat(parts) for parts in zip(*found, strict=True))
        shape = self.shape[:-1]
        return ids.view((*shape, k)), logprobs.view((*shape, k)), tail.view(shape)

    def _rows(self) -> Tensor:
        return self.hidden.detach().reshape(-1, self.hidden.shape[-1])

    def _chunks(self, live: Tensor | None) -> Chunks:
        kind = self.device.type
        unknown = kind == "meta" or (kind == "cuda" and torch.cuda.is_current_stream_capturing())
        if not self.drop_ignored or unknown:
            live = None
        return Chunks(self.weight, self.shape[:-1].numel(), live, self.workspace)

    def __repr__(self) -> str:
        return f"LinearLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


@contextlib.contextmanager
def in_memory(weight: Tensor, module: torch.nn.Module | None):
    """The head's weight in memory: FSDP frees it after the module's forward."""
    if weight.untyped_storage().size() or not weight.numel() or weight.device.type == "meta":
        yield
    elif hasattr(module, "unshard"):
        module.unshard()  # pyright: ignore
        try:
            yield
        finally:
            module.reshard()  # pyright: ignore
    else:
        raise RuntimeError(
            "weight of a head must still be in memory when its loss is computed, and the module"
            " that shards it has freed it: compute the loss inside that module's forward, shard"
            " the head by itself (fully_shard(head)), or pass reshard_after_forward=False."
        )


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _autocast(t: Tensor) -> Tensor:
    """As F.linear is cast: fp64 is left as it is."""
    if not isinstance(t, Tensor) or t.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


def _dtypes_as_given(device: torch.device):
    """Autocast off: dtypes stay as they are given."""
    if not _autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _evaluate(source: LinearLogits, loss: RowLoss, reduction: str, row_weight: Tensor | None):
    if in_func():
        _checks.no_head_in_func()
    _call.values(loss, source.shape[-1])
    if reduction != "none":
        return _Total.apply(
            *source.parts, row_weight, source, loss, reduction, torch.is_grad_enabled(),
            *loss.others,
        )  # fmt: skip
    outputs = _Each.apply(*source.parts, source, loss, *loss.others)
    if loss.several:
        return outputs
    return reduced(outputs[0], loss.reading, row_weight, None, reduction)


def _live(loss: RowLoss) -> Tensor | None:
    reading = loss.reading
    return None if reading.ignore_index is None else (reading.mark != reading.ignore_index).view(-1)


def _save(ctx, source: LinearLogits, loss: RowLoss, row_weight: Tensor | None) -> None:
    """All that a backward reads, as autograd saves it and nowhere else; a teacher's head too."""
    tensors, empty = loss.tensors, (None, None, None)
    given = [t if isinstance(t, Tensor) else None for t in tensors]
    heads = [t if isinstance(t, LinearLogits) else None for t in tensors]
    parts = [part for head in heads if head is not None for part in head.parts]
    ctx.save_for_backward(*source.parts, row_weight, *given, *parts)
    ctx.source, ctx.loss = source.with_parts(empty), loss.with_tensors((None,) * len(tensors))
    ctx.heads = [None if head is None else head.with_parts(empty) for head in heads]


def _saved(ctx) -> tuple[LinearLogits, Tensor | None, RowLoss]:
    """The head, the rows' weights and the loss."""
    hidden, weight, bias, row_weight, *rest = ctx.saved_tensors  # once, for a checkpoint's sake
    tensors, more = rest[: len(ctx.heads)], rest[len(ctx.heads) :]
    for i, head in enumerate(ctx.heads):
        if head is not None:
            tensors[i], more = head.with_parts(tuple(more[:3])), more[3:]
    source = ctx.source.with_parts((hidden, weight, bias))
    return source, row_weight, ctx.loss.with_tensors(tensors)


def _like(gradients: list, parts: tuple) -> list:
    """Each in the shape and dtype of what it is the gradient of."""
    pairs = zip(gradients, parts, strict=True)
    return [None if t is None else t.view(part.shape).to(part.dtype) for t, part in pairs]


def _detached(parts: tuple) -> tuple:
    """Hidden as (N, D), weight and bias, without history."""
    hidden, weight, bias = (None if t is None else t.detach() for t in parts)
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias


class _Total(Node):
    """Loss and gradients of a sum or mean over rows, made in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, row_weight, source, loss, reduction, grad, *others):
        parts = (hidden, weight, bias)
        ctx.needs = [grad and t is not None and t.requires_grad for t in (*parts, row_weight)]
        ctx.others = [grad and t.requires_grad for t in others]
        ctx.mean = reduction == "mean"
        # fp16 cannot hold the gradient of a mean: it gets its share at the end.
        ctx.late = ctx.mean and hidden.dtype == torch.float16
        _save(ctx, source, loss, row_weight)
        with _dtypes_as_given(hidden.device), in_memory(weight, source.module):
            total, ctx.share, ctx.gradients = _Total.compute(ctx, source, row_weight, loss)
        if not (ctx.late or source.main_grad is not None):
            ctx.gradients[:3] = _like(ctx.gradients[:3], parts)
        return total

    @staticmethod
    def compute(ctx, source, row_weight, loss):
        """The loss, the share of a row in its mean, and all gradients at an upstream of 1."""
        flat, W, b = _detached(source.parts)
        run, lead, V = backend(flat), source.shape[:-1], W.shape[0]
        mass = None
        if ctx.mean and loss.reading.class_weight is not None:
            mass = loss.mass(run, V, flat.dtype)
        share = _share(run, loss, mass, flat) if ctx.mean else None
        full, factor = PRECISION[flat.dtype], None
        if row_weight is not None:
            factor = row_weight.detach().reshape(-1).to(full)
        if share is not None and not ctx.late:
            factor = share if factor is None else factor * share
        chunks = source._chunks(_live(loss))
        visits = chunks.logits(flat, W, b)
        wanted = any(ctx.needs[:3])
        sums = None
        if wanted:
            sums = HeadGradients(run, chunks, (flat, W, b), ctx.needs[:3], source.accumulate)
        values = torch.zeros(lead.numel(), device=flat.device, dtype=PRECISION[flat.dtype])
        others = RowGradients(loss, ctx.others)
        for rows, h, z in visits:
            some = loss.take(rows, lead)
            own = factor if factor is None or factor.dim() == 0 else factor[rows]
            if wanted:
                values[rows], dz, saved = some.at_once(run, z, own, z)
                sums.add(rows, h, dz)
            else:
                (values[rows],), saved = some.forward(run, z)
            if any(ctx.others):
                others.add(rows, some, saved, torch.ones_like(values[0]) if own is None else own)
            del some, saved  # a teacher's logits, before the next chunk's are made
        total, _ = run.reduce(values, loss.reading, row_weight, mass, ctx.mean)
        d_rows = None
        if ctx.needs[3]:
            d_rows = values if share is None else values * share
            d_rows = d_rows.view(lead).to(row_weight.dtype)
        return (
            total,
            share,
            [*([None] * 3 if sums is None else sums.found()), d_rows, *others.found],
        )

    @staticmethod
    def backward(ctx, upstream):
        Node.each_by_itself((upstream,))
        source, row_weight, loss = _saved(ctx)
        parts = source.parts
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            if gradients is None:  # a second backward: the first gave its gradients away
                with _dtypes_as_given(parts[0].device), in_memory(parts[1], source.module):
                    _, _, gradients = _Total.compute(ctx, source, row_weight, loss)
            scale = upstream if not ctx.late else upstream * ctx.share
            run, main_grad = backend(parts[0]), source.main_grad
            if main_grad is not None and gradients[1] is not None:
                main_grad.addcmul_(gradients[1], scale)
                gradients[1] = None
            for t in gradients[:3]:
                if t is not None:
                    run.scale_(t.view(1, -1) if t.dim() < 2 else t, scale)
            gradients[:3] = _like(gradients[:3], parts)
            gradients[3] = None if gradients[3] is None else gradients[3] * upstream
            gradients[4:] = [None if t is None else _scaled(t, scale) for t in gradients[4:]]
        if torch.is_grad_enabled():
            inputs = (*parts, row_weight, *loss.tensors, upstream)
            gradients = refuse_second(tuple(gradients), inputs)
        return *gradients[:4], None, None, None, None, *gradients[4:]


def _scaled(t: Tensor, scale: Tensor) -> Tensor:
    return t * scale.to(t.dtype)


def _share(run, loss: RowLoss, mass: Tensor | None, flat: Tensor) -> Tensor:
    """One over what a mean divides by."""
    full = PRECISION[flat.dtype]
    if mass is None and loss.reading.ignore_index is None:
        return torch.full((), 1.0 / max(len(flat), 1), device=flat.device, dtype=full)
    return run.reduce(None, loss.reading, None, mass, True)[1].to(full)


class _Each(Node):
    """Results a row; backward makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, source, loss, *others):
        ctx.needs = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        ctx.others = [t.requires_grad for t in others]
        parts, lead = _detached((hidden, weight, bias)), source.shape[:-1]
        run = backend(hidden)
        results: list[Tensor] = []
        with _dtypes_as_given(hidden.device), in_memory(weight, source.module):
            chunks = source._chunks(_live(loss)).logits(*parts)
            for rows, _, z in chunks:
                found, _ = loss.take(rows, lead).forward(run, z)
                results = results or [_unread(t, lead.numel()) for t in found]
                for result, t in zip(results, found, strict=True):
                    result[rows] = t
        if not results:  # no rows that count: the form of the results is that of nothing's
            nothing = torch.empty((0, weight.shape[0]), device=hidden.device, dtype=hidden.dtype)
            found, _ = loss.take(slice(0, 0), lead).forward(run, nothing)
            results = [_unread(t, lead.numel()) for t in found]
        _save(ctx, source, loss, None)
        shaped = tuple(t.view((*lead, *t.shape[1:])).clone() for t in results)
        ctx.mark_non_differentiable(*(t for t in shaped if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return shaped

    @staticmethod
    def backward(ctx, *upstream):
        Node.each_by_itself(upstream)
        source, _, loss = _saved(ctx)
        parts = source.parts
        if all(g is None for g in upstream):
            return (None,) * (5 + len(loss.others))
        with (
            torch.no_grad(),
            _dtypes_as_given(parts[0].device),
            in_memory(parts[1], source.module),
        ):
            found = _Each.compute(ctx, upstream, source, loss)
        if torch.is_grad_enabled():
            found = refuse_second(tuple(found), (*parts, *loss.tensors, *upstream))
        return *found[:3], None, None, *found[3:]

    @staticmethod
    def compute(ctx, upstream, source, loss) -> list:
        flat = _detached(source.parts)
        run, lead = backend(flat[0]), source.shape[:-1]
        chunks = source._chunks(_live(loss))
        visits = chunks.logits(*flat)
        sums = HeadGradients(run, chunks, flat, ctx.needs, source.accumulate, source.main_grad)
        given = [None if g is None else g.reshape(lead.numel(), *g.shape[len(lead) :])
                 for g in upstream]  # fmt: skip
        others = RowGradients(loss, ctx.others)
        for rows, h, z in visits:
            some = loss.take(rows, lead)
            _, saved = some.forward(run, z)
            own = tuple(None if g is None else g[rows] for g in given)
            sums.add(rows, h, some.backward(run, z, saved, own, None, z))
            if loss.others:
                others.add(rows, some, saved, own[0])
            del some, saved
        d_hidden, d_weight, d_bias = sums.found()
        d_weight = None if source.main_grad is not None else d_weight
        heads = _like([d_hidden, d_weight, d_bias], source.parts)
        return [*heads, *others.found]


def _unread(t: Tensor, rows: int) -> Tensor:
    """What ignored rows have: zeros, and no class."""
    fill = 0.0 if t.is_floating_point() else -1
    return torch.full((rows, *t.shape[1:]), fill, device=t.device, dtype=t.dtype)
