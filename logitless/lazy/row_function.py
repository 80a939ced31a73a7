"""Runs a function of PyTorch on lazy logits, chunk of rows by chunk of rows.

`topk`, `amax`, `F.kl_div` and other functions that reduce the vocabulary, but have no kernel in
this library, are computed in this way. Values and gradients are the same as PyTorch's, because the
function runs on plain logits and autograd differentiates the function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..contract import Reading
from ..core.loss import RowLoss
from .gradient import pulled_back
from .logits import LazyLogits, UnscaledLogits
from .nodes import OfValues
from .recipe import Recipe


def by_rows(z: LazyLogits, function: Callable[..., Any], *rows: Tensor) -> tuple[Tensor, ...]:
    """Calls function(values (n, V), *rows (n, ...)) on n rows at a time; joins the results.

    NotImplemented is returned if a rank has only some columns, or if a tensor in `rows` needs a
    gradient.
    """
    return _evaluated(RowFunction, "none", z, function, rows)


def summed_by_rows(z: LazyLogits, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The sum over all rows of the numbers (n,) that function(values (n, V), *rows) returns.

    It takes three GEMMs, including the gradient.
    """
    return _evaluated(RowTerm, "sum", z, function, rows)


def _evaluated(kind: "type[RowFunction]", reduction: str, z: LazyLogits, function, rows) -> Any:
    recipe = z.recipe
    needed = torch.is_grad_enabled() and any(t.requires_grad for t in rows)
    if recipe.shard is not None or needed:
        return NotImplemented
    blank = recipe.with_tensors(None, None, None)._replace(watch=None)
    constants = tuple(t.detach() for t in rows)
    loss = kind(Reading(z.shape[-1]), function, blank, constants)
    return UnscaledLogits(z).evaluate(loss, reduction, None)


@dataclass(eq=False)
class RowFunction(RowLoss, OfValues):
    """A loss that is any function of whole rows of values and of row_inputs (...) or (..., k)."""

    multiple_outputs: ClassVar[bool] = True

    function: Callable[..., Any]  # maps values (n, V) and row_inputs to tensors (n, ...)
    recipe: Recipe | None  # None if x holds the values instead of the head's logits
    row_inputs: tuple[Tensor, ...]

    def apply(self, x: Tensor) -> tuple[Tensor, ...]:
        values = x if self.recipe is None else self.recipe.values_of(x)
        lead = values.shape[:-1]
        flat = [t.reshape((lead.numel(), *t.shape[len(lead) :])) for t in self.row_inputs]
        results = self.function(values.reshape(lead.numel(), values.shape[-1]), *flat)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(t.reshape((*lead, *t.shape[1:])) for t in results)

    def forward(self, backend, x):
        return self.apply(x), (None,)

    def backward(self, backend, x, saved, upstream, factor=None, into=None):
        with torch.inference_mode(False):
            d = pulled_back(self.apply, x, *upstream)
        d = d if factor is None else d * factor.reshape(-1, 1).to(d.dtype)
        return d if into is None else into.copy_(d)

    def of_values(self):
        return self.replace(recipe=None)

    def d_row_inputs(self, saved, scale):
        return (None,) * len(self.row_inputs)


class RowTerm(RowFunction):
    """A function with one result per row, for a sum whose gradient is computed in forward."""

    multiple_outputs: ClassVar[bool] = False

    def value_and_gradient(self, backend, x, factor, into):
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (value,) = self.apply(leaf)
            (d,) = torch.autograd.grad(value.sum(), leaf)
        if factor is not None:
            d = d * factor.reshape(-1, 1).to(d.dtype)
        into.copy_(d)
        return value.detach(), into, (None,)
