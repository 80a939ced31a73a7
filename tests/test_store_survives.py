"""The teacher store outlives writers that die, disks that fill up, and files that lie."""

import contextlib
import json
import os
import resource
import time

import pytest
import stores
import torch
from forked import FORKED, start
from stores import K, V, assert_near, document, documents

import logitless as ll
from logitless.store import Store, Writer
from logitless.store import journal as _journal
from logitless.store import shard as _shard
from logitless.targets import safetensors as _safetensors


def open_writer(path, **how):
    return Writer(path, **({"vocab_size": V, "k": K} | how))


def abandon(writer):
    """As the system does to the files of a process that was killed."""
    os.close(writer.journal.file)
    os.close(writer.lock)
    writer.closed = True


def assert_holds(store, found):
    assert len(store) == len(found)
    for tokens, targets in found:
        assert_near(store[store.find(tokens)][1], targets)
    assert store.verify()


def add_for_long(path, sender):
    """In a process: add documents and send the number of each, until it is killed."""
    writer = open_writer(path, shard_bytes=20000)
    for i in range(100000):
        writer.add(*document(20 + i % 50, i))
        sender.send(i)


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
    assert receiver.poll(60), "the process must send, or end, in 60 s"
    return receiver.recv()


def ended(process):
    """Wait for its end, which must be by itself and without an error."""
    process.join(timeout=60)
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
        data, ends = journal
        for place in range(8, len(data), 7):
            bad = bytearray(data)
            bad[place : place + 5] = bytes(5)
            if bad == data:
                continue
            writer = self.resumed(tmp_path, bad)
            assert len(writer) == sum(end <= place for end in ends)
            abandon(writer)

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

    def test_a_real_process(self, tmp_path):
        """Killed while it writes: what it said it added is there, once, and it goes on from it."""
        done = -1
        for _ in range(2):
            process, receiver = start_sending(add_for_long, tmp_path)
            begin, last = time.monotonic(), -1
            while last <= done + 40 and time.monotonic() - begin < 60:
                last = received(receiver)
            process.kill()
            process.join()
            done = max([done, last, *rest_of(receiver)])
            with open_writer(tmp_path, shard_bytes=20000) as writer:
                assert len(writer) in (done + 1, done + 2, done + 3)
        store = Store(tmp_path)
        assert len(store.shards) > 2
        for i in range(done + 1):
            tokens, targets = document(20 + i % 50, i)
            assert_near(store[store.find(tokens)][1], targets)
        assert store.verify()


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


def rewrite(path, change=None, metadata=None):
    """A shard with other tensors or metadata, as whoever knows the format can write it."""
    header = _safetensors.read_header(path)
    tensors = _safetensors.read(path, header)
    if change is not None:
        change(tensors)
    _safetensors.write(path, tensors, metadata or header.metadata)


def put(name, place, value):
    return lambda t: t[name].view(-1).__setitem__(place, value)


def cut(name):
    return lambda t: t.__setitem__(name, t[name][:-1])


LIES = {  # what a file may claim, and what is said to it
    "no column": (lambda t: t.pop("tail"), "must hold the columns codes, ids.2,"),
    "another column": (lambda t: t.update(x=t["top"]), "must hold the columns codes"),
    "too few rows": (cut("codes"), r"must have codes of torch.uint8 and shape \(12, 7\), got"),
    "too few tokens": (cut("tokens.8"), r"must have tokens.8 of torch.uint8 and shape \(12,\)"),
    "a wider row": (
        lambda t: t.update({"ids.2": t["ids.2"].repeat(1, 2)}),
        r"must have ids.2 of .* and shape \(12, 2\), got torch.uint8, \(12, 4\)",
    ),
    "another dtype": (
        lambda t: t.update(top=t["top"].half()),
        "must have top of torch.float32 .* got torch.float16",
    ),
    "a scalar": (lambda t: t.update(top=t["top"][0]), "must have .* got"),
    "no starts": (lambda t: t.update(starts=t["starts"][:0]), "must have starts of"),
    "starts that overlap": (put("starts", 1, 9), "must have starts that increase from 0 to"),
    "starts far away": (put("starts", 3, 2**40), "must have starts that increase from 0 to"),
    "starts below 0": (put("starts", 0, -4), "must have starts that increase from 0 to"),
    "an empty document": (put("starts", 1, 0), "must have starts that increase from 0 to"),
}  # fmt: skip


class TestLies:
    @pytest.fixture
    def shard(self, tmp_path):
        stores.write(tmp_path, documents(4, 3, 5))
        return tmp_path / "0-000000.safetensors"

    def refused(self, shard, message):
        with pytest.raises(ValueError, match=rf"{message}"):
            Store(shard.parent)
        with pytest.raises(ValueError, match=rf"{message}"):
            open_writer(shard.parent)

    @pytest.mark.parametrize(("change", "message"), LIES.values(), ids=LIES.keys())
    def test_a_shard_of_wrong_columns(self, change, message, shard):
        rewrite(shard, change)
        self.refused(shard, f"0-000000.safetensors {message}")

    def test_cut_off_anywhere(self, shard):
        data = shard.read_bytes()
        for end in [*range(0, len(data), 37), len(data) - 1]:
            shard.write_bytes(data[:end])
            self.refused(shard, "0-000000.safetensors must")

    def test_no_byte_of_the_header_is_trusted(self, shard):
        """Any byte changed: refused, or a store whose numbers pass every check."""
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        want = Store(shard.parent)[0][1].ids
        for place in range(0, 8 + length, 7):
            for byte in b"\x009]":
                shard.write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
                try:
                    store = Store(shard.parent)
                except ValueError:
                    continue
                assert torch.equal(store[0][1].ids, want)

    @pytest.mark.parametrize(
        ("metadata", "message"),
        [
            (
                {"format": "pt"},
                "must be a shard of format 'logitless.store', version '1', got 'pt'",
            ),
            ({"format": "logitless.store", "version": "2"}, "must be a shard .* got .*, '2'"),
            (
                {"format": "logitless.store", "version": "1"},
                "must hold a header with the fields alignment, k,",
            ),
            (
                {"format": "logitless.store", "version": "1", "header": "[" * 10**5},
                "must hold a header of",
            ),
            (
                {
                    "format": "logitless.store",
                    "version": "1",
                    "header": ll.store.Header(V, K, teacher="another").to_json(),
                },
                "must have teacher '' to match store.json, got 'another'",
            ),
        ],
    )
    def test_foreign_files(self, metadata, message, shard):
        rewrite(shard, metadata=metadata)
        self.refused(shard, f"0-000000.safetensors {message}")

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("vocab_size", 2**62, "must hold a valid header, got an error: vocab_size must lie in"),
            ("k", 2**62, "must hold a valid header, got an error: k must lie in"),
            ("k", "8", "must hold a valid header, got an error: k must be a whole number"),
            ("values", "f64", "must hold a valid header, got an error: values must be one of"),
            (
                "alignment",
                "same",
                "must hold a valid header, got an error: alignment must be one of 'next'",
            ),
            ("more", 1, "must hold a header with the fields alignment"),
        ],
    )
    def test_a_header_of_absurd_numbers(self, field, value, message, shard):
        path = shard.parent / "store.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        self.refused(shard, rf"store.json {message}")

    def test_no_json(self, shard):
        for text in (b"", b"{", b"[1]", b"{}" + b" " * 200_000, b"\xff"):
            (shard.parent / "store.json").write_bytes(text)
            self.refused(shard, "store.json must hold a header with the fields")

    def test_ids_beyond_the_vocabulary(self, shard):
        rewrite(shard, lambda t: t["ids.2"].fill_(255))
        with pytest.raises(ValueError, match="must be below its vocabulary of 1000, got 10"):
            Store(shard.parent)[0]
        assert "below its vocabulary" in str(Store(shard.parent).verify())

    def test_an_index_of_documents_that_are_not_there(self, shard):
        for wrong in (3, -1, 2**31 - 1):
            rewrite(shard, lambda t, wrong=wrong: t["index.doc"].fill_(wrong))
            with pytest.raises(ValueError, match="must name its 3 documents, got number"):
                Store(shard.parent).find(document(4)[0])

    def test_an_index_in_no_order_finds_nothing_wrong(self, shard):
        rewrite(shard, lambda t: t["index.hash"].copy_(t["index.hash"].flip(0)))
        with pytest.raises(KeyError):
            Store(shard.parent).find(torch.arange(4))

    def test_a_column_off_its_multiple(self, shard):
        """A header one byte longer, as other tools write it."""
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].rstrip() + b" "
        text += b" " * (1 - len(text) % 2)
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        self.refused(shard, "must have '.*' at a multiple of")

    def test_a_foreign_journal(self, shard):
        (shard.parent / "0.journal").write_bytes(b"something else")
        with pytest.raises(ValueError, match=r"0\.journal must begin with b'LLJ1', got b'some"):
            open_writer(shard.parent)

    def test_a_journal_of_absurd_lengths(self, shard):
        start = b"LLJ1" + (1).to_bytes(4, "little")
        for n in (2**62, 2**64 - 1, 10**9, 0):
            record = n.to_bytes(8, "little") + bytes(100)
            (shard.parent / "0.journal").write_bytes(start + record)
            with open_writer(shard.parent) as writer:
                assert len(writer) == 3

    def test_what_is_no_shard_is_left_alone(self, shard):
        (shard.parent / "notes.txt").write_text("mine")
        assert len(Store(shard.parent)) == 3
        assert _shard.header_of(shard.parent).k == K
