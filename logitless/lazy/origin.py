"""Computes the values of lazy logits from their recipe, or from the values of other lazy logits."""

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

    Aliases, such as z.detach(), share it. Only tensors and autograd nodes refer to cells, so a
    recipe and its hidden states are freed together with the last of these.
    """

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.values: Tensor | None = None
        # Whether a write, or other code that shares the memory, may have changed the values.
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
    """The autograd graph of an operation whose result has been computed, but no values.

    The operation's autograd node and the `Origin` of its result share it.
    """

    def __init__(self, needs: Sequence[bool], formulas: Sequence[Formula]):
        self.needs = needs  # whether each argument needs a gradient
        # Per argument, the Formula that computes it from the head in the result's recipe.
        self.formulas = formulas
        self.graph: Graph | None = None


class Graph:
    """The autograd graph of one operation, with only the tensors that backward needs."""

    def __init__(self, result: Tensor, blanks: list[Tensor]):
        self.edge: GradientEdge | None = None
        if result.requires_grad:
            self.edge = get_gradient_edge(result)
        self.dtype, self.blanks = result.dtype, blanks

    def gradients(self, d: Tensor) -> list[Tensor | None]:
        """The arguments' gradients from the result's gradient d. Frees the graph."""
        needed = [t for t in self.blanks if t.requires_grad]
        if self.edge is None:
            return [None] * len(self.blanks)
        found = torch.autograd.grad(self.edge, needed, d.to(self.dtype), allow_unused=True)
        left = iter(found)
        return [next(left) if t.requires_grad else None for t in self.blanks]


def recorded(
    function: Callable[..., Tensor], values: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, Graph]:
    """function(*values), detached, and the autograd graph of the function."""
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

    They stay in the `Cell` as long as a tensor or an autograd node refers to it, so that several
    functions of the same logits compute the head's product only once.

    Views share memory, and once it may have been changed (`exposed`), all of them read from it. The
    results of other operations, such as z * 2, are then computed from the head, so that a write to
    z does not change them.
    """

    def __init__(self, cell: Cell):
        self.cell = weakref.ref(cell)
        self.bases: tuple[Origin, ...] = ()
        self.function: Callable[..., Tensor] | None = None  # takes the values of `bases`
        self.is_view = False
        self.record: Record | None = None  # None if no autograd node needs the function's graph
        self.views: weakref.WeakSet[Origin] | None = None  # views of these logits (`register`)
        # Read-only views and arrays that share memory with these logits (Deferred.lent).
        self.lent: list[weakref.ref] = []

    def after(self, bases: "tuple[Origin, ...]", function: Callable[..., Tensor], is_view: bool):
        self.bases, self.function, self.is_view = bases, function, is_view

    @property
    def exposed(self) -> bool:
        cell = self.cell()
        return (cell is not None and cell.exposed) or self.reads_exposed

    @property
    def reads_exposed(self) -> bool:
        """Whether these are a view of `exposed` logits, which is read from memory."""
        return self.is_view and self.bases[0].exposed

    @property
    def known(self) -> bool:
        """Whether the values can be computed from values that are already in memory."""
        return self.reachable(None)

    def reachable(self, size: int | None) -> bool:
        """Whether the values can be computed from values in memory, or from recipes.

        Only recipes of exactly `size` values count, as a larger one would compute values that are
        not needed. If `size` is None, none does.
        """
        cell = self.cell()
        if cell is not None and (cell.values is not None or cell.size == size):
            return True
        return self.has_bases(size)

    def has_bases(self, size: int | None) -> bool:
        usable = self.is_view or not any(base.exposed for base in self.bases)
        return len(self.bases) > 0 and usable and all(base.reachable(size) for base in self.bases)

    def values(
        self,
        size: int | None = None,
        computation: Computation | None = None,
        formula: Formula | None = None,
    ) -> Tensor:
        """The values of these logits, of which the caller needs `size`.

        If their cell has been freed, `computation` and `formula` take the place of its recipe.
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
        """The values from those of `bases`. Records the autograd graph if a node needs it."""
        function: Any = self.function
        with torch.inference_mode(False), torch.no_grad(), without_autocast(bases[0].device):
            if self.record is None:
                values = function(*bases)
            else:
                values, self.record.graph = recorded(function, bases, self.record.needs)
            return values.contiguous()

    def expose(self) -> Tensor:
        """The values, for a caller that may write to their memory.

        A contiguous view shares memory with its base, so a write also changes the base. Any other
        gets memory of its own, because lazy logits are contiguous.
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
        """The start of the chain of views, or `self`."""
        return self.bases[0].root if self.is_view else self

    def register(self) -> None:
        root = self.root
        root.views = weakref.WeakSet() if root.views is None else root.views
        root.views.add(self)

    def top(self) -> "Origin":
        """The base nearest to `root` that still has a cell, or `self`."""
        base = self.viewed()
        return self if base is None else base.top()

    def owns_memory(self) -> bool:
        """Whether all views of the same logits can read their values from the memory of `self`.

        They cannot if another one has memory of its own, or if a read-only view or array shares it.
        """
        root = self.root
        alone = all(o.cell() is None or o.top() is self for o in (root, *(root.views or ())))
        return alone and all(view() is None for view in root.lent)

    def lend(self) -> bool:
        """Whether plain tensors may share the memory. If so, all views read from it from now on."""
        owns = self.owns_memory()
        if owns:
            cell: Any = self.cell()
            cell.exposed = True
        return owns

    def writable(self) -> Tensor | None:
        """The values as a writable tensor, in the memory that all views share.

        Returns None if they do not all share it, or if a read-only view or array does. For a view,
        the tensor can be non-contiguous.
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
        """The nearest base of this view that still has a cell, or None."""
        if not self.is_view:
            return None
        base = self.bases[0]
        return base if base.cell() is not None else base.viewed()
