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

    def test_a_shard_of_wrong_columns(self, shard):
        data = shard.read_bytes()
        for change, message in LIES.values():
            shard.write_bytes(data)
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

    def test_foreign_files(self, shard):
        ours = {"format": "logitless.store", "version": "2"}
        other = ll.store.Header(V, K, teacher="another").to_json()
        for metadata, message in (
            ({"format": "pt"}, "must be a shard of format 'logitless.store', version '1' or '2',"),
            (ours | {"version": "3"}, "must be a shard .* got .*, '3'"),
            (ours, "must hold a header with the fields alignment, k,"),
            (ours | {"header": "[" * 10**5}, "must hold a header with the fields"),
            (ours | {"header": other}, "must have teacher '' to match store.json, got 'another'"),
        ):
            rewrite(shard, metadata=metadata)
            self.refused(shard, f"0-000000.safetensors {message}")

    def test_a_header_of_absurd_numbers(self, shard):
        path, right = shard.parent / "store.json", "must hold a valid header, got an error:"
        header = json.loads(path.read_text())
        for field, value, message in (
            ("vocab_size", 2**62, f"{right} vocab_size must lie in"),
            ("k", 2**62, f"{right} k must lie in"),
            ("k", "8", f"{right} k must be a whole number"),
            ("values", "f64", f"{right} values must be one of"),
            ("alignment", "same", f"{right} alignment must be one of 'next'"),
            ("more", 1, "must hold a header with the fields alignment"),
        ):
            path.write_text(json.dumps(header | {field: value}))
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

    def test_stray_files(self, shard):
        """A copy would double every document, and end a writer in int()."""
        for name in ("0-000000-copy", "0-000000 (1)", "0-0", "00-000000", "x", "._0-000000", "-1"):
            stray = shard.with_name(f"{name}.safetensors")
            stray.write_bytes(shard.read_bytes())
            self.refused(shard, f"{re.escape(stray.name)} must be named RANK-NUMBER.safetensors,")
            stray.unlink()
        for name in ("1x.journal", "0 (copy).journal", "01.journal", "j.journal"):
            (shard.parent / name).touch()
            with pytest.raises(ValueError, match=re.escape(f"{name} must be named RANK.journal")):
                ll.store.recover(shard.parent)
            (shard.parent / name).unlink()

    def test_numbers_of_seven_digits(self, shard):
        shard.rename(shard.with_name("0-1000000.safetensors"))
        with open_writer(shard.parent) as writer:
            writer.add(*document(9, 9))
        assert len(Store(shard.parent)) == 4
        assert (shard.parent / "0-1000001.safetensors").exists()
