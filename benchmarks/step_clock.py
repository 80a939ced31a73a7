"""Measures the time and the memory of a training step of a head, on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bench import clocks


def time_and_memory(
    step: Callable[[], object], leaves: tuple[Tensor, ...], budget: float
) -> tuple[float, float]:
    """Returns the milliseconds of `step`, and its peak memory in MiB beyond the gradients.

    `step` computes the gradients of `leaves`. `budget` is the milliseconds of timing.
    """

    def run(_):
        for leaf in leaves:
            leaf.grad = None
        step()

    run(None)
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(None)
    gradients = sum(leaf.nbytes for leaf in leaves)
    peak = torch.cuda.max_memory_allocated() - before - gradients
    return clocks.device_time(lambda: None, run, budget), peak / 2**20
