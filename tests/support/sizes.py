"""Real sizes where there is a GPU, and small ones, of the same shape, for Triton's interpreter."""

from typing import TypeVar

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK = 32  # columns in a block without a GPU: a row of 75 has two whole ones and a ragged one

T = TypeVar("T")


def sized(real: T, small: T) -> T:
    """What a GPU is given, or what stands for it here."""
    return real if ON_GPU else small
