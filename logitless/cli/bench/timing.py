"""Clocks: device events, graph replay, wall time; and peak memory.

Every clock takes a `prepare`, called before each repetition outside of the time, and a `run` that
is given what it returned. All report the median.
"""

from __future__ import annotations

import contextlib
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


class Timing(NamedTuple):
    ms: float  # the median
    p20: float
    p80: float
    reps: int


def summary(times_ms: list[float]) -> Timing:
    ordered = sorted(times_ms)
    last = len(ordered) - 1
    low, high = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered))


def repetitions(budget_ms: float, one_ms: float, *, least: int = 5, most: int = 500) -> int:
    return max(least, min(most, int(budget_ms / max(one_ms, 1e-3))))


def device_time(prepare: Prepare, run: Run, budget: Budget) -> Timing:
    """Events around each call, with a cold L2.

    The cache is flushed by *reading* a large buffer. Zeroing one would leave it full of dirty
    lines, whose writing back (60 MB on an H200) would fall into the time of what follows. Reading
    it takes a quarter of a millisecond, a head start for the host, which in training has one too:
    this is the device's time. The host's has a case of its own.
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
    several(repetitions(budget.warmup, estimate, least=2))
    return summary(several(repetitions(budget.measure, estimate)))


def graph_time(run: Run, copies: Tensor, budget: Budget) -> Timing:
    """Time of one call inside a replayed CUDA graph, for work shorter than its launch.

    The graph holds one call for each of `copies` (M, N, V), which together are larger than L2, so
    that no call finds its input there.
    """
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
    ms, p20, p80, reps = device_time(lambda: graph, lambda g: g.replay(), budget)
    return Timing(ms / len(copies), p20 / len(copies), p80 / len(copies), reps)


def host_time(run: Run, leaf: Tensor, *, calls: int = 200, batches: int = 5) -> Timing:
    """Wall time of a call when many follow each other and nobody waits for the device."""

    def batch() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            leaf.grad = None
            run(leaf)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / calls

    batch()
    return summary([batch() for _ in range(batches)])


def wall_times(works: list[tuple[Prepare, Run]], budget: Budget) -> list[Timing]:
    """Wall time of several works on a CPU, in turns: the machine's moods then hit all alike."""

    def once(prepare: Prepare, run: Run) -> float:
        argument = prepare()
        start = time.perf_counter()
        run(argument)
        return (time.perf_counter() - start) * 1e3

    slowest = max(once(*work) for work in works)
    rounds = repetitions(10 * budget.measure, slowest, most=50)
    times = [[once(*work) for work in works] for _ in range(rounds)]
    return [summary(list(column)) for column in zip(*times, strict=True)]


def copy_bandwidth(device: str, budget: Budget) -> float:
    """TB/s, bytes read plus bytes written, of copying a buffer much larger than any cache."""
    size = 256 * MIB
    if device == "cuda":
        size = min(4096 * MIB, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device=device)
    work = (lambda: None), (lambda _: out.copy_(source))
    if device == "cuda":
        timing = device_time(*work, budget)
    else:
        (timing,) = wall_times([work], budget)
    return 2 * size / (timing.ms * 1e-3) / 1e12


def extra_memory(device: str, argument: Any, run: Run) -> int:
    """Most bytes allocated at once during a call, beyond what was there before it."""
    if device == "cpu":
        return _cpu_extra_memory(argument, run)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run(argument)
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def _cpu_extra_memory(argument: Any, run: Run) -> int:
    """PyTorch counts no peak on a CPU, but its profiler sees each allocation."""
    with _quiet(), torch.profiler.profile(profile_memory=True) as profile:
        kept = run(argument)
    del kept
    found: Any = profile.profiler  # whose raw events have no types
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the profiler's C++ prints to stderr on starting and stopping."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def release() -> None:
    """Gives freed memory back, so that one contender's cache is no burden to the next.

    Nothing here makes reference cycles, so no garbage is collected: that would cost 0.1 s a call.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
