"""Finds documents by their tokens: sorted hashes of all documents, in files that grow like a log.

A search reads the first key of each block once, and then one block, so it needs 8 bytes of memory
per BLOCK documents. A writer adds one run, the file A-B.lookup of the shards A to B - 1, per shard,
and merges the last runs while the one before is not larger: there are about log2(shards) runs, and
a document is copied as often.
"""

import hashlib
import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..targets.safetensors import replaced
from . import checks
from .format import bytes_of
from .shard import File

FIRST = 32
BLOCK = 256  # documents per checksum
PIECE = 1 << 10  # blocks that a merge reads at once
Entries = tuple[Tensor, Tensor]  # keys and numbers


class Hashes(NamedTuple):
    key: int
    check: int


def hashes_of(tokens: Tensor) -> Hashes:
    """The hashes of a whole document, int64 (T,)."""
    data = bytes_of(tokens.to(torch.int32))
    whole = int.from_bytes(_hash(data, 16), "little")
    return Hashes(_first_of(data) << 24 | whole & 2**24 - 1, (whole >> 64) - 2**63)


def keys_from(tokens: Tensor) -> tuple[int, int]:
    """The smallest and largest key of a document that begins with these tokens, at least 32."""
    first = _first_of(bytes_of(tokens[:FIRST].to(torch.int32)))
    return first << 24, first << 24 | 2**24 - 1


def _first_of(data: bytes) -> int:
    return int.from_bytes(_hash(data[: 4 * FIRST], 8), "little") >> 25


def _hash(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


class Run(NamedTuple):
    """A run of the listed shards `begin` to `end` - 1."""

    begin: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.begin}-{self.end}.lookup"


def run_bytes(documents: int) -> int:
    return 16 * documents + 12 * -(-documents // BLOCK) + 4


class RunFile:
    def __init__(self, file: File, documents: int, name: object | None = None):
        self.name, self.documents = name or file.path, documents
        self.file, self.blocks = file, -(-documents // BLOCK)
        size = os.fstat(self.file.number).st_size
        checks.size_of_file(self.name, size, run_bytes(documents))
        data = self.file.read(size - 8 * self.blocks - 4, 8 * self.blocks + 4)
        checks.lookup_bytes(self.name, _is_right(memoryview(data)))
        self.firsts = memoryview(data)[:-4].cast("q")

    def numbers(self, low: int, high: int) -> list[int]:
        """The numbers of all documents whose keys are in [low, high]."""
        found: list[int] = []
        # Equal keys can begin in the block before the first block that begins with one.
        block = max(0, bisect_left(self.firsts, low) - 1)
        for n in range(block, bisect_right(self.firsts, high)):
            keys, numbers = self._block(n)
            found += numbers[bisect_left(keys, low) : bisect_right(keys, high)]
        return found

    def _block(self, n: int) -> tuple[memoryview, memoryview]:
        size = min(BLOCK, self.documents - n * BLOCK)
        data = memoryview(self.file.read(n * (16 * BLOCK + 4), 16 * size + 4))
        checks.lookup_bytes(self.name, _is_right(data))
        values = data[:-4].cast("q")
        return values[:size], values[size:]

    def pieces(self) -> Iterator[Entries]:
        """All entries, in pieces."""
        for first in range(0, self.blocks, PIECE):
            blocks = [self._block(n) for n in range(first, min(first + PIECE, self.blocks))]
            keys, numbers = (bytearray().join(part) for part in zip(*blocks, strict=True))
            yield (
                torch.frombuffer(keys, dtype=torch.int64),
                torch.frombuffer(numbers, dtype=torch.int64),
            )


def _is_right(data: memoryview) -> bool:
    return zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")


def extended(
    folder: Path, runs: Sequence[Run], sizes: Sequence[int], entries: Entries
) -> list[Run]:
    """Writes the run of one more shard, and returns the runs of all shards.

    `sizes` has the number of documents of each listed shard before it. The last runs are merged
    into the new one, but their files stay.
    """
    keys, order = entries[0].sort()
    kept, merged, documents = list(runs), [[(keys, entries[1][order])]], len(keys)
    while kept and (of_last := sum(sizes[kept[-1].begin : kept[-1].end])) <= documents:
        last = kept.pop()
        merged.append(RunFile(File(folder / last.name), of_last).pieces())
        documents += of_last
    run = Run(kept[-1].end if kept else 0, len(sizes) + 1)
    _write(folder / run.name, _merged(merged))
    return [*kept, run]


def _merged(sources: Sequence[Iterable[Entries]]) -> Iterator[Entries]:
    """Merges sorted entries, of which only a piece per source is in memory."""
    waiting = [(next(source, None), source) for source in map(iter, sources)]
    waiting = [(piece, source) for piece, source in waiting if piece is not None]
    while waiting:
        # Up to the smallest last key of a piece, nothing can follow in any source.
        limit = min(int(keys[-1]) for (keys, _), _ in waiting)
        parts, rest = [], []
        for (keys, numbers), source in waiting:
            n = int(torch.searchsorted(keys, limit, right=True))
            parts.append((keys[:n], numbers[:n]))
            piece = (keys[n:], numbers[n:]) if n < len(keys) else next(source, None)
            if piece is not None:
                rest.append((piece, source))
        keys, numbers = (torch.cat(part) for part in zip(*parts, strict=True))
        keys, order = keys.sort(stable=True)
        yield keys, numbers[order]
        waiting = rest


def _write(path: Path, pieces: Iterable[Entries]) -> None:
    firsts = bytearray()
    left = (torch.empty(0, dtype=torch.int64),) * 2
    with replaced(path) as file:
        for piece in pieces:
            keys, numbers = (torch.cat(pair) for pair in zip(left, piece, strict=True))
            whole = len(keys) - len(keys) % BLOCK
            firsts += _write_blocks(file, keys[:whole], numbers[:whole])
            left = keys[whole:], numbers[whole:]
        firsts += _write_blocks(file, *left)
        file.write(firsts + zlib.crc32(firsts).to_bytes(4, "little"))


def _write_blocks(file, keys: Tensor, numbers: Tensor) -> bytes:
    """Writes blocks, and returns their first keys."""
    for a in range(0, len(keys), BLOCK):
        data = bytes_of(torch.cat((keys[a : a + BLOCK], numbers[a : a + BLOCK])))
        file.write(data + zlib.crc32(data).to_bytes(4, "little"))
    return bytes_of(keys[::BLOCK])
