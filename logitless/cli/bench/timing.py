"""Clocks: device events, graph replay, wall time; and peak memory.

Every clock takes a `prepare`, called before each repetition outside of the time, and a `run` that
is given what it returned. All report the median, in milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIB = 2**20
L2_FLUSH_BYTES = 1024 * MIB  # more than any last-level cache

Prepare = Callable[[], Any]
Run = Callable[[Any], Any]


class Budget(NamedTuple):
    """Milliseconds to spend on one contender in one case."""

    warmup: float = 25.0
    measure: float = 60.0

    def longer(self) -> Budget:
        """For work of tens of milliseconds: until the GPU's clocks settle."""
        return Budget(5 * self.warmup, 5 * self.measure)

    def repetitions(self, one_ms: float, *, least: int = 5, most: int = 500) -> int:
        return max(least, min(most, int(self.measure / max(one_ms, 1e-3))))


def device_time(prepare: Prepare, run: Run, budget: Budget) -> float:
    """Events around each call, with a cold L2.

    The cache is flushed by *reading* a large buffer. Zeroing one would leave it full of dirty
    lines, whose writing back (60 MB on an H200) would fall into the time of what follows. Reading
    it takes a quarter of a millisecond, a head start for the host, which in training has one too:
    this is the device's time. The host's has cases of its own.
    """
    flush = torch.ones(L2_FLUSH_BYTES // 4, device="cuda")

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        argument = prepare()
        flush.sum()
        start.record()
        run(argument)
        end.record()
        return start, end

    def several(count: int) -> list[float]:
        events = [once() for _ in range(count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    estimate = statistics.median(several(3))
    several(Budget(measure=budget.warmup).repetitions(estimate, least=2))
    return statistics.median(several(budget.repetitions(estimate)))


def graph_time(run: Run, copies: Tensor, budget: Budget) -> float:
    """Time of one call inside a replayed CUDA graph that calls it on each of `copies`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in copies[:3]:
            run(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in copies:
            run(x)
    return device_time(lambda: None, lambda _: graph.replay(), budget) / len(copies)


def host_time(run: Run, leaves: tuple[Tensor, ...]) -> float:
    """Wall time of a call when many follow each other and nobody waits for the device."""
    calls, batches = 200, 5

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            for leaf in leaves:
                leaf.grad = None
            run(leaves)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / calls

    batch()
    return statistics.median(batch() for _ in range(batches))


def synchronises(run: Run, argument: Any) -> bool:
    """Whether a call makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(argument)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def wall_times(works: list[tuple[Prepare, Run]], budget: Budget) -> list[float]:
    """Wall time of several works on a CPU, in turns: what slows the machine down hits all alike."""

    def once(prepare: Prepare, run: Run) -> float:
        argument = prepare()
        start = time.perf_counter()
        run(argument)
        return (time.perf_counter() - start) * 1e3

    slowest = max((once(*work) for work in works), default=0.0)
    rounds = budget.repetitions(slowest, most=50)
    times = [[once(*work) for work in works] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def copy_bandwidth(budget: Budget) -> float:
    """TB/s, bytes read plus bytes written, of copying a buffer much larger than any cache."""
    size = min(4096 * MIB, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device="cuda")
    ms = device_time(lambda: None, lambda _: out.copy_(source), budget)
    return 2 * size / ms / 1e9


def extra_memory(device: str, argument: Any, run: Run) -> int:
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
    with quiet(), torch.profiler.profile(profile_memory=True) as profile:
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


def release() -> None:
    """Gives freed memory back, so that one contender's cache is no burden to the next."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
