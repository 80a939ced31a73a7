"""Runs a PyTorch function on lazy logits, one chunk of rows at a time.

For functions that reduce over the vocabulary without a kernel here, such as `topk`, `amax` and
`F.kl_div`. The function runs on plain tensors and autograd differentiates it, so values and
gradients are PyTorch's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract import Reading
from ..core.loss import RowLoss
from ..heads.head import ScaledHead
from .gradient import pulled_back
from .logits import LazyLogits, UnscaledLogits
from .loss_nodes import OfValues
from .recipe import Recipe, RowInput

# A function runs on one piece of a chunk at a time, of at most this many bytes of logits but at
# least one row, because nested functions allocate several temporary tensors of its size.
PIECE = {"cpu": 4 << 20}
PIECE_ON_GPU = 128 << 20


def by_rows(z: LazyLogits, function: Callable[..., Any], *rows: Tensor) -> tuple[Tensor, ...]:
    """Calls function(values, *rows) for n rows at a time, and joins the results.

    `values` is (n, V), and each tensor in `rows` is sliced to the same n rows. NotImplemented if
    the vocabulary is sharded over ranks, or if a tensor in `rows` needs a gradient.
    """
    return _evaluated(RowFunction, "none", z, function, rows)


def mean_by_rows(z: LazyLogits, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The mean over all rows of function(values, *rows), one number per row.

    The mean and its gradient together take three GEMMs.
    """
    return _evaluated(RowTerm, "mean", z, function, rows)


def _evaluated(kind: "type[RowFunction]", reduction: str, z: LazyLogits, function, rows) -> Any:
    recipe = z.recipe
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in rows)
    if recipe.shard is not None or needed:
        return NotImplemented
    _, blank = recipe.flatten()
    inputs = tuple(r.moved(in_rows_of(recipe.lead)) for r in recipe.inputs)
    blank = blank.replace(watch=None, inputs=inputs)
    constants = tuple(t.detach() for t in rows)
    loss = kind(Reading(z.shape[-1]), function, blank, constants)
    return UnscaledLogits(z).evaluate(loss, reduction, None)


def in_rows_of(lead: torch.Size) -> Callable[[Tensor], Tensor]:
    """Copies a tensor if view() cannot flatten its leading dimensions."""
    return lambda t: t.reshape(-1, t.shape[-1]).view(*lead, t.shape[-1])


@dataclass(eq=False)
class RowFunction(RowLoss, OfValues):
    """A function of the values of some rows, and of the tensors in `row_inputs`, as a loss."""

    multiple_outputs: ClassVar[bool] = True

    function: Callable[..., Any]  # (values of n rows, *row_inputs) → tensors
    recipe: Recipe | None  # None if x holds values instead of the head's logits
    row_inputs: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[RowInput, ...]:  # pyright: ignore
        return () if self.recipe is None else self.recipe.inputs

    @property
    def teachers(self):
        """The heads among the formula's inputs, whose weights must be in memory."""
        heads = (r.source for r in self.inputs if not isinstance(r.source, Tensor))
        return tuple(map(ScaledHead, heads))

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.recipe is not None:
            x = self.recipe.rows(x).values(self.recipe.formula)
        results = self.function(x, *self.row_inputs)
        return results if isinstance(results, tuple) else (results,)

    def pieces(self, x: Tensor) -> "Iterator[tuple[slice, RowFunction]]":
        size = x.element_size() * max(x.shape[-1], 1)
        step = max(PIECE.get(x.device.type, PIECE_ON_GPU) // size, 1)
        whole: Any = self
        if self.recipe is not None:  # the heads in `inputs` run once for all pieces
            inputs = tuple(r._replace(source=r.values()) for r in self.inputs)
            whole = self.replace(recipe=self.recipe.replace(inputs=inputs))
        for start in range(0, len(x), step) if len(x) else (0,):
            piece = slice(start, start + step)
            yield piece, whole.rows(piece, x.shape[:1])

    def forward(self, backend, x):
        lead, loss = x.shape[:-1], self.rows(slice(None), x.shape[:-1])
        x = x.reshape(lead.numel(), x.shape[-1])
        results = zip(*(piece.apply(x[at]) for at, piece in loss.pieces(x)), strict=True)
        joined = (ts[0] if len(ts) == 1 else torch.cat(ts) for ts in results)
        return tuple(t.reshape((*lead, *t.shape[1:])) for t in joined), (None,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        lead, loss = x.shape[:-1], self.rows(slice(None), x.shape[:-1])
        if into is None:
            into = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, out = (t.reshape(lead.numel(), t.shape[-1]) for t in (x, into))
        upstream = [
            g if g is None or not g.dim() else g.reshape(len(x), *g.shape[len(lead) :])
            for g in upstream
        ]
        with torch.inference_mode(False), torch.no_grad():
            for at, piece in loss.pieces(x):
                d = pulled_back(piece.apply, x[at], *(sliced(g, at) for g in upstream))
                out[at] = scaled(d, factor, at)
        return into

    def of_values(self):
        return self.replace(recipe=None)

    def d_row_inputs(self, saved, scale):
        return (None,) * len(self.row_inputs)

    # --- access to the tensors of the formula's inputs

    def rows(self, rows, lead):
        loss: Any = super().rows(rows, lead)
        if self.recipe is None or not self.recipe.inputs:
            return loss
        chunk = [r.moved(lambda t: t.reshape(lead.numel(), -1)[rows]) for r in self.inputs]
        return loss.replace(recipe=self.recipe.replace(inputs=tuple(chunk)))

    def flatten(self, recompute=False):
        tensors, loss = super().flatten(recompute)
        if self.recipe is None:
            return tensors, loss
        more, blank = self.recipe.flatten()
        return (*tensors, *more), loss.replace(recipe=blank)

    def rebuild(self, tensors):
        label, ids, class_weight, row_temperature, *rest = tensors
        count = len(self.row_inputs)
        loss: Any = super().rebuild((label, ids, class_weight, row_temperature, *rest[:count]))
        if self.recipe is None:
            return loss
        return loss.replace(recipe=self.recipe.rebuild(rest[count:]))


def sliced(t: Tensor | None, at: slice) -> Tensor | None:
    """The rows of t in the slice. A 0-d tensor holds one number for all rows."""
    return t if t is None or not t.dim() else t[at]


def scaled(d: Tensor, factor: Tensor | None, at: slice) -> Tensor:
    """d times `factor`, one number or one per row, of which the slice `at` belongs to d."""
    if factor is None:
        return d
    factor = factor.reshape(-1, 1).to(d.dtype)
    return d * (factor if len(factor) == 1 else factor[at])


class RowTerm(RowFunction):
    """A RowFunction with one number per row, whose mean and gradient are computed in forward."""

    multiple_outputs: ClassVar[bool] = False

    def value_and_gradient(self, backend, x, factor, into):
        values = []
        with torch.inference_mode(False), torch.no_grad():
            for at, piece in self.pieces(x):
                leaf = x[at].detach().requires_grad_()
                with torch.enable_grad():
                    (value,) = piece.apply(leaf)
                if value.requires_grad:
                    (d,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
                    into[at] = scaled(d, factor, at)
                else:
                    into[at] = 0
                values.append(value.detach())
                del value
        return (torch.cat(values),), into, (None,)
