"""Writes and reads shards, files of documents that never change (store/format.py)."""

import bisect
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..targets import safetensors
from . import file_checks
from .blocks import Blocks, checksum_bytes, checksums
from .counts import compact, expand, slots_of
from .folder import shard_files
from .format import (
    FORMAT,
    OLDER,
    VERSION,
    Header,
    Table,
    pack,
    packed_length,
    unpack,
    widths,
)
from .index import index_of
from .rows import Pieces, recoded, table_of, tensor_of

Span = tuple[int, int]  # a range [begin, end) of rows of a shard
ROWS = 8192  # number of rows that `groups` reads at once
PIECE = 1 << 22  # number of bytes that `is_intact` reads at once


class Shard:
    """The documents of a shard.

    Opening it reads the header and the column `starts`; other rows are read when used. In version
    2, all bytes that are read are compared with their checksums.
    """

    def __init__(self, path: Path, header: Header):
        self.path, self.header = path, header
        file = safetensors.read_header(path)
        self.version = file_checks.shard_format(path, file.metadata, FORMAT, (*OLDER, VERSION))
        text = file.metadata.get("header", "")
        file_checks.same_header(path, Header.from_json(path, text), header, "store.json")
        self.digest = file.metadata.get("sha256", "")
        self.entries = file.entries
        checked = self.version == VERSION
        size = sum(e.end - e.begin for name, e in self.entries.items() if name != "crc")
        file_checks.shard_columns(path, self.entries, _wanted(header, self.entries, size, checked))
        if checked:
            file_checks.checksums_come_last(path, self.entries["crc"].begin, size)
        self.blocks = Blocks(path, file.start, size, checked)
        self._set_starts(self.column("starts"))
        file_checks.shard_starts(path, self.starts, self.entries[header.row_column].shape[0])
        if header.sampled:
            self.slots = self.column("slots")
            lengths = {
                name: (self.entries[name].shape[0], packed_length(int(self.slots[-1]), width))
                for name, width in ((f"ids.{w}", w) for w, _ in widths(header.bits))
            }
            file_checks.shard_slots(path, self.slots, lengths)

    def _set_starts(self, starts: Tensor) -> None:
        self.starts = starts
        # A memoryview reads single elements faster than a tensor.
        self._spans = memoryview(safetensors.buffer(starts)).cast("B").cast("q")

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size

    def __len__(self) -> int:
        return len(self.starts) - 1

    def span(self, document: int) -> Span:
        return self._spans[document], self._spans[document + 1]

    def column(self, name: str) -> Tensor:
        dtype, shape, begin, end = self.entries[name]
        return self.blocks.read(begin, end, dtype).view(shape)

    def tokens(self, begin: int, end: int) -> Tensor:
        tokens, (first,) = self.tokens_of([(begin, end)])
        return tokens[first : first + end - begin]

    def tokens_of(self, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        """The tokens of several spans, up to 7 others around each, and their positions."""
        return self._packed("tokens", spans)

    def _packed(self, name: str, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        """One tensor with the integers of several spans, and the position of each span.

        Every eighth integer begins at a byte boundary, so spans are extended to multiples of eight.
        """
        whole = [(begin - begin % 8, end + -end % 8) for begin, end in spans]
        counts = [b - a for a, b in whole]
        fields, ranges = widths(self.header.bits), []
        for width, _ in fields:
            _, _, offset, last = self.entries[f"{name}.{width}"]
            ranges += [
                (offset + a * width // 8, min(offset + b * width // 8, last)) for a, b in whole
            ]
        pieces, columns = self.blocks.pieces(ranges), {}
        for i, (width, dtype) in enumerate(fields):
            parts = []
            for n, piece in zip(counts, pieces[i * len(spans) :], strict=False):
                parts.append(piece)
                if missing := n * width // 8 - len(piece):
                    # At the end of a column, zeros pad the integers to a multiple of eight.
                    parts.append(bytes(missing))
            data = parts[0] if len(parts) == 1 else bytearray().join(parts)
            kind = dtype or torch.uint8
            columns[width] = tensor_of(data, len(data) // kind.itemsize, kind, ())
        places = accumulate(counts[:-1], initial=0)
        first = [at + begin % 8 for at, (begin, _) in zip(places, spans, strict=True)]
        integers = torch.empty(sum(counts), dtype=torch.int64)
        unpack(columns, integers)
        return integers, first

    def pieces_of(self, spans: Sequence[Span]) -> Pieces:
        if self.header.sampled:
            return self._sampled_pieces(spans)
        sizes, ranges = self.header.sizes(), []
        for name, size in sizes.items():
            begin = self.entries[name].begin
            ranges += [(begin + a * size, begin + b * size) for a, b in spans]
        pieces, n = self.blocks.pieces(ranges), len(spans)
        columns = {name: pieces[i * n : (i + 1) * n] for i, name in enumerate(sizes)}
        if self.version == VERSION:
            return columns
        rows = recoded(table_of(columns, self.header), self.header)
        cuts = list(pairwise(accumulate((b - a for a, b in spans), initial=0)))
        return {
            name: [bytearray(safetensors.buffer(t[a:b])) for a, b in cuts]
            for name, t in rows.items()
        }

    def _sampled_pieces(self, spans: Sequence[Span]) -> Pieces:
        """Implements `pieces_of` for sampled targets, whose rows have different lengths.

        The column `slots` has only the first slot of each document, so `draws` is read from the
        first row of the document in which a span starts, to count the slots before it.
        """
        size, offset = self.header.sizes()["draws"], self.entries["draws"].begin
        documents = [bisect.bisect_right(self._spans, a) - 1 for a, _ in spans]
        ranges = [
            (offset + self._spans[d] * size, offset + b * size)
            for d, (_, b) in zip(documents, spans, strict=True)
        ]
        found, slots = [], []
        for (a, _), d, piece in zip(spans, documents, self.blocks.pieces(ranges), strict=True):
            draws = tensor_of(piece, len(piece) // size, torch.uint8, (size,))
            ends = slots_of(draws).cumsum(0)
            before = a - self._spans[d]
            first = int(self.slots[d])
            begin = first + (int(ends[before - 1]) if before else 0)
            end = first + (int(ends[-1]) if len(ends) else 0)
            file_checks.slots_in_shard(self.path, end, int(self.slots[-1]))
            found.append(draws[before:])
            slots.append((begin, max(begin, end)))
        ids, places = self._packed("ids", slots)
        pieces: dict[str, list] = {"ids": [], "draws": []}
        for draws, place, (a, b) in zip(found, places, slots, strict=True):
            rows = expand(draws, ids[place : place + b - a], self.header)
            for name, t in rows.items():
                pieces[name].append(bytearray(safetensors.buffer(t.contiguous())))
        return pieces

    def rows_of(self, begin: int, end: int) -> Table:
        return table_of(self.pieces_of([(begin, end)]), self.header)

    def groups(self, spans: Sequence[Span]) -> Iterator[tuple[Tensor, list[int], Table]]:
        """Yields the tokens, starts and rows of documents, in groups of about ROWS rows."""
        sizes = list(accumulate((b - a for a, b in spans), initial=0))
        first = 0
        while first < len(spans):
            last = bisect.bisect_left(sizes, sizes[first] + ROWS, first + 1, len(spans))
            group = spans[first:last]
            tokens, places = self.tokens_of(group)
            parts = [tokens[p : p + b - a] for p, (a, b) in zip(places, group, strict=True)]
            starts = [size - sizes[first] for size in sizes[first : last + 1]]
            yield torch.cat(parts), starts, table_of(self.pieces_of(group), self.header)
            first = last

    def index(self) -> tuple[Tensor, Tensor]:
        """The columns index.hash and index.doc, computed from the tokens in version 1."""
        if self.version == VERSION:
            return self.column("index.hash"), self.column("index.doc")
        return index_of(self.tokens(0, int(self.starts[-1])), self.starts)

    def is_intact(self) -> bool:
        """Whether the tensors have the SHA-256 in the shard's metadata."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            if name != "crc":
                digest.update(f"{name}:".encode())
                _, _, begin, end = self.entries[name]
                for a in range(begin, end, PIECE):
                    piece = self.blocks.read(a, min(a + PIECE, end))
                    digest.update(safetensors.buffer(piece))
        return digest.hexdigest() == self.digest


def write_shard(
    path: Path, header: Header, tokens: Tensor, starts: Tensor, rows: Mapping[str, Tensor]
) -> None:
    """Writes a shard atomically and durably."""
    columns = compact(dict(rows), starts, header) if header.sampled else dict(rows)
    columns |= {f"tokens.{w}": field for w, field in pack(tokens, header.bits).items()}
    columns["starts"] = starts
    columns["index.hash"], columns["index.doc"] = index_of(tokens, starts)
    columns = {name: t.contiguous() for name, t in columns.items()}
    metadata = {
        "format": FORMAT, "version": VERSION, "header": header.to_json(),
        "sha256": digest_of(columns),
    }  # fmt: skip
    # The checksums follow the order of the columns in the file, so these are sorted here as in
    # `safetensors.write`, widest dtype first. `crc` stays last there: the sort is stable, and no
    # dtype is narrower than uint8.
    columns = dict(sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize))
    columns["crc"] = checksums(columns.values())
    safetensors.write(path, columns, metadata, durable=True)


def digest_of(columns: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the columns in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(f"{name}:".encode())
        digest.update(safetensors.buffer(columns[name]))
    return digest.hexdigest()


def _wanted(
    header: Header, entries: dict, size: int, checked: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The expected dtype and shape of every column, for the lengths that `entries` give."""

    def length(name: str) -> int:
        shape = entries[name].shape if name in entries else ()
        return shape[0] if shape else 0

    T, E = length(header.row_column), length("index.hash")
    wanted = {name: (dtype, (T, *shape)) for name, (dtype, shape) in header.layout().items()}
    if header.sampled:
        del wanted["ids"]
        for width, dtype in widths(header.bits):  # `shard_slots` checks the lengths
            name = f"ids.{width}"
            wanted[name] = (dtype or torch.uint8, (length(name),))
        wanted["slots"] = (torch.int64, (max(length("starts"), 2),))
    for width, dtype in widths(header.bits):
        wanted[f"tokens.{width}"] = (dtype or torch.uint8, (packed_length(T, width),))
    wanted["starts"] = (torch.int64, (max(length("starts"), 2),))
    wanted |= {"index.hash": (torch.int64, (E,)), "index.doc": (torch.int32, (E,))}
    return wanted | ({"crc": (torch.uint8, (checksum_bytes(size),))} if checked else {})


def shards_of(path: Path, header: Header) -> list[Shard]:
    return [Shard(file, header) for file in shard_files(path)]
