"""The arguments that operators of ours are called with."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def detached(args, leaves=False):
    """The arguments, out of the graph; as leaves, those that wanted a gradient do so again."""
    return tuple(
        t.detach().requires_grad_(leaves and t.requires_grad) if isinstance(t, torch.Tensor) else t
        for t in args
    )


class Calls(TorchDispatchMode):
    """What operators of ours are called with, the last time each."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "logitless":
            assert not kwargs
            self.made[func] = args
        return func(*args, **(kwargs or {}))
