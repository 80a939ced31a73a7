"""An autograd function that says in plain words what it cannot do: the base of all of ours."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks as _checks
from .call import mapped


class Node(torch.autograd.Function):
    """Reverse mode only, and one upstream gradient at a time."""

    jvp = staticmethod(_checks.only_in_reverse)  # pyright: ignore

    @staticmethod
    def each_by_itself(upstream: Sequence[Tensor | None]) -> None:
        """Raise where torch.func.vmap passes several upstream gradients as one tensor."""
        for t in upstream:
            if t is not None and mapped(t):
                _checks.not_mapped()


def refuse_second(gradients: tuple, inputs: tuple) -> tuple:
    """The same gradients, as functions of `inputs` that cannot be differentiated, and say so."""
    given = [t for t in gradients if t is not None]
    needed = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not given or not needed:
        return gradients
    tied = iter(_Final.apply(len(given), *given, *needed))
    return tuple(None if t is None else next(tied) for t in gradients)


class _Final(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "logitless: a loss must not be differentiated twice; its backward has no gradient."
        )
