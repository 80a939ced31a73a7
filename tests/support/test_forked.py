"""CUDA_VISIBLE_DEVICES hides GPUs from a forked process."""

import os

import torch

from tests.support.forked import together


def _devices(rank: int) -> tuple[str | None, int]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count()


def test_more_ranks_than_gpus_see_no_gpu():
    ranks = max(2, torch.cuda.device_count() + 1)
    assert together(ranks, _devices) == [("", 0)] * ranks
