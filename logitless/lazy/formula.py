"""Formulas of lazy logits: functions of the head's logits, computed for some rows at a time.

Logits that a head returns have a `Direct` formula, with a scale, a softcap and a log_softmax, which
losses and statistics over the head's logits apply themselves (log_softmax only F.nll_loss, F.kl_div
and most statistics). Any other function of lazy logits, such as the product of probabilities and
log-probabilities, is an `Applied` formula: PyTorch's own function computes it when a later
operation reduces over the vocabulary (row_function.py).
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Rows:
    """The head's logits x for some rows, and the tensors of the formula's inputs (class Input)."""

    def __init__(self, x: Tensor, inputs: "dict[Input, Tensor]"):
        self.x, self.inputs = x, inputs
        self.results: dict[Formula, Tensor] = {}

    def values(self, formula: "Formula") -> Tensor:
        """The differentiable values of a formula, computed only once."""
        if formula not in self.results:
            self.results[formula] = formula.compute(self)
        return self.results[formula]


class Formula:
    """Maps some rows of the head's logits to values of the same shape."""

    dtype: torch.dtype

    def compute(self, rows: Rows) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Direct(Formula):
    """y = post · tanh(pre · z) if `capped`, else pre · z; or factor · log_softmax(y) if `log`."""

    dtype: torch.dtype
    pre: float = 1.0
    capped: bool = False
    post: float = 1.0
    log: bool = False
    factor: float = 1.0

    @property
    def scale(self) -> float:
        """The factor of the logits z before the softcap, x → post · tanh(x / post)."""
        scale = self.pre * self.post
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    @property
    def cap(self) -> float | None:
        return self.post if self.capped else None

    @property
    def reads(self) -> dict[str, float]:
        """The temperature and softcap with which a loss over z is the loss over y."""
        if self.capped:
            return {"softcap": 1 / self.pre, "temperature": 1 / (self.pre * self.post)}
        return {"temperature": 1 / self.pre}

    def compute(self, rows: Rows) -> Tensor:
        z = rows.x.to(self.dtype)
        z = z if self.pre == 1 else z * self.pre
        z = torch.tanh(z) * self.post if self.capped else z
        z = torch.log_softmax(z, -1) if self.log else z
        return z if self.factor == 1 else z * self.factor


class Input(Formula):
    """A tensor with one row per row of the logits, such as a mask or probabilities.

    The tensors are in `Recipe.inputs`, so that a view of the logits keeps the formula and
    rearranges only their rows.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def compute(self, rows: Rows) -> Tensor:
        return rows.inputs[self]


@dataclass(frozen=True)
class Elsewhere(Formula):
    """A formula over the logits of another head, such as a teacher's, which are an `Input`."""

    formula: Formula
    logits: Input

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.formula.dtype

    def compute(self, rows: Rows) -> Tensor:
        return Rows(rows.inputs[self.logits], rows.inputs).values(self.formula)


@dataclass(frozen=True)
class Constant(Formula):
    formula: Formula

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.formula.dtype

    def compute(self, rows: Rows) -> Tensor:
        return rows.values(self.formula).detach()


@dataclass(eq=False, frozen=True)
class Applied(Formula):
    """The result of a PyTorch function whose arguments are formulas, numbers and tensors.

    It maps whole rows, of shape (n, V) instead of (..., V), to whole rows, so the number of leading
    dimensions must not matter.
    """

    function: Callable[..., Tensor]
    args: tuple
    kwargs: dict
    dtype: torch.dtype
    autocast: "Autocast"

    @cached_property
    def depth(self) -> int:
        return 1 + max(map(depth_of, pytree.tree_leaves((self.args, self.kwargs))))

    def compute(self, rows: Rows) -> Tensor:
        args, kwargs = pytree.tree_map_only(Formula, rows.values, (self.args, self.kwargs))
        with self.autocast.on():
            return self.function(*args, **kwargs)


def depth_of(formula: Any) -> int:
    if isinstance(formula, (Constant, Elsewhere)):
        return depth_of(formula.formula)
    return formula.depth if isinstance(formula, Applied) else 0


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a call, in which its formula is computed later."""

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
