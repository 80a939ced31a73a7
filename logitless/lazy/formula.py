"""Formulas of lazy logits: expression trees over the logits that a head computes.

A formula is computed by PyTorch's own functions, for all rows or for some rows at a time. At a loss
or a statistic, `Formula.direct` tells whether the tree is a scale, a softcap and a log_softmax of
the head's logits. Our kernels apply these three themselves.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..contract import has_values
from ..core.option_checks import LEAST, MOST

T = Tensor


class Rows:
    """The head's logits x for some rows, and the tensors of the formula's inputs."""

    def __init__(self, x: Tensor, inputs: "dict[Input, Tensor]"):
        self.x, self.inputs = x, inputs
        self.results: dict[Formula, Tensor] = {}

    def values(self, formula: "Formula") -> Tensor:
        """The differentiable values of a formula. The values are computed only once."""
        if formula not in self.results:
            self.results[formula] = formula.compute(self)
        return self.results[formula]


class Formula:
    """Maps some rows of the head's logits to values of the same shape."""

    dtype: torch.dtype
    depth = 0  # of nested functions
    direct: "Direct | None" = None

    def compute(self, rows: Rows) -> Tensor:
        raise NotImplementedError


class HeadLogits(Formula):
    """The logits of the head."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.direct = dtype, Direct(dtype)

    def compute(self, rows: Rows) -> Tensor:
        return rows.x


class Input(Formula):
    """A tensor with one row per row of the logits. `Recipe.inputs` holds the tensor."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def compute(self, rows: Rows) -> Tensor:
        return rows.inputs[self]


class Elsewhere(Formula):
    """A formula over the logits of another head, such as a teacher's. The logits are an `Input`."""

    def __init__(self, formula: Formula, logits: Input):
        self.formula, self.logits = formula, logits
        self.dtype, self.depth = formula.dtype, formula.depth

    def compute(self, rows: Rows) -> Tensor:
        return Rows(rows.inputs[self.logits], rows.inputs).values(self.formula)


class Constant(Formula):
    """The values of a formula, detached from the autograd graph."""

    def __init__(self, formula: Formula):
        self.formula, self.dtype, self.depth = formula, formula.dtype, formula.depth

    def compute(self, rows: Rows) -> Tensor:
        return rows.values(self.formula).detach()


@dataclass(eq=False)
class Applied(Formula):
    """The result of a PyTorch function whose arguments are formulas, numbers and tensors."""

    function: Callable[..., Tensor]
    args: tuple
    kwargs: dict
    dtype: torch.dtype
    autocast: "Autocast"

    def __post_init__(self) -> None:
        # Attributes, because compiled code reads them of logits that were made outside the graph.
        parts = pytree.tree_leaves((self.args, self.kwargs))
        self.depth = 1 + max(getattr(t, "depth", 0) for t in parts)
        self.direct = self.normal_form()

    def normal_form(self) -> "Direct | None":
        step = STEPS.get(self.function)
        if step is None or not self.args:
            return None
        first, *rest = self.args
        if not isinstance(first, Formula):  # such as 30 * logits
            first, rest = self.args[-1], [first] if len(self.args) == 2 else [None, None]
        inner = first.direct if isinstance(first, Formula) else None
        found = None if inner is None else step(inner, self.dtype, *rest, **self.kwargs)
        # Our losses accept no temperature and no softcap outside of these limits.
        within = found is not None and all(LEAST <= abs(n) <= MOST for n in found.reads.values())
        return found if within else None

    def compute(self, rows: Rows) -> Tensor:
        args, kwargs = pytree.tree_map_only(Formula, rows.values, (self.args, self.kwargs))
        with self.autocast.on():
            return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Direct:
    """The normal form of a formula: y, or factor · log_softmax(y) if `log` is true.

    y is post · tanh(pre · z) if `capped` is true, and pre · z otherwise. z are the head's logits.
    """

    dtype: torch.dtype
    pre: float = 1.0
    capped: bool = False
    post: float = 1.0
    log: bool = False
    factor: float = 1.0

    @property
    def negative(self) -> bool:
        """Whether y decreases with z. The caller then negates the head (tanh is odd)."""
        return (self.pre < 0) != (self.capped and self.post < 0)

    @property
    def scale(self) -> float:
        scale = abs(self.pre * self.post)
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    @property
    def cap(self) -> float | None:
        return abs(self.post) if self.capped else None

    @property
    def reads(self) -> dict[str, float]:
        """The options `temperature` and `softcap` for a loss over the head's logits."""
        if self.capped:
            return {"softcap": 1 / abs(self.pre), "temperature": 1 / abs(self.pre * self.post)}
        return {"temperature": 1 / abs(self.pre)}


def cast(f: Direct, dtype: torch.dtype, /, *_, **__) -> Direct | None:
    return replace(f, dtype=dtype) if dtype in (f.dtype, torch.float32) and not f.log else None


def times(f: Direct, dtype: torch.dtype, /, by: Any = None, **kwargs) -> Direct | None:
    factor = number(by)
    if kwargs or factor is None or dtype != f.dtype:
        return None
    if f.log:
        return replace(f, factor=f.factor * factor)
    if factor == 0 or factor != factor:
        return None
    field = "post" if f.capped else "pre"
    return replace(f, **{field: getattr(f, field) * factor})


def divided(f: Direct, dtype: torch.dtype, /, by: Any = None, **kwargs) -> Direct | None:
    by = number(by)
    return times(f, dtype, 1 / by, **kwargs) if by else None


def tanh(f: Direct, dtype: torch.dtype) -> Direct | None:
    return None if f.log or f.capped else replace(f, capped=True)


def log_softmax(f: Direct, dtype: torch.dtype, /, *_, **__) -> Direct | None:
    wide = dtype in (f.dtype, torch.float32)
    return replace(f, log=True, dtype=dtype) if wide and not f.log else None


def number(by: Any) -> float | None:
    """Returns `by` as a float if `by` is a number or a 0-d tensor on the CPU, else None."""
    readable = isinstance(by, Tensor) and by.dim() == 0 and by.is_cpu and has_values(by)
    if readable and not by.requires_grad:
        by = by.item()
    return float(by) if isinstance(by, (int, float)) and not isinstance(by, bool) else None


PRODUCTS = (T.mul, T.__mul__, T.__rmul__, torch.mul, T.multiply, torch.multiply)
STEPS: dict[Any, Callable[..., Direct | None]] = {
    T.to: cast,
    **dict.fromkeys(PRODUCTS, times),
    **dict.fromkeys((T.div, T.__truediv__, T.true_divide, torch.div, torch.true_divide), divided),
    **dict.fromkeys((T.neg, T.__neg__, torch.neg), lambda f, dtype: times(f, dtype, -1)),
    **dict.fromkeys((T.tanh, torch.tanh, F.tanh), tanh),
    torch.log_softmax: log_softmax,
}


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a function call. The formula is computed later, in the same state."""

    kind: str  # type of the device, such as "cuda"
    dtype: torch.dtype | None  # None if autocast was off

    @staticmethod
    def of(device: torch.device) -> "Autocast":
        kind = device.type
        active = kind != "meta" and torch.is_autocast_enabled(kind)
        return Autocast(kind, torch.get_autocast_dtype(kind) if active else None)

    def on(self) -> Any:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.kind, self.dtype, cache_enabled=False)
