"""The journal of a writer: a file with the documents that are not in a shard yet.

    bytes 0-3     LLJ2
    bytes 4-7     the number of the shard that the documents will be in
    then one record per document:
    4 bytes       n, the number of tokens
    4 bytes       k, the number of slots (stored ids) per token; 0 if the rows are already encoded
    4 bytes       CRC-32 of the tokens and rows
    8 n bytes     the tokens
    ...           the rows, column by column, encoded as in a shard (store/format.py)

`Writer.add` does not encode the rows of a short document whose targets are on the CPU; they are
encoded together when their shard is written. The rows of such a record, whose k is at least 1, are:

    8 n k bytes   ids; negative if the slot is masked
    4 n k bytes   log-probabilities, fp32
    4 n bytes     tails, fp32; NaN if the targets have no tail

If a writer is killed, the last record can be too short or have a wrong checksum. Recovery cuts such
a record off, and ignores any other with a wrong checksum, and documents that are already in a
shard: the writer may have been killed between writing the shard and clearing the journal. In
memory, a writer keeps only a digest and the offset of each document, whatever its length.
"""

import mmap
import os
import struct
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from ..targets.sparse import SparseTargets, unchecked
from . import file_checks
from .folder import journals, shard_path
from .format import Header
from .rows import Table, encoded, tensor_of

MAGIC = b"LLJ2"
START = 8  # bytes before the first record
HEAD = struct.Struct("<III")  # n, k and CRC-32, at the start of each record
RECORD = HEAD.size
ROWS = 4096  # number of rows of short documents that are encoded at once
AT_ONCE = 1 << 16  # number of tokens that recovery looks up in the store at once


class Journal:
    """A journal of the documents that will be in shard `number`. `recover` must be called first."""

    def __init__(self, path: Path, header: Header, number: int):
        self.path, self.header, self.number = path, header, number
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.close = weakref.finalize(self, os.close, self.file)
        self.size, self.tokens = 0, 0
        self.layout = {"tokens": (torch.int64, ()), **header.layout()}
        self.sizes = {name: d.itemsize * (s[0] if s else 1) for name, (d, s) in self.layout.items()}
        self.places = array("Q")  # byte offsets of the records that belong to the next shard

    def __len__(self) -> int:
        return len(self.places)

    def recover(
        self, known: Callable[[Tensor, Tensor], Iterable[bool]], keep: Callable[[Tensor], None]
    ) -> None:
        """Finds the undamaged records, and cuts off all bytes after the last of them.

        `known(tokens, starts)` tells, for each document, whether the store has it; these records
        are ignored. `keep` is called with the tokens of every other document.
        """
        end = os.fstat(self.file).st_size
        start = os.pread(self.file, START, 0)
        if len(start) < START or not any(start):  # a loss of power can leave a file of zeros
            self.clear(self.number)
            return
        file_checks.is_journal(self.path, start, MAGIC)
        self.size = START
        for some in _in_groups(self._complete(end)):
            starts = torch.tensor([0, *(len(tokens) for _, tokens in some)]).cumsum(0)
            in_store = known(torch.cat([tokens for _, tokens in some]), starts)
            for (place, tokens), is_known in zip(some, in_store, strict=True):
                if not is_known:
                    self.places.append(place)
                    self.tokens += len(tokens)
                    keep(tokens)
        if not self.places:
            self.clear(self.number)
            return
        os.ftruncate(self.file, self.size)
        _write(self.file, memoryview(self._start()), 0)

    def append(self, tokens: Tensor, starts: Sequence[int], rows: Table) -> None:
        """Appends encoded documents. If an error occurs, the file stays unchanged."""
        parts = [rows[name] for name in self.layout if name != "tokens"]
        self._append(tokens, starts, 0, parts)

    def append_targets(self, tokens: Tensor, targets: SparseTargets) -> None:
        """Appends a document whose rows `columns` encodes later."""
        ids = targets.ids.long()
        if targets.mask is not None:
            ids = ids.masked_fill(targets.mask == 0, -1)
        if targets.tail is None:
            tail = torch.full((len(tokens),), torch.nan, dtype=torch.float32)
        else:
            tail = targets.tail.detach().float()
        parts = [ids, targets.logprobs.detach().float(), tail]
        self._append(tokens, (0, len(tokens)), targets.k, parts)

    def _append(
        self, tokens: Tensor, starts: Sequence[int], k: int, rows: Sequence[Tensor]
    ) -> None:
        parts = [t.contiguous() for t in (tokens, *rows)]  # keeps the memory of `views` alive
        views = [memoryview(buffer(t)).cast("B") for t in parts]
        sizes = [len(view) // len(tokens) for view in views]
        records, places, end = [], [], self.size
        for a, b in pairwise(starts):
            record = b"".join([v[a * n : b * n] for v, n in zip(views, sizes, strict=True)])
            records += HEAD.pack(b - a, k, zlib.crc32(record)), record
            places.append(end)
            end += RECORD + len(record)
        try:
            self.size = _write(self.file, memoryview(b"".join(records)), self.size)
        except BaseException:
            os.ftruncate(self.file, self.size)
            raise
        self.places.extend(places)
        self.tokens += starts[-1] - starts[0]

    def clear(self, number: int) -> None:
        self.number = number
        os.ftruncate(self.file, 0)
        self.size = _write(self.file, memoryview(self._start()), 0)
        self.places, self.tokens = array("Q"), 0

    def _start(self) -> bytes:
        return MAGIC + self.number.to_bytes(4, "little")

    def columns(self) -> tuple[Tensor, Tensor, Table]:
        """The tokens, starts and encoded rows of all documents, as columns of a shard."""
        columns = {name: bytearray(self.tokens * size) for name, size in self.sizes.items()}
        starts, waiting, rows = [0], [], 0

        def put(first: int, n: int, part: Mapping[str, Any]) -> None:
            for name, data in part.items():
                size = self.sizes[name]
                columns[name][first * size : (first + n) * size] = data

        with mmap.mmap(self.file, self.size, access=mmap.ACCESS_READ) as mapped:
            for place in self.places:
                n, k, checksum = HEAD.unpack_from(mapped, place)
                at, first = place + RECORD, starts[-1]
                record = mapped[at : at + self._length(n, k)]
                file_checks.same_record(self.path, zlib.crc32(record) == checksum)
                starts.append(first + n)
                if k == 0:
                    put(first, n, _cut(record, {name: n * s for name, s in self.sizes.items()}))
                    continue
                if rows >= ROWS or (waiting and waiting[0].k != k):
                    self._encode(waiting, put)
                    waiting, rows = [], 0
                waiting.append(_Waiting(first, n, k, record))
                rows += n
            self._encode(waiting, put)
        table = {
            name: tensor_of(data, starts[-1], *self.layout[name]) for name, data in columns.items()
        }
        return table.pop("tokens"), torch.tensor(starts), table

    def _encode(self, waiting: "list[_Waiting]", put: Callable) -> None:
        """Encodes several documents with the same number of slots together."""
        if not waiting:
            return
        rows = encoded(_targets(waiting), self.header)
        views = {name: memoryview(buffer(t)).cast("B") for name, t in rows.items()}
        a = 0
        for first, n, records in _runs(waiting):
            parts = {name: view[a * self.sizes[name] :][: n * self.sizes[name]]
                     for name, view in views.items()}  # fmt: skip
            tokens = b"".join([w.record[: 8 * w.n] for w in records])
            put(first, n, {"tokens": tokens, **parts})
            a += n

    def _length(self, n: int, k: int) -> int:
        """The bytes of a record's n tokens and rows of k slots; k is 0 if the rows are encoded."""
        return n * (8 + k * 12 + 4) if k else n * sum(self.sizes.values())

    def _complete(self, end: int) -> Iterator[tuple[int, Tensor]]:
        """Yields the offset and the tokens of each undamaged record, and sets `self.size`."""
        place = self.size
        while len(head := os.pread(self.file, RECORD, place)) == RECORD:
            n, k, checksum = HEAD.unpack(head)
            length = self._length(n, k)
            if n == 0 or k > self.header.k or length > end - place - RECORD:
                return
            data = _read(self.file, length, place + RECORD)
            if len(data) == length and zlib.crc32(data) == checksum:
                tokens = torch.frombuffer(bytearray(data[: 8 * n]), dtype=torch.int64)
                if int(tokens.min()) >= 0 and int(tokens.max()) < self.header.vocab_size:
                    yield place, tokens
                    self.size = place + RECORD + length
            place += RECORD + length


def _in_groups(records: Iterable[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yields groups of documents with about AT_ONCE tokens in total."""
    group, tokens = [], 0
    for record in records:
        group.append(record)
        tokens += len(record[1])
        if tokens >= AT_ONCE:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _cut(record: bytes, sizes: dict[str, int]) -> dict[str, bytes]:
    ends = accumulate(sizes.values())
    return {
        name: record[end - size : end]
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


class _Waiting(NamedTuple):
    first: int  # the document's first row in the shard
    n: int
    k: int
    record: bytes


def _runs(waiting: list[_Waiting]) -> Iterator[tuple[int, int, list[_Waiting]]]:
    """Groups documents whose rows are adjacent: first row, number of rows, documents."""
    group: list[_Waiting] = []
    for one in [*waiting, None]:
        if group and (one is None or one.first != group[-1].first + group[-1].n):
            yield group[0].first, sum(w.n for w in group), group
            group = []
        if one is not None:
            group.append(one)


def _targets(waiting: list[_Waiting]) -> SparseTargets:
    k = waiting[0].k
    parts = [
        _cut(w.record, {"tokens": 8 * w.n, "ids": 8 * w.n * k, "logprobs": 4 * w.n * k,
                        "tail": 4 * w.n})
        for w in waiting
    ]  # fmt: skip
    data = {name: bytearray().join([p[name] for p in parts]) for name in parts[0]}
    rows = sum(w.n for w in waiting)
    ids = tensor_of(data["ids"], rows, torch.int64, (k,))
    logprobs = tensor_of(data["logprobs"], rows, torch.float32, (k,))
    tail = tensor_of(data["tail"], rows, torch.float32, ())
    missing = tail.isnan()
    if bool(missing.any()):  # as in `topk_distill`, a missing tail is log(1 - Σ p)
        mass = logprobs.masked_fill(ids < 0, -torch.inf).double().exp().sum(-1)
        tail = torch.where(missing, torch.log1p(-mass.clamp_max(1)).float(), tail)
    return unchecked(ids.clamp_min(0), logprobs, tail, ids >= 0)


def _write(file: int, data: memoryview, place: int) -> int:
    """Writes all data at the offset `place`, because one pwrite may write only a part of it."""
    while data:
        done = os.pwrite(file, data, place)
        data, place = data[done:], place + done
    return place


def _read(file: int, length: int, place: int) -> bytes:
    """Reads in pieces of 1 GiB, because one call of pread returns at most 2 GiB."""
    pieces = []
    while length and (piece := os.pread(file, min(length, 1 << 30), place)):
        pieces.append(piece)
        length, place = length - len(piece), place + len(piece)
    return b"".join(pieces)


def unfinished(path: Path) -> int:
    """Bytes of the journals, open or left by a killed writer, whose shard is not written yet."""
    size = 0
    for journal, rank in journals(path):
        with open(journal, "rb") as file:
            number = int.from_bytes(file.read(START)[len(MAGIC) :], "little")
        if not shard_path(path, rank, number).exists():
            size += max(0, journal.stat().st_size - START)
    return size
