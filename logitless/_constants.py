"""Small tensors that are made once, and never written to."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class made_once(dict, Generic[T]):
    """A function of a key, or of a tuple of them: found[key] is make(key), remembered.

    It is made outside of inference mode, whose tensors autograd cannot save. What is made while a
    CUDA graph is captured belongs to that graph, and is not remembered.
    """

    def __init__(self, make: Callable[..., T]):
        super().__init__()
        self.make = make

    def __missing__(self, key) -> T:
        with torch.inference_mode(False):
            found = self.make(*key) if isinstance(key, tuple) else self.make(key)
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self[key] = found
        return found
