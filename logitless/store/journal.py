"""Documents that are in no shard yet, in a file to which they are appended one by one.

    bytes 0-3     LLJ1
    bytes 4-7     the number of the shard that they will be in
    then, for each document,
    8 bytes       its number of tokens n
    4 bytes       CRC-32 of the rest
    8 n bytes     its tokens
    ...           its rows, column by column, as in a shard

A writer that was killed leaves a last record that is too short, or whose checksum is wrong: it is
cut off. A journal whose shard exists is one that was not removed any more.
"""

import os
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from . import checks as rules
from .format import Columns, Header
from .shard import shard_path

MAGIC = b"LLJ1"
START = 8  # bytes before the first record
RECORD = 12  # bytes before the tokens


class Journal:
    """Of the shard of some number; `recover` comes first."""

    def __init__(self, path: Path, header: Header, number: int):
        self.path, self.header, self.number = path, header, number
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.size = 0

    def recover(self) -> list[tuple[Tensor, Columns]]:
        """The documents that are whole; what follows them is cut off."""
        end = os.fstat(self.file).st_size
        start = os.pread(self.file, START, 0)
        rules.is_journal(self.path, start, MAGIC)
        number = int.from_bytes(start[4:], "little")
        if len(start) < START or number < self.number:
            self.clear(self.number)
            return []
        self.number = number
        found, self.size = [], START
        while (record := self._read(self.size, end)) is not None:
            document, self.size = record
            found.append(document)
        os.ftruncate(self.file, self.size)
        return found

    def append(self, tokens: Tensor, rows: Columns) -> None:
        """Whole, or not at all."""
        parts = [buffer(tokens)] + [buffer(rows[name]) for name in self.header.layout()]
        check = 0
        for part in parts:
            check = zlib.crc32(part, check)
        head = len(tokens).to_bytes(8, "little") + check.to_bytes(4, "little")
        place = self.size
        try:
            for part in (head, *parts):
                place = _write(self.file, memoryview(part).cast("B"), place)
        except BaseException:
            os.ftruncate(self.file, self.size)
            raise
        self.size = place

    def clear(self, number: int) -> None:
        """Empty, for the next shard."""
        self.number = number
        os.ftruncate(self.file, 0)
        self.size = _write(self.file, memoryview(self._start()), 0)

    def close(self) -> None:
        os.close(self.file)

    def _start(self) -> bytes:
        return MAGIC + self.number.to_bytes(4, "little")

    def _read(self, place: int, end: int) -> tuple[tuple[Tensor, Columns], int] | None:
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
                part = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
                rows[name].view(-1).view(torch.uint8).copy_(part)
            at += size
        return (tokens, rows), place + RECORD + length


def _write(file: int, data: memoryview, place: int) -> int:
    """All of it, however little the system takes at a time; returns where it ends."""
    while data:
        done = os.pwrite(file, data, place)
        data, place = data[done:], place + done
    return place


def _read(file: int, length: int, place: int) -> bytes:
    """Of at most 2 GiB at a time, which is what the system gives."""
    parts = []
    while length and (part := os.pread(file, min(length, 1 << 30), place)):
        parts.append(part)
        length, place = length - len(part), place + len(part)
    return b"".join(parts)


def unfinished(path: Path) -> int:
    """Bytes in the journals of a store whose shards are not written, a cut-off last record too.

    They are of writers at work, or that have died.
    """
    found = 0
    for journal in path.glob("[0-9]*.journal"):
        with open(journal, "rb") as file:
            number = int.from_bytes(file.read(START)[4:], "little")
        if not shard_path(path, journal.stem, number).exists():
            found += max(0, journal.stat().st_size - START)
    return found
