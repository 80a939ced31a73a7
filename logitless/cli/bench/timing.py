"""Clocks: device events, graph replay, wall time.

A clock takes `prepare`, called before each repetition outside of the time, and `run`, which is
given what that returned. It reports the median of the repetitions that fill `budget` milliseconds,
after a warm-up of 0.4 of that; all times are in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import MIB

L2_FLUSH_BYTES = 1024 * MIB  # more than any last-level cache

Prepare = Callable[[], Any]
Run = Callable[[Any], Any]


def repetitions(budget: float, one: float, least: int = 5, most: int = 500) -> int:
    return max(least, min(most, int(budget / max(one, 1e-3))))


def device_time(prepare: Prepare, run: Run, budget: float) -> float:
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

    def median(count: int) -> float:
        events = [once() for _ in range(count)]
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    one = median(3)
    median(repetitions(0.4 * budget, one, least=2))
    return median(repetitions(budget, one))


def graph_time(run: Run, copies: Tensor, budget: float) -> float:
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


def wall_times(works: list[tuple[Prepare, Run]], budget: float) -> list[float]:
    """Wall time of several works, in turns: what slows a CPU down hits all alike."""

    def once(prepare: Prepare, run: Run) -> float:
        argument = prepare()
        start = time.perf_counter()
        run(argument)
        return (time.perf_counter() - start) * 1e3

    slowest = max((once(*work) for work in works), default=0.0)
    rounds = range(repetitions(budget, slowest, most=50))
    times = [[once(*work) for work in works] for _ in rounds]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def host_time(run: Run, leaves: tuple[Tensor, ...], calls: int = 200) -> float:
    """Wall time of a call when many follow each other and nobody waits for the device."""

    def batch(leaves: tuple[Tensor, ...]) -> None:
        for _ in range(calls):
            for leaf in leaves:
                leaf.grad = None
            run(leaves)
        torch.cuda.synchronize()

    return wall_times([(lambda: leaves, batch)], 0.0)[0] / calls


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


def copy_bandwidth(budget: float) -> float:
    """TB/s, bytes read plus bytes written, of copying a buffer much larger than any cache."""
    size = min(4096 * MIB, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device="cuda")
    return 2e-9 * size / device_time(lambda: None, lambda _: out.copy_(source), budget)
