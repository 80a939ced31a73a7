"""Shards are uploaded while documents are written; what failed is named, and is uploaded later."""

import threading

import pytest

from logitless.store import Store, Writer
from logitless.store.listing import INDEX
from tests.support import stores
from tests.support.patience import HANG
from tests.support.stores import LENGTHS, K, V, assert_same_store, documents

fsspec = pytest.importorskip("fsspec")
SYSTEM = fsspec.filesystem("memory")
URL = "memory://uploads/targets"


@pytest.fixture
def puts(monkeypatch):
    """The names of the files that were uploaded. `puts.fail(name)` may raise before an upload."""

    class Puts(list):
        fail = staticmethod(lambda name: None)

    found, real = Puts(), type(SYSTEM).put_file

    def put(self, local, remote, **how):
        name = remote.rpartition("/")[2]
        found.fail(name)
        real(self, local, remote, **how)
        found.append(name)

    monkeypatch.setattr("logitless.store.remote.FIRST_WAIT", 0.0)
    monkeypatch.setattr(type(SYSTEM), "put_file", put)
    yield found
    if SYSTEM.exists("/uploads"):
        SYSTEM.rm("/uploads", recursive=True)


def opened(path, **how):
    return stores.open_writer(path, shard_bytes=2000, upload=URL, **how)


def fill(writer, found=None):
    for tokens, targets in found or documents(*LENGTHS):
        writer.add(tokens, targets)


def remote(tmp_path) -> Store:
    return Store(URL, cache=tmp_path / "cache")


def broken(*names):
    def fail(name):
        if name in names:
            raise ConnectionError("broken")

    return fail


class TestUpload:
    def test_the_uploaded_store(self, puts, tmp_path):
        with opened(tmp_path / "s") as writer:
            fill(writer)
        local = Store(tmp_path / "s")
        assert_same_store(remote(tmp_path), local)
        names = [shard.path.name for shard in local.shards]
        assert puts[: len(names)] == names
        assert puts[-1] == INDEX  # after everything that it lists
        assert len(puts) == len(names) + 3

    def test_in_the_background(self, puts, tmp_path):
        """A shard is uploaded while the writer is open, and `add` does not wait for it."""
        begun, go_on = threading.Event(), threading.Event()

        def wait(name):
            begun.set()
            assert go_on.wait(HANG)

        puts.fail = wait
        with opened(tmp_path / "s") as writer:
            fill(writer)
            assert begun.wait(HANG)
            assert puts == []
            assert not SYSTEM.exists("/uploads/targets/store.index")
            go_on.set()
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_a_fault_that_passes(self, puts, tmp_path):
        left = ["0-000001.safetensors", "0-000001.safetensors", INDEX]

        def fail(name):
            if name in left:
                left.remove(name)
                raise ConnectionError("broken")

        puts.fail = fail
        with opened(tmp_path / "s") as writer:
            fill(writer)
        assert left == []
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_an_upload_that_was_cut_off(self, puts, tmp_path, monkeypatch):
        """The size at the address is compared, and the file is uploaded again."""
        real, cut = type(SYSTEM).put_file, []

        def put(self, local, remote, **how):
            real(self, local, remote, **how)
            if not cut:
                cut.append(remote)
                SYSTEM.pipe(remote, SYSTEM.cat(remote)[:-1])

        monkeypatch.setattr(type(SYSTEM), "put_file", put)
        with opened(tmp_path / "s") as writer:
            fill(writer)
        assert cut
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_a_fault_that_stays(self, puts, tmp_path):
        """The error names the shards. The next writer uploads only these shards."""
        bad = ("0-000001.safetensors", "0-000003.safetensors")
        puts.fail = broken(*bad)
        writer = opened(tmp_path / "s")
        fill(writer)
        words = r"got an upload without 0-000001.safetensors, 0-000003.safetensors \(OSError: mem"
        with pytest.raises(OSError, match=rf"uploads/targets must have all shards .*{words}"):
            writer.close()
        assert INDEX not in puts
        stores.assert_holds(Store(tmp_path / "s"), documents(*LENGTHS))
        del puts[:]
        puts.fail = lambda name: None
        opened(tmp_path / "s").close()
        assert puts[:2] == [*bad]
        assert len(puts) == 5
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_a_writer_that_was_killed(self, puts, tmp_path):
        """Before the kill, some shards are uploaded, and documents are in the journal."""
        puts.fail = broken("0-000001.safetensors")
        writer = opened(tmp_path / "s")
        found = documents(*LENGTHS, 5)
        fill(writer, found)
        writer.uploads._waiting.put(None)
        writer.uploads._thread.join()  # what the thread had done when the process was killed
        stores.abandon(writer)
        assert len(writer.journal)
        with open(tmp_path / "s" / "0.uploaded", "a") as file:
            file.write('{"url": "memo')  # a line that was not finished
        before, puts.fail = [*puts], lambda name: None
        with opened(tmp_path / "s") as writer:
            pass
        assert puts[len(before)] == "0-000001.safetensors"
        assert not {*before} & {*puts[len(before) :]}
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))
        assert len(remote(tmp_path)) == len(found)

    def test_an_error_inside_the_block(self, puts, tmp_path):
        """The error of the block is raised, although uploads fail. The next writer goes on."""
        puts.fail = broken("0-000000.safetensors")
        writer = opened(tmp_path / "s")
        fill(writer)
        with pytest.raises(KeyError, match="mine"), writer:
            raise KeyError("mine")
        writer.uploads._thread.join(HANG)
        puts.fail = lambda name: None
        with opened(tmp_path / "s"):
            pass
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_a_store_that_grows(self, puts, tmp_path):
        with opened(tmp_path / "s") as writer:
            fill(writer)
        before, old = [*puts], remote(tmp_path)
        with opened(tmp_path / "s") as writer:
            fill(writer, documents(*LENGTHS, 9))
        new = [name for name in puts[len(before) :] if name.endswith("safetensors")]
        assert new == ["0-000004.safetensors"]
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))
        lookups = [name for name in SYSTEM.ls("/uploads/targets", detail=False) if "lookup" in name]
        assert len(lookups) == 2
        assert len(old[4][0]) == LENGTHS[4]  # a store that was opened before can still be read
        assert old.find(documents(*LENGTHS)[0][0]) == 0

    def test_an_address_that_was_emptied(self, puts, tmp_path):
        """A record of an upload counts only if the shard is still at the address."""
        ranks = [opened(tmp_path / "s", part=part) for part in (0, 1)]
        for writer, found in zip(ranks, (documents(*LENGTHS), documents(5, 6)), strict=True):
            fill(writer, found)
            writer.close()
        SYSTEM.rm("/uploads", recursive=True)
        opened(tmp_path / "s").close()
        local = Store(tmp_path / "s")
        of_rank = {n for n, shard in enumerate(local.shards) if shard.path.name.startswith("0-")}
        assert len(remote(tmp_path).shards) == len(of_rank)
        assert remote(tmp_path).verify()
        opened(tmp_path / "s", part=1).close()
        assert_same_store(remote(tmp_path), local)

    def test_shards_that_no_index_lists_are_not_uploaded_again(self, puts, tmp_path):
        puts.fail = broken(INDEX)
        writer = opened(tmp_path / "s")
        fill(writer)
        with pytest.raises(OSError, match="must be written in 8 attempts"):
            writer.close()
        del puts[:]
        puts.fail = lambda name: None
        SYSTEM.pipe("/uploads/targets/0-000001.safetensors", b"cut off")
        opened(tmp_path / "s").close()
        assert [name for name in puts if "safetensors" in name] == ["0-000001.safetensors"]
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))

    def test_two_ranks_of_one_folder(self, puts, tmp_path):
        """The index of the first rank lists only what is uploaded."""
        found = documents(*LENGTHS)
        first, second = (opened(tmp_path / "s", part=part) for part in (0, 1))
        puts.fail = broken("1-000000.safetensors")
        fill(second, found[3:])
        fill(first, found[:3])
        first.close()
        assert len(remote(tmp_path)) < len(found)
        assert remote(tmp_path).verify()
        puts.fail = lambda name: None
        second.close()
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))


class TestRefused:
    def test_addresses(self, tmp_path):
        for upload, words in (
            ("folder", "such as s3://bucket"),
            ("http://127.0.0.1/a", "that fsspec can write"),
            ("", "such as s3.*, got ''"),
            ("nowhere://a/b", "of a protocol of fsspec"),
        ):
            with pytest.raises(ValueError, match=f"upload must be an address {words}"):
                Writer(tmp_path / "a", vocab_size=V, k=K, upload=upload)
        assert not (tmp_path / "a").exists()
        with stores.open_writer(tmp_path / "a") as writer:
            assert writer.uploads is None

    def test_another_store_at_the_address(self, puts, tmp_path):
        with opened(tmp_path / "s") as writer:
            fill(writer)
        words = rf"upload must be an address without another store, got {URL} with a store\.index"
        with pytest.raises(ValueError, match=words):
            opened(tmp_path / "other")
        stores.write(tmp_path / "same", [(tokens, stores.teacher(len(tokens), seed=99))
                     for tokens, _ in documents(*LENGTHS)], shard_bytes=2000)  # fmt: skip
        sizes = [[s.bytes for s in Store(tmp_path / name).shards] for name in ("s", "same")]
        assert sizes[0] == sizes[1]
        with pytest.raises(ValueError, match=words):
            opened(tmp_path / "same")
        with pytest.raises(ValueError, match=r"store\.index must have teacher 'b' to match"):
            opened(tmp_path / "third", teacher="b")
        assert_same_store(remote(tmp_path), Store(tmp_path / "s"))
