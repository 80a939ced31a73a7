"""The cache: its limit, which files it deletes, and several processes that share it."""

import contextlib
import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from logitless.store import Store, cache
from logitless.store.cache import Cache, default_folder
from logitless.store.lock import Lock
from logitless.store.remote import Listed
from tests.support import forked, stores
from tests.support.patience import HANG
from tests.support.servers import served_store
from tests.support.stores import LENGTHS, documents


def file_of(text: bytes, size: int = 100) -> tuple[Listed, bytes]:
    data = text * size
    return Listed(text.decode(), len(data), hashlib.sha256(data).hexdigest()), data


FILES = dict(file_of(bytes([letter])) for letter in b"abcdef")
A, B, C, *_ = FILES


@pytest.fixture
def small(tmp_path):
    """A cache with room for three files, and the list of files that were fetched."""
    fetched = []

    def fetch(listed, into):
        fetched.append(listed.name)
        into.write(FILES[listed])

    found = Cache(tmp_path / "cache", 300)
    return found, fetch, fetched


def use(found: Cache, listed, fetch) -> None:
    with found.reading(listed, fetch) as path:
        assert path.read_bytes() == FILES[listed]


def read(small, listed) -> None:
    found, fetch, _ = small
    use(found, listed, fetch)


def held(found: Cache) -> set[str]:
    return {listed.name for listed in FILES if (found.folder / listed.sha256).exists()}


def size(found: Cache) -> int:
    return sum(p.stat().st_size for p in found.folder.iterdir() if p.suffix in ("", ".part"))


class TestRoom:
    def test_a_file_is_fetched_once(self, small):
        read(small, A)
        read(small, A)
        assert small[2] == ["a"]

    def test_the_least_recently_used_file_goes(self, small):
        a, b, c, d, e, _ = FILES
        for n, listed in enumerate((a, b, c)):
            read(small, listed)
            os.utime(small[0].folder / listed.sha256, (n, n))
        read(small, a)  # now the file that was used last
        read(small, d)
        assert held(small[0]) == {"a", "c", "d"}
        read(small, e)
        assert held(small[0]) == {"a", "d", "e"}
        assert size(small[0]) == 300

    def test_an_open_file_stays(self, small):
        found, fetch, _ = small
        a, b, c, d, e, f = FILES
        with found.reading(a, fetch) as path:
            for listed in (b, c, d, e, f):
                read(small, listed)
                assert size(found) <= 300
            assert path.read_bytes() == FILES[a]
        assert "a" in held(found)

    def test_no_room_until_a_reader_ends(self, small, monkeypatch):
        """A thread waits for room. It does not exceed the limit, and deletes no open file."""
        found, fetch, fetched = small
        a, b, c, d, *_ = FILES
        waited, ended = threading.Event(), threading.Event()
        monkeypatch.setattr(cache.time, "sleep", lambda _: (waited.set(), ended.wait(0.01)))
        with found.reading(a, fetch), found.reading(b, fetch):
            with found.reading(c, fetch):
                thread = threading.Thread(target=read, args=(small, d))
                thread.start()
                while thread.is_alive() and not waited.is_set():
                    waited.wait(0.01)
                assert waited.is_set()
                assert held(found) == {"a", "b", "c"}
                assert "d" not in fetched
            thread.join(HANG)
            assert held(found) == {"a", "b", "d"}

    def test_a_failed_fetch_leaves_nothing(self, small):
        found, _, _ = small

        def fail(listed, into):
            into.write(b"half")
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"), found.reading(A, fail):
            pass
        assert size(found) == 0
        read(small, A)

    def test_parts_of_killed_processes_are_deleted(self, small):
        found, _, _ = small
        (found.folder / f"{A.sha256}.part").write_bytes(bytes(250))
        read(small, B)
        assert size(found) == 100
        (found.folder / f"{C.sha256}.part").write_bytes(b"old")
        read(small, C)
        assert held(found) == {"b", "c"}

    def test_a_part_counts_with_its_full_size(self, small):
        found, _, _ = small

        def look(listed, into):
            assert size(found) == 100
            into.write(FILES[listed])

        use(found, A, look)

    def test_parts_of_ended_processes_are_deleted_at_the_next_start(self, small):
        """The part of a file that another process fetches now stays."""
        found, _, _ = small
        for listed in (A, B):
            (found.folder / f"{listed.sha256}.part").write_bytes(bytes(100))
        with Lock(found.folder / f"{B.sha256}.lock"):
            assert size(Cache(found.folder, 300)) == 100
        assert (found.folder / f"{B.sha256}.part").exists()

    def test_files_of_others(self, small):
        """The cache neither counts nor deletes files that the cache has not written."""
        found, _, _ = small
        (found.folder / "folder").mkdir()
        others = [found.folder / name for name in ("thesis.txt", "a" * 63, f"{'A' * 64}")]
        for path in others:
            path.write_bytes(bytes(500))
            os.utime(path, (0, 0))
        for listed in FILES:
            read(small, listed)
        assert all(path.exists() for path in others)
        assert len(held(found)) == 3

    def test_a_file_that_is_renamed_while_another_process_makes_room(self, small, monkeypatch):
        """The limit holds, although a fetch ends after its .part file was listed."""
        found, fetch, _ = small
        a, b, c, d, *_ = FILES
        for listed in (a, b):
            read(small, listed)
        listed_files, written = threading.Event(), threading.Event()

        def slow(listed, into):
            written.set()
            assert listed_files.wait(HANG)
            fetch(listed, into)

        thread = threading.Thread(target=use, args=(found, c, slow))
        real = found._files

        def files():
            paths = real()
            listed_files.set()
            thread.join(0.2)  # without the lock, the file is renamed here
            return sorted(paths, key=lambda path: path.suffix)

        thread.start()
        assert written.wait(HANG)
        os.utime(found.folder / f"{c.sha256}.part", (0, 0))  # the first file to be deleted
        monkeypatch.setattr(found, "_files", files)
        with found.reading(d, fetch):
            thread.join(HANG)
            assert size(found) <= 300

    def test_a_deleted_folder(self, small):
        read(small, A)
        shutil.rmtree(small[0].folder)
        read(small, A)
        assert small[2] == ["a", "a"]

    def test_a_file_instead_of_a_folder(self, tmp_path):
        (tmp_path / "file").write_text("a")
        for path in (tmp_path / "file", tmp_path / "file" / "cache"):
            with pytest.raises(NotADirectoryError, match=r"cache must be a folder, got '.*file"):
                Cache(path)

    def test_folders(self, monkeypatch, tmp_path):
        monkeypatch.setenv("LOGITLESS_CACHE", str(tmp_path / "chosen"))
        assert Cache().folder == tmp_path / "chosen"
        assert Cache().limit == 1 << 36
        monkeypatch.delenv("LOGITLESS_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert default_folder() == tmp_path / "logitless"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_folder() == tmp_path / ".cache/logitless"


class TestFailures:
    def test_a_process_that_waited_raises_the_error_of_the_fetch(self, small, monkeypatch):
        """So N processes do not wait for a server that stalls one after the other."""
        found, _, fetched = small
        tried, waiting = [], threading.Event()

        def fail(listed, into):
            tried.append(listed.name)
            waiting.wait(HANG)
            raise OSError("the server stalls")

        errors, lock = [], cache.Lock

        def seen(path, **how):
            if tried and path.name == f"{A.sha256}.lock":
                waiting.set()
            return lock(path, **how)

        monkeypatch.setattr(cache, "Lock", seen)

        def wait():
            with pytest.raises(OSError, match=r"^the server stalls$") as raised:
                use(found, A, fail)
            errors.append(raised)

        first, second = threading.Thread(target=wait), threading.Thread(target=wait)
        first.start()
        while not tried:
            first.join(0.001)
        second.start()
        first.join(HANG)
        second.join(HANG)
        assert len(errors) == 2
        assert tried == ["a"]
        read(small, A)  # a process that did not wait fetches the file itself
        assert fetched == ["a"]

    def test_a_prefetch_fails_alone(self, small):
        found, _, _ = small

        def fail(listed, into):
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            found.prefetched(A, fail)
        assert not [*found.folder.glob("*.failed")]
        locked = pytest.raises(ValueError, match="one writer at a time")
        with Lock(found.folder / f"{A.sha256}.lock"), locked:  # another process fetches the file
            found.prefetched(A, fail)


class TestLock:
    def test_shared(self, tmp_path):
        path = tmp_path / "a.lock"
        refused = pytest.raises(ValueError, match="must have one writer at a time")
        with Lock(path, shared=True), Lock(path, shared=True), refused:
            Lock(path)
        with Lock(path), pytest.raises(ValueError, match="must have one writer at a time"):
            Lock(path, shared=True)
        Lock(path).release()


def _size(folder: str) -> int:
    """The size of all files. The other process can delete files between listing and reading."""
    total = 0
    for path in Path(folder).iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.suffix in ("", ".part") else 0
    return total


def _epoch(rank: int, url: str, folder: str, limit: int) -> list[float]:
    """Reads all documents several times, each process in another order."""
    store = Store(url, cache=folder, cache_bytes=limit)
    sums = torch.zeros(len(store), dtype=torch.float64)
    for turn in range(6):
        order = range(len(store)) if (rank + turn) % 2 else range(len(store) - 1, -1, -1)
        for i in order:
            _, targets = store[i]
            sums[i] = targets.logprobs.double().sum() + targets.ids.double().sum()
            with Lock(Cache(folder).folder / "cache.lock", wait=True):
                assert _size(folder) <= limit
    return sums.tolist()


class TestProcesses:
    def test_two_processes_share_a_cache(self, tmp_path):
        """With room for all shards, each shard is fetched once by one of the two processes."""
        local = stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)
        want = _sums(local)
        with served_store(local) as server:
            folder = str(tmp_path / "cache")
            assert forked.together(2, _epoch, server.url, folder, 10**6) == [want, want]
            shards = [n for name, n in server.requests.items() if name.endswith(".safetensors")]
            assert shards == [1] * len(local.shards)

    def test_a_cache_with_room_for_one_or_two_shards(self, tmp_path):
        """Files are deleted all the time, and all rows are right."""
        local = stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)
        want, limit = _sums(local), max(shard.bytes for shard in local.shards) + 1500
        with served_store(local) as server:
            folder = str(tmp_path / "cache")
            assert forked.together(2, _epoch, server.url, folder, limit) == [want, want]
            assert sum(server.requests.values()) > 2 + len(local.shards)


def _sums(store) -> list[float]:
    rows = (store[i][1] for i in range(len(store)))
    return [float(t.logprobs.double().sum() + t.ids.double().sum()) for t in rows]
