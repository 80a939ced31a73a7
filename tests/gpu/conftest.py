"""The sizes people train with, on a GPU; without one, small sizes in small blocks, interpreted."""

from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.kernels import config as kernel_config
from tests.support.sizes import BLOCK, ON_GPU


def pytest_collection_modifyitems(config, items):
    """Without a GPU, the first case of each test runs. Tests of the other rooms hold the same."""
    if ON_GPU:
        return
    here, seen, others = Path(__file__).parent, set(), []
    for item in items:
        case = (item.path, item.originalname)
        if here in item.path.parents and case in seen:
            others.append(item)
        seen.add(case)
    config.hook.pytest_deselected(items=others)
    dropped = {item.nodeid for item in others}
    items[:] = [item for item in items if item.nodeid not in dropped]


@pytest.fixture(autouse=True)
def by_the_kernels():
    """As they come on a GPU. Elsewhere they are asked for, and a short row is several blocks."""
    if ON_GPU:
        yield
        torch.cuda.empty_cache()
    else:
        with ll.impl("triton"), kernel_config.override(block_v=BLOCK):
            yield
