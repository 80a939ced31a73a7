"""Shards: files of finished documents, which never change.

    start       the magic bytes, the length of the next field as U32, and JSON: store.json, the
                part and the number of the shard
    documents   one after the other, each an entry and its rows
    table       the entries of all documents once more
    end         magic bytes, the numbers of documents and tokens, and the place of the table, each
                U64, and a CRC-32 of these bytes

An entry (ENTRY) has 40 bytes: the place and the size of the document's rows in the file, two hashes
of its tokens (store/lookup.py), its number of tokens, and a CRC-32 of the 36 bytes before. So the
40 bytes at `table + 40 * d` tell where document d is. Its rows (store/format.py) come in groups of
GROUP = 32, each followed by the CRC-32 of the group: a range of rows is one read. With
values="counts", the whole document is one group (store/counts.py).

A reader compares what it reads with the checksums, so it raises if a byte has changed. Files are
not memory-mapped, because the system kills a process that reads a mapped file beyond its end.
"""

import json
import os
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from . import checks
from .counts import packed, unpacked
from .format import GROUP, Header, bytes_of

MAGIC, LAST = b"LLSHARD3", b"LLTABLE3"
ENTRY = struct.Struct("<QQqqII")
END = struct.Struct("<8sQQQI")
KEPT_OPEN = 128  # largest number of open shards; many systems limit a process to 1,024 open files
IOV = 1024  # largest number of buffers of one read
PIECE = 1 << 30  # largest number of bytes of one read
_recent: deque["weakref.ref[Shard]"] = deque()


class Entry(NamedTuple):
    place: int
    size: int
    key: int
    check: int
    tokens: int

    def packed(self) -> bytes:
        data = ENTRY.pack(*self, 0)
        return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


class Listed(NamedTuple):
    """A shard in store.index."""

    shard: str  # PART-NUMBER
    size: int
    documents: int
    tokens: int
    crc: int  # CRC-32 of the table

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


def entry_of(data: bytes) -> Entry | None:
    """The entry with these bytes, or None if its checksum is wrong."""
    *fields, crc = ENTRY.unpack(data)
    return Entry(*fields) if zlib.crc32(data[:-4]) == crc else None


def listed_of(path: Path, shard: str) -> Listed:
    """What store.index lists of a finished shard."""
    file = File(path)
    size = os.fstat(file.number).st_size
    data = file.read(size - END.size, END.size) if size > END.size else bytes(END.size)
    magic, documents, tokens, table, crc = END.unpack(data)
    right = magic == LAST and zlib.crc32(data[:-4]) == crc
    checks.end_of_shard(path, right and table + ENTRY.size * documents + END.size == size)
    entries = file.read(table, ENTRY.size * documents)
    return Listed(shard, size, documents, tokens, zlib.crc32(entries))


def document_of(rows: Tensor, header: Header) -> bytes:
    """The rows of one document as on disk, with their checksums."""
    if header.sampled:
        data = packed(rows, header)
        return data + zlib.crc32(data).to_bytes(4, "little")
    rows = rows.contiguous()
    view, size, parts = memoryview(buffer(rows)).cast("B"), GROUP * header.row_bytes, []
    for a in range(0, len(view), size):
        group = view[a : a + size]
        parts += group, zlib.crc32(group).to_bytes(4, "little")
    return b"".join(parts)


def document_bytes(n: int, header: Header) -> int | None:
    """The size of n rows on disk, or None if it depends on them."""
    return None if header.sampled else n * header.row_bytes + 4 * -(-n // GROUP)


def groups_in(data: bytes, header: Header) -> Iterator[bool]:
    """Whether each group in the bytes of a document has its checksum."""
    view = memoryview(data)
    size = len(view) if header.sampled else GROUP * header.row_bytes + 4
    for a in range(0, len(view), size):
        group = view[a : a + size]
        yield zlib.crc32(group[:-4]) == int.from_bytes(group[-4:], "little")


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

    def read_into(self, place: int, buffers: Sequence[memoryview]) -> None:
        """Fills several buffers with the bytes that follow each other in the file."""
        for first in range(0, len(buffers), IOV):
            some = buffers[first : first + IOV] if len(buffers) > IOV else buffers
            size = sum(map(len, some))
            if os.preadv(self.number, some, place) < size:  # at the end of the file, or above 2 GiB
                for part in some:
                    part[:] = self.read(place, len(part))
                    place += len(part)
            else:
                place += size

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
            file = File(self.folder.local(listed.name, listed.size, listed.crc))
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
        self._file = None

    def entry(self, document: int) -> Entry:
        entry = entry_of(self.file.read(self.table + ENTRY.size * document, ENTRY.size))
        if entry is None:
            checks.damaged(self.name, f"in the table, at document {document + self.first}")
        return entry

    def entries(self) -> Tensor:
        """The table as int64 (D, 5): place, size, key, check and tokens, all without a copy."""
        data = bytearray(self.file.read(self.table, ENTRY.size * len(self)))
        if zlib.crc32(data) != self.listed.crc:
            for document in range(len(self)):
                self.entry(document)
            checks.damaged(self.name, "in the table")
        table = torch.frombuffer(data, dtype=torch.int64).view(-1, 5).clone()
        table[:, 4] &= 2**32 - 1  # the upper half is the checksum
        return table

    def document(self, document: int, entry: Entry) -> bytes:
        """The bytes of a document, compared with its checksums."""
        data = self.file.read(entry.place, entry.size)
        for g, right in enumerate(groups_in(data, self.header)):
            if not right:
                self._damaged(document, g)
        return data

    def read_rows(self, document: int, entry: Entry, a: int, b: int, into: memoryview) -> None:
        """Writes the rows a to b - 1 of a document into `into`, and compares their checksums."""
        if self.header.sampled:
            data = self.document(document, entry)[:-4]
            rows = unpacked(str(self.name), data, entry.tokens, self.header)
            into[:] = bytes_of(rows[a:b])
            return
        width, tokens = self.header.row_bytes, entry.tokens
        begin, end = a - a % GROUP, min(b + -b % GROUP, tokens)
        rows = into if end - begin == b - a else memoryview(bytearray((end - begin) * width))
        size, buffers = GROUP * width, []
        checksums = memoryview(bytearray(4 * -(-(end - begin) // GROUP)))
        for g, at in enumerate(range(0, len(rows), size)):
            buffers += rows[at : at + size], checksums[4 * g : 4 * g + 4]
        self.file.read_into(entry.place + begin * width + 4 * (begin // GROUP), buffers)
        for g, checksum in enumerate(checksums.cast("I")):
            if zlib.crc32(buffers[2 * g]) != checksum:
                self._damaged(document, begin // GROUP + g)
        if rows is not into:  # the groups have other rows too
            into[:] = rows[(a - begin) * width : (b - begin) * width]

    def _damaged(self, document: int, group: int) -> NoReturn:
        where = f"rows {group * GROUP} to {group * GROUP + GROUP - 1}"
        where = "the rows" if self.header.sampled else where
        checks.damaged(self.name, f"in {where} of document {document + self.first}")
