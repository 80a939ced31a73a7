"""Small tensors that are made once, and never written to."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def made_once(make: Callable[..., T]) -> Callable[..., T]:
    """make(*key), remembered for each key.

    It is made outside of inference mode, whose tensors autograd cannot save. What is made while a
    CUDA graph is captured belongs to that graph, and is not remembered.
    """
    made: dict[tuple, T] = {}

    @functools.wraps(make)
    def remembered(*key) -> T:
        found = made.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = make(*key)
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                made[key] = found
        return found

    return remembered
