"""The sigmoid loss of SigLIP, in which every pair is one binary classification.

Without a normaliser, loss and gradient of a chunk depend only on its own similarities. So forward
computes both for a mean or sum, in three GEMMs, and backward scales. For "none", upstream gradients
differ between rows, and backward computes the similarities again: four GEMMs.
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
from .similarities import Gradients, Similarities, cast_embeddings, times


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
        evaluate: Any = torch.compiler.disable(_evaluate)  # pyright: ignore[reportCallIssue]
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
    full = PRECISION[a.dtype]
    scale, bias = (
        t if isinstance(t, Tensor) else torch.full((), float(t), device=a.device, dtype=full)
        for t in (scale, bias)
    )
    how = How(ring, reduction, averaged, workspace)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, scale, bias))
    return _SigmoidContrastive.apply(a, b, scale, bias, positives, how, grad)  # pyright: ignore


class How(NamedTuple):
    ring: Ring
    reduction: str
    averaged: bool
    workspace: int | None


class Inputs(NamedTuple):
    a: Tensor
    b: Tensor
    scale: Tensor
    bias: Tensor
    positives: Tensor | None

    def number(self, t: Tensor) -> Tensor:
        return t.detach().reshape(()).to(PRECISION[self.a.dtype])


class Needs(NamedTuple):
    a: bool
    b: bool
    scale: bool
    bias: bool

    @staticmethod
    def of(ctx) -> "Needs":
        return Needs(*ctx.needs_input_grad[: len(Needs._fields)])


class Sums(NamedTuple):
    """The gradients of the sum of all losses, before `_scaled`."""

    a: Tensor | None
    b: Tensor | None
    numbers: Tensor  # (2,), the gradients of `scale` and `bias`


class _SigmoidContrastive(Node):
    @staticmethod
    def forward(ctx, a, b, scale, bias, positives, how, grad):
        inputs = Inputs(a, b, scale, bias, positives)
        needs = Needs.of(ctx) if grad and how.reduction != "none" else None
        with without_autocast(a.device):
            losses, ctx.sums = _pass(inputs, how, needs)
        ctx.how, ctx.share = how, None
        if how.reduction != "none":
            losses, ctx.share = _reduced(losses, how)
        ctx.save_for_backward(a, b, scale, bias, positives)
        return losses

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore
        Node.refuse_vmap((upstream,))
        inputs, how, needs = Inputs(*ctx.saved_tensors), ctx.how, Needs.of(ctx)
        with torch.no_grad(), without_autocast(inputs.a.device):
            sums, ctx.sums = ctx.sums, None  # a second backward computes the sums again
            if sums is None:
                by_row = upstream.contiguous() if ctx.share is None else None
                sums = _pass(inputs, how, needs, by_row)[1]
            gradients = _scaled(sums, inputs, how, ctx.share, upstream, needs)
        if torch.is_grad_enabled():
            gradients = refuse_second(gradients, (*inputs, upstream))
        return *gradients, None, None, None


def _pass(
    inputs: Inputs, how: How, needs: Needs | None, upstream: Tensor | None = None
) -> tuple[Tensor, Sums | None]:
    """The loss of each row, and the gradients of the sum of all, unless `needs` is None.

    `upstream` (N,) multiplies the gradient of each row.
    """
    ring, a, b = how.ring, inputs.a, inputs.b
    # Without stored normalisers, forward and backward can use different backends.
    similarities = Similarities(a, ring.largest, how.workspace)
    backend = similarities.backend
    scale, bias = inputs.number(inputs.scale), inputs.number(inputs.bias)
    gradients = None if needs is None else Gradients(similarities, needs.a)
    losses, numbers = scale.new_zeros(len(a)), scale.new_zeros(2)
    own, bad = inputs.positives, None
    if own is not None:
        # On a GPU, a positive out of range makes loss and gradient of its row NaN.
        bad = (own < 0) | (own >= len(b))
        upstream = torch.where(bad, torch.nan, 1.0 if upstream is None else upstream)

    def visit(owner: int, given: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        here = owner == ring.index
        block = Block(scale, own if here else None, 0 if here and own is None else None)
        for chunk in similarities.chunks(owner, given[0], block, gradients is not None):
            at = chunk.rows
            by_row = None if upstream is None else upstream[at]
            loss, found = backend.sigmoid_contrastive(
                chunk.x, chunk.block, bias, gradients is not None, by_row
            )
            losses[at] += loss
            if gradients is not None:
                numbers.add_(found)
                gradients.add(chunk, given[0], sums[0] if sums else None)

    sums = [gradients.zeros_like(b)] if gradients is not None and needs and needs.b else []
    d_b = ring.around((similarities.working(b),), sums, visit)
    if bad is not None:
        losses = losses.masked_fill(bad, torch.nan)
    if gradients is None:
        return losses, None
    return losses, Sums(gradients.d_a, d_b[0] if d_b else None, numbers)


def _reduced(losses: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """The sum or mean of the losses of all ranks, and the factor (1, or 1 / rows) of each loss."""
    total = how.ring.total(losses.sum().double())
    share = 1 / max(sum(how.ring.rows), 1) if how.reduction == "mean" else 1.0
    return (total * share).to(losses.dtype), losses.new_full((), share)


def _scaled(
    sums: Sums, inputs: Inputs, how: How, share: Tensor | None, upstream: Tensor,
    needs: Needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    factor = inputs.number(torch.ones_like(inputs.scale))
    if share is not None:
        factor = share * upstream * (how.ring.count if how.averaged else 1)
    scaled = factor * inputs.number(inputs.scale)
    d_a, d_b = times(sums.a, scaled, inputs.a), times(sums.b, scaled, inputs.b)
    numbers = [
        (d * factor).to(t.dtype).reshape(t.shape) if needed else None
        for d, t, needed in zip(
            sums.numbers, (inputs.scale, inputs.bias), (needs.scale, needs.bias), strict=True
        )
    ]
    return d_a, d_b, *numbers
