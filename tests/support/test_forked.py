"""A forked process sees no GPU that its own environment variables hide."""

import os
import subprocess
import sys

from tests.support.forked import together
from tests.support.paths import ROOT

IMPORT = """
import torch

def refuse():
    raise AssertionError("The module looks for GPUs.")

torch.cuda.is_available = torch.cuda.device_count = refuse
import tests.support.forked
"""


def test_the_module_does_not_look_for_gpus():
    """CUDA_VISIBLE_DEVICES has no effect after the first look."""
    command = [sys.executable, "-c", IMPORT]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def _devices(rank: int) -> tuple[str | None, int]:
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()


def test_more_ranks_than_gpus_see_no_gpu():
    assert together(2, _devices) == [("", 0)] * 2
