"""Inputs for tests of losses in place, and cross-entropy in fp64."""

import torch

from tests.support import oracle
from tests.support.laws import value_and_grad

V = 37
CHANGED = "modified by an inplace operation"


def make(rows=5, dtype=torch.float32, device="cpu"):
    x = torch.randn(rows, V, device=device).to(dtype)
    target = torch.randint(0, V, (rows,), device=device)
    target[1] = -100
    return x, target


def truth(x, target, upstream, reduction="mean"):
    """Cross-entropy and its gradient, in fp64."""
    upstream = torch.as_tensor(upstream, dtype=torch.float64).to(x.device)
    return value_and_grad(
        lambda x: oracle.cross_entropy(x, target, reduction=reduction), x.double(), upstream
    )
