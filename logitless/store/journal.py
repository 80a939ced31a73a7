"""The journal of a writer: documents that are not in a shard yet, appended one by one.

    bytes 0-3     LLJ1
    bytes 4-7     the number of the shard that the documents will be in
    then one record per document:
    8 bytes       n, the number of tokens
    4 bytes       CRC-32 of the tokens and rows
    8 n bytes     the tokens
    ...           the rows, column by column, encoded as in a shard (store/format.py)

A killed writer may leave a last record that is too short or has a wrong checksum. Recovery cuts
such a record off. If the journal's shard exists, the writer was killed after writing the shard and
before clearing the journal. Recovery then discards the documents, because the shard has them.
"""

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from . import checks
from .format import Header, Table
from .shard import shard_path

MAGIC = b"LLJ1"
START = 8  # bytes before the first record
RECORD = 12  # bytes before the tokens


class Journal:
    """The journal for shard `number`. Call `recover` before `append`."""

    def __init__(self, path: Path, header: Header, number: int):
        self.path, self.header, self.number = path, header, number
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.size = 0

    def recover(self) -> list[tuple[Tensor, Table]]:
        """Returns the complete documents and cuts off anything after them."""
        end = os.fstat(self.file).st_size
        start = os.pread(self.file, START, 0)
        checks.is_journal(self.path, start, MAGIC)
        number = int.from_bytes(start[len(MAGIC) :], "little")
        if len(start) < START or number < self.number:
            self.clear(self.number)
            return []
        self.number = number
        documents, self.size = [], START
        while (record := self._read(self.size, end)) is not None:
            document, self.size = record
            documents.append(document)
        os.ftruncate(self.file, self.size)
        return documents

    def append(self, tokens: Tensor, rows: Table) -> None:
        """Appends one document; if an error occurs, nothing of it stays in the file."""
        buffers = [buffer(tokens)] + [buffer(rows[name]) for name in self.header.layout()]
        checksum = 0
        for data in buffers:
            checksum = zlib.crc32(data, checksum)
        head = len(tokens).to_bytes(8, "little") + checksum.to_bytes(4, "little")
        place = self.size
        try:
            for data in (head, *buffers):
                place = _write(self.file, memoryview(data).cast("B"), place)
        except BaseException:
            os.ftruncate(self.file, self.size)
            raise
        self.size = place

    def clear(self, number: int) -> None:
        """Empties the journal, which then belongs to shard `number`."""
        self.number = number
        os.ftruncate(self.file, 0)
        self.size = _write(self.file, memoryview(self._start()), 0)

    def close(self) -> None:
        os.close(self.file)

    def _start(self) -> bytes:
        return MAGIC + self.number.to_bytes(4, "little")

    def _read(self, place: int, end: int) -> tuple[tuple[Tensor, Table], int] | None:
        """The document at `place` and the end of its record; None if the record is damaged."""
        head = os.pread(self.file, RECORD, place)
        n = int.from_bytes(head[:8], "little")
        length = n * (8 + self.header.row_bytes())
        if len(head) < RECORD or n == 0 or length > end - place - RECORD:
            return None
        data = bytearray(_read(self.file, length, place + RECORD))
        if len(data) < length or zlib.crc32(data) != int.from_bytes(head[8:], "little"):
            return None
        tokens, at, rows = torch.frombuffer(data, dtype=torch.int64, count=n).clone(), 8 * n, {}
        for name, (dtype, shape) in self.header.layout().items():
            rows[name] = torch.empty((n, *shape), dtype=dtype)
            size = rows[name].numel() * dtype.itemsize
            if size:
                column = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
                rows[name].view(-1).view(torch.uint8).copy_(column)
            at += size
        return (tokens, rows), place + RECORD + length


def _write(file: int, data: memoryview, place: int) -> int:
    """Writes all data and returns its end. A single call of pwrite may write less."""
    while data:
        done = os.pwrite(file, data, place)
        data, place = data[done:], place + done
    return place


def _read(file: int, length: int, place: int) -> bytes:
    """Reads `length` bytes in pieces of 1 GiB, because one call returns at most 2 GiB."""
    pieces = []
    while length and (piece := os.pread(file, min(length, 1 << 30), place)):
        pieces.append(piece)
        length, place = length - len(piece), place + len(piece)
    return b"".join(pieces)


def unfinished(path: Path) -> int:
    """The number of bytes in the journals of a store that are not in a shard yet.

    The journals belong to open writers or to writers that were killed. A damaged last record
    counts as well.
    """
    size = 0
    for journal in path.glob("[0-9]*.journal"):
        with open(journal, "rb") as file:
            number = int.from_bytes(file.read(START)[len(MAGIC) :], "little")
        if not shard_path(path, journal.stem, number).exists():
            size += max(0, journal.stat().st_size - START)
    return size
