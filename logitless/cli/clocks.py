"""Clocks: device events, graph replay, wall time.

A clock takes `prepare`, called before each repetition outside of the time, and `run`, which is
given what that returned. It reports the median of the repetitions that fill `budget` milliseconds,
on a GPU after a warm-up of 0.4 of that; all times are in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

L2_FLUSH_BYTES = 2**30  # more than any last-level cache

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

    def median(count: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            argument = prepare()
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
    """Time of one call inside a replayed CUDA graph of many, all on x in the cache.

    If `cold`, each call has a copy of x, in all enough to overflow L2 twice.
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
    """Of one call, and of the work that it leaves to a GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run(argument)
    wait()
    return (time.perf_counter() - start) * 1e3


def wall_times(device: str, works: list[tuple[Prepare, Run]], budget: float) -> list[float]:
    """Of several works, in turns: what slows a machine down hits all alike."""

    def once(prepare: Prepare, run: Run) -> float:
        return wall_time(device, run, prepare())

    slowest = max((once(*work) for work in works), default=0.0)
    rounds = range(repetitions(budget, slowest, most=50))
    times = [[once(*work) for work in works] for _ in rounds]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def host_time(run: Run, leaves: tuple[Tensor, ...], calls: int = 200) -> float:
    """Wall time of a call when many follow each other and nobody waits for the GPU."""

    def batch(leaves: tuple[Tensor, ...]) -> None:
        for _ in range(calls):
            for leaf in leaves:
                leaf.grad = None
            run(leaves)

    return wall_times("cuda", [(lambda: leaves, batch)], 0.0)[0] / calls


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


def copy_bandwidth(device: str, budget: float) -> float:
    """TB/s, bytes read plus bytes written, of copying more than any cache holds; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device="cuda")
    return 2e-9 * size / device_time(lambda: None, lambda _: out.copy_(source), budget)
