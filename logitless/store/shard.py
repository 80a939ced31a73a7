"""A shard: a file of finished documents, written once, then read where it lies in memory."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets import safetensors as _safetensors
from . import checks as rules
from .format import (
    FORMAT,
    VERSION,
    Columns,
    Header,
    field_at,
    joined,
    pack,
    packed_length,
    unpack,
    widths,
)
from .lookup import index_of


class Shard:
    """The columns of a file, mapped: opening it reads its header and where its documents begin."""

    def __init__(self, path: Path, header: Header):
        self.path, self.header = path, header
        found = _safetensors.read_header(path)
        rules.shard_format(path, found.metadata, FORMAT, VERSION)
        text = found.metadata.get("header", "")
        rules.same_header(path, Header.from_json(path, text), header)
        self.digest = found.metadata.get("sha256", "")
        rules.shard_columns(path, found.entries, _wanted(header, found.entries))
        self.columns: Columns = _safetensors.mapped(path, found)
        self.starts = self.columns["starts"]
        self.rows = {name: self.columns[name] for name in header.layout()}
        rules.shard_starts(path, self.starts, len(self.rows["top"]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def span(self, document: int) -> tuple[int, int]:
        a, b = self.starts[document : document + 2].tolist()
        return a, b

    def tokens(self, begin: int, end: int) -> Tensor:
        first = begin - begin % 8  # where a byte begins, in every field
        fields = {
            width: self.columns[f"tokens.{width}"][
                packed_length(first, width) : packed_length(end, width)
            ]
            for width, _ in widths(self.header.bits)
        }
        return unpack(fields, end - first, torch.int64)[begin - first :]

    def tokens_at(self, places: Tensor) -> Tensor:
        found, shift = torch.zeros_like(places), 0
        for width, _ in widths(self.header.bits):
            found |= field_at(self.columns[f"tokens.{width}"], width, places) << shift
            shift += width
        return found

    def rows_of(self, begin: int, end: int) -> Columns:
        return {name: column[begin:end] for name, column in self.rows.items()}


def write(path: Path, header: Header, documents: list[tuple[Tensor, Columns]]) -> None:
    """All of it, or nothing: what is there when this returns survives a loss of power."""
    tokens = torch.cat([tokens for tokens, _ in documents])
    starts = torch.tensor([0, *(len(tokens) for tokens, _ in documents)]).cumsum(0)
    columns = joined([rows for _, rows in documents])
    columns |= {f"tokens.{w}": field for w, field in pack(tokens, header.bits).items()}
    columns["starts"] = starts
    columns["index.hash"], columns["index.doc"] = index_of(tokens, starts)
    about = {
        "format": FORMAT, "version": VERSION, "header": header.to_json(),
        "sha256": digest_of(columns),
    }  # fmt: skip
    _safetensors.write(path, columns, about, durable=True)


def digest_of(columns: Columns) -> str:
    """Of the columns, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(columns):
        found.update(f"{name}:".encode())
        found.update(_safetensors.buffer(columns[name].contiguous()))
    return found.hexdigest()


def _wanted(header: Header, entries: dict) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The columns that a shard of as many documents, tokens and index entries has."""

    def length(name: str) -> int:
        shape = entries[name].shape if name in entries else ()
        return shape[0] if shape else 0

    T, E = length("top"), length("index.hash")
    found = {name: (dtype, (T, *shape)) for name, (dtype, shape) in header.layout().items()}
    for width, dtype in widths(header.bits):
        found[f"tokens.{width}"] = (dtype or torch.uint8, (packed_length(T, width),))
    found["starts"] = (torch.int64, (max(length("starts"), 2),))
    return found | {"index.hash": (torch.int64, (E,)), "index.doc": (torch.int32, (E,))}


def header_of(path: Path) -> Header:
    """That of the store in a folder."""
    rules.is_store(path)
    file = path / "store.json"
    with open(file, "rb") as f:
        return Header.from_json(file, f.read(1 << 17))


def write_header(path: Path, header: Header) -> Header:
    """Where there is none yet; returns the one that is there."""
    unfinished = path / f"store.json.{os.getpid()}.unfinished"
    unfinished.write_text(header.to_json())
    try:
        os.link(unfinished, path / "store.json")  # which fails where another was faster
    except FileExistsError:
        pass
    finally:
        unfinished.unlink()
    return header_of(path)


def shard_path(path: Path, part: int | str, number: int) -> Path:
    return path / f"{part}-{number:06}.safetensors"


def shards_of(path: Path, header: Header) -> list[Any]:
    return [Shard(file, header) for file in sorted(path.glob("*-*.safetensors"))]
