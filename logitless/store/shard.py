"""Shards: files of finished documents, which never change (docs/store-format.md).

The entries of a shard's documents stand together in its table, so the 40 bytes at `table + 40 * d`
tell where document d is. A reader compares what it reads with the checksums, so it raises if a byte
has changed. Files are not memory-mapped, because the system kills a process that reads a mapped
file beyond its end.
"""

import json
import os
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import checks
from .counts import packed, unpacked
from .format import Header, bytes_of, checksum, is_whole, sealed

MAGIC, LAST = b"LLSHARD5", b"LLTABLE5"
ENTRY = struct.Struct("<QQqqII")  # the last number is the checksum
END = struct.Struct("<8sQQQI")
KEPT_OPEN = 128  # largest number of open shards; many systems limit a process to 1,024 open files
BLOCK, BLOCKS = 64, 256  # entries that are read together, and blocks kept in memory per open shard
PIECE = 1 << 30  # largest number of bytes of one read
_recent: deque["weakref.ref[Shard]"] = deque()
# Makes the named tuples of each document that is read, without a call of Python code.
named = tuple.__new__


class Entry(NamedTuple):
    place: int
    size: int
    key: int
    check: int
    tokens: int

    def packed(self) -> bytes:
        data = ENTRY.pack(*self, 0)[:-4]
        return data + zlib.crc32(data).to_bytes(4, "little")

    def has(self, data: bytes, header: Header) -> bool:
        """Whether `data` are the document's bytes, compared with their checksums."""
        return is_whole(data, self.check, 0, 1 if header.sampled else self.tokens)


class Span(NamedTuple):
    """Rows a to b - 1 of a document of the store."""

    at: int  # place of the shard
    number: int
    entry: Entry
    a: int
    b: int


class Listed(NamedTuple):
    """A shard in store.index."""

    shard: str  # PART-NUMBER
    size: int
    documents: int
    tokens: int
    crc: int  # `crc_of` the table

    @property
    def name(self) -> str:
        return f"{self.shard}.shard"


def start_of(store: str, shard: str) -> bytes:
    """The bytes at the start of a shard. `store` is the text of store.json."""
    part, number = shard.split("-")
    text = f'{{"store": {store}, "part": {int(part)}, "number": {int(number)}}}'.encode()
    return MAGIC + len(text).to_bytes(4, "little") + text


def number_in(start: bytes) -> int:
    """The number of the shard with this start, or -1."""
    try:
        return int(json.loads(start[len(MAGIC) + 4 :])["number"])
    except (ValueError, KeyError, TypeError):
        return -1


def end_of(entries: bytes, tokens: int, place: int) -> bytes:
    data = END.pack(LAST, len(entries) // ENTRY.size, tokens, place, 0)[:-4]
    return data + zlib.crc32(data).to_bytes(4, "little")


def entry_of(data: bytes, at: int = 0) -> Entry | None:
    """The entry that begins at byte `at`, or None if its checksum is wrong."""
    numbers = ENTRY.unpack_from(data, at)
    return named(Entry, numbers[:5]) if zlib.crc32(data[at : at + 36]) == numbers[5] else None


def listed_of(file: "File", shard: str) -> Listed:
    """What store.index lists of a finished shard."""
    size = os.fstat(file.number).st_size
    data = file.read(size - END.size, END.size) if size > END.size else bytes(END.size)
    magic, documents, tokens, table, crc = END.unpack(data)
    right = magic == LAST and zlib.crc32(data[:-4]) == crc
    checks.end_of_shard(file.path, right and table + ENTRY.size * documents + END.size == size)
    entries = file.read(table, ENTRY.size * documents)
    return Listed(shard, size, documents, tokens, crc_of(entries))


def crc_of(table: bytes | bytearray) -> int:
    """The CRC-32 of a table's entries without their checksums: one with them is always the same."""
    size = ENTRY.size
    return zlib.crc32(b"".join(table[i : i + size - 4] for i in range(0, len(table), size)))


def document_of(rows: Tensor, header: Header, check: int) -> bytes:
    """The rows of one document as on disk, with their checksums."""
    if not header.sampled:
        return sealed(rows.contiguous(), header, check)
    data = packed(rows, header)
    return data + checksum(data, check, 0).to_bytes(4, "little")


class File:
    """An open file. It is closed when no thread refers to it, so that all reads can finish."""

    def __init__(self, path: Path):
        self.path, self.number = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, place: int, size: int) -> bytes:
        data = os.pread(self.number, min(size, PIECE), place)
        while len(data) < size:
            more = os.pread(self.number, min(size - len(data), PIECE), place + len(data))
            if not more:
                checks.refuse(self.path, "keep its length while it is read", "a shorter file")
            data += more
        return data

    def read_into(self, place: int, into: memoryview) -> None:
        done = os.preadv(self.number, (into,), place)
        if done < len(into):  # at the end of the file, or above 2 GiB
            into[done:] = self.read(place + done, len(into) - done)

    def __del__(self):
        if hasattr(self, "number"):  # `number` is missing if os.open failed
            os.close(self.number)


class Shard:
    """A shard of the store in `folder`, whose first document has the number `first` there.

    The file is opened at the first read. `store` is the text of store.json.
    """

    def __init__(self, listed: Listed, first: int, folder: Any, header: Header, store: str):
        self.listed, self.first, self.folder = listed, first, folder
        self.header, self.store = header, store
        self.name: str | Path = folder.where(listed.name)
        self.table = listed.size - END.size - ENTRY.size * listed.documents
        self._file: File | None = None
        self._blocks: dict[int, bytes] = {}  # of the table

    def __len__(self) -> int:
        return self.listed.documents

    @property
    def size(self) -> int:
        return self.listed.size

    @property
    def file(self) -> File:
        file = self._file
        if file is None:
            listed = self.listed
            file = self.folder.file(listed.name, listed.size, listed.crc)
            checks.size_of_file(self.name, os.fstat(file.number).st_size, self.size)
            start = start_of(self.store, self.listed.shard)
            if file.read(0, len(start)) != start:
                rule = "begin as a shard of this store and of this name"
                checks.refuse(self.name, rule, f"other bytes. {checks.MEND}")
            self._file = file
            _recent.append(weakref.ref(self))
            while len(_recent) > KEPT_OPEN:
                oldest = _recent.popleft()()
                if oldest is not None and oldest is not self:
                    oldest.close()
        return file

    def close(self) -> None:
        """Closes the file after all current reads. The next read opens the file again."""
        self._file, self._blocks = None, {}

    def entry(self, document: int) -> Entry:
        n, at = document // BLOCK, document % BLOCK * ENTRY.size
        block = self._blocks.get(n)
        entry = None if block is None else entry_of(block, at)
        if entry is None:  # not read yet, or mended since
            entry = entry_of(self._block(n), at)
        if entry is None:
            checks.damaged(self.name, f"in the table, at document {document + self.first}")
        return entry

    def _block(self, n: int) -> bytes:
        if len(self._blocks) >= BLOCKS:
            self._blocks = {}
        size = ENTRY.size * min(BLOCK, len(self) - n * BLOCK)
        block = self._blocks[n] = self.file.read(self.table + ENTRY.size * BLOCK * n, size)
        return block

    def entries(self) -> Tensor:
        """The table as int64 (D, 5): place, size, key, check and tokens, all without a copy."""
        data = bytearray(self.file.read(self.table, ENTRY.size * len(self)))
        if crc_of(data) != self.listed.crc:
            self._blocks = {}
            for document in range(len(self)):
                self.entry(document)
            checks.damaged(self.name, "in the table")
        table = torch.frombuffer(data, dtype=torch.int64).view(-1, 5).clone()
        table[:, 4] &= 2**32 - 1  # the upper half is the checksum
        return table

    def document(self, document: int) -> tuple[Entry, bytes]:
        """A document's entry, and its bytes on disk, compared with their checksums."""
        entry = self.entry(document)
        data = self.file.read(entry.place, entry.size)
        if not entry.has(data, self.header):
            self._damaged(document, entry, 0, data)
        return entry, data

    def read(self, spans: Sequence[tuple[int, Span]], data: memoryview) -> None:
        """Writes the rows of each span to a place of `data`, and compares their checksums."""
        file, width, sampled = self.file, self.header.row_bytes, self.header.sampled
        for begin, (_, number, entry, a, b) in spans:
            if a == b:
                continue
            into = data[begin : begin + (b - a) * width]
            if sampled:
                _, packed_rows = self.document(number - self.first)
                rows = unpacked(str(self.name), packed_rows[:-4], entry.tokens, self.header)
                into[:] = bytes_of(rows[a:b])
                continue
            file.read_into(entry.place + a * width, into)
            if not is_whole(into, entry.check, a, b):
                self._damaged(number - self.first, entry, a, into)

    def _damaged(self, document: int, entry: Entry, first: int, data: Any) -> NoReturn:
        """Raises for a document with damaged bytes in these rows, which begin at row `first`."""
        width, where = self.header.row_bytes, "the rows"
        if not self.header.sampled:
            bad = [
                i
                for i in range(first, first + len(data) // width)
                if not is_whole(data[(i - first) * width :][:width], entry.check, i, i + 1)
            ]
            a, b = bad[0], bad[-1]
            where = f"row {a}" if a == b else f"rows {a} to {b}"
        checks.damaged(self.name, f"in {where} of document {document + self.first}")
