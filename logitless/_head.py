"""The two autograd nodes of a head: loss and gradients at once, or results a row.

- A mean or sum: loss and gradients of each chunk in forward, for an upstream gradient of 1. Three
  GEMMs: logits, d_hidden, d_weight. Backward scales what it finds.
- Anything a row: forward keeps statistics of the rows, and backward makes the logits again.
  Four GEMMs.

Where the workspace is small, logits are cut along the vocabulary instead (_cut.py, _columns.py): a
mean or sum takes up to four GEMMs then, results a row four, for forward keeps their statistics.
"""

import contextlib
from types import ModuleType

import torch
from torch import Tensor

from ._call import backend
from ._chunks import Chunk, Chunks, HeadGradients, Part, RowGradients, Rows, Step
from ._columns import BlockMemory, Blocks, ColumnGradients, add_gradients
from ._contract import PRECISION
from ._in_memory import heads_in_memory
from ._loss import RowLoss, Saved, one
from ._node import Node, refuse_second
from ._partials import settled


def autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def dtypes_as_given(device: torch.device):
    """Autocast off: dtypes stay as they are given."""
    if not autocasts(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def _ready(source, loss: RowLoss):
    """Autocast off, and the weights of the head and of a teacher's in memory."""
    heads = (source, *(t for t in loss.tensors if hasattr(t, "with_parts")))
    weights = [head.weight for head in heads]  # pyright: ignore[reportAttributeAccessIssue]
    if all(weight.untyped_storage().size() for weight in weights):  # always, but for FSDP
        return dtypes_as_given(source.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(dtypes_as_given(source.device))
        stack.enter_context(heads_in_memory(heads))
        return stack.pop_all()


def _live(loss: RowLoss) -> Tensor | None:
    mark, ignored = loss.reading.mark, loss.reading.ignore_index
    return None if ignored is None else (mark != ignored).reshape(-1)


def _save(ctx, source, loss: RowLoss, row_weight: Tensor | None) -> None:
    """All that a backward reads, as autograd saves it and nowhere else; a teacher's head too."""
    tensors = loss.tensors
    given = [t if isinstance(t, Tensor) else None for t in tensors]
    heads = [t if hasattr(t, "with_parts") else None for t in tensors]
    parts = [part for head in heads if head is not None for part in head.parts]  # pyright: ignore
    ctx.save_for_backward(*source.parts, source.own_hidden, row_weight, *given, *parts)
    ctx.source, ctx.loss = source.without_parts(), loss.with_tensors((None,) * len(tensors))
    ctx.heads = [None if head is None else head.without_parts() for head in heads]  # pyright: ignore


def _saved(ctx) -> tuple:
    """The head, the rows' weights and the loss."""
    # Asked for once: activation checkpointing unpacks them only once.
    hidden, weight, bias, own_hidden, row_weight, *rest = ctx.saved_tensors
    tensors, more = rest[: len(ctx.heads)], rest[len(ctx.heads) :]
    for i, head in enumerate(ctx.heads):
        if head is not None:
            tensors[i], more = head.with_parts(tuple(more[:3])), more[3:]
    source = ctx.source.with_parts((hidden, weight, bias))
    source.own_hidden = own_hidden
    return source, row_weight, ctx.loss.with_tensors(tensors)


def as_parts(gradients: list, parts: tuple) -> list:
    """Each in the shape and dtype of what it is the gradient of."""
    pairs = zip(gradients, parts, strict=True)
    return [None if t is None else t.view(part.shape).to(part.dtype) for t, part in pairs]


def _detached(parts: tuple) -> tuple:
    """Hidden as (N, D), weight and bias, without history."""
    hidden, weight, bias = (None if t is None else t.detach() for t in parts)
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias


def _block_memory(source, chunks) -> BlockMemory:
    """For blocks of columns."""
    return BlockMemory.of(chunks.first, chunks.cut.columns, source.dtype, source.hidden)


def _statistics(run: ModuleType, loss: RowLoss, blocks: Blocks) -> tuple[tuple[Tensor, ...], Saved]:
    return settled(run, loss, blocks.statistics(run, loss.reading), len(blocks.weight))


class Total(Node):
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
        with _ready(source, loss):
            total, ctx.share, ctx.gradients = Total.compute(ctx, source, row_weight, loss)
        if not (ctx.late or source.main_grad is not None):
            ctx.gradients[:3] = as_parts(ctx.gradients[:3], parts)
        return total

    @staticmethod
    def compute(ctx, source, row_weight, loss):
        """The loss, the share of a row in its mean, and all gradients at an upstream of 1."""
        parts = _detached(source.parts)
        (flat, W, _), lead = parts, source.shape[:-1]
        run, V = source.backend(), len(W)
        mass = None
        if ctx.mean and loss.reading.class_weight is not None:
            mass = loss.mass(run, V, flat.dtype)
        share = _share(run, loss, mass, flat) if ctx.mean else None
        full, factor = PRECISION[flat.dtype], None
        if row_weight is not None:
            factor = row_weight.detach().reshape(-1).to(full)
        if share is not None and not ctx.late:
            factor = share if factor is None else factor * share
        values = torch.zeros(lead.numel(), device=flat.device, dtype=full)
        others = RowGradients(loss, ctx.others)
        wanted = any(ctx.needs[:3])
        work = source.work(loss.merges, gemms=int(wanted), sums=ctx.needs[1], keeps=ctx.needs[1])
        chunks = source.chunks(_live(loss), work)
        way = Total.by_rows if chunks.cut.columns is None else Total.by_columns
        found = way(ctx, run, source, parts, chunks, loss, factor, values, others)
        total, _ = run.reduce(values, loss.reading, row_weight, mass, ctx.mean)
        d_rows = None
        if ctx.needs[3]:
            d_rows = values if share is None else values * share
            d_rows = d_rows.view(lead).to(row_weight.dtype)
        return total, share, [*found, d_rows, *others.found]

    @staticmethod
    def by_rows(ctx, run, source, parts, chunks, loss, factor, values, others) -> list:
        """Gradients of the parts, while values and others are filled."""
        lead, wanted = source.shape[:-1], any(ctx.needs[:3])
        made_chunks = chunks.logits(*parts, source.dtype)
        sums = None
        if wanted:
            sums = HeadGradients(run, chunks, parts, ctx.needs[:3], source.accumulate)
        for chunk in made_chunks:
            made = []
            for some, rows, z, into in _steps(chunk, loss, lead, wanted):
                own = _factor_of(factor, rows)
                if wanted:
                    values[rows], dz, saved = some.at_once(run, z, own, into)
                    made.append(dz)
                else:
                    (values[rows],), saved = some.forward(run, z)
                if any(ctx.others):
                    others.add(rows, some, saved, _or_one(own, values))
                del some, saved  # a teacher's logits, before the next chunk's are made
            if sums is not None:
                sums.add(chunk.rows, chunk.hidden, made[0] if len(made) == 1 else chunk.gradient)
        return [None] * 3 if sums is None else sums.found()

    @staticmethod
    def by_columns(ctx, run, source, parts, chunks, loss, factor, values, others) -> list:
        """The same, for logits that are cut along the vocabulary."""
        (flat, W, b), lead = parts, source.shape[:-1]
        chunks.wait(len(flat))
        memory, sums, kept_in = _block_memory(source, chunks), None, None
        if any(ctx.needs[:3]):
            sums = ColumnGradients(run, chunks, parts, ctx.needs[:3], source.accumulate)
            kept_in = sums.logits_memory() if chunks.cut.kept else None
        for rows in chunks.slices():
            some, own = loss.take(rows, lead), _factor_of(factor, rows)
            blocks = Blocks(chunks.cut.columns, memory, (flat[rows], W, b), kept_in)
            (values[rows],), saved = _statistics(run, some, blocks)
            if sums is not None:
                given = some.coefficients(saved, (one[flat.device, values.dtype],), len(W))
                add_gradients(run, blocks, sums, rows, some.reading, saved[0], given, own)
            if any(ctx.others):
                others.add(rows, some, saved, _or_one(own, values))
        return [None] * 3 if sums is None else sums.found()

    @staticmethod
    def backward(ctx, upstream):
        Node.each_by_itself((upstream,))
        source, row_weight, loss = _saved(ctx)
        parts = source.inputs
        gradients, ctx.gradients = ctx.gradients, None
        with torch.no_grad():
            if gradients is None:  # a second backward: the first handed its gradients to autograd
                with _ready(source, loss):
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
            gradients[4:] = [None if t is None else _scaled(t, scale) for t in gradients[4:]]
        if torch.is_grad_enabled():
            inputs = (*parts, row_weight, *loss.tensors, upstream)
            gradients = refuse_second(tuple(gradients), inputs)
        return *gradients[:4], None, None, None, None, *gradients[4:]


def _steps(chunk: Chunk, loss: RowLoss, lead: torch.Size, wanted: bool):
    """(The loss of some rows, the rows, their logits, where a gradient goes), step by step."""
    for part in chunk.parts:
        some = loss.take(part.rows, lead)
        if wanted:
            for step in part.steps:
                yield _at(some, part, step), *step[1:]
        else:
            yield some, part.rows, part.logits, None
        del some


def _at(some: RowLoss, part: Part, step: Step) -> RowLoss:
    """The loss of a part at a step of it: a teacher's logits are made for the whole part."""
    return some if len(part.steps) == 1 else some.take(step.at, torch.Size((len(part.logits),)))


def _factor_of(factor: Tensor | None, rows: Rows) -> Tensor | None:
    return factor if factor is None or factor.dim() == 0 else factor[rows]


def _or_one(factor: Tensor | None, values: Tensor) -> Tensor:
    return torch.ones_like(values[0]) if factor is None else factor


def _scaled(t: Tensor, scale: Tensor) -> Tensor:
    return t * scale.to(t.dtype)


def _share(run, loss: RowLoss, mass: Tensor | None, flat: Tensor) -> Tensor:
    """One over what a mean divides by."""
    full = PRECISION[flat.dtype]
    if mass is None and loss.reading.ignore_index is None:
        return torch.full((), 1.0 / max(len(flat), 1), device=flat.device, dtype=full)
    return run.reduce(None, loss.reading, None, mass, True)[1].to(full)


class Each(Node):
    """Results a row; backward makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, source, loss, *others):
        ctx.needs = [t is not None and t.requires_grad for t in (hidden, weight, bias)]
        ctx.others = [t.requires_grad for t in others]
        parts, lead = _detached(source.parts), source.shape[:-1]
        run = source.backend()
        results: list[Tensor] = []
        ctx.known = []  # of the rows, chunk by chunk: what backward would read the logits for
        with _ready(source, loss):
            for rows, found in Each.results(ctx, run, source, parts, loss):
                results = results or [_unread(t, lead.numel()) for t in found]
                for result, t in zip(results, found, strict=True):
                    result[rows] = t
            if not results:  # no row counts: shapes and dtypes are those of a loss of no rows
                nothing = hidden.new_empty((0, weight.shape[0]), dtype=source.dtype)
                found, _ = loss.take(slice(0, 0), lead).forward(run, nothing)
                results = [_unread(t, lead.numel()) for t in found]
        _save(ctx, source, loss, None)
        shaped = tuple(t.view((*lead, *t.shape[1:])).clone() for t in results)
        ctx.mark_non_differentiable(*(t for t in shaped if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return shaped

    @staticmethod
    def results(ctx, run, source, parts, loss):
        """(rows, what the loss gives of them), one chunk after another."""
        lead, chunks = source.shape[:-1], _chunks_of_each(ctx, source, loss)
        flat, W, b = parts
        if chunks.cut.columns is None:
            for chunk in chunks.logits(flat, W, b, source.dtype):
                for part in chunk.parts:
                    found, saved = loss.take(part.rows, lead).forward(run, part.logits)
                    ctx.known.append(() if loss.saves_gradient else saved)
                    yield part.rows, found
            return
        chunks.wait(len(flat))
        memory = _block_memory(source, chunks)
        for rows in chunks.slices():
            some = loss.take(rows, lead)
            blocks = Blocks(chunks.cut.columns, memory, (flat[rows], W, b), None)
            found, saved = _statistics(run, some, blocks)
            ctx.known.append(saved)
            yield rows, found

    @staticmethod
    def backward(ctx, *upstream):
        Node.each_by_itself(upstream)
        source, _, loss = _saved(ctx)
        parts = source.inputs
        if all(g is None for g in upstream):
            return (None,) * (5 + len(loss.others))
        with torch.no_grad(), _ready(source, loss):
            found = Each.compute(ctx, upstream, source, loss)
        if torch.is_grad_enabled():
            found = refuse_second(tuple(found), (*parts, *loss.tensors, *upstream))
        return *found[:3], None, None, *found[3:]

    @staticmethod
    def compute(ctx, upstream, source, loss) -> list:
        lead = source.shape[:-1]
        given = [None if g is None else g.reshape(lead.numel(), *g.shape[len(lead) :])
                 for g in upstream]  # fmt: skip
        others = RowGradients(loss, ctx.others)
        chunks = _chunks_of_each(ctx, source, loss)
        way = Each.by_rows if chunks.cut.columns is None else Each.by_columns
        d_hidden, d_weight, d_bias = way(ctx, given, source, loss, chunks, others)
        d_weight = None if source.main_grad is not None else d_weight
        heads = as_parts([d_hidden, d_weight, d_bias], source.inputs)
        return [*heads, *others.found]

    @staticmethod
    def by_rows(ctx, given, source, loss, chunks, others) -> list:
        """Gradients of the parts, while others are filled."""
        parts, lead = _detached(source.parts), source.shape[:-1]
        run = source.backend()
        made_chunks = chunks.logits(*parts, source.dtype)
        sums = HeadGradients(run, chunks, parts, ctx.needs, source.accumulate, source.main_grad)
        known = iter(ctx.known or ())
        for chunk in made_chunks:
            made = []
            for part in chunk.parts:
                all_of, found = loss.take(part.rows, lead), next(known, None)
                for step in part.steps:
                    some, own, z = _at(all_of, part, step), _rows_of(given, step.rows), step.logits
                    saved = _saved_of(found, part, step.at) if found else some.forward(run, z)[1]
                    made.append(some.backward(run, z, saved, own, None, step.into))
                    if loss.others:
                        others.add(step.rows, some, saved, own[0])
                    del some, saved
                del all_of
            sums.add(chunk.rows, chunk.hidden, made[0] if len(made) == 1 else chunk.gradient)
        return sums.found()

    @staticmethod
    def by_columns(ctx, given, source, loss, chunks, others) -> list:
        """The same, for logits that are cut along the vocabulary."""
        parts, lead = _detached(source.parts), source.shape[:-1]
        flat, W, b = parts
        run = source.backend()
        chunks.wait(len(flat))
        memory = _block_memory(source, chunks)
        sums = ColumnGradients(run, chunks, parts, ctx.needs, source.accumulate, source.main_grad)
        for rows, saved in zip(chunks.slices(), ctx.known, strict=True):
            some, own = loss.take(rows, lead), _rows_of(given, rows)
            blocks = Blocks(chunks.cut.columns, memory, (flat[rows], W, b), None)
            coefficients = some.coefficients(saved, own, len(W))
            add_gradients(run, blocks, sums, rows, some.reading, saved[0], coefficients, None)
            if loss.others:
                others.add(rows, some, saved, own[0])
        return sums.found()


def _chunks_of_each(ctx, source, loss: RowLoss) -> Chunks:
    """The same in forward and backward; whole rows where backward has no saved statistics."""
    merges = loss.merges and ctx.known is not None
    return source.chunks(_live(loss), source.work(merges, sums=ctx.needs[1]))


def _saved_of(saved: Saved, part: Part, at: slice) -> Saved:
    """What was saved of a part, for some of its rows; what is one for all stays."""
    return tuple(t if t is None or len(t) != len(part.logits) else t[at] for t in saved)


def _rows_of(given: list, rows: Rows) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else g[rows] for g in given)


def _unread(t: Tensor, rows: int) -> Tensor:
    """What ignored rows have: zeros, and no class."""
    fill = 0.0 if t.is_floating_point() else -1
    return torch.full((rows, *t.shape[1:]), fill, device=t.device, dtype=t.dtype)
