"""Computes the values of lazy logits from their recipe, or from the values of other lazy logits.

A recipe is a head and a formula (recipe.py).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..heads.gemms import without_autocast
from .deferred import memory_of
from .formula import Formula
from .gradient import described, outside
from .recipe import Computation, Recipe


class Cell:
    """Holds the recipe of lazy logits, and the values after they are computed.

    Lazy logits and their aliases, such as z.detach(), share one cell. Only tensors and autograd
    nodes hold references to cells. So a recipe and its hidden states are freed together with the
    last tensor or node that refers to the cell.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.values: Tensor | None = None
        # Whether the values may have been changed, by a write or by other code that shares the
        # memory.
        self.exposed = False

    def keep(self, values: Tensor) -> None:
        """Stores the computed values, and frees the hidden states of logits for inference."""
        self.values = values
        if self.recipe.inference:
            self.recipe = self.recipe.released()

    @property
    def size(self) -> int:
        return torch.Size(self.recipe.shape).numel()


class Record:
    """Holds the autograd graph of an operation after the operation's result has been computed.

    The operation's autograd node and the `Origin` of its result refer to the same `Record`. A
    `Record` holds no values.
    """

    def __init__(self, needs: Sequence[bool], formulas: Sequence[Formula]):
        self.needs = needs  # whether each argument needs a gradient
        # For each argument, the Formula that computes the argument from the head's logits. The
        # recipe of the operation's result holds this head.
        self.formulas = formulas
        self.graph: Graph | None = None


class Graph:
    """The autograd graph of one operation, which holds only the tensors that backward needs."""

    def __init__(self, result: Tensor, blanks: list[Tensor]):
        self.edge: GradientEdge | None = None
        if result.requires_grad:
            self.edge = get_gradient_edge(result)
        self.dtype, self.blanks = result.dtype, blanks

    def gradients(self, d: Tensor) -> list[Tensor | None]:
        """Computes the arguments' gradients from the result's gradient d, and frees the graph."""
        needed = [t for t in self.blanks if t.requires_grad]
        if self.edge is None:
            return [None] * len(self.blanks)
        found = torch.autograd.grad(self.edge, needed, d.to(self.dtype), allow_unused=True)
        left = iter(found)
        return [next(left) if t.requires_grad else None for t in self.blanks]


def recorded(
    function: Callable[..., Tensor], values: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, Graph]:
    """Returns function(*values), detached, and the autograd graph of the function."""
    with outside(), torch.enable_grad():
        pairs = zip(values, needs, strict=True)
        blanks = [described(t).blank().requires_grad_(need) for t, need in pairs]
        result = function(*map(Filled.apply, blanks, values))
    return result.detach(), Graph(result, blanks)


class Filled(torch.autograd.Function):
    """Returns `values`. In backward, the gradient goes to `blank`, a leaf without memory."""

    @staticmethod
    def forward(ctx, blank, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, None


class Origin:
    """Computes the values of lazy logits from the values of other lazy logits, or from the head.

    Computed values stay in the `Cell` of the logits as long as a tensor or an autograd node refers
    to the cell. So the head's product is computed only once if several functions of the same logits
    are materialised.

    Views of lazy logits share memory. If the shared memory may have been changed (`exposed`), all
    views read their values from this memory. The results of other operations, such as z * 2, are
    then computed from the head. So a write to z does not change the result of z * 2.
    """

    def __init__(self, cell: Cell):
        self.cell = weakref.ref(cell)
        self.bases: tuple[Origin, ...] = ()
        self.function: Callable[..., Tensor] | None = None  # takes the values of `bases`
        self.is_view = False
        self.record: Record | None = None  # None if no autograd node needs the function's graph
        self.views: weakref.WeakSet[Origin] | None = None  # views of these logits (`register`)
        # Read-only views and arrays that share memory with these logits or their views
        # (Deferred.lent).
        self.lent: list[weakref.ref] = []

    def after(self, bases: "tuple[Origin, ...]", function: Callable[..., Tensor], is_view: bool):
        self.bases, self.function, self.is_view = bases, function, is_view

    @property
    def exposed(self) -> bool:
        cell = self.cell()
        return (cell is not None and cell.exposed) or self.reads_exposed

    @property
    def reads_exposed(self) -> bool:
        """Whether these logits are a view of `exposed` logits. Such a view is read from memory."""
        return self.is_view and self.bases[0].exposed

    @property
    def known(self) -> bool:
        """Whether the values can be computed from values that are already in memory."""
        return self.reachable(None)

    def reachable(self, size: int | None) -> bool:
        """Whether the values can be computed from values in memory, or from recipes.

        Only recipes that compute exactly `size` values are used, because a larger recipe would
        compute values that are not needed. If `size` is None, no recipe is used.
        """
        cell = self.cell()
        if cell is not None and (cell.values is not None or cell.size == size):
            return True
        return self.has_bases(size)

    def has_bases(self, size: int | None) -> bool:
        """Whether the values can be computed from the values of all `bases` (see `reachable`)."""
        usable = self.is_view or not any(base.exposed for base in self.bases)
        return len(self.bases) > 0 and usable and all(base.reachable(size) for base in self.bases)

    def values(
        self,
        size: int | None = None,
        computation: Computation | None = None,
        formula: Formula | None = None,
    ) -> Tensor:
        """Returns the values of these logits.

        `size` is the number of values that the caller needs. The cell of these logits may have been
        freed. Then `computation` and `formula` are used instead of the cell's recipe.
        """
        cell = self.cell()
        if self.reads_exposed:
            return self.computed([base.values() for base in self.bases])
        if cell is not None and cell.values is not None:
            return cell.values
        if cell is not None:
            size, formula = cell.size, cell.recipe.formula
            computation = computation or Computation(cell.recipe)
        if self.has_bases(size):
            values = self.computed([base.values(size) for base in self.bases])
        elif self.record is not None:  # `computation` can compute all arguments
            pairs = zip(self.bases, self.record.formulas, strict=True)
            values = self.computed(
                [
                    computation.values(f) if base.exposed else base.values(size, computation, f)
                    for base, f in pairs
                ]
            )
        else:
            values = computation.values(formula)
        if cell is not None:
            cell.keep(values)
        return values

    def computed(self, bases: list[Tensor]) -> Tensor:
        """Computes the values from the values of `bases`.

        Also records the autograd graph of the function if an autograd node needs the graph.
        """
        function: Any = self.function
        with torch.inference_mode(False), torch.no_grad(), without_autocast(bases[0].device):
            if self.record is None:
                values = function(*bases)
            else:
                values, self.record.graph = recorded(function, bases, self.record.needs)
            return values.contiguous()

    def expose(self) -> Tensor:
        """Returns the values for a caller that may write to their memory.

        A contiguous view shares memory with its base, so a write to the view also changes the base.
        A view that is not contiguous gets memory of its own, because lazy logits are contiguous.
        """
        owner = self.viewed()
        if owner is not None:
            whole, part = owner.values(), self.from_bases()
            if memory_of(part) == memory_of(whole):
                owner.expose()
                return part
        cell, values = self.cell(), self.values()
        if owner is not None and memory_of(values) == memory_of(owner.values()):
            values = values.clone()
        if cell is not None:
            cell.values, cell.exposed = values, True
        return values

    # --- logits for inference, which may be written to

    @property
    def root(self) -> "Origin":
        """The `Origin` at the start of the chain of views, or `self` if `self` is not a view."""
        return self.bases[0].root if self.is_view else self

    def register(self) -> None:
        """Adds this view to the set `views` of its `root`."""
        root = self.root
        root.views = weakref.WeakSet() if root.views is None else root.views
        root.views.add(self)

    def top(self) -> "Origin":
        """The base nearest to `root` that still has a cell, or `self` if no base has a cell."""
        base = self.viewed()
        return self if base is None else base.top()

    def owns_memory(self) -> bool:
        """Whether all views of the same logits can read their values from the memory of `self`.

        Returns False if another view or base of the same logits has memory of its own. Also returns
        False if a read-only view or array shares memory with the logits.
        """
        root = self.root
        alone = all(o.cell() is None or o.top() is self for o in (root, *(root.views or ())))
        return alone and all(view() is None for view in root.lent)

    def lend(self) -> bool:
        """Whether plain tensors are allowed to share the memory of the values.

        If the result is True, all later operations read these logits and their views from memory.
        """
        owns = self.owns_memory()
        if owns:
            cell: Any = self.cell()
            cell.exposed = True
        return owns

    def writable(self) -> Tensor | None:
        """Returns the values as a writable tensor, in the memory that all views share.

        A write to this tensor changes all views. Returns None if the logits, their bases and their
        views do not all share the same memory. Also returns None if a read-only view or array
        shares the memory. If these logits are a view, the returned tensor can be non-contiguous.
        """
        top = self.top()
        if not top.owns_memory():
            return None
        memory, cell = top.values(), top.cell()
        part = memory if top is self else self.part_of(top, memory)
        if memory_of(part) != memory_of(memory):
            return None
        cell.exposed = True  # pyright: ignore[reportOptionalMemberAccess]
        return part

    def part_of(self, top: "Origin", memory: Tensor) -> Tensor:
        """The values of this view, as a view of the values of `top`."""
        base, function = self.bases[0], self.function
        whole = memory if base is top else base.part_of(top, memory)
        with torch.inference_mode(False), torch.no_grad():
            return function(whole)  # pyright: ignore[reportOptionalCall]

    def from_bases(self) -> Tensor:
        """The values of a view, computed from the values of its base."""
        base = self.bases[0]
        return self.computed([base.values() if base.cell() is not None else base.from_bases()])

    def viewed(self) -> "Origin | None":
        """Returns the nearest base of this view that still has a cell, or None.

        A cell exists as long as a tensor or an autograd node refers to the cell.
        """
        if not self.is_view:
            return None
        base = self.bases[0]
        return base if base.cell() is not None else base.viewed()
