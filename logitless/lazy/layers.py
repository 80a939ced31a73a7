"""Second forwards for third-party layers whose own forward cannot return lazy logits.

A second forward has the same result as the layer's own forward, apart from rounding. The logits of
a second forward can be lazy.

Two kinds of layers have a second forward. A `Linear4bit` of bitsandbytes multiplies by its weight
in a function of bitsandbytes (four_bit.py). A DoRA adapter of PEFT multiplies the logits by one
number per column (dora.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from . import dora, four_bit


def has_second_forward(module: nn.Module) -> bool:
    """Whether a module is one of the layers that can have a second forward."""
    return four_bit.is_four_bit(module) or dora.is_dora(module)


def second_forward(module: nn.Module, args: tuple, kwargs: dict) -> Callable[..., Any] | None:
    """Returns a module's second forward, or None if the module or its arguments are not supported.

    The second forward calls torch.nn.functional.linear.
    """
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        return None
    if four_bit.is_four_bit(module):
        return partial(four_bit.forward, module)
    return dora.forward_of(module, args[0]) if dora.is_dora(module) else None
