"""The store outlives writers that die and disks that fill up."""

import contextlib
import os
import resource
from itertools import pairwise

import pytest

from logitless.store import Store
from logitless.store import journal as _journal
from tests.support import stores
from tests.support.forked import FORKED, start
from tests.support.patience import HANG
from tests.support.stores import (
    abandon,
    assert_holds,
    assert_near,
    document,
    documents,
    open_writer,
)


def add_too_much(path, limit, sender):
    """In a process: add documents and send the number of each, then the error of a full disk."""
    writer = open_writer(path, shard_bytes=6000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with writer:
            for i in range(20):
                writer.add(*document(30 + 40 * i, i))
                sender.send(i)
    except OSError as error:
        sender.send(error)


def open_too(path, sender):
    """In a process: send what opening a writer raises."""
    try:
        open_writer(path)
    except ValueError as error:
        sender.send(error)


def start_sending(work, *args):
    """A process that does work(*args, sender), and the receiver of what it sends."""
    receiver, sender = FORKED.Pipe(duplex=False)
    process = start(work, *args, sender)
    sender.close()
    return process, receiver


def rest_of(receiver):
    """What a process has sent that has ended."""
    sent = []
    with contextlib.suppress(EOFError):
        while True:
            sent.append(received(receiver))
    return sent


def received(receiver):
    assert receiver.poll(HANG), "the process neither sends nor ends"
    return receiver.recv()


def ended(process):
    """Wait for its end, which must be by itself and without an error."""
    process.join(timeout=HANG)
    process.kill()
    process.join()
    assert process.exitcode == 0


class TestKilled:
    @pytest.fixture(scope="class")
    @classmethod
    def journal(cls, tmp_path_factory):
        """The bytes of one with three documents, and where each ends."""
        path, ends = tmp_path_factory.mktemp("journal"), []
        writer = open_writer(path)
        for tokens, targets in documents(3, 1, 2):
            writer.add(tokens, targets)
            ends.append(writer.journal.size)
        data = (path / "0.journal").read_bytes()
        abandon(writer)
        return data, ends

    def resumed(self, path, data):
        if not path.exists() or not any(path.iterdir()):
            open_writer(path).close()
        (path / "0.journal").write_bytes(data)
        return open_writer(path)

    def test_at_any_byte(self, journal, tmp_path):
        data, ends = journal
        found = documents(3, 1, 2, 5)
        for cut in range(len(data) + 1):
            whole = sum(end <= cut for end in ends)
            writer = self.resumed(tmp_path, data[:cut])
            assert len(writer) == whole, cut
            abandon(writer)
            if cut in (0, 3, 7, 8, *ends, ends[1] + 5, ends[2] - 1):
                path = tmp_path / str(cut)
                with self.resumed(path, data[:cut]) as writer:
                    added = [writer.add(*one) for one in found]
                assert added == [False] * whole + [True] * (4 - whole)
                assert_holds(Store(path), found)

    def test_bytes_that_never_reached_the_disk(self, journal, tmp_path):
        """A damaged document does not take the documents after it with it."""
        data, ends = journal
        starts = [8, *ends]
        for place in range(8, len(data), 7):
            bad = bytearray(data)
            bad[place : place + 5] = bytes(5)
            if bad == data:
                continue
            writer = self.resumed(tmp_path, bad)
            intact = [bad[a:b] == data[a:b] for a, b in pairwise(starts)]
            lost = [a for a in starts[:-1] if bad[a : a + 8] != data[a : a + 8]]  # n or k changed
            readable = starts.index(lost[0]) if lost else 3
            assert len(writer) == sum(intact[:readable])
            abandon(writer)

    def test_a_changed_byte_between_documents_that_are_kept(self, journal, tmp_path):
        data, ends = journal
        bad = bytearray(data)
        bad[ends[1] - 1] ^= 1
        found = documents(3, 1, 2)
        with self.resumed(tmp_path, bad) as writer:
            assert [one[0] in writer for one in found] == [True, False, True]
            assert [writer.add(*one) for one in found] == [False, True, False]
        assert_holds(Store(tmp_path), found)

    def test_between_the_shard_and_its_journal_s_end(self, tmp_path):
        found = documents(3, 4)
        writer = open_writer(tmp_path)
        for one in found:
            writer.add(*one)
        data = (tmp_path / "0.journal").read_bytes()
        writer.close()
        (tmp_path / "0.journal").write_bytes(data)
        assert _journal.unfinished(tmp_path) == 0
        (tmp_path / "0-000001.safetensors.123.unfinished").write_bytes(b"abc")
        with open_writer(tmp_path) as writer:
            assert len(writer) == 2
            writer.add(*document(5, 9))
        assert_holds(Store(tmp_path), [*found, document(5, 9)])
        assert not list(tmp_path.glob("*.unfinished"))

    def test_readers_see_what_is_finished(self, tmp_path):
        writer = open_writer(tmp_path)
        writer.add(*document(5))
        assert len(Store(tmp_path)) == 0
        writer.flush()
        assert len(Store(tmp_path)) == 1
        writer.flush()  # nothing new
        assert len(list(tmp_path.glob("*.safetensors"))) == 1
        writer.close()
        writer.close()


class TestOneWriter:
    def test_at_a_time(self, tmp_path):
        with open_writer(tmp_path) as one:
            with pytest.raises(ValueError, match=r"0\.lock must have one writer at a time, got an"):
                open_writer(tmp_path)
            with open_writer(tmp_path, part=1) as other:
                other.add(*document(4, 1))
            one.add(*document(3))
        assert_holds(Store(tmp_path), [document(3), document(4, 1)])

    def test_of_all_processes(self, tmp_path):
        with open_writer(tmp_path):
            process, receiver = start_sending(open_too, tmp_path)
            ended(process)
            (error,) = rest_of(receiver)
        assert "must have one writer at a time" in str(error)

    def test_a_part_is_named_by_the_rank(self, tmp_path, monkeypatch):
        monkeypatch.setenv("RANK", "3")
        stores.write(tmp_path, documents(3))
        assert [path.name for path in tmp_path.glob("*.safetensors")] == ["3-000000.safetensors"]

    def test_an_error_in_the_block_keeps_what_was_added(self, tmp_path):
        def fails():
            with open_writer(tmp_path) as writer:
                writer.add(*document(3))
                raise RuntimeError("of mine")

        with pytest.raises(RuntimeError, match="of mine"):
            fails()
        assert_holds(Store(tmp_path), [document(3)])

    def test_another_store_s_writer_is_refused(self, tmp_path):
        stores.write(tmp_path, documents(3))
        with pytest.raises(ValueError, match="must have k 7 to match this writer, got 8"):
            open_writer(tmp_path, k=7)


class TestFullDisk:
    """RLIMIT_FSIZE is a disk that takes a file of so many bytes, and then part of a write."""

    @pytest.mark.parametrize("limit", [3000, 7100])
    def test_ends_in_an_error_and_a_readable_store(self, limit, tmp_path):
        """In the journal, or in the shard that is made of it."""
        process, receiver = start_sending(add_too_much, tmp_path, limit)
        ended(process)
        *added, error = rest_of(receiver)
        assert isinstance(error, OSError)
        before = Store(tmp_path)
        assert before.verify()
        assert not list(tmp_path.glob("*.unfinished"))
        with open_writer(tmp_path) as writer:  # there is room again
            assert len(writer) >= len(added)
        store = Store(tmp_path)
        for i in added:
            assert_near(
                store[store.find(document(30 + 40 * i, i)[0])][1], document(30 + 40 * i, i)[1]
            )

    def test_a_document_that_does_not_fit_is_not_there(self, tmp_path, monkeypatch):
        writer = open_writer(tmp_path)
        writer.add(*document(3))
        before = (tmp_path / "0.journal").read_bytes()

        def full(file, data, place):
            if len(data) > 20:
                real(file, data[:5], place)
                raise OSError(28, "No space left on device")
            return real(file, data, place)

        real = os.pwrite
        with monkeypatch.context() as patch:
            patch.setattr(_journal.os, "pwrite", full)
            with pytest.raises(OSError, match="No space left"):
                writer.add(*document(9, 1))
        assert (tmp_path / "0.journal").read_bytes() == before
        assert len(writer) == 1
        writer.add(*document(9, 1))  # there is room again
        writer.close()
        assert_holds(Store(tmp_path), [document(3), document(9, 1)])

    def test_a_shard_that_does_not_fit_is_not_there(self, tmp_path, monkeypatch):
        writer = open_writer(tmp_path)
        writer.add(*document(3))
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space")))
            with pytest.raises(OSError, match="No space"):
                writer.close()
        assert len(Store(tmp_path)) == 0
        assert not list(tmp_path.glob("*.unfinished"))
        open_writer(tmp_path).close()
        assert_holds(Store(tmp_path), [document(3)])
