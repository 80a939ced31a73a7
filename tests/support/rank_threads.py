"""Ranks that are threads of one process: collectives without a network, for tests of shards.

Only one thread runs at a time, because Triton's interpreter does not support several threads. A
thread that waits for other ranks lets another thread run.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from logitless.parallel.ranks import Ranks


class _World:
    """The state that all ranks share."""

    def __init__(self, count: int):
        self.count, self.turn = count, threading.Condition()
        self.given: list[dict[int, Tensor]] = []  # for each collective, the tensor of each rank
        self.failed: BaseException | None = None

    def exchange(self, rank: int, number: int, t: Tensor) -> list[Tensor]:
        """The tensors of all ranks in the collective with this number. The caller holds `turn`."""
        while len(self.given) <= number:
            self.given.append({})
        given = self.given[number]
        given[rank] = t
        self.turn.notify_all()
        self.turn.wait_for(lambda: len(given) == self.count or self.failed is not None)
        if self.failed is not None:
            raise RuntimeError("another rank failed")
        return [given[rank] for rank in range(self.count)]


class Simulated(Ranks):
    """One of several ranks, which records its collectives and how many numbers it sends."""

    def __init__(self, world: _World, index: int):
        self.group, self.world = self, world
        self.index, self.count = index, world.count
        self.calls: list[tuple[str, int]] = []

    def exchange(self, what: str, t: Tensor) -> Tensor:
        self.calls.append((what, t.numel()))
        given = self.world.exchange(self.index, len(self.calls) - 1, t.detach().clone())
        assert all(other.shape == t.shape and other.dtype == t.dtype for other in given)
        return torch.stack(given)

    def gather(self, t: Tensor) -> Tensor:
        return self.exchange("gather", t) if t.numel() else t.new_empty((self.count, *t.shape))

    def all_reduce(self, t: Tensor):
        t.copy_(self.exchange("all_reduce", t).sum(0))
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter(self, t: Tensor):
        own = self.exchange("reduce_scatter", t).sum(0).chunk(self.count)[self.index]
        return SimpleNamespace(wait=lambda: own)

    def shift(self, tensors, rows: int, tag: int = 0):
        received = []
        for t in tensors:
            self.calls.append(("shift", t.numel()))
            given = self.world.exchange(self.index, len(self.calls) - 1, t.detach().clone())
            received.append(given[self.index - 1])
        assert all(len(t) == rows for t in received)
        return SimpleNamespace(wait=lambda: received)


def on_ranks(count: int, work: Callable[[Simulated], Any]) -> list[Any]:
    """The results of work(rank) on all ranks."""
    world, results = _World(count), [None] * count

    def run(index: int) -> None:
        # Autograd's thread for a GPU would serve all ranks, and would wait for itself.
        with world.turn, torch.autograd.set_multithreading_enabled(False):
            if torch.cuda.is_available():
                torch.cuda.set_device(0)  # cuBLAS warns in a thread without a CUDA context
            try:
                results[index] = work(Simulated(world, index))
            except BaseException as error:
                world.failed = world.failed or error
                world.turn.notify_all()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failed is not None:
        raise world.failed
    return results
