"""Real sizes on a real GPU; nothing here runs without one."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def no_leftovers():
    yield
    torch.cuda.empty_cache()
