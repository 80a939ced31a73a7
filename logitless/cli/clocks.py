"""Measures times with device events, graph replay or wall time. All times are in milliseconds.

Each clock is a function that times the function `run`. Some clocks also take a function `prepare`.
Before each repetition, the clock calls `prepare`, and passes the result of `prepare` to `run`. Only
`run` is timed. A clock with a `budget` repeats `run` for about `budget` milliseconds and returns
the median time. `device_time` first repeats `run` for 0.4 · `budget` milliseconds as a warm-up.
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
    """Returns the number of calls that fit into `budget` ms, if each call takes `one` ms.

    The result is clamped to [least, most].
    """
    return max(least, min(most, int(budget / max(one, 1e-3))))


def device_time(prepare: Prepare, run: Run, budget: float, reads: int = 1) -> float:
    """Returns a call's device time with a cold L2 cache, measured with events around the call.

    The cache is flushed by *reading* a large buffer. If a buffer were zeroed instead, the cache (60
    MB on an H200) would be full of modified cache lines. Writing these cache lines back to memory
    would add to the measured time. Reading the buffer takes a quarter of a millisecond. While the
    GPU reads the buffer, the host queues the call, so the result does not include host time. If the
    host needs more than a quarter of a millisecond to queue the call, pass `reads` > 1. Then the
    buffer is read `reads` times before the call. For host time, see `host_times`.
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
    """Returns the time per call of `run`, measured by replaying a CUDA graph of many calls.

    If `cold` is False, all calls read `x`, which is in the L2 cache. If `cold` is True, each call
    reads a different copy of `x` that is not in the L2 cache. The number of copies is clamped to
    [4, 512]. Within these limits, all copies together are about twice as large as the L2 cache.
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
    """Returns the wall time of one call, including the work that the call queues on a GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run(argument)
    wait()
    return (time.perf_counter() - start) * 1e3


def wall_times(device: str, calls: list[tuple[Prepare, Run]], budget: float) -> list[float]:
    """Returns the median wall time of each of several calls.

    The calls alternate, so that a slow phase of the machine slows all calls equally.
    """

    def once(prepare: Prepare, run: Run) -> float:
        return wall_time(device, run, prepare())

    slowest = max((once(*call) for call in calls), default=0.0)
    rounds = range(repetitions(budget, slowest, most=50))
    times = [[once(*call) for call in calls] for _ in rounds]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def host_times(
    runs: list[tuple[Run, tuple[Tensor, ...]]], calls: int = 200, turns: int = 15
) -> list[float]:
    """Returns the wall time per call of each of several functions, as the median of all turns.

    In each turn, every function is called `calls` times in a row. The host waits for the GPU only
    after the last of these calls. The functions alternate, so that a slow phase of the host slows
    all functions equally. All turns together take several seconds, because other work can slow the
    host for one or two seconds.
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
    """Returns whether a call makes the host wait for the GPU."""
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
    """Returns the bandwidth of a large copy in TB/s, counting reads and writes; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    size = min(2**32, torch.cuda.mem_get_info()[0] // 4)
    source, out = torch.ones(2, size // 4, device="cuda")
    return 2e-9 * size / device_time(lambda: None, lambda _: out.copy_(source), budget)
