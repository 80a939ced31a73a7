"""Every test runs on one device, by each way of computing that it has.

A GPU where there is one; else the CPU, with the kernels under Triton's interpreter.
"""

import os
import tempfile

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

# A cache of its own: what is compiled depends on code of ours that the cache's key doesn't know.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="logitless-")

import logitless as ll  # noqa: E402


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=["eager", "triton"])
def impl(request):
    """Run the test by each implementation, chosen explicitly."""
    with ll.impl(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def small_blocks(impl):
    """Several blocks in a short row, so that blocks merge."""
    from logitless.kernels import config

    with config.override(block_v=32):
        yield
