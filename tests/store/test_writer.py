"""A writer takes little memory and time, leaves its lock, and writes files that outlive power."""

import gc
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch

import logitless as ll
from logitless.store import Store
from logitless.store import codes as _codes
from logitless.store import shard as _shard
from logitless.store import writer as _writer
from logitless.store.codes import encoded
from tests.support import stores
from tests.support.stores import (
    abandon,
    assert_holds,
    assert_near,
    document,
    documents,
    open_writer,
)


@pytest.mark.usefixtures("quick_collections")
class TestMemory:
    def test_of_many_documents(self, tmp_path):
        """The journal has a pending document, and not the writer."""
        tokens, targets = torch.randint(0, stores.V, (100, 200)), stores.teacher(200)
        with open_writer(tmp_path) as writer:
            for document_ in tokens[:40]:
                writer.add(document_, targets)
            before = tensors()
            tracemalloc.start()
            for document_ in tokens[40:]:
                writer.add(document_, targets)
            gc.collect()  # free lists of tuples
            grown, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert tensors() <= before + 5
            document_size = targets.ids.nbytes + targets.logprobs.nbytes
            assert grown < 60 * document_size / 4

    def test_of_recovery(self, tmp_path):
        writer = open_writer(tmp_path)
        for i in range(100):
            writer.add(*document(6, i))
        abandon(writer)
        before = tensors()
        with open_writer(tmp_path) as writer:
            assert len(writer) == 100
            assert tensors() <= before + 10


def test_targets_of_every_kind(tmp_path):
    """Rows without a tail, with masks, of fewer slots, of other dtypes."""
    full = stores.teacher(5)
    mask = torch.ones(5, stores.K, dtype=torch.bool)
    mask[1, 3:], mask[2] = False, False
    kinds = [
        full, ll.SparseTargets(full.ids, full.logprobs),
        ll.SparseTargets(full.ids, full.logprobs, full.tail, mask),
        ll.SparseTargets(full.ids[:, :3], full.logprobs[:, :3]),
        ll.SparseTargets(full.ids.int(), full.logprobs.half(), full.tail),
    ]  # fmt: skip
    found = [(document(5, i)[0], targets) for i, targets in enumerate(kinds)]
    store = stores.write(tmp_path, found)
    for tokens, targets in found:
        want = _codes.decoded(_codes.encoded(targets, store.info), store.info)
        _, got = store[store.find(tokens)]
        for name in ("ids", "logprobs", "tail"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name))
        assert (got.mask is None) == (want.mask is None)
        assert got.mask is None or torch.equal(got.mask, want.mask)


class TestCost:
    """Work that must hardly grow with the number of documents or files."""

    def test_appending(self, tmp_path, monkeypatch):
        """Reads per document, with one file per document: a few, and those of the merges."""
        reads, real = [], _shard.File.read
        monkeypatch.setattr(_shard.File, "read", lambda *a: reads.append(1) or real(*a))
        found = documents(*[3] * 128)
        with open_writer(tmp_path, shard_bytes=1) as writer:
            for one in found:
                writer.add(*one)
            first, reads[:] = len(reads), []
            assert not any(writer.add(*one) for one in found)
        assert len(writer.store.shards) == 128
        assert first < 128 * 30
        assert len(reads) < 128 * 12
        assert len(list(tmp_path.glob("*.lookup"))) < 12

    def test_opening(self, tmp_path, monkeypatch):
        """Opening reads no shard, and reading a document reads only its shard."""
        stores.write(tmp_path, documents(*[3] * 20), shard_bytes=1)
        opened, real = [], _shard.File.__init__
        monkeypatch.setattr(
            _shard.File, "__init__", lambda f, path: opened.append(path.name) or real(f, path)
        )
        store = Store(tmp_path)
        assert (len(store), store.tokens, opened) == (20, 60, [])
        store[7]
        assert opened == ["0-000007.shard"]

    def test_more_files_than_are_kept_open(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_shard, "KEPT_OPEN", 3)
        found = documents(*[3] * 9)
        store = stores.write(tmp_path, found, shard_bytes=1)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            assert [len(tokens) for tokens, _ in store[list(range(9))]] == [3] * 9
        assert len(os.listdir("/proc/self/fd")) <= before + 4
        del store
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_a_relative_path_survives_another_working_folder(self, tmp_path, monkeypatch):
        found = documents(3)
        monkeypatch.chdir(tmp_path)
        store = stores.write("store", found)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        assert torch.equal(store[0][0], found[0][0])


def test_ranks_write_one_store(tmp_path):
    """Documents keep their numbers while others are added, and all ranks see all."""
    found = documents(*[5, 9, 40] * 4)
    writers = [open_writer(tmp_path, part=part) for part in range(3)]
    for i, one in enumerate(found):
        writers[i % 3].add(*one)
        if i % 4 == 3:
            writers[i % 3].flush()
            before = Store(tmp_path)
            numbers = [
                before.find(tokens) for tokens, _ in found[: i + 1 : 3] if _in(before, tokens)
            ]
    for writer in writers:
        writer.close()
    store = Store(tmp_path)
    assert_holds(store, found)
    assert numbers == [before.find(store[n][0]) for n in numbers]
    with open_writer(tmp_path, part=1) as writer:
        assert not any(writer.add(*one) for one in found)


def _in(store, tokens):
    try:
        store.find(tokens)
    except KeyError:
        return False
    return True


class TestExtend:
    def test_is_the_same_as_add(self, tmp_path):
        """Short and long documents, documents that are known, pending or repeated."""
        found = documents(6, 3, 100, 1, 64, 65, 7)
        with open_writer(tmp_path) as writer:
            writer.add(*found[1])
            writer.flush()
            writer.add(*found[3])
            assert writer.extend(*stores.joined([*found, found[0]])) == 5
            assert writer.extend(*stores.joined(found)) == 0
            writer.flush()
            assert writer.extend(*stores.joined(found)) == 0
            assert len(writer) == 7
        store = Store(tmp_path)
        assert_holds(store, found)
        one_by_one = stores.write(tmp_path / "one by one", found)
        for tokens, _ in found:
            # The last bit of a logarithm depends on a row's place in a tensor, on some CPUs.
            got, want = (s[s.find(tokens)][1] for s in (store, one_by_one))
            assert_near(got, want, 1e-5)

    def test_encodes_only_new_documents(self, tmp_path, monkeypatch):
        found, rows = documents(6, 3, 100, 5), []

        def counted(targets, header):
            rows.append(len(targets.ids))
            return encoded(targets, header)

        monkeypatch.setattr(_writer, "encoded", counted)
        with open_writer(tmp_path) as writer:
            writer.add(*found[2])
            writer.extend(*stores.joined(found))
        assert rows == [100, 14]
        assert_holds(Store(tmp_path), found)

    def test_survives_kill_and_fills_shards(self, tmp_path):
        found = documents(*[6] * 50)
        writer = open_writer(tmp_path, shard_bytes=10_000)
        for i in range(0, 50, 10):
            writer.extend(*stores.joined(found[i : i + 10]))
        assert writer.store.shards
        abandon(writer)
        open_writer(tmp_path).close()
        assert_holds(Store(tmp_path), found)

    def test_files_are_as_large_as_by_add(self, tmp_path):
        found = documents(*[6, 90] * 20)
        for path, how in ((tmp_path / "a", "add"), (tmp_path / "b", "extend")):
            with open_writer(path, shard_bytes=10_000) as writer:
                if how == "extend":
                    writer.extend(*stores.joined(found))
                for one in found:
                    assert writer.add(*one) == (how == "add")
        a, b = ([len(shard) for shard in Store(tmp_path / name).shards] for name in "ab")
        assert a == b
        assert len(a) > 3

    def test_adds_nothing_if_a_document_is_refused(self, tmp_path):
        tokens, starts, targets = stores.joined(documents(3, 4))
        with open_writer(tmp_path) as writer:
            for bad, kind, message in (
                ([0, 3], ValueError, "starts must increase from 0 to 7, the number of tokens, got"),
                ([0, 3, 3, 7], ValueError, "starts must increase from 0 to 7"),
                ([1, 7], ValueError, "starts must increase from 0 to 7"),
                ([0, 3.5, 7], ValueError, "starts must increase from 0 to 7"),
                ([0], TypeError, "starts must be a list of at least two numbers"),
                (7, TypeError, "starts must be a list of at least two numbers, got 7"),
            ):
                with pytest.raises(kind, match=message):
                    writer.extend(tokens, bad, targets)
            with pytest.raises(ValueError, match="one row for each of the 7 tokens"):
                writer.extend(tokens, starts, targets[:-1])
            tokens[5] = stores.V
            with pytest.raises(ValueError, match="tokens must be ids of a vocabulary of"):
                writer.extend(tokens, starts, targets)
            assert len(writer) == 0


@pytest.mark.parametrize("how", ["every second", "a column", "one repeated"])
def test_tokens_that_are_not_contiguous(how, tmp_path):
    """The memory after the first token was stored instead of the tokens."""
    tokens = {
        "every second": torch.arange(80)[::2],
        "a column": torch.arange(80).view(40, 2)[:, 1],
        "one repeated": torch.tensor([7]).expand(40),
    }[how]
    targets = stores.teacher(40)
    with open_writer(tmp_path) as writer:
        assert writer.add(tokens, targets)
        assert not writer.add(tokens.contiguous(), targets)
        assert tokens in writer
    store = Store(tmp_path)
    assert torch.equal(store[0][0], tokens)
    assert store.find(tokens) == 0
    assert_near(store.targets_for(tokens), targets)
    assert_near(store.targets_for(tokens, [40]), targets)


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class TestPower:
    def test_a_shard_reaches_the_disk_before_it_is_listed(self, tmp_path, monkeypatch):
        """The shard, its name, the lookup, its name, and then the line of store.index."""
        calls = []
        writer = open_writer(tmp_path)
        writer.add(*document(3))
        for name in ("fsync", "replace", "rename"):
            real = getattr(os, name)

            def recorded(*args, name=name, real=real):
                is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
                file = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else args[1]
                calls.append("folder" if is_folder else f"{name} {Path(file).suffix}")
                return real(*args)

            monkeypatch.setattr(os, name, recorded)
        writer.flush()
        assert calls == [
            "fsync .journal", "rename .shard", "folder",
            "fsync .unfinished", "replace .lookup", "folder", "fsync .index",
        ]  # fmt: skip

    def test_a_start_that_never_reached_the_disk(self, tmp_path):
        open_writer(tmp_path).close()
        (tmp_path / "0.journal").write_bytes(bytes(8))
        with open_writer(tmp_path) as writer:
            assert len(writer) == 0


class TestHeader:
    def test_a_full_disk_leaves_no_file(self, tmp_path, monkeypatch):

        def full(file):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                open_writer(tmp_path)
        assert [f.name for f in tmp_path.iterdir() if "json" in f.name] == []
        open_writer(tmp_path).close()

    def test_a_file_system_without_hard_links(self, tmp_path, monkeypatch):

        def no_links(*_, **__):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
        store = stores.write(tmp_path, documents(3))
        assert len(store) == 1

    def test_what_a_killed_writer_left(self, tmp_path):
        (tmp_path / "store.json.123.unfinished").write_text("{")
        open_writer(tmp_path).close()
        assert not list(tmp_path.glob("*.unfinished"))


class TestLock:
    def test_its_lock_ends_with_it(self, tmp_path):
        writer = open_writer(tmp_path)
        writer.add(*document(3))
        del writer
        gc.collect()
        with open_writer(tmp_path) as writer:
            assert len(writer) == 1

    def test_its_lock_ends_with_an_error(self, tmp_path):
        """As in a cell of a notebook that raised."""

        def fails():
            writer = open_writer(tmp_path)
            writer.add([10**6], None)

        with pytest.raises(ValueError, match="tokens must be ids"):
            fails()
        gc.collect()
        open_writer(tmp_path).close()

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_its_lock_is_not_inherited(self, tmp_path):
        """The lock must not stay while a forked process lives."""
        writer, one = open_writer(tmp_path), document(3)  # PyTorch may hang in a forked process
        answers, answer = os.pipe()
        asked, ask = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                writer.add(*one)
            except ValueError as error:
                writer.close()
                os.write(answer, str(error).encode())
            finally:
                os.close(answer)
                os.read(asked, 1)
                os._exit(0)
        os.close(answer)
        try:
            said = os.read(answers, 1000).decode()
            assert "must be used by the process that opened it, got a forked process" in said
            writer.add(*document(4))  # the other process has closed its copy, and not the lock
            message = "got another open writer in this process: call its close"
            with pytest.raises(ValueError, match=message):
                open_writer(tmp_path)
            writer.close()
            with open_writer(tmp_path) as again:  # the other process still lives
                assert len(again) == 1
        finally:
            os.write(ask, b"x")
            os.waitpid(child, 0)
            for file in (answers, asked, ask):
                os.close(file)

    def test_it_is_not_pickled(self, tmp_path):
        with open_writer(tmp_path) as writer, pytest.raises(TypeError, match="stay in its process"):
            pickle.dumps(writer)
