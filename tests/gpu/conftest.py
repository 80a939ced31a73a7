"""The sizes people train with, on a GPU; without one, small sizes in small blocks, interpreted."""

import pytest
import torch

import logitless as ll
from logitless.kernels import config
from tests.support.sizes import BLOCK, ON_GPU


@pytest.fixture(autouse=True)
def by_the_kernels():
    """As they come on a GPU. Elsewhere they are asked for, and a short row is several blocks."""
    if ON_GPU:
        yield
        torch.cuda.empty_cache()
    else:
        with ll.impl("triton"), config.override(block_v=BLOCK):
            yield
