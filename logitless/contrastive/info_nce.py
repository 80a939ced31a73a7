"""InfoNCE, the cross-entropy of each row against the other rows of a batch, as in CLIP.

Forward computes the similarities once, in chunks, and keeps two numbers per row and per column.
Backward computes the similarities again, turns each chunk in place into its gradient, and adds the
chunk's part of both gradients. Both passes together take four GEMMs, for one direction or for both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import PRECISION
from ..core import call
from ..core.autograd import Node, refuse_second
from ..eager.contrastive import Block
from ..heads.gemms import autocasts, cast_by_autocast, without_autocast
from . import checks
from .ring import Ring
from .similarities import Gradients, Similarities, picked, times


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

    Let z = scale · a bᵀ be the logits of all pairs. The loss of row i is the cross-entropy

        log Σ_j e^(z_ij) - z_ip      where p is the positive of row i

    With `symmetric`, a and b have the same number of rows, the positive of row i is column i, and
    the loss of pair i is the mean of the cross-entropies of row i and of column i. With
    symmetric=False, the loss has one direction, and b can have more rows than a, for example hard
    negatives. Then `positives` (N,) holds a row of b for each row of a. The default is row i for
    row i. A row whose positive is `ignore_index` does not count.

    `scale` is 1 / temperature: a number, or a tensor with one number, which can require a gradient.
    a and b are used as they are: normalise them before the call if similarities should be cosines.

    Some pairs are not real negatives. `mask` (N, M) is True for pairs that are left out of the sum
    over j. `labels` leaves out all pairs with equal labels, without a mask in memory. `labels` is
    one integer tensor for the rows of both a and b, or a pair of tensors. A positive is never left
    out.

    `reduction` is "mean", "sum", or "none" for one loss per row. The loss is fp32 (fp64 for fp64
    embeddings). Neither the logits nor their gradient exist as a whole. `workspace` bounds the
    bytes of logits in memory. Forward and backward together take four GEMMs.

    If `group` is a process group or a DeviceMesh, each rank passes its own rows of a and b. The
    rows of b on all ranks are negatives of each row of a. "mean" and "sum" are over the rows of all
    ranks and are the same on all ranks. `positives` are rows of this rank's b, and `mask` has a
    column for every row of b on all ranks, in the order of the ranks. Every rank must call
    `backward`. The gradients on a rank are those of this rank's rows, and this rank's part of the
    gradient of `scale`. For "mean" and "sum", the gradients are multiplied by the number of ranks
    if `averaged`, because DDP and FSDP average gradients over ranks. With averaged=False, the sum
    of the ranks' gradients is the gradient of the loss.

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
    of_a, of_b = checks.split_labels(labels)
    ring = Ring(group)
    ring.check(
        checks.contrastive, a, b, scale, symmetric, positives, mask, of_a, of_b, ignore_index,
        reduction, averaged, workspace,
    )  # fmt: skip
    checks.values(positives, b, ignore_index)
    ring.exchange_sizes(a, b)
    if mask is not None:
        checks.pair_mask(mask, a, sum(ring.columns))
    if autocasts(a.device):
        a, b = cast_by_autocast(a), cast_by_autocast(b)
    if not isinstance(scale, Tensor):
        scale = torch.full((), float(scale), device=a.device, dtype=PRECISION[a.dtype])
    how = How(ring, symmetric, ignore_index, reduction, averaged, workspace)
    return _Contrastive.apply(a, b, scale, positives, mask, of_a, of_b, how)  # pyright: ignore


class How(NamedTuple):
    """The options of a call of `contrastive`."""

    ring: Ring
    symmetric: bool
    ignore_index: int
    reduction: str
    averaged: bool
    workspace: int | None


class Pairs(NamedTuple):
    """The tensors of a call: embeddings, scale, and which pairs count."""

    a: Tensor
    b: Tensor
    scale: Tensor  # (), fp32 or fp64
    positives: Tensor | None  # int64, -1 for ignored rows
    ignored: Tensor | None  # (N,), bool
    mask: Tensor | None
    labels: tuple[Tensor, ...]  # () or (labels of a, labels of b)
    ring: Ring

    @staticmethod
    def of(a, b, scale, positives, mask, of_a, of_b, how: How) -> "Pairs":
        ignored = None
        if positives is not None:
            # The embeddings of ignored rows are not used, because they can be infinite or NaN.
            ignored = positives == how.ignore_index
            positives = torch.where(ignored, -1, positives.long())
            a = torch.where(ignored.unsqueeze(1), 0.0, a)
        labels = () if of_a is None else (of_a.long(), of_b.long())
        scale = scale.detach().reshape(()).to(PRECISION[a.dtype])
        return Pairs(a, b, scale, positives, ignored, mask, labels, how.ring)

    def block(self, owner: int, labels: Sequence[Tensor]) -> Block:
        """Returns the options of the similarities of this rank's a with the b of rank `owner`."""
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
            losses, rows, columns = _losses(similarities, pairs, how)
        ctx.how, ctx.share, ctx.backend = how, None, similarities.backend
        if how.reduction != "none":
            losses, ctx.share = _reduced(losses, pairs.ignored, how)
        ctx.save_for_backward(a, b, scale, positives, mask, of_a, of_b, rows, columns)
        return losses

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore
        Node.refuse_vmap((upstream,))
        *tensors, rows, columns = ctx.saved_tensors
        a, b, scale = tensors[:3]
        with torch.no_grad(), without_autocast(a.device):
            pairs = Pairs.of(*tensors, ctx.how)  # pyright: ignore
            how, backend = ctx.how, ctx.backend
            similarities = Similarities(pairs.a, how.ring.largest, how.workspace, backend)
            d_a, d_b, d_scale = _gradients(
                similarities, pairs, how, ctx.share, rows, columns, upstream, ctx.needs_input_grad
            )
        if d_scale is not None:
            d_scale = d_scale.to(scale.dtype).reshape(scale.shape)
        gradients = d_a, d_b, d_scale
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (a, b, scale, upstream))
        return *gradients, None, None, None, None, None


def _losses(
    similarities: Similarities, pairs: Pairs, how: How
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the loss of each row, and the normalisers of rows and columns."""
    ring, backend = pairs.ring, similarities.backend
    rows, columns = (_no_logits(len(t), pairs.scale) for t in (pairs.a, pairs.b))
    of_positives = torch.zeros(len(pairs.a), device=pairs.a.device, dtype=similarities.a.dtype)
    bad = None  # rows that are ignored, or whose positive is out of range
    if pairs.positives is not None:
        bad = (pairs.positives < 0) | (pairs.positives >= len(pairs.b))

    def visit(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        b, *labels = given
        for chunk in similarities.chunks(b, pairs.block(owner, labels)):
            at = chunk.rows
            found = picked(chunk, None if bad is None else ~bad[at])
            if found is not None:
                of_positives[at] = found
            backend.contrastive_read(chunk.x, chunk.block, rows[at], sums[0] if sums else None)

    given = (similarities.working(pairs.b), *pairs.labels[1:])
    columns = ring.around(given, (columns,) if how.symmetric else (), visit)
    loss, rows = backend.contrastive_finish(rows, of_positives, pairs.scale)
    if how.symmetric:
        other, lse = backend.contrastive_finish(columns[0], of_positives, pairs.scale)
        return (loss + other) / 2, rows, lse
    if bad is not None and pairs.ignored is not None:
        loss, rows = loss.masked_fill(bad, torch.nan), rows.masked_fill(bad, torch.nan)
        loss, rows = (
            loss.masked_fill(pairs.ignored, 0.0), rows.masked_fill(pairs.ignored, torch.inf),
        )  # fmt: skip
    return loss, rows, None


def _reduced(losses: Tensor, ignored: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """Returns the sum or mean of the losses of all ranks, and the factor of each loss in it."""
    count = torch.full((), len(losses), device=losses.device, dtype=torch.float64)
    if ignored is not None:
        count = (~ignored).sum().double()
    total, count = how.ring.total(torch.stack((losses.sum().double(), count)))
    share = torch.ones_like(total) if how.reduction == "sum" else 1 / count.clamp(min=1)
    return (total * share).to(losses.dtype), share.to(losses.dtype)


def _gradients(
    similarities: Similarities,
    pairs: Pairs,
    how: How,
    share: Tensor | None,
    rows: Tensor,
    columns: Tensor | None,
    upstream: Tensor,
    needs: Sequence[bool],  # of a, b, scale, and of other arguments
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of a, b and scale."""
    for_a, for_b, for_scale, *_ = needs
    backend, gradients = similarities.backend, Gradients(similarities, for_a)
    factor, by_row = pairs.scale.new_full((), 0.5 if how.symmetric else 1.0), None
    if share is None:
        by_row = upstream.to(pairs.scale.dtype).contiguous()
    else:
        factor = factor * share * upstream
        if how.averaged:
            factor = factor * pairs.ring.count
    d_scale = torch.zeros_like(factor)

    def visit(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        b, *rest = given
        of_columns = rest.pop(0) if how.symmetric else None
        by_column = rest.pop(0) if how.symmetric and by_row is not None else None
        for chunk in similarities.chunks(b, pairs.block(owner, rest)):
            at = chunk.rows
            found = backend.contrastive_gradient(
                chunk.x, chunk.block, rows[at], of_columns,
                None if by_row is None else by_row[at], by_column, for_scale,
            )  # fmt: skip
            if found is not None:
                d_scale.add_(found)
            gradients.add(chunk, b, sums[0] if sums else None)

    given = [similarities.working(pairs.b)]
    given += [columns] if columns is not None else []
    given += [by_row] if columns is not None and by_row is not None else []
    sums = [gradients.zeros_like(pairs.b)] if for_b else []
    d_b = pairs.ring.around((*given, *pairs.labels[1:]), sums, visit)
    factored = factor * pairs.scale
    d_a = times(gradients.d_a, factored, pairs.a)
    if d_a is not None and pairs.ignored is not None:
        d_a = d_a.masked_fill_(pairs.ignored.unsqueeze(1), 0.0)
    return (
        d_a,
        times(d_b[0] if d_b else None, factored, pairs.b),
        d_scale * factor if for_scale else None,
    )


def _no_logits(count: int, like: Tensor) -> Tensor:
    """Returns the states of `count` rows without logits."""
    state = like.new_zeros((count, 2))
    state[:, 0] = -torch.inf
    return state
