"""A shard: a file of finished documents, written once and then mapped into memory.

store/format.py describes the columns of the file, targets/safetensors.py reads and writes it.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets import safetensors
from . import checks
from .format import (
    FORMAT,
    VERSION,
    Header,
    Table,
    field_at,
    joined,
    pack,
    packed_length,
    unpack,
    widths,
)
from .lookup import index_of


class Shard:
    """The columns of a shard, mapped into memory.

    Opening a shard reads its header and the column `starts`.
    """

    def __init__(self, path: Path, header: Header):
        self.path, self.header = path, header
        file = safetensors.read_header(path)
        checks.shard_format(path, file.metadata, FORMAT, VERSION)
        text = file.metadata.get("header", "")
        checks.same_header(path, Header.from_json(path, text), header, "store.json")
        self.digest = file.metadata.get("sha256", "")
        checks.shard_columns(path, file.entries, _wanted(header, file.entries))
        self.columns: dict[str, Tensor] = safetensors.mapped(path, file)
        self.starts = self.columns["starts"]
        self.rows = {name: self.columns[name] for name in header.layout()}
        checks.shard_starts(path, self.starts, len(self.rows["top"]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def span(self, document: int) -> tuple[int, int]:
        a, b = self.starts[document : document + 2].tolist()
        return a, b

    def tokens(self, begin: int, end: int) -> Tensor:
        first = begin - begin % 8  # a token whose fields all begin at a byte
        fields = {
            width: self.columns[f"tokens.{width}"][
                packed_length(first, width) : packed_length(end, width)
            ]
            for width, _ in widths(self.header.bits)
        }
        return unpack(fields, end - first, torch.int64)[begin - first :]

    def tokens_at(self, places: Tensor) -> Tensor:
        tokens, shift = torch.zeros_like(places), 0
        for width, _ in widths(self.header.bits):
            tokens |= field_at(self.columns[f"tokens.{width}"], width, places) << shift
            shift += width
        return tokens

    def rows_of(self, begin: int, end: int) -> Table:
        return {name: column[begin:end] for name, column in self.rows.items()}


def write_shard(path: Path, header: Header, documents: list[tuple[Tensor, Table]]) -> None:
    """Writes a whole shard or nothing. After the return, the shard survives a loss of power."""
    tokens = torch.cat([tokens for tokens, _ in documents])
    starts = torch.tensor([0, *(len(tokens) for tokens, _ in documents)]).cumsum(0)
    columns = joined([rows for _, rows in documents])
    columns |= {f"tokens.{w}": field for w, field in pack(tokens, header.bits).items()}
    columns["starts"] = starts
    columns["index.hash"], columns["index.doc"] = index_of(tokens, starts)
    metadata = {
        "format": FORMAT, "version": VERSION, "header": header.to_json(),
        "sha256": digest_of(columns),
    }  # fmt: skip
    safetensors.write(path, columns, metadata, durable=True)


def digest_of(columns: dict[str, Tensor]) -> str:
    """SHA-256 of the columns, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        digest.update(f"{name}:".encode())
        digest.update(safetensors.buffer(columns[name].contiguous()))
    return digest.hexdigest()


def _wanted(header: Header, entries: dict) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every column of a shard.

    The numbers of documents, tokens and index entries are taken from the file's own entries.
    """

    def length(name: str) -> int:
        shape = entries[name].shape if name in entries else ()
        return shape[0] if shape else 0

    T, E = length("top"), length("index.hash")
    wanted = {name: (dtype, (T, *shape)) for name, (dtype, shape) in header.layout().items()}
    for width, dtype in widths(header.bits):
        wanted[f"tokens.{width}"] = (dtype or torch.uint8, (packed_length(T, width),))
    wanted["starts"] = (torch.int64, (max(length("starts"), 2),))
    return wanted | {"index.hash": (torch.int64, (E,)), "index.doc": (torch.int32, (E,))}


def header_of(path: Path) -> Header:
    """The header of the store in a folder."""
    checks.is_store(path)
    file = path / "store.json"
    with open(file, "rb") as f:
        return Header.from_json(file, f.read(1 << 17))


def write_header(path: Path, header: Header) -> Header:
    """Writes store.json unless it exists; returns the header that is in the folder afterwards."""
    unfinished = path / f"store.json.{os.getpid()}.unfinished"
    unfinished.write_text(header.to_json())
    try:
        os.link(unfinished, path / "store.json")  # fails if another writer was faster
    except FileExistsError:
        pass
    finally:
        unfinished.unlink()
    return header_of(path)


def shard_path(path: Path, rank: int | str, number: int) -> Path:
    return path / f"{rank}-{number:06}.safetensors"


def shards_of(path: Path, header: Header) -> list[Any]:
    return [Shard(file, header) for file in sorted(path.glob("*-*.safetensors"))]
