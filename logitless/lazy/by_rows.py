"""Runs a PyTorch function on lazy logits, one chunk of rows at a time.

This module runs functions that reduce over the vocabulary and have no kernel in this library, such
as `topk`. Autograd differentiates the function on the plain tensors of a chunk.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract import Reading
from ..core.loss import RowLoss
from ..heads.head import Head, ScaledHead
from .formula import Rows
from .history import tied
from .logits import LazyLogits
from .recipe import Recipe, values_of

# A function runs on one piece of a chunk at a time: at most this many bytes of logits, or one row.
PIECE = {"cpu": 4 << 20}
PIECE_ON_GPU = 128 << 20


def by_rows(z: LazyLogits, function: Callable[..., Any], *rows: Tensor) -> Any:
    """Calls function(values, *rows) for n rows at a time, and joins the results.

    `values` has the shape (n, V), and each tensor in `rows` is sliced to the same n rows.
    """
    return _evaluated(RowFunction, "none", z, function, rows)


def mean_by_rows(z: LazyLogits, function: Callable[..., Tensor], *rows: Tensor) -> Any:
    """The mean of function(values, *rows) over all rows. It takes three GEMMs."""
    return _evaluated(RowTerm, "mean", z, function, rows)


def _evaluated(kind: "type[RowFunction]", reduction: str, z: LazyLogits, function, rows) -> Any:
    recipe = z.settle().recipe
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in rows)
    if recipe.shard is not None or needed:
        return NotImplemented

    def in_rows(t: Tensor) -> Tensor:
        """Copies a tensor if view() cannot flatten its leading dimensions."""
        return t.detach().reshape(-1, t.shape[-1]).view(*recipe.lead, t.shape[-1])

    blank = recipe.blank().replace(watches=(), inputs=recipe.map_inputs(in_rows))
    loss = kind(Reading(z.shape[-1]), function, blank, tuple(t.detach() for t in rows))
    z.used = z.used or z.sends
    recipe.check()
    head = recipe.head if z.sends else recipe.constant_head()
    result = recipe.source(head).evaluate(loss, reduction, None)
    return tied(result, z.anchors) if z.sends else result


@dataclass(eq=False)
class RowFunction(RowLoss):
    """A loss that computes a function of whole rows of the values, and of `row_inputs`."""

    multiple_outputs: ClassVar[bool] = True

    function: Callable[..., Any]  # (values of n rows, *row_inputs) → tensors
    recipe: Recipe  # the formula and its inputs, in rows
    row_inputs: tuple[Tensor, ...]

    @property
    def teachers(self):
        """The heads among the formula's inputs. The weights of these heads must be in memory."""
        return tuple(ScaledHead(t) for t in self.recipe.inputs.values() if isinstance(t, Head))

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:
        """Applies the function to the n rows of x, and returns differentiable results."""
        inputs = {key: values_of(t) for key, t in self.recipe.inputs.items()}
        results = self.function(Rows(x, inputs).values(self.recipe.formula), *self.row_inputs)
        return results if isinstance(results, tuple) else (results,)

    def pieces(self, x: Tensor) -> "Iterator[tuple[slice, RowFunction]]":
        """Yields pairs: a slice of the rows of x, and the loss of these rows."""
        size = x.element_size() * max(x.shape[-1], 1)
        step = max(PIECE.get(x.device.type, PIECE_ON_GPU) // size, 1)
        inputs = {key: values_of(t) for key, t in self.recipe.inputs.items()}  # heads run once
        whole: Any = self.replace(recipe=self.recipe.replace(inputs=inputs))
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
        if into is None:
            into = torch.empty_like(x, memory_format=torch.contiguous_format)
        lead = x.shape[:-1]
        upstream = [
            g if g is None or not g.dim() else g.reshape(lead.numel(), *g.shape[len(lead) :])
            for g in upstream
        ]
        self.differentiate(x, lambda at: [sliced(g, at) for g in upstream], factor, into)
        return into

    def differentiate(self, x, upstream: Callable, factor, into, values=None) -> None:
        """Writes the gradient of x to `into`, and the first result to the list `values`.

        upstream(rows) are the gradients of the results of these rows.
        """
        lead, loss = x.shape[:-1], self.rows(slice(None), x.shape[:-1])
        x, out = (t.reshape(lead.numel(), t.shape[-1]) for t in (x, into))
        with torch.inference_mode(False), torch.no_grad():
            for at, piece in loss.pieces(x):
                leaf = x[at].detach().requires_grad_()
                with torch.enable_grad():
                    results = piece.apply(leaf)
                pairs = [
                    (t, g.to(t.dtype).expand(t.shape))
                    for t, g in zip(results, upstream(at), strict=True)
                    if g is not None and t.requires_grad
                ]
                d = None
                if pairs:
                    ts, gs = zip(*pairs, strict=True)
                    (d,) = torch.autograd.grad(ts, leaf, gs, allow_unused=True)
                out[at] = 0 if d is None else scaled(d, factor, at)
                if values is not None:
                    values.append(results[0].detach())
                del leaf, results, pairs

    def d_row_inputs(self, saved, scale):
        return (None,) * len(self.row_inputs)

    # --- access to the tensors of the formula's inputs

    def rows(self, rows, lead):
        loss: Any = super().rows(rows, lead)
        if not self.recipe.inputs:
            return loss
        inputs = self.recipe.map_inputs(lambda t: t.reshape(lead.numel(), -1)[rows])
        return loss.replace(recipe=self.recipe.replace(inputs=inputs))

    def flatten(self, recompute=False):
        tensors, loss = super().flatten(recompute)
        return (*tensors, *self.recipe.tensors), loss.replace(recipe=self.recipe.blank())

    def rebuild(self, tensors):
        label, ids, class_weight, row_temperature, *rest = tensors
        count = len(self.row_inputs)
        loss: Any = super().rebuild((label, ids, class_weight, row_temperature, *rest[:count]))
        return loss.replace(recipe=self.recipe.rebuild(rest[count:]))


def sliced(t: Tensor | None, at: slice) -> Tensor | None:
    """The rows of t in `at`. A 0-d tensor holds one number for all rows."""
    return t if t is None or not t.dim() else t[at]


def scaled(d: Tensor, factor: Tensor | None, at: slice) -> Tensor:
    """d times `factor`, which is one number, or one number per row."""
    if factor is None:
        return d
    factor = factor.reshape(-1, 1).to(d.dtype)
    return d * (factor if len(factor) == 1 else factor[at])


class RowTerm(RowFunction):
    """A RowFunction that returns one number per row, whose mean is computed with its gradient."""

    multiple_outputs: ClassVar[bool] = False

    def value_and_gradient(self, backend, x, factor, into):
        values, one = [], torch.ones((), device=x.device)
        self.differentiate(x, lambda _: [one], factor, into, values)
        return (torch.cat(values).view(x.shape[:-1]),), into, (None,)
