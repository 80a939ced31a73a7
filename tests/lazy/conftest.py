"""Hidden states and targets for the model of lazy_models.py."""

import pytest
import torch

from tests.support.lazy_models import B, T, V


@pytest.fixture
def x(device):
    return torch.randn(B, T, 4, device=device, dtype=torch.float64)


@pytest.fixture
def t(device):
    target = torch.randint(0, V, (B, T), device=device)
    target[0, 1] = -100
    return target
