"""The sigmoid loss of SigLIP, in which every pair is one binary classification.

Without a normaliser, loss and gradient of a chunk depend only on its own similarities. So forward
computes both for a mean or sum, in three GEMMs, and backward scales. For "none", upstream gradients
differ between rows, and backward computes the similarities again: four GEMMs.
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
from .similarities import Chunk, Similarities, cast_embeddings


@call.named()
def sigmoid_contrastive(
    a: Tensor,  # (N, D)
    b: Tensor,  # (M, D)
    *,
    scale: float | Tensor = 1.0,
    bias: float | Tensor = 0.0,
    positives: Tensor | None = None,
    reduction: str = "mean",
    group=None,
    averaged: bool = True,
    workspace: int | None = None,
) -> Tensor:
    """Computes the sigmoid loss of SigLIP over all pairs of rows of `a` and `b`.

    With the logits z = scale · a bᵀ + bias of all pairs, for `a` (N, D) and `b` (M, D), and y = 1
    for positives, -1 for all other pairs, the loss of row i is

        Σ_j log(1 + e^(-y_ij z_ij))

    `positives` (N,) holds the index of each row's positive in `b`, by default i. "mean" divides by
    the number of rows of `a`, and "none" returns one loss per row. `scale` and `bias` are numbers,
    or tensors with one number, which can require gradients. SigLIP starts with scale 10 and bias
    -10, because most pairs are negatives.

    The other arguments are those of `contrastive`; with `group`, each row of `a` is paired with the
    rows of `b` on all ranks. Forward and backward together take three GEMMs for "mean" and "sum",
    and four for "none". torch.compile breaks the graph at this function, so fullgraph=True raises
    an error.

    >>> sigmoid_contrastive(torch.eye(3), torch.eye(3), scale=10.0, bias=-5.0)
    tensor(0.0201)
    """
    if torch.compiler.is_compiling():  # this call breaks the graph of torch.compile
        evaluate: Any = torch.compiler.disable(_evaluate)
    else:
        evaluate = _evaluate
    return evaluate(a, b, scale, bias, positives, reduction, group, averaged, workspace)


def _evaluate(a, b, scale, bias, positives, reduction, group, averaged, workspace) -> Tensor:
    checks.supported("sigmoid_contrastive")
    a, b = cast_embeddings(a, b)
    ring = Ring(group)
    options = (a, b, scale, bias, positives, reduction, averaged, workspace)
    with ring.same_call("sigmoid_contrastive", *options):
        call.check_once(checks.sigmoid, *options)
        positives = checks.positive_ids(positives, b)
    ring.exchange_sizes(a, b)
    how = How(ring, reduction, averaged, workspace)
    return evaluate_pairs(Sigmoid(), how, a, b, (scale, bias), positives)


class Sigmoid(Objective):
    def early(self, how):
        return True

    def losses(self, similarities, pairs, how, needs):
        losses, sums = _pass(similarities, pairs, needs)
        return losses, (), sums

    def sums(self, similarities, pairs, how, needs, saved, by_row):
        return _pass(similarities, pairs, needs, by_row)[1]


def _pass(
    similarities: Similarities, pairs: Pairs, needs: Needs | None, upstream: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The loss of each row, and the gradients of the sum of all, unless `needs` is None.

    `upstream` (N,) multiplies the gradient of each row.
    """
    backend, (scale, bias) = similarities.backend, pairs.numbers
    losses, numbers = scale.new_zeros(len(pairs.a)), scale.new_zeros(2)
    if pairs.bad is not None:
        # On a GPU, a positive out of range makes loss and gradient of its row NaN.
        upstream = torch.where(pairs.bad, torch.nan, 1.0 if upstream is None else upstream)

    def visit(chunk: Chunk, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        by_row = None if upstream is None else upstream[chunk.rows]
        loss, found = backend.sigmoid_contrastive(
            chunk.x, chunk.block, bias, needs is not None, by_row
        )
        losses[chunk.rows] += loss
        if found is not None:
            numbers.add_(found)

    _, gradients, d_b = around(similarities, pairs, needs, (), (), visit)
    if pairs.bad is not None:
        losses = losses.masked_fill(pairs.bad, torch.nan)
    if gradients is None or needs is None:
        return losses, None
    needed = zip(numbers, needs.numbers, strict=True)
    return losses, Sums(gradients.d_a, d_b, tuple(d if need else None for d, need in needed))
