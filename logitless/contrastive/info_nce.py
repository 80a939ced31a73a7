"""InfoNCE, the cross-entropy of each row against the other rows of a batch, as in CLIP.

The first pass computes the similarities in chunks, and keeps two numbers per row (if symmetric,
also per column). The second pass computes them again, overwrites each chunk with its gradient, and
adds its contributions to the gradients of `a` and `b`: four GEMMs.

In one process, forward computes the gradients of a mean or sum. Both passes are needed if the loss
is symmetric, the second in reverse, because the last chunk is still in memory. In one direction,
the gradient needs only the statistics of whole rows: one pass, three GEMMs. Otherwise, backward
runs the second pass: for "none", the upstream gradients are known only there, and over several
ranks, a row is complete only after the last step of the ring.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core import call
from ..core.autograd import Node, refuse_second
from ..eager.contrastive import Block
from ..heads.gemms import without_autocast
from . import checks
from .ring import Ring
from .similarities import Gradients, Similarities, cast_embeddings, picked, times


@call.named()
def contrastive(
    a: Tensor,  # (N, D)
    b: Tensor,  # (M, D)
    *,
    scale: float | Tensor = 1.0,
    symmetric: bool = True,
    positives: Tensor | None = None,
    mask: Tensor | None = None,
    labels: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    group=None,
    averaged: bool = True,
    workspace: int | None = None,
) -> Tensor:
    """Computes InfoNCE, the contrastive loss of CLIP and of retrieval with in-batch negatives.

    With the logits z = scale · a bᵀ of all pairs, for `a` (N, D) and `b` (M, D), the loss of row i
    is the cross-entropy

        log Σ_j e^(z_ij) - z_ip      where p is the positive of row i

    With symmetric=True, as in CLIP, the positive of row i is column i, N = M, and the loss of pair
    i is the mean of the cross-entropies of row i and of column i. With symmetric=False, the loss
    has one direction, and `b` can have more rows, such as hard negatives. `positives` (N,) then
    holds the index of each row's positive in `b`, by default i; a row whose positive is
    `ignore_index` does not count.

    `scale` is 1 / temperature: a number, or a tensor with one number, which can require a gradient.
    The embeddings are not normalised; for cosine similarities, normalise them before the call.

    To leave pairs that are no real negatives out of the sum over j, pass `mask` (N, M), which is
    True for these pairs, or `labels`, which leaves out all pairs with equal labels without a mask
    in memory: one integer tensor for the rows of `a` and of `b`, or a pair of such tensors. The
    pair of a row and its positive always stays.

    `reduction` is "mean", "sum", or "none" for one loss per row. The loss is fp32 (fp64 for fp64
    embeddings). Neither the logits nor their gradient are materialised, and `workspace` bounds the
    bytes of logits in memory. Forward and backward together take four GEMMs. In one process, the
    forward of a mean or sum computes the gradients too, so use torch.no_grad() for evaluation; with
    symmetric=False, these take three GEMMs.

    With `group`, a process group or a DeviceMesh, each rank passes its own rows of `a` and `b`, and
    the rows of `b` on all ranks are negatives. A mean or sum includes the rows of all ranks, and is
    the same on all ranks. `positives` are indices of this rank's rows of `b`; `mask` has a column
    for every row of `b` on all ranks, in the order of the ranks. Every rank must call `backward`,
    and gets the gradients of its own rows, and its own part of that of `scale`. With averaged=True,
    gradients of a mean or sum are multiplied by the number of ranks, because DDP and FSDP average
    them; with averaged=False, their sum over ranks is the gradient of the loss.

    A call inside `ll.invariant()` or torch.func raises an error. torch.compile breaks the graph at
    this function, so fullgraph=True raises one too.

    >>> contrastive(torch.eye(3), torch.eye(3), scale=2.0)
    tensor(0.2395)
    """
    if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
        evaluate: Any = torch.compiler.disable(_evaluate)  # pyright: ignore[reportCallIssue]
    else:
        evaluate = _evaluate
    return evaluate(
        a, b, scale, symmetric, positives, mask, labels, ignore_index, reduction, group, averaged,
        workspace,
    )  # fmt: skip


def _evaluate(
    a, b, scale, symmetric, positives, mask, labels, ignore_index, reduction, group, averaged,
    workspace,
) -> Tensor:  # fmt: skip
    checks.supported("contrastive")
    a, b = cast_embeddings(a, b)
    ring = Ring(group)
    with ring.same_call(
        "contrastive", a, b, scale, symmetric, positives, mask, labels, ignore_index, reduction,
        averaged, workspace,
    ):  # fmt: skip
        of_a, of_b = checks.split_labels(labels)
        call.check_once(
            checks.contrastive, a, b, scale, symmetric, positives, mask, of_a, of_b, ignore_index,
            reduction, averaged, workspace,
        )  # fmt: skip
        positives = checks.positive_ids(positives, b, ignore_index)
    ring.exchange_sizes(a, b)
    if mask is not None:
        with ring.same_call("mask"):
            checks.pair_mask(mask, a, sum(ring.columns))
    if not isinstance(scale, Tensor):
        scale = torch.full((), float(scale), device=a.device, dtype=PRECISION[a.dtype])
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, scale))
    early = grad and reduction != "none" and ring.count == 1
    how = How(ring, symmetric, ignore_index, reduction, averaged, workspace, early)
    return _Contrastive.apply(a, b, scale, positives, mask, of_a, of_b, how)  # pyright: ignore


class How(NamedTuple):
    ring: Ring
    symmetric: bool
    ignore_index: int
    reduction: str
    averaged: bool
    workspace: int | None
    early: bool  # whether forward computes the gradients


class Sums(NamedTuple):
    """The gradients of the sum of all losses, before `_scaled`."""

    a: Tensor | None
    b: Tensor | None
    scale: Tensor | None


class Pairs(NamedTuple):
    """The tensors of a call."""

    a: Tensor
    b: Tensor
    scale: Tensor  # (), fp32 or fp64
    positives: Tensor | None  # int64, -1 for ignored rows
    ignored: Tensor | None  # (N,), bool
    bad: Tensor | None  # (N,), bool; rows that are ignored, or whose positive is out of range
    mask: Tensor | None
    labels: tuple[Tensor, ...]  # () or (labels of a, labels of b)
    ring: Ring

    @staticmethod
    def of(a, b, scale, positives, mask, of_a, of_b, how: How) -> "Pairs":
        ignored = bad = None
        if positives is not None:
            # ignored rows of `a` become 0, because they can be inf or NaN
            ignored = positives == how.ignore_index
            positives = torch.where(ignored, -1, positives.long())
            bad = (positives < 0) | (positives >= len(b))
            a = torch.where(ignored.unsqueeze(1), 0.0, a)
        labels = () if of_a is None else (of_a.long(), of_b.long())
        scale = scale.detach().reshape(()).to(PRECISION[a.dtype])
        return Pairs(a, b, scale, positives, ignored, bad, mask, labels, how.ring)

    def block(self, owner: int, labels: Sequence[Tensor]) -> Block:
        """Pairs this rank's rows of `a` with the rows of `b` on rank `owner`."""
        own, mask = owner == self.ring.index, self.mask
        if mask is not None:
            start = self.ring.columns_before(owner)
            mask = mask[:, start : start + self.ring.columns[owner]]
        return Block(
            self.scale,
            self.positives if own else None,
            0 if own and self.positives is None else None,
            mask,
            (self.labels[0], labels[0]) if labels else None,
        )


class _Contrastive(Node):
    @staticmethod
    def forward(ctx, a, b, scale, positives, mask, of_a, of_b, how):
        with without_autocast(a.device):
            pairs = Pairs.of(a, b, scale, positives, mask, of_a, of_b, how)
            similarities = Similarities(pairs.a, how.ring.largest, how.workspace)
            needs = ctx.needs_input_grad if how.early else None
            if how.symmetric:
                losses, rows, columns, ctx.sums = _losses(similarities, pairs, how, None)
                if needs is not None:
                    ctx.sums = _sums(similarities, pairs, how, rows, columns, None, needs)
            else:
                losses, rows, columns, ctx.sums = _losses(similarities, pairs, how, needs)
        ctx.how, ctx.share, ctx.backend = how, None, similarities.backend
        if how.reduction != "none":
            losses, ctx.share = _reduced(losses, pairs.ignored, how)
        ctx.save_for_backward(a, b, scale, positives, mask, of_a, of_b, rows, columns)
        return losses

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore
        Node.refuse_vmap((upstream,))
        *tensors, rows, columns = ctx.saved_tensors
        (a, b, scale, *_), how = tensors, ctx.how
        sums, ctx.sums = ctx.sums, None  # a second backward computes the sums again
        with torch.no_grad(), without_autocast(a.device):
            pairs = Pairs.of(*tensors, how)  # pyright: ignore
            if sums is None:
                similarities = Similarities(pairs.a, how.ring.largest, how.workspace, ctx.backend)
                by_row = _of_counted(upstream, pairs) if ctx.share is None else None
                needs = ctx.needs_input_grad
                sums = _sums(similarities, pairs, how, rows, columns, by_row, needs)
            gradients = _scaled(sums, pairs, how, ctx.share, upstream, scale)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (a, b, scale, upstream))
        return *gradients, None, None, None, None, None


def _of_counted(upstream: Tensor, pairs: Pairs) -> Tensor:
    """`upstream` (N,) with 0 in ignored rows, where inf · 0 would be NaN."""
    if pairs.ignored is not None:
        upstream = torch.where(pairs.ignored, 0.0, upstream)
    return upstream.contiguous()


def _losses(
    similarities: Similarities, pairs: Pairs, how: How, needs: Sequence[bool] | None
) -> tuple[Tensor, Tensor, Tensor | None, Sums | None]:
    """The loss of each row, the normalisers of rows and columns, and the gradients.

    The normalisers of columns are None in one direction, and the gradients if `needs` is None.
    """
    backend, gradients = similarities.backend, None
    rows, columns = (_no_logits(len(t), pairs.scale) for t in (pairs.a, pairs.b))
    of_positives = torch.zeros(len(pairs.a), device=pairs.a.device, dtype=similarities.a.dtype)
    d_b = d_scale = None
    if needs is not None:
        for_a, for_b, for_scale, *_ = needs
        gradients = Gradients(similarities, for_a)
        d_b = gradients.zeros_like(pairs.b) if for_b else None
        d_scale = torch.zeros_like(pairs.scale) if for_scale else None

    def visit(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        b, *labels = given
        block, overwritten = pairs.block(owner, labels), gradients is not None
        for chunk in similarities.chunks(owner, b, block, overwritten):
            at = chunk.rows
            found = picked(chunk, None if pairs.bad is None else ~pairs.bad[at])
            if found is not None:
                of_positives[at] = found
            backend.contrastive_read(chunk.x, chunk.block, rows[at], sums[0] if sums else None)
            if gradients is not None:
                _, lse = _finished(backend, rows, of_positives, pairs, at)
                more = backend.contrastive_gradient(
                    chunk.x, chunk.block, lse, None, d_scale=d_scale is not None
                )
                if d_scale is not None:
                    d_scale.add_(more)
                gradients.add(chunk, b, d_b)

    given = (similarities.working(pairs.b), *pairs.labels[1:])
    columns = pairs.ring.around(given, (columns,) if how.symmetric else (), visit)
    loss, rows = _finished(backend, rows, of_positives, pairs, slice(None))
    if how.symmetric:
        other, lse = backend.contrastive_finish(columns[0], of_positives, pairs.scale)
        return (loss + other) / 2, rows, lse, None
    return loss, rows, None, gradients and Sums(gradients.d_a, d_b, d_scale)


def _finished(
    backend: Any, rows: Tensor, of_positives: Tensor, pairs: Pairs, at: slice
) -> tuple[Tensor, Tensor]:
    """The losses and the normalisers of some rows.

    In an ignored row, the loss is 0 and the normaliser inf, so that the gradient is 0 even if all
    pairs are left out. If the positive is out of range, both are NaN.
    """
    loss, lse = backend.contrastive_finish(rows[at], of_positives[at], pairs.scale)
    if pairs.bad is not None and pairs.ignored is not None:
        bad, ignored = pairs.bad[at], pairs.ignored[at]
        loss = loss.masked_fill(bad, torch.nan).masked_fill(ignored, 0.0)
        bad, ignored = bad.unsqueeze(1), ignored.unsqueeze(1)
        lse.masked_fill_(bad, torch.nan).masked_fill_(ignored, torch.inf)
    return loss, lse


def _reduced(losses: Tensor, ignored: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """The sum or mean of the losses of all ranks, and the factor (1, or 1 / count) of each loss."""
    count = torch.full((), len(losses), device=losses.device, dtype=torch.float64)
    if ignored is not None:
        count = (~ignored).sum().double()
    total, count = how.ring.total(torch.stack((losses.sum().double(), count)))
    share = torch.ones_like(total) if how.reduction == "sum" else 1 / count.clamp(min=1)
    return (total * share).to(losses.dtype), share.to(losses.dtype)


def _sums(
    similarities: Similarities,
    pairs: Pairs,
    how: How,
    rows: Tensor,
    columns: Tensor | None,
    by_row: Tensor | None,  # (N,), the upstream gradient, or None for ones
    needs: Sequence[bool],  # whether `a`, `b`, `scale` and the other arguments need a gradient
) -> Sums:
    """The second pass: the gradients of `a`, `b` and `scale`."""
    for_a, for_b, for_scale, *_ = needs
    backend, gradients = similarities.backend, Gradients(similarities, for_a)
    d_scale = torch.zeros_like(pairs.scale) if for_scale else None

    def visit(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        b, *rest = given
        of_columns = rest.pop(0) if how.symmetric else None
        by_column = rest.pop(0) if how.symmetric and by_row is not None else None
        for chunk in similarities.chunks(owner, b, pairs.block(owner, rest), overwritten=True):
            at = chunk.rows
            found = backend.contrastive_gradient(
                chunk.x, chunk.block, rows[at], of_columns,
                None if by_row is None else by_row[at], by_column, for_scale,
            )  # fmt: skip
            if d_scale is not None:
                d_scale.add_(found)
            gradients.add(chunk, b, sums[0] if sums else None)

    given = [similarities.working(pairs.b)]
    given += [columns] if columns is not None else []
    given += [by_row] if columns is not None and by_row is not None else []
    sums = [gradients.zeros_like(pairs.b)] if for_b else []
    d_b = pairs.ring.around((*given, *pairs.labels[1:]), sums, visit)
    return Sums(gradients.d_a, d_b[0] if d_b else None, d_scale)


def _scaled(
    sums: Sums, pairs: Pairs, how: How, share: Tensor | None, upstream: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    factor = pairs.scale.new_full((), 0.5 if how.symmetric else 1.0)
    if share is not None:
        factor = factor * share * upstream
        if how.averaged:
            factor = factor * pairs.ring.count
    factored = factor * pairs.scale
    d_a, d_b = times(sums.a, factored, pairs.a), times(sums.b, factored, pairs.b)
    if d_a is not None and pairs.ignored is not None:
        d_a = d_a.masked_fill_(pairs.ignored.unsqueeze(1), 0.0)
    d_scale = None
    if sums.scale is not None:
        d_scale = (sums.scale * factor).to(scale.dtype).reshape(scale.shape)
    return d_a, d_b, d_scale


def _no_logits(count: int, like: Tensor) -> Tensor:
    """The initial states of `count` rows, with the max -inf and the sum 0."""
    state = like.new_zeros((count, 2))
    state[:, 0] = -torch.inf
    return state
