"""Reads the tensors of a shard block by block, and compares every block with its checksum.

The checksums follow the tensors in the same file, one CRC-32 per BLOCK bytes (store/format.py). A
read copies whole blocks and compares the copy, so it raises if a byte has changed since the shard
was written, or if the file was cut off. Files are not memory-mapped, because the system kills a
process that reads a mapped file beyond its end.
"""

import os
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from . import file_checks
from .format import BLOCK

KEPT_OPEN = 128  # largest number of open shards; many systems limit a process to 1,024 open files
_recent: deque["weakref.ref[Blocks]"] = deque()


class Blocks:
    """Reads the tensors of a file: `size` bytes from byte `start`."""

    def __init__(self, path: Path, start: int, size: int, checked: bool):
        self.path, self.start, self.size, self.checked = path, start, size, checked
        # Absolute, because the process may change its folder before it opens the file again.
        self._absolute = path.absolute()
        self._file: _File | None = None
        self._header: bytes | None = None  # the bytes before the tensors

    def read(self, begin: int, end: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        if begin == end:
            return torch.empty(0, dtype=dtype)
        (piece,) = self.pieces([(begin, end)])
        return torch.frombuffer(piece, dtype=dtype)

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Copies the bytes of each range. A block that several ranges share is read only once."""
        file, unit = self._file or self._opened(), BLOCK if self.checked else 1
        runs: list[list[int]] = []  # ranges [first, end) of block numbers to read, ascending
        complete, shift, places = 0, 0, [0] * len(ranges)
        for number in sorted(range(len(ranges)), key=ranges.__getitem__):
            begin, end = ranges[number]
            first, last = begin // unit, -(-end // unit)
            if not runs or first > runs[-1][1]:
                complete += runs[-1][1] - runs[-1][0] if runs else 0
                shift = (first - complete) * unit
                runs.append([first, last])
            elif last > runs[-1][1]:
                runs[-1][1] = last
            places[number] = begin - shift
        sizes = [min(last * unit, self.size) - first * unit for first, last in runs]
        data, at = memoryview(bytearray(sum(sizes))), 0
        for (first, _), size in zip(runs, sizes, strict=True):
            file.read(self.start + first * unit, data[at : at + size])
            at += size
        if self.checked:
            self._compare(data, file.checksums, runs)
        return [data[p : p + b - a] for p, (a, b) in zip(places, ranges, strict=True)]

    def _compare(self, data: memoryview, checksums: memoryview, runs: list[list[int]]) -> None:
        """Compares `data`, the blocks of `runs` one after the other, with their checksums."""
        crc32, wanted = zlib.crc32, []
        for first, last in runs:
            wanted += checksums[first:last]
        found = [crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        if found != wanted:
            blocks = chain.from_iterable(range(*run) for run in runs)
            block = next(b for b, a, c in zip(blocks, found, wanted, strict=True) if a != c)
            file_checks.changed_block(self.path, self.start + block * BLOCK)

    def close(self) -> None:
        """Closes the file after all current reads. The next read opens the file again."""
        self._file = None

    def _opened(self) -> "_File":
        file = _File(self._absolute)
        header = bytearray(self.start)
        file.read(0, memoryview(header))
        if self._header is not None and self._header != header:
            file_checks.replaced(self.path)
        self._header = bytes(header)
        if self.checked:
            stored = memoryview(bytearray(checksum_bytes(self.size)))
            file.read(self.start + self.size, stored)
            file.checksums = stored.cast("I")
        self._file = file
        _recent.append(weakref.ref(self))
        while len(_recent) > KEPT_OPEN:
            oldest = _recent.popleft()()
            if oldest is not None and oldest is not self:
                oldest._file = None
        return file


class _File:
    """An open file. It is closed when no thread refers to it, so that all reads can finish."""

    def __init__(self, path: Path):
        self.path, self.checksums = path, memoryview(b"")
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, place: int, into: memoryview) -> None:
        while into:
            done = os.preadv(self.number, [into], place)
            if not done:
                file_checks.shorter(self.path)
            into, place = into[done:], place + done

    def __del__(self):
        if hasattr(self, "number"):  # `number` is missing if os.open failed
            os.close(self.number)


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """One checksum per block of a file, as bytes. `tensors` come in the order of the file."""
    found, checksum, room = [], 0, BLOCK
    for t in tensors:
        view = memoryview(buffer(t)).cast("B")
        while view:
            piece, view = view[:room], view[room:]
            checksum, room = zlib.crc32(piece, checksum), room - len(piece)
            if not room:
                found.append(checksum)
                checksum, room = 0, BLOCK
    if room < BLOCK:
        found.append(checksum)
    return _as_bytes(found)


def _as_bytes(numbers: list[Any]) -> Tensor:
    data = bytearray().join(n.to_bytes(4, "little") for n in numbers)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()


def checksum_bytes(size: int) -> int:
    """Size of the checksums of `size` bytes of tensors."""
    return 4 * -(-size // BLOCK)
