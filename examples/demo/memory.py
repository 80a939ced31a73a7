"""Measures the peak memory of a call, on a GPU or a CPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


def extra_memory(device: str, argument: Any, run: Callable) -> int:
    """Returns the peak memory during a call, minus the memory before the call, in bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = run(argument)
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    # PyTorch records no peak on a CPU, but its profiler records each allocation.
    with quiet(), torch.profiler.profile(profile_memory=True) as profile:
        kept = run(argument)
    del kept
    profiler: Any = profile.profiler  # the type is Any, because the raw events have no type stubs
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards the profiler's messages: those of C++ on stderr, and a warning of older PyTorch."""
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
