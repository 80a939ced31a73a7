"""Fetches the shards that will be read next, in background threads.

The order is known from `Store.prefetch`, or because the shards are read one after the other. Each
thread fetches one shard into the cache and ends. If it fails, its error is ignored: the reader
fetches the shard itself, and raises if that fails too.
"""

import contextlib
import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

SCANNED = 256  # number of entries of `order` that are searched for the next shards
NEARBY = 1024  # a shard is not fetched again if one of the last NEARBY documents is in this shard


class Prefetch:
    """Starts the threads. `fetch(number)` fetches a shard; the cache has room for `room` of them.

    `use(number)` tells whether the cache has a shard, and marks it as used now, so that it is not
    deleted to make room for the next.
    """

    def __init__(
        self, shards: int, use: Callable[[int], bool], fetch: Callable[[int], None], room: int
    ):
        self.shards, self.use, self.fetch, self.room = shards, use, fetch, room
        self.ahead = self._fitting(2)  # number of shards to fetch before they are read
        self.order: Tensor | None = None  # shard numbers, as `without_repetitions` returns them
        self.at = -1  # position in `order`
        self.last: int | None = None  # the shard that was read last
        self._of_process = (0, set())  # process id, and the shards that its threads fetch
        self._change = threading.Lock()

    def follow(self, order: Tensor | None, ahead: int, mixed: int = 1) -> None:
        """Sets the order of the shards, by default that of the store, and fetches the first.

        `mixed` shards are read at the same time, because their documents are shuffled together.
        """
        self._fetching()
        with self._change:
            self.order, self.at, self.last = order, -1, None
            self.ahead = self._fitting(ahead, mixed)
        self._start(self._upcoming(-1))

    def _fitting(self, ahead: int, mixed: int = 1) -> int:
        """`ahead`, or less if the cache has no room for (ahead + mixed) shards."""
        return max(0, min(ahead, self.room - mixed))

    def reading(self, number: int) -> None:
        """Starts to fetch the shards after this one. Called before each read."""
        self._fetching()
        with self._change:
            if number == self.last:
                return
            in_order = number == (0 if self.last is None else self.last + 1)
            self.last = number
            if self.order is not None:
                following = self.order[self.at + 1 : self.at + 1 + SCANNED].tolist()
                if number not in following:
                    return
                self.at += 1 + following.index(number)
            elif not in_order:
                return
        self.use(number)
        self._start(self._upcoming(number))

    def _upcoming(self, number: int) -> list[int]:
        """The next `ahead` distinct shards after shard `number`."""
        if self.order is None:
            return [*range(number + 1, min(number + 1 + self.ahead, self.shards))]
        following = self.order[self.at + 1 : self.at + 1 + SCANNED].tolist()
        return [n for n in dict.fromkeys(following) if n != number][: self.ahead]

    def _start(self, numbers: list[int]) -> None:
        fetching = self._fetching()
        with self._change:
            missing = [n for n in numbers if n not in fetching and not self.use(n)]
            fetching.update(missing)
        for number in missing:
            name, work = f"logitless prefetch {number}", (self.fetch, number, fetching)
            threading.Thread(target=_fetch, args=work, name=name, daemon=True).start()

    def _fetching(self) -> set[int]:
        """The shards that this process is fetching: none after a fork, which copies no threads."""
        if self._of_process[0] != os.getpid():
            self._change = threading.Lock()  # the parent may have held the lock during the fork
            self._of_process = (os.getpid(), set())
        return self._of_process[1]


def without_repetitions(numbers: Tensor) -> Tensor:
    """Removes each shard number that also occurs among the NEARBY numbers before it.

    Where the documents of a few shards are shuffled together, each of these shards stays once.
    """
    by_shard = torch.argsort(numbers, stable=True)
    repeated = torch.zeros(len(numbers), dtype=torch.bool)
    same = numbers[by_shard[1:]] == numbers[by_shard[:-1]]
    repeated[by_shard[1:]] = same & (by_shard.diff() <= NEARBY)
    return numbers[~repeated]


def _fetch(fetch: Callable[[int], None], number: int, fetching: set[int]) -> None:
    try:
        with contextlib.suppress(Exception):  # the reader fetches again, and raises the error
            fetch(number)
    finally:
        fetching.discard(number)
