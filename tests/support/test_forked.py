"""CUDA_VISIBLE_DEVICES hides GPUs from a forked process."""

import os
import subprocess
import sys

import torch

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
    """CUDA_VISIBLE_DEVICES has no effect in a process that has already looked for GPUs."""
    command = [sys.executable, "-c", IMPORT]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def _devices(rank: int) -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()


def test_more_ranks_than_gpus_see_no_gpu():
    ranks = max(2, torch.cuda.device_count() + 1)
    assert together(ranks, _devices) == [("", 0)] * ranks
