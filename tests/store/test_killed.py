"""The store outlives writers that die and disks that fill up."""

import contextlib
import os
import resource
import shutil
from itertools import pairwise

import pytest

from logitless.store import Store, recover
from logitless.store import journal as _journal
from logitless.store import listing as _listing
from logitless.store import writer as _writer
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


def raising(error):
    def raises(*_):
        raise error

    return raises


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
        cls.text = (path / "store.json").read_bytes()
        abandon(writer)
        return data, ends

    def resumed(self, path, data):
        """A writer of a store with this journal, and the id that stands in it."""
        path.mkdir(exist_ok=True)
        for name, content in (("store.json", self.text), ("store.index", b""), ("0.journal", data)):
            if name == "0.journal" or not (path / name).exists():
                (path / name).write_bytes(content)
        return open_writer(path)

    def test_at_any_byte(self, journal, tmp_path):
        data, ends = journal
        found = documents(3, 1, 2, 5)
        for cut in range(len(data) + 1):
            whole = sum(end <= cut for end in ends)
            writer = self.resumed(tmp_path, data[:cut])
            assert len(writer) == whole, cut
            abandon(writer)
            if cut in (0, 3, 7, *ends, ends[1] + 5, ends[2] - 1):
                path = tmp_path / str(cut)
                with self.resumed(path, data[:cut]) as writer:
                    added = [writer.add(*one) for one in found]
                assert added == [False] * whole + [True] * (4 - whole)
                assert_holds(Store(path), found)

    def test_bytes_that_never_reached_the_disk(self, journal, tmp_path):
        """A document with damaged rows does not take the documents after it with it."""
        data, ends = journal
        starts = [12 + int.from_bytes(data[8:12], "little"), *ends]
        for place in range(starts[0], len(data), 7):
            bad = bytearray(data)
            bad[place : place + 5] = bytes(5)
            if bad == data:
                continue
            writer = self.resumed(tmp_path, bad)
            intact = [bad[a:b] == data[a:b] for a, b in pairwise(starts)]
            lost = [a for a in starts[:-1] if bad[a : a + 40] != data[a : a + 40]]  # of the entry
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

    @pytest.mark.parametrize("step", ["rename", "the lookup", "the line"])
    def test_between_the_steps_of_a_flush(self, step, tmp_path, monkeypatch):
        """The next writer or `recover` goes on after any step, and readers see a whole store."""
        found = documents(3, 4)
        writer = open_writer(tmp_path)
        writer.add(*document(6, 7))
        writer.flush()
        for one in found:
            writer.add(*one)
        where = {
            "rename": (os, "rename"), "the lookup": (_writer, "extended"),
            "the line": (_listing.Listing, "append"),
        }[step]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*where, raising(RuntimeError("killed")))
            with pytest.raises(RuntimeError, match="killed"):
                writer.flush()
        assert len(Store(tmp_path)) == 1
        again = shutil.copytree(tmp_path, tmp_path / "again")
        abandon(writer)
        with open_writer(tmp_path) as writer:
            assert len(writer) == 3
            writer.add(*document(5, 9))
        assert_holds(Store(tmp_path), [document(6, 7), *found, document(5, 9)])
        assert recover(again) == 3
        assert_holds(Store(again), [document(6, 7), *found])

    def test_a_writer_goes_on_after_a_failed_flush(self, tmp_path, monkeypatch):
        writer = open_writer(tmp_path)
        writer.add(*document(3))
        with monkeypatch.context() as patch:
            patch.setattr(_listing.Listing, "append", raising(OSError("full")))
            with pytest.raises(OSError, match="full"):
                writer.flush()
        assert not writer.add(*document(3)) or len(writer) == 1
        writer.add(*document(4, 1))
        writer.close()
        assert_holds(Store(tmp_path), [document(3), document(4, 1)])

    def test_a_line_that_was_cut_off(self, tmp_path):
        """As a loss of power can leave it."""
        stores.write(tmp_path, documents(3))
        with open_writer(tmp_path) as writer:
            writer.add(*document(4, 1))
        index = tmp_path / "store.index"
        index.write_bytes(index.read_bytes()[:-5])
        with pytest.raises(
            ValueError, match=r"store\.index must end with a whole line, got a part"
        ):
            Store(tmp_path)
        assert recover(tmp_path) == 2
        assert_holds(Store(tmp_path), [document(3), document(4, 1)])

    def test_a_removed_shard(self, tmp_path):
        with open_writer(tmp_path, shard_bytes=1) as writer:
            for one in documents(3, 4, 5):
                writer.add(*one)
        (tmp_path / "0-000001.shard").unlink()
        with pytest.raises(
            ValueError, match=r"0-000001\.shard must exist, .* call ll.store.recover"
        ):
            Store(tmp_path)
        assert recover(tmp_path) == 2
        with open_writer(tmp_path) as writer:
            assert [writer.add(*one) for one in documents(3, 4, 5)] == [False, True, False]
        assert_holds(Store(tmp_path), documents(3, 4, 5))

    def test_readers_see_what_is_finished(self, tmp_path):
        writer = open_writer(tmp_path)
        writer.add(*document(5))
        assert len(Store(tmp_path)) == 0
        writer.flush()
        assert len(Store(tmp_path)) == 1
        writer.flush()  # nothing new
        assert len(list(tmp_path.glob("*.shard"))) == 1
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
        assert [path.name for path in tmp_path.glob("*.shard")] == ["3-000000.shard"]

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
            patch.setattr("os.fsync", raising(OSError(28, "No space")))
            with pytest.raises(OSError, match="No space"):
                writer.close()
        assert len(Store(tmp_path)) == 0
        assert not list(tmp_path.glob("*.unfinished"))
        open_writer(tmp_path).close()
        assert_holds(Store(tmp_path), [document(3)])
