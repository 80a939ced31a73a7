"""Measures times with device events, graph replay or wall time. All times are in milliseconds.

A clock times `run`, given the result of `prepare`, which it calls before each repetition. With a
`budget`, it repeats `run` for about as many milliseconds and returns the median; `device_time`
warms up for 0.4 of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

L2_FLUSH_BYTES = 2**30  # larger than the last-level cache of any GPU

Prepare = Callable[[], Any]
Run = Callable[[Any], Any]


def repetitions(budget: float, one: float, least: int = 5, most: int = 500) -> int:
    """The number of calls of `one` ms that fit into `budget` ms, clamped to [least, most]."""
    return max(least, min(most, int(budget / max(one, 1e-3))))


def device_time(prepare: Prepare, run: Run, budget: float, reads: int = 1) -> float:
    """A call's device time with a cold L2 cache, measured with events around the call.

    The cache is flushed by *reading* a large buffer: zeroing one would fill it (60 MB on an H200)
    with modified lines, whose writing back would add to the time. The read takes a quarter of a
    millisecond, in which the host queues the call, so host time is not included (`host_times`
    measures it). If the host needs longer, pass `reads` > 1.
    """
    flush = torch.ones(L2_FLUSH_BYTES // 4, device="cuda")

    def median(count: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            argument = prepare()
            for _ in range(reads):
                flush.sum()
            start.record()
            run(argument)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    one = median(3)
    median(repetitions(0.4 * budget, one, least=2))
    return median(repetitions(budget, one))


def graph_time(run: Run, x: Tensor, budget: float, *, cold: bool) -> float:
    """The time per call of `run`, from replays of a CUDA graph of many calls.

    All calls read `x` in the L2 cache, or if `cold`, each reads another copy outside of it: 4 to
    512 copies, within these limits twice as large as the cache together.
    """
    copies = x.expand(10, *x.shape)
    if cold:
        wanted = 2 * torch.cuda.get_device_properties(x.device).L2_cache_size
        copies = x.expand(min(512, max(4, wanted // x.nbytes)), *x.shape).contiguous()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in copies[:3]:
            run(copy)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            run(copy)
    return device_time(lambda: None, lambda _: graph.replay(), budget) / len(copies)


def wall_time(device: str, run: Run, argument: Any = None) -> float:
    """The wall time of one call, including the work that it queues on a GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run(argument)
    wait()
    return (time.perf_counter() - start) * 1e3


def wall_times(device: str, calls: list[tuple[Prepare, Run]], budget: float) -> list[float]:
    """The median wall time of each call. They alternate, so that a slow phase slows all equally."""

    def once(prepare: Prepare, run: Run) -> float:
        return wall_time(device, run, prepare())

    slowest = max((once(*call) for call in calls), default=0.0)
    rounds = range(repetitions(budget, slowest, most=50))
    times = [[once(*call) for call in calls] for _ in rounds]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def host_times(
    runs: list[tuple[Run, tuple[Tensor, ...]]], calls: int = 200, turns: int = 15
) -> list[float]:
    """The wall time per call of each function, as the median of all turns.

    In each turn, every function is called `calls` times in a row before the host waits for the GPU.
    The functions alternate, and all turns take several seconds, because other work can slow the
    host for one or two.
    """

    def batch(run: Run, leaves: tuple[Tensor, ...]) -> None:
        for _ in range(calls):
            run(leaves)
            for leaf in leaves:
                leaf.grad = None

    rounds = [
        [wall_time("cuda", lambda _, one=one: batch(*one)) / calls for one in runs]
        for _ in range(turns)
    ]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def synchronises(run: Run, argument: Any) -> bool:
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


def copy_bandwidth(device: str, budget: float) -> float:
    """The bandwidth of a large copy in TB/s, counting reads and writes; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device="cuda")
    return 2e-9 * size / device_time(lambda: None, lambda _: out.copy_(source), budget)
