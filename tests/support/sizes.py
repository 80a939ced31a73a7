"""Sizes of tests: realistic sizes on a GPU, and small sizes for Triton's interpreter."""

from typing import TypeVar

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK = 32  # columns per block without a GPU; a row of 75 has two blocks and a shorter block

T = TypeVar("T")


def sized(real: T, small: T) -> T:
    """Returns `real` on a GPU, and `small` without a GPU."""
    return real if ON_GPU else small
