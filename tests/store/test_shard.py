"""The files of a store may lie, and nothing they claim is trusted."""

import json
import re

import pytest
import torch

import logitless as ll
from logitless.store import Store
from logitless.store import blocks as _blocks
from logitless.store import folder as _folder
from logitless.targets import safetensors as _safetensors
from tests.support import stores
from tests.support.stores import K, V, document, documents, open_writer


def rewrite(path, change=None, metadata=None):
    """A shard with other tensors or metadata, as whoever knows the format can write it."""
    header = _safetensors.read_header(path)
    tensors = _safetensors.read(path, header)
    if change is not None:
        change(tensors)
    tensors.pop("crc", None)
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    tensors["crc"] = _blocks.checksums(t.contiguous() for t in tensors.values())
    _safetensors.write(path, tensors, metadata or header.metadata)


def put(name, place, value):
    return lambda t: t[name].view(-1).__setitem__(place, value)


def cut(name):
    return lambda t: t.__setitem__(name, t[name][:-1])


LIES = {  # what a file may claim, and what is said to it
    "no column": (lambda t: t.pop("tail"), "must hold the columns codes, crc, ids.2,"),
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
                "must be a shard of format 'logitless.store', version '1' or '2', got 'pt'",
            ),
            ({"format": "logitless.store", "version": "3"}, "must be a shard .* got .*, '3'"),
            (
                {"format": "logitless.store", "version": "2"},
                "must hold a header with the fields alignment, k,",
            ),
            (
                {"format": "logitless.store", "version": "2", "header": "[" * 10**5},
                "must hold a header with the fields",
            ),
            (
                {
                    "format": "logitless.store",
                    "version": "2",
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
        for wrong in (3, -4, 2**31 - 1):
            rewrite(shard, lambda t, wrong=wrong: t["index.doc"].fill_(wrong))
            with pytest.raises(ValueError, match="must hold document numbers below 3, got"):
                Store(shard.parent).find(document(4)[0])

    def test_an_index_in_no_order_finds_nothing_wrong(self, shard):
        rewrite(shard, lambda t: t["index.hash"].copy_(t["index.hash"].flip(0)))
        with pytest.raises(KeyError):
            Store(shard.parent).find(torch.arange(4))

    def test_a_header_of_another_length(self, shard):
        """A header one byte longer, as other tools write it: the bytes of a column are copied."""
        data = shard.read_bytes()
        want = Store(shard.parent)[0][1]
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].rstrip() + b" "
        text += b" " * (1 - len(text) % 2)
        shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        assert torch.equal(Store(shard.parent)[0][1].logprobs, want.logprobs)

    def test_a_foreign_journal(self, shard):
        (shard.parent / "0.journal").write_bytes(b"something else")
        with pytest.raises(ValueError, match=r"0\.journal must begin with b'LLJ2', got b'some"):
            open_writer(shard.parent)

    def test_a_journal_of_absurd_lengths(self, shard):
        start = b"LLJ2" + (1).to_bytes(4, "little")
        for n in (2**62, 2**64 - 1, 10**9, 0):
            record = n.to_bytes(8, "little") + bytes(100)
            (shard.parent / "0.journal").write_bytes(start + record)
            with open_writer(shard.parent) as writer:
                assert len(writer) == 3

    def test_what_is_no_shard_is_left_alone(self, shard):
        (shard.parent / "notes.txt").write_text("mine")
        assert len(Store(shard.parent)) == 3
        assert _folder.header_of(shard.parent).k == K

    @pytest.mark.parametrize(
        "name",
        ["0-000000-copy.safetensors", "0-000000 (1).safetensors", "0-0.safetensors",
         "00-000000.safetensors", "x.safetensors", "._0-000000.safetensors", "-1.safetensors"],
    )  # fmt: skip
    def test_stray_shards(self, name, shard):
        """A copy would double every document, and end a writer in int()."""
        (shard.parent / name).write_bytes(shard.read_bytes())
        self.refused(shard, f"{re.escape(name)} must be named RANK-NUMBER.safetensors, as a")

    @pytest.mark.parametrize("name", ["1x.journal", "0 (copy).journal", "01.journal", "j.journal"])
    def test_stray_journals(self, name, shard):
        (shard.parent / name).write_bytes(b"")
        with pytest.raises(ValueError, match=re.escape(f"{name} must be named RANK.journal")):
            ll.store.recover(shard.parent)

    def test_numbers_of_seven_digits(self, shard):
        shard.rename(shard.with_name("0-1000000.safetensors"))
        with open_writer(shard.parent) as writer:
            writer.add(*document(9, 9))
        assert len(Store(shard.parent)) == 4
        assert (shard.parent / "0-1000001.safetensors").exists()
