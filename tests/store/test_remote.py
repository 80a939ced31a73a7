"""A store at an address: the same targets through a bounded cache, and clear errors."""

import errno
import os
import pickle
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import fsspec
import pytest
import torch

from logitless.store import Store, merge, recover, remote
from logitless.store.remote import Cache, Prefetch, is_address
from logitless.store.shard import Listed
from tests.support import stores
from tests.support.forked import FORKED
from tests.support.patience import HANG
from tests.support.servers import FAULTS, PROTOCOLS, options_of, served_store
from tests.support.stores import abandon, assert_same_store, documents, open_writer

LENGTHS = (9, 4, 30, 1, 7, 22, 3, 15, 8, 11, 2)
PASSING = [fault for fault in FAULTS if fault != "refuse"]
SHARD = "0-000001.shard"


@pytest.fixture
def local(tmp_path):
    store = stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=500)
    assert len(store.shards) > 4
    return store


@pytest.fixture
def server(local):
    with served_store(local) as server:
        yield server


@pytest.fixture(params=PROTOCOLS)
def opened(request, server, tmp_path):
    """Opens the served store, with a new cache."""
    options = options_of(request.param)

    def opens(name="cache", **how):
        how = {"cache": tmp_path / name, "storage_options": options} | how
        return Store(server.address(request.param), **how)

    return opens


def until(right):
    """Whether this becomes true, as background threads go on."""
    deadline = time.monotonic() + HANG
    while not (found := right()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def shards(server):
    return {name: n for name, n in server.requests.items() if name.endswith(".shard")}


class TestSame:
    def test_all_that_is_read(self, opened, local, server, tmp_path):
        store = opened()
        assert_same_store(store, local)
        assert store.digest == local.digest
        assert store.verify()
        assert merge(tmp_path / "merged", [store]) == len(local)
        assert set(shards(server).values()) == {1}  # the cache has them
        assert_same_store(opened(), local)
        assert set(shards(server).values()) == {1}

    def test_opening_and_one_document(self, opened, server, local):
        seen = []
        store = opened(progress=seen.append)
        assert server.requests == {"store.json": 1, "store.index": 1}
        stores.assert_equal(store[5], local[5])
        number = next(i for i, first in enumerate(local.firsts) if first > 5) - 1
        assert shards(server)[f"0-{number:06}.shard"] == 1
        assert sum(seen) >= local.shards[number].size

    def test_pickled(self, opened, local):
        store = opened()
        assert_same_store(pickle.loads(pickle.dumps(store)), local)
        data = pickle.dumps(store)
        with open_writer(local.path) as writer:
            writer.add(*stores.document(6, 77))
        with pytest.raises(ValueError, match="must have the shards of the pickled Store"):
            pickle.loads(data)

    def test_file_systems_of_fsspec(self, local, tmp_path):
        for url in (f"file://{local.path}", f"simplecache::file://{local.path}"):
            assert_same_store(Store(url, cache=tmp_path / "c"), local)
        memory = fsspec.filesystem("memory")
        memory.put(os.fspath(local.path), "/bucket/targets", recursive=True)
        assert_same_store(Store("memory://bucket/targets/", cache=tmp_path / "d"), local)
        memory.rm("/bucket", recursive=True)

    def test_an_empty_store(self, tmp_path):
        with served_store(stores.write(tmp_path / "s", [])) as server:
            store = Store(server.url, cache=tmp_path / "c")
            assert (len(store), store.tokens) == (0, 0)
            assert store.verify()


class TestFaults:
    @pytest.mark.parametrize("fault", PASSING)
    @pytest.mark.parametrize("name", ["store.index", SHARD, "lookup"])
    def test_a_fault_that_passes(self, fault, name, server, opened, local):
        if name == "lookup":
            name = local.listing.runs[-1].name
        server.faults[name] = [fault]
        assert_same_store(opened(), local)

    @pytest.mark.parametrize("fault", ["wrong", "longer", "shorten"])
    def test_a_damaged_index(self, fault, server, opened):
        server.always["store.index"] = fault
        with pytest.raises(
            OSError, match=r"store/store\.index must be read in 5 attempts, got Val"
        ):
            opened()

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault_that_stays(self, fault, server, opened, local):
        server.always[SHARD] = fault
        store = opened(attempts=2)
        error = PermissionError if fault == "refuse" else (OSError, ValueError)
        with pytest.raises(error) as raised:
            store[local.firsts[1]]
        if fault != "refuse":
            assert SHARD in str(raised.value)
        stores.assert_equal(store[0], local[0])
        del server.always[SHARD]
        stores.assert_equal(store[local.firsts[1]], local[local.firsts[1]])

    def test_words(self, server, local, tmp_path):
        store = Store(server.url, cache=tmp_path / "c", attempts=3)
        server.always[SHARD] = "busy"
        message = rf"{SHARD} must be read in 3 attempts, got OSError: HTTP status 503"
        with pytest.raises(OSError, match=message):
            store[local.firsts[1]]
        server.always[SHARD] = "wrong"
        with pytest.raises(ValueError, match=rf"{SHARD} must (have the bytes it was|begin)"):
            store[local.firsts[1]]
        (local.path / SHARD).unlink()
        del server.always[SHARD]
        message = "must exist, got no file. store.index listed this file when the store was opened"
        with pytest.raises(FileNotFoundError, match=message):
            store[local.firsts[1]]
        (local.path / "store.index").unlink()
        with pytest.raises(FileNotFoundError, match=r"must be the folder of a store, got no store"):
            Store(server.url, cache=tmp_path / "c")

    def test_a_file_that_was_changed_in_the_cache(self, server, local, tmp_path):
        store = Store(server.url, cache=tmp_path / "c")
        store[local.firsts[1]]
        (path,) = (tmp_path / "c").glob(f"*{SHARD}*[0-9a-f]")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert_same_store(store, local)
        assert shards(server)[SHARD] == 2

    def test_waits_grow(self, server, monkeypatch, tmp_path):
        waits = []
        monkeypatch.setattr(remote, "FIRST_WAIT", 0.5)
        monkeypatch.setattr(time, "sleep", waits.append)
        server.always["store.json"] = "busy"
        with pytest.raises(OSError, match="in 9 attempts"):
            Store(server.url, cache=tmp_path / "c", attempts=9)
        assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]

    def test_a_full_disk_is_not_tried_again(self, server, local, tmp_path, monkeypatch):
        store = Store(server.url, cache=tmp_path / "c")

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("tests.support.servers.Loopback.get_file", full)
        with pytest.raises(OSError, match="No space left"):
            store[0]
        assert until(
            lambda: not [*(tmp_path / "c").glob("*.room"), *(tmp_path / "c").glob("*.part")]
        )


class TestArguments:
    def test_what_is_refused(self, server, local, tmp_path, monkeypatch):
        how = {"cache": tmp_path / "c"}
        for more, kind, message in (
            ({"attempts": 0}, ValueError, r"attempts must lie in \[1, "),
            ({"storage_options": 3}, TypeError, "storage_options must map names to values, got 3"),
            ({"cache_bytes": 10}, ValueError, r"cache_bytes must be at least \d+, the size of the"),
            (
                {"cache": local.path / "store.json"},
                NotADirectoryError,
                "cache must be a folder, got",
            ),
        ):
            with pytest.raises(kind, match=message):
                Store(server.url, **(how | more))
        for name in ("cache", "cache_bytes", "attempts", "storage_options"):
            with pytest.raises(
                ValueError, match=f"{name} must be left out for a store in a local folder, got"
            ):
                Store(local.path, **{name: 1})
        with pytest.raises(
            ValueError, match="path must be an address of a protocol of fsspec, got"
        ):
            Store("nonsense://x/y", **how)
        with pytest.raises(ValueError, match="upload must be an address such as s3://"):
            open_writer(tmp_path / "w", upload="folder")
        monkeypatch.setitem(sys.modules, "aiohttp", None)
        message = "must be read with fsspec and its package for this protocol, got an import error"
        with pytest.raises(ModuleNotFoundError, match=message):
            Store("http://127.0.0.1:1/store", **how)

    def test_addresses(self):
        for path in ("s3://b/t", "https://h/t", "simplecache::s3://b/t", "gs://b"):
            assert is_address(path)
        for path in ("targets", "/a/b", "C:\\a", "a:b", 3, None):
            assert not is_address(path)


class Files:
    """A cache of 100 bytes, and files of 40 bytes that count how often they are fetched."""

    def __init__(self, folder, limit=100):
        self.cache, self.fetched = Cache(folder, limit), []

    def file(self, name, size=40):
        def fetch(into):
            self.fetched.append(name)
            into.write_bytes(bytes(size))

        return self.cache.file(f"{name:0>16}-0.shard-00000000", size, fetch)


class TestCache:
    def test_the_least_recently_used_file_goes(self, tmp_path):
        files = Files(tmp_path)
        for n, name in enumerate("abab"):
            os.utime(files.file(name).path, ns=(n, n))
        (tmp_path / "notes.txt").write_bytes(bytes(1000))  # files of others stay
        a, b = files.file("a"), files.file("b")
        os.utime(a.path, ns=(9, 9))
        os.utime(b.path, ns=(8, 8))
        c = files.file("c")
        assert [file.path.exists() for file in (a, b, c)] == [True, False, True]
        assert b.read(0, 40) == bytes(40)  # another process may have read it
        assert files.fetched == ["a", "b", "c"]
        assert (tmp_path / "notes.txt").exists()

    def test_a_failed_or_killed_fetch_leaves_nothing(self, tmp_path):
        files = Files(tmp_path)

        def fails(into):
            into.write_bytes(bytes(10))
            raise OSError("broken")

        with pytest.raises(OSError, match="broken"):
            files.cache.file(f"{'e':0>16}-0.shard-00000000", 40, fails)
        assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
        name = f"{'d':0>16}-0.shard-00000000"
        for suffix in ("part", "room"):
            (tmp_path / f"{name}.{suffix}").write_bytes(bytes(90))
        assert files.file("a").path.exists()  # what a killed process reserved is free
        assert files.file("d").path.exists()

    def test_a_file_that_is_fetched_keeps_its_room(self, tmp_path):
        files, begun, end = Files(tmp_path), threading.Event(), threading.Event()

        def slow(into):
            begun.set()
            assert end.wait(HANG)
            into.write_bytes(bytes(80))

        name = f"{'f':0>16}-0.shard-00000000"
        first = threading.Thread(target=files.cache.file, args=(name, 80, slow))
        second = threading.Thread(target=files.file, args=("a",))
        first.start()
        assert begun.wait(HANG)
        second.start()
        time.sleep(0.1)
        assert files.fetched == []
        end.set()
        first.join(HANG)
        second.join(HANG)
        assert files.fetched == ["a"]
        assert not (tmp_path / name).exists()

    def test_processes_share_it(self, server, local, tmp_path):
        """With room for one or two shards, and with room for all."""
        largest = max(shard.size for shard in local.shards)
        for limit in (largest, 2 * largest, 1 << 30):
            folder = tmp_path / str(limit)
            with FORKED.Pool(2) as pool:
                how = [(server.url, folder, limit)] * 2
                found = pool.starmap_async(read_all, how).get(HANG)
            want = [int(tokens.sum()) for tokens, _ in local[list(range(len(local)))]]
            assert found == [want, want]
            size = sum(p.stat().st_size for p in folder.iterdir() if p.suffix != ".lock")
            assert size <= limit

    def test_folders(self, monkeypatch):
        for name in ("LOGITLESS_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/h")
        assert str(remote.default_folder()) == "/h/.cache/logitless"
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert str(remote.default_folder()) == "/x/logitless"
        monkeypatch.setenv("LOGITLESS_CACHE", "/c")
        assert str(remote.default_folder()) == "/c"


def read_all(url, folder, limit):
    """In a process: the sum of the tokens of each document."""
    store = Store(url, cache=folder, cache_bytes=limit)
    return [int(store[i][0].sum()) for i in range(len(store))]


class TestPrefetch:
    def followed(self, reads, room=8, **how):
        """The shards that are fetched before each read, of 6."""
        fetched: list[int] = []
        folder = SimpleNamespace(cache=SimpleNamespace(limit=room))
        prefetch = Prefetch(folder, [Listed("0-000000", 1, 1, 1, 0)] * 6)
        prefetch._start = (
            lambda place: fetched.extend(  # without threads
                prefetch.order[place : place + prefetch.ahead]
            )
        )
        if how:
            prefetch.follow(**how)
        found = [fetched[:]]
        for shard in reads:
            before = len(fetched)
            prefetch.reading(shard)
            found.append(fetched[before:])
        return found

    def test_in_order(self):
        want = [[], [1, 2], [2, 3], [], [3, 4], [4, 5], [5], []]
        assert self.followed([0, 1, 1, 2, 3, 4, 5]) == want
        assert self.followed([3, 1, 5]) == [[], [], [], []]

    def test_a_known_order(self):
        want = [[4, 0], [0, 2], [2], []]
        assert self.followed([4, 0, 2], order=[4, 0, 2], ahead=2) == want

    def test_only_shards_that_fit(self):
        assert self.followed([0], room=2) == [[], [1]]
        assert self.followed([0], room=1) == [[], []]
        assert self.followed([], room=4, order=[5, 1, 2], ahead=4, mixed=3) == [[5]]

    def test_of_a_store(self, server, local, tmp_path):
        store = Store(server.url, cache=tmp_path / "c")
        store.prefetch([10, 0], ahead=1)
        assert until(lambda: shards(server) == {local.shards[-1].listed.name: 1})
        local.prefetch([3, 1])  # a local store checks the arguments alone
        for order, kind, message in (
            ([11], ValueError, r"order must list numbers of documents in \[0, 11\), got 11"),
            ([[1]], ValueError, r"order must have the shape \(n,\)"),
            ([1.5], TypeError, "order must"),
        ):
            with pytest.raises(kind, match=message):
                local.prefetch(order)
        with pytest.raises(ValueError, match="ahead must lie in"):
            local.prefetch(ahead=0)


class TestUpload:
    @pytest.fixture
    def address(self, tmp_path):
        return f"file://{tmp_path}/bucket"

    def writer(self, tmp_path, address, **how):
        return open_writer(tmp_path / "mine", shard_bytes=500, upload=address, **how)

    def assert_uploaded(self, tmp_path, address):
        store = Store(tmp_path / "mine")
        assert_same_store(Store(address, cache=tmp_path / "c"), store)
        return len(store)

    def test_in_the_background(self, tmp_path, address):
        found = documents(*LENGTHS)
        with self.writer(tmp_path, address) as writer:
            for one in found:
                writer.add(*one)
            assert until(lambda: list((tmp_path / "bucket").glob("*.shard")))
            assert not (tmp_path / "bucket/store.index").exists()
        assert self.assert_uploaded(tmp_path, address) == len(found)
        with self.writer(tmp_path, address) as writer:
            writer.add(*stores.document(6, 77))
        assert self.assert_uploaded(tmp_path, address) == len(found) + 1

    def test_a_killed_writer_and_two_ranks(self, tmp_path, address):
        found = documents(*LENGTHS)
        writer = self.writer(tmp_path, address)
        other = self.writer(tmp_path, address, part=1)
        for i, one in enumerate(found):
            (writer, other)[i % 2].add(*one)
        abandon(writer)
        writer.uploads.stop()
        other.close()
        shutil.rmtree(tmp_path / "bucket")  # and an address that was emptied
        self.writer(tmp_path, address).close()
        assert self.assert_uploaded(tmp_path, address) == len(found)

    def test_a_fault_that_stays(self, tmp_path, address, monkeypatch):
        monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
        real = remote.Remote.write

        def fails(self, path, name):
            if name.endswith("1.shard"):
                raise OSError("no connection")
            real(self, path, name)

        with monkeypatch.context() as patch:
            patch.setattr(remote.Remote, "write", fails)
            writer = self.writer(tmp_path, address)
            for one in documents(*LENGTHS):
                writer.add(*one)
            message = r"must have all shards of the store, got an upload without 0-000001\.shard"
            with pytest.raises(OSError, match=message):
                writer.close()
        assert Store(tmp_path / "mine").verify()
        self.writer(tmp_path, address).close()
        self.assert_uploaded(tmp_path, address)

    def test_an_error_inside_the_block(self, tmp_path, address):
        def fails():
            with self.writer(tmp_path, address) as writer:
                writer.add(*stores.document(9))
                raise RuntimeError("of mine")

        with pytest.raises(RuntimeError, match="of mine"):
            fails()
        assert not (tmp_path / "bucket/store.index").exists()

    def test_another_store_at_the_address(self, tmp_path, address):
        self.writer(tmp_path, address).close()
        with pytest.raises(
            ValueError, match="upload must be an address without another store, got"
        ):
            open_writer(tmp_path / "other", upload=address)
        published = tmp_path / "bucket/store.json"
        published.write_bytes(published.read_bytes()[:9])  # as a killed upload can leave it
        self.writer(tmp_path, address).close()
        assert len(Store(address, cache=tmp_path / "c")) == 0
        shutil.copytree(tmp_path / "mine", tmp_path / "copy")  # a copy is the same store
        assert recover(tmp_path / "copy") == 0
        open_writer(tmp_path / "copy", upload=address).close()


def test_tokens_are_compared_after_a_download(server, local, tmp_path):
    store = Store(server.url, cache=tmp_path / "c")
    tokens, targets = local[2]
    got = store.targets_for(tokens[None], documents=[2])
    assert torch.equal(got.reshape(-1).logprobs, targets.logprobs)
