"""Shards are fetched before they are read."""

import threading

import pytest
import torch

from logitless.store import Store
from logitless.store.prefetch import Prefetch
from tests.support import stores
from tests.support.patience import HANG
from tests.support.servers import served_store
from tests.support.stores import LENGTHS, documents


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("logitless prefetch"):
            thread.join(HANG)


class Shards:
    """Shards of which tests can see which threads have begun to fetch them."""

    def __init__(self, n: int, room: int = 100):
        self.begun: list[int] = []
        self.done: set[int] = set()
        self.prefetch = Prefetch(n, self.done.__contains__, self.fetch, room)

    def fetch(self, number: int) -> None:
        self.begun.append(number)
        self.done.add(number)

    def only(self, *numbers: int) -> bool:
        """Whether exactly these shards were fetched, once all threads have ended."""
        wait_for_threads()
        return sorted(self.begun) == sorted(numbers)


class TestOrder:
    def test_in_order(self):
        shards = Shards(6)
        shards.prefetch.reading(0)
        assert shards.only(1, 2)
        shards.prefetch.reading(0)
        assert shards.only(1, 2)
        shards.prefetch.reading(1)
        assert shards.only(1, 2, 3)
        for number in (2, 3, 4, 5):
            shards.prefetch.reading(number)
        assert shards.only(1, 2, 3, 4, 5)

    def test_reading_here_and_there_fetches_nothing(self):
        shards = Shards(9)
        for number in (4, 2, 7, 3):
            shards.prefetch.reading(number)
        assert shards.only()
        shards.prefetch.reading(4)  # the shard after 3
        assert shards.only(5, 6)

    def test_a_known_order(self):
        shards = Shards(6)
        shards.prefetch.follow(torch.tensor([5, 0, 3, 0, 1]), 2)
        assert shards.only(5, 0)
        shards.prefetch.reading(5)
        assert shards.only(5, 0, 3)
        shards.prefetch.reading(0)
        assert shards.only(5, 0, 3, 1)  # the next two shards, except 0, which is being read
        shards.prefetch.reading(3)
        assert shards.only(5, 0, 3, 1)

    def test_only_shards_that_fit(self):
        """Shards that are being read stay in the cache."""
        for room, fetched in ((1, ()), (2, (1,)), (3, (1, 2)), (4, (1, 2))):
            shards = Shards(6, room)
            shards.prefetch.reading(0)
            assert shards.only(*fetched)
        for room, fetched in ((1, ()), (4, ()), (6, (0, 1)), (8, (0, 1, 2, 3)), (99, (0, 1, 2, 3))):
            shards = Shards(9, room)
            shards.prefetch.follow(torch.arange(9), ahead=4, mixed=4)
            assert shards.only(*fetched)

    def test_the_next_shards_are_marked_before_room_is_made(self):
        """Otherwise the cache deletes a shard that was fetched and not yet read."""
        calls, done = [], {0, 1, 2}

        def use(number):
            calls.append(("use", number))
            return number in done

        prefetch = Prefetch(9, use, lambda number: calls.append(("fetch", number)), 4)
        prefetch.follow(torch.arange(1, 9), 3)
        wait_for_threads()
        calls.clear()
        prefetch.reading(1)
        wait_for_threads()
        assert calls[:4] == [("use", n) for n in (1, 2, 3, 4)]
        assert {*calls[4:]} == {("fetch", 3), ("fetch", 4)}

    def test_all_shards(self):
        shards = Shards(3)
        shards.prefetch.follow(None, 2)
        assert shards.only(0, 1)

    def test_a_failure_is_left_to_the_reader(self):
        def fail(number):
            raise OSError("broken")

        prefetch = Prefetch(3, lambda number: False, fail, 100)
        prefetch.reading(0)
        wait_for_threads()
        assert prefetch._fetching() == set()


class TestStore:
    @pytest.fixture
    def local(self, tmp_path):
        return stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)

    def test_a_known_order(self, local, tmp_path):
        with served_store(local) as server:
            remote = Store(server.url, cache=tmp_path / "cache")
            remote.prefetch([4, 0, 4, 4], ahead=1)
            wait_for_threads()
            name = local.shards[-1].path.name
            assert server.requests == {"store.index": 1, name: 1}
            remote[4]
            wait_for_threads()
            assert server.requests["0-000000.safetensors"] == 1

    def test_arguments(self, local):
        for order, ahead, words in (
            ([0, 5], 2, r"order must list numbers of documents in \[0, 5\), got 5"),
            ([-1], 2, r"order must list numbers of documents in \[0, 5\), got -1"),
            ([0.5], 2, "order must"),
            (torch.zeros(2, 2).long(), 2, r"order must have the shape \(n,\), got \(2, 2\)"),
            (None, 0, r"ahead must lie in \[1, 1000\], got 0"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                local.prefetch(order, ahead=ahead)

    def test_a_local_store(self, local):
        local.prefetch()
        local.prefetch(range(5))
        local.prefetch([])
