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
from typing import Any

import torch
from torch import Tensor

from ..core import call
from . import checks
from .pairwise import How, Needs, Objective, Pairs, Sums, around
from .pairwise import evaluate as evaluate_pairs
from .ring import Ring
from .similarities import Chunk, Similarities, cast_embeddings, picked


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
        evaluate: Any = torch.compiler.disable(_evaluate)
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
    how = How(ring, reduction, averaged, workspace, ignore_index, symmetric)
    return evaluate_pairs(InfoNCE(), how, a, b, (scale,), positives, mask, of_a, of_b)


class InfoNCE(Objective):
    def early(self, how):
        return how.ring.count == 1

    def losses(self, similarities, pairs, how, needs):
        if not how.symmetric:
            return _losses(similarities, pairs, how, needs)
        losses, saved, sums = _losses(similarities, pairs, how, None)
        if needs is not None:
            sums = self.sums(similarities, pairs, how, needs, saved, None)
        return losses, saved, sums

    def sums(self, similarities, pairs, how, needs, saved, by_row):
        """The second pass."""
        (rows, columns), backend = saved, similarities.backend
        d_scale = torch.zeros_like(pairs.scale) if needs.numbers[0] else None

        def visit(chunk: Chunk, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
            of_columns, by_column = (*given, None, None)[:2]
            found = backend.contrastive_gradient(
                chunk.x, chunk.block, rows[chunk.rows], of_columns,
                None if by_row is None else by_row[chunk.rows], by_column, d_scale is not None,
            )  # fmt: skip
            if d_scale is not None:
                d_scale.add_(found)

        given = [] if columns is None else [columns] if by_row is None else [columns, by_row]
        _, gradients, d_b = around(similarities, pairs, needs, given, (), visit)
        assert gradients is not None
        return Sums(gradients.d_a, d_b, (d_scale,))


def _losses(
    similarities: Similarities, pairs: Pairs, how: How, needs: Needs | None
) -> tuple[Tensor, tuple[Tensor, Tensor | None], Sums | None]:
    """The loss of each row, the normalisers of rows and columns, and the gradients.

    The normalisers of columns are None in one direction, and the gradients if `needs` is None.
    """
    backend = similarities.backend
    rows, columns = (_no_logits(len(t), pairs.scale) for t in (pairs.a, pairs.b))
    of_positives = torch.zeros(len(pairs.a), device=pairs.a.device, dtype=similarities.a.dtype)
    d_scale = torch.zeros_like(pairs.scale) if needs is not None and needs.numbers[0] else None

    def visit(chunk: Chunk, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        at = chunk.rows
        found = picked(chunk, None if pairs.bad is None else ~pairs.bad[at])
        if found is not None:
            of_positives[at] = found
        backend.contrastive_read(chunk.x, chunk.block, rows[at], sums[0] if sums else None)
        if needs is not None:
            _, lse = _finished(backend, rows, of_positives, pairs, at)
            more = backend.contrastive_gradient(
                chunk.x, chunk.block, lse, None, d_scale=d_scale is not None
            )
            if d_scale is not None:
                d_scale.add_(more)

    states = (columns,) if how.symmetric else ()
    states, gradients, d_b = around(similarities, pairs, needs, (), states, visit)
    loss, rows = _finished(backend, rows, of_positives, pairs, slice(None))
    if how.symmetric:
        other, lse = backend.contrastive_finish(states[0], of_positives, pairs.scale)
        return (loss + other) / 2, (rows, lse), None
    return loss, (rows, None), gradients and Sums(gradients.d_a, d_b, (d_scale,))


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


def _no_logits(count: int, like: Tensor) -> Tensor:
    """The initial states of `count` rows, with the max -inf and the sum 0."""
    state = like.new_zeros((count, 2))
    state[:, 0] = -torch.inf
    return state
