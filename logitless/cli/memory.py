"""The most memory that a call takes, on a GPU or a CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def extra_memory(device: str, argument: Any, run: Callable) -> int:
    """Most bytes allocated at once during a call, beyond what was there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run(argument)
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    # PyTorch counts no peak on a CPU, but its profiler sees each allocation.
    with quiet(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        kept = run(argument)
    del kept
    found: Any = profile.profiler  # whose raw events have no types
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drops what the profiler's C++ prints to stderr on starting and stopping."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
