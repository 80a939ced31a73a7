"""A remote store has the targets of the local store, whatever its server does."""

import builtins
import errno
import pickle
import re
import sys
import threading

import fsspec.registry  # noqa: F401
import pytest

from logitless.store import Store, merge, recover
from logitless.store.cache import Cache
from logitless.store.remote import Listed, Remote, is_address
from tests.support import stores
from tests.support.patience import HANG
from tests.support.servers import FAULTS, TIMEOUT, served, served_store
from tests.support.stores import LENGTHS, assert_equal, assert_same_store, documents

SHARD = "0-000001.safetensors"


@pytest.fixture
def local(tmp_path):
    """A store of several shards."""
    store = stores.write(tmp_path / "store", documents(*LENGTHS), shard_bytes=2000)
    assert len(store.shards) == 4
    return store


@pytest.fixture
def server(local):
    with served_store(local) as server:
        yield server


@pytest.fixture
def opened(server, tmp_path):
    def open_(**how):
        return Store(server.url, **{"cache": tmp_path / "cache", "timeout": TIMEOUT} | how)

    return open_


class TestSame:
    def test_over_http(self, opened, local, server):
        remote = opened()
        assert_same_store(remote, local)
        assert remote.verify()
        assert set(server.requests.values()) == {1}  # each file once; store.json never
        assert "store.json" not in server.requests

    def test_opening_reads_one_file(self, opened, server, local):
        assert repr(opened()) == repr(local).replace(repr(str(local.path)), repr(server.url))
        assert server.requests == {"store.index": 1}

    def test_one_document_fetches_one_shard(self, opened, server, local):
        """The lookup file is fetched at the first lookup, and holds no rows."""
        remote = opened()
        remote.find(local[3][0])
        fetched = {name for name in server.requests if name.endswith(".safetensors")}
        assert fetched == {local.shards[2].path.name}

    def test_through_fsspec(self, local, tmp_path):
        fsspec = pytest.importorskip("fsspec")
        system = fsspec.filesystem("memory")
        system.put(str(local.path), "/same", recursive=True)
        try:
            assert_same_store(Store("memory://same", cache=tmp_path / "cache"), local)
        finally:
            system.rm("/same", recursive=True)
        assert_same_store(Store(local.path.as_uri(), cache=tmp_path / "other"), local)

    def test_an_empty_store(self, tmp_path):
        local = stores.write(tmp_path / "store", [])
        with served_store(local) as server:
            remote = Store(server.url, cache=tmp_path / "cache")
            assert len(remote) == 0
            with pytest.raises(KeyError, match="must be a document of the store"):
                remote.find([1])

    def test_pickled(self, opened, local):
        again = pickle.loads(pickle.dumps(opened(cache_bytes=30_000, attempts=3)))
        assert again._files.cache.limit == 30_000
        assert again._files.remote.attempts == 3
        assert_same_store(again, local)

    def test_merged(self, opened, local, tmp_path):
        assert merge(tmp_path / "merged", [opened()]) == len(local)
        merged = Store(tmp_path / "merged")
        for tokens, targets in (local[i] for i in range(len(local))):
            assert_equal(merged[merged.find(tokens)], (tokens, targets))

    def test_headers_and_a_query(self, server, local, tmp_path):
        headers = {"Authorization": "Bearer abc"}
        remote = Store(
            f"{server.url}/?token=1", cache=tmp_path / "c", storage_options={"headers": headers}
        )
        assert_same_store(remote, local)
        assert {*server.headers} == {"Bearer abc"}

    def test_a_query_that_ends_with_a_slash(self):
        remote = Remote("https://a/b/?key=c/d/")
        assert remote.address("f") == "https://a/b/f?key=c/d/"
        assert Remote("https://a/b/").address("f") == "https://a/b/f"

    def test_headers_after_a_redirection(self, server, local, tmp_path):
        """Another host does not receive the headers, which can contain a secret."""
        how = {"storage_options": {"headers": {"Authorization": "Bearer abc"}}}
        with served(local.path) as other:
            server.redirect = other.url
            assert_same_store(Store(server.url, cache=tmp_path / "a", **how), local)
            assert {*server.headers} == {"Bearer abc"}
            assert {*other.headers} == {None}
        server.redirect = server.url.replace("/store", "/moved/store")
        server.headers.clear()
        assert_same_store(Store(server.url, cache=tmp_path / "b", **how), local)
        assert {*server.headers} == {"Bearer abc"}

    def test_pickled_before_the_store_changed(self, opened, local):
        """Documents of the changed store have other numbers."""
        before = pickle.dumps(opened()), pickle.dumps(local)
        stores.write(local.path, documents(*LENGTHS, 7))
        for data in before:
            with pytest.raises(ValueError, match=r"must have the shards of the pickled Store, got"):
                pickle.loads(data)
        assert opened().digest == Store(local.path).digest != local.digest


class TestFaults:
    @pytest.mark.parametrize("fault", [f for f in FAULTS if f != "refuse"])
    @pytest.mark.parametrize("name", ["store.index", SHARD])
    def test_a_fault_that_passes(self, fault, name, server, opened, local):
        """The request is repeated, and the targets are right."""
        server.faults[name] = [fault, fault]
        assert_same_store(opened(), local)
        assert server.requests[name] == 3

    def test_an_index_that_stays_damaged(self, server, opened):
        server.always["store.index"] = "wrong"
        match = rf"{server.url}/store\.index must be read in 2 attempts, got"
        with pytest.raises(OSError, match=match):
            opened(attempts=2)
        assert server.requests == {"store.index": 2}

    @pytest.mark.parametrize("fault", [f for f in FAULTS if f != "refuse"])
    def test_a_fault_that_stays(self, fault, server, opened, local, tmp_path):
        """The error names the address, and the other shards can still be read."""
        server.always[SHARD] = fault
        remote = opened(attempts=3)
        with pytest.raises(OSError, match=f"{server.url}/{SHARD} must be read in 3 attempts, got"):
            remote[1]
        assert_equal(remote[0], local[0])
        assert not list((tmp_path / "cache").glob("*.part"))
        assert not (tmp_path / "cache" / remote.shards[1].listed.sha256).exists()
        server.always.clear()
        assert_same_store(remote, local)

    def test_words_of_a_wrong_file(self, server, opened):
        server.always[SHARD] = "wrong"
        with pytest.raises(OSError, match=r"must have the SHA-256 \w{64} that store.index lists"):
            opened(attempts=1)[1]
        server.always[SHARD] = "shorten"
        with pytest.raises(OSError, match=r"must have the \d+ bytes that store.index lists, got"):
            opened(attempts=1)[1]

    def test_refused_at_once(self, server, opened):
        server.always[SHARD] = "refuse"
        with pytest.raises(PermissionError, match=f"{SHARD} must be readable, got HTTP status 403"):
            opened()[1]

    def test_a_missing_file(self, server, opened, local):
        (local.path / SHARD).unlink()
        with pytest.raises(FileNotFoundError, match=f"{SHARD} must exist, got HTTP status 404"):
            opened()[1]

    def test_a_lookup_file_that_was_removed(self, server, opened, local):
        remote = opened()
        next(local.path.glob("*.lookup")).unlink()
        words = r"\.lookup must exist, got HTTP status 404\. store\.index listed this file when"
        with pytest.raises(FileNotFoundError, match=rf"{words}.* open it again\.$"):
            remote.find(local[0][0])

    def test_a_missing_file_of_a_file_system(self, local, tmp_path):
        pytest.importorskip("fsspec")
        remote = Store(local.path.as_uri(), cache=tmp_path / "cache")
        (local.path / SHARD).unlink()
        with pytest.raises(FileNotFoundError, match=rf"file://.*{SHARD} must exist, got no file"):
            remote[1]

    def test_a_lookup_file_that_was_changed_in_the_cache(self, opened, local, tmp_path, server):
        """Any changed byte is found, and the file is fetched again."""
        remote = opened()
        remote.find(local[0][0])
        listed = remote._files.listing.lookup
        path = tmp_path / "cache" / listed.sha256
        data, count = path.read_bytes(), 1
        for place in (0, 10, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert_same_store(opened(), local)
            count += 1
            assert server.requests[listed.name] == count
        path.write_bytes(b"")
        assert_same_store(opened(), local)

    def test_a_prefetch_makes_one_attempt(self, opened, server):
        server.always[SHARD] = "busy"
        opened(attempts=3)[0]
        for thread in threading.enumerate():
            if thread.name.startswith("logitless prefetch"):
                thread.join(HANG)
        assert server.requests[SHARD] == 1

    def test_a_store_without_an_index(self, tmp_path):
        """The error says what to do: close the writer, or recover the store."""
        writer, path = stores.open_writer(tmp_path / "store"), tmp_path / "store"
        with served(path) as server:
            match = f"{server.url} must have a store.index, got none. .*ll.store.recover"
            with pytest.raises(FileNotFoundError, match=match):
                Store(server.url, cache=tmp_path / "cache")
            assert server.requests == {"store.index": 1}
            stores.abandon(writer)
            (path / "0.journal").unlink()  # a folder that was copied without its journals
            assert recover(path) == 0
            assert len(Store(server.url, cache=tmp_path / "cache")) == 0

    def test_a_file_that_was_changed_in_the_cache(self, opened, local, tmp_path, server):
        """The file is fetched again. No changed byte is read."""
        remote = opened()
        remote[1]
        path = tmp_path / "cache" / remote.shards[1].listed.sha256
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        assert_same_store(remote, local)
        assert server.requests[SHARD] == 2

    def test_another_store_at_the_address(self, opened, local, server):
        """An open store never reads the shard of another store."""
        remote = opened(attempts=2)
        stores.write(server.folder.parent / "other", documents(*LENGTHS[::-1]), shard_bytes=2000)
        server.folder = server.folder.parent / "other"
        with pytest.raises(OSError, match=r"that store\.index lists"):
            remote[1]

    def test_waits_grow(self, server, monkeypatch, tmp_path):
        monkeypatch.setattr("logitless.store.remote.FIRST_WAIT", 1.0)
        monkeypatch.setattr("logitless.store.remote.LONGEST_WAIT", 5.0)
        waits, remote = [], Remote(server.url, attempts=6)
        remote.pause = waits.append
        server.always["store.index"] = "busy"
        with pytest.raises(OSError, match="must be read in 6 attempts, got HTTPError: HTTP Error"):
            remote.read("store.index", lambda _, data: data)
        assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]

    def test_a_full_disk_is_not_tried_again(self, server, opened, local):
        class Full:
            def seek(self, place):
                pass

            def write(self, data):
                raise OSError(errno.ENOSPC, "no space left")

        listed = opened().shards[0].listed
        with pytest.raises(OSError, match="no space left"):
            Remote(server.url).fetch(listed, Full())
        assert server.requests[listed.name] == 1

    def test_an_error_of_a_file_system(self, local, tmp_path, monkeypatch):
        """fsspec's file systems raise errors of many packages."""
        pytest.importorskip("fsspec")
        monkeypatch.setattr("logitless.store.remote.FIRST_WAIT", 0.0)
        remote, errors = Remote(local.path.as_uri(), attempts=3), [KeyError("a"), EOFError("b")]
        system, _ = remote._system
        real = system.open

        def fail(*args, **kwargs):
            if errors:
                raise errors.pop()
            return real(*args, **kwargs)

        monkeypatch.setattr(system, "open", fail)
        read = remote.read("store.index", lambda _, data: data)
        assert read == (local.path / "store.index").read_bytes()
        assert not errors


class TestArguments:
    def test_of_a_remote_store(self, opened):
        for how, words in (
            ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
            ({"timeout": "1"}, "timeout must be a positive number of seconds, got '1'"),
            ({"attempts": 0}, r"attempts must lie in \[1, 1000\], got 0"),
            ({"cache_bytes": 0}, r"cache_bytes must lie in \[1, 1152921504606846976\], got 0"),
            ({"cache_bytes": 10}, r"cache_bytes must be at least \d{4}, the size of the store's"),
            ({"storage_options": ["a"]}, r"storage_options must map names to values, got \['a'\]"),
            ({"storage_options": {"key": 1}}, "must have only the key 'headers' .* got 'key'"),
            ({"storage_options": {"headers": {"a": 1}}}, r"\['headers'\] must be a dict of"),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                opened(**how)

    def test_of_a_local_store(self, local):
        for name in ("cache", "cache_bytes", "timeout", "attempts"):
            with pytest.raises(ValueError, match=f"{name} must be left out for a store in a local"):
                Store(local.path, **{name: 1})

    def test_an_unknown_protocol(self):
        with pytest.raises(
            ValueError, match="path must be an address of a protocol of fsspec, got"
        ):
            Store("nowhere://bucket/targets")

    def test_a_missing_package(self, monkeypatch):
        for name in ("fsspec", "s3fs"):
            with monkeypatch.context() as patch:
                # fsspec remembers the classes of protocols that another test has used.
                patch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
                patch.setitem(sys.modules, name, None)
                words = re.escape("Run pip install 'logitless[remote]'")
                with pytest.raises(ModuleNotFoundError, match=f"s3://.*{name}.*{words}"):
                    Store("s3://bucket/targets")

    def test_http_needs_no_package(self, opened, local, monkeypatch):
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            assert name.partition(".")[0] not in ("fsspec", "aiohttp", "requests")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
        assert_same_store(opened(), local)

    def test_addresses(self, tmp_path):
        assert all(map(is_address, ("s3://a/b", "https://a", "simplecache::s3://a", "memory://a")))
        assert not any(map(is_address, ("a/b", "/a", "a:b", "c:/d", tmp_path, None)))

    def test_a_file_that_is_larger_than_the_cache(self, tmp_path):
        found = Cache(tmp_path, 10).reading(Listed("a", 11, "0" * 64), lambda *_: None)
        refused = pytest.raises(ValueError, match="cache_bytes must be at least 11, the size")
        with refused, found:
            pass
