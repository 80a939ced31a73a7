"""The file store.index, which lists the shards of a store and the starts of their documents.

A writer that closes lists all shards in its folder, so that any static server can serve the folder.
A reader opens a remote store with this file alone, and fetches store-HASH.lookup at the first
lookup by tokens. Both are safetensors files. The tensors of store.index are:

    files    U8   JSON with the store's header, and with the name, the size and the SHA-256 of each
                  shard and of the lookup file; each shard also has its number of documents, its
                  number of index entries, and the SHA-256 of its columns (store/shard.py)
    starts   I64  the column `starts` of each shard, one shard after the other   (store/format.py)

The metadata of store.index holds a SHA-256 of both. The lookup file has the tensors `index.hash`
and `index.doc` of all shards, one shard after the other (store/index.py), and HASH is the first 16
digits of their SHA-256: a new lookup file does not replace the one that an older store.index lists.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..targets import safetensors
from . import file_checks
from . import remote_checks as checks
from .device import on_cpu
from .folder import LOOKUP, SHARD, shard_files
from .format import Header
from .lock import Lock
from .remote import Listed
from .shard import Shard, digest_of

INDEX, FORMAT, VERSION = "store.index", "logitless.index", "1"
PIECE = 1 << 22  # number of bytes that are hashed at once
SHA256 = re.compile("[0-9a-f]{64}")
Hashed = tuple[str, Listed]  # the SHA-256 in a shard's metadata, and the shard's file


class ListedShard(NamedTuple):
    file: Listed
    documents: int
    entries: int  # number of index entries
    digest: str  # the SHA-256 in the shard's metadata
    starts: Tensor


@dataclass(frozen=True)
class Listing:
    header: Header
    shards: Sequence[ListedShard]
    lookup: Listed

    @property
    def hashed(self) -> list[Hashed]:
        return [(shard.digest, shard.file) for shard in self.shards]

    @staticmethod
    def of_bytes(where: str, data: bytes) -> "Listing":
        file, tensors = safetensors.from_bytes(where, data)
        checks.index_format(where, file.metadata, FORMAT, VERSION)
        checks.index_digest(where, digest_of(tensors) == file.metadata.get("sha256"))
        fields = _fields(where, tensors)
        header = Header.from_json(where, json.dumps(fields["header"]))
        shards, first = [], 0
        for name, size, sha256, documents, entries, digest in fields["shards"]:
            starts = tensors["starts"][first : first + documents + 1]
            checks.index_content(where, len(starts) == documents + 1 > 1)
            file_checks.shard_starts(f"{where} for {name}", starts, int(starts[-1]))
            file = Listed(name, size, sha256)
            shards.append(ListedShard(file, documents, entries, digest, starts))
            first += documents + 1
        checks.index_content(where, first == len(tensors["starts"]))
        return Listing(header, shards, Listed(*fields["lookup"]))

    def write(self, path: Path) -> None:
        fields = {
            "header": asdict(self.header),
            "shards": [[*s.file, *s[1:4]] for s in self.shards],
            "lookup": list(self.lookup),
        }
        text = bytearray(json.dumps(fields).encode())
        starts = [torch.empty(0, dtype=torch.int64), *(shard.starts for shard in self.shards)]
        tensors = {"starts": torch.cat(starts), "files": torch.frombuffer(text, dtype=torch.uint8)}
        metadata = {"format": FORMAT, "version": VERSION, "sha256": digest_of(tensors)}
        safetensors.write(path / INDEX, tensors, metadata, durable=True)


def _fields(where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    kinds = {name: (t.dtype, t.dim()) for name, t in tensors.items()}
    wanted = {"starts": (torch.int64, 1), "files": (torch.uint8, 1)}
    checks.index_content(where, kinds == wanted)
    try:
        fields = json.loads(bytes(safetensors.buffer(tensors["files"])))
    except (ValueError, RecursionError):
        fields = None
    right = isinstance(fields, dict) and fields.keys() == {"header", "shards", "lookup"}
    checks.index_content(where, right)
    lookup, shards = fields["lookup"], fields["shards"]
    checks.index_content(where, _is_listed(lookup, 3, LOOKUP) and isinstance(shards, list))
    checks.index_content(where, all(_is_listed(shard, 6, SHARD) for shard in shards))
    return fields


def _is_listed(item: Any, length: int, name: Any) -> bool:
    """Whether `item` lists name, size and SHA-256, and for a shard two counts and a SHA-256.

    The name must match `name`, because it becomes a part of an address.
    """
    return (
        isinstance(item, list)
        and len(item) == length
        and all(isinstance(text, str) for text in (item[0], item[2], *item[5:]))
        and name.fullmatch(item[0]) is not None
        and all(SHA256.fullmatch(text) for text in (item[2], *item[5:]))
        and all(type(n) is int and 0 <= n < 2**63 for n in (item[1], *item[3:5]))
    )


@on_cpu
def write_listing(folder: Path, header: Header, hashed: Iterable[Hashed]) -> None:
    """Lists all shards of a local folder in its store.index.

    The lookup file of the previous one stays, for readers that have read it.
    """
    with Lock(folder / "store.lock", wait=True):
        old = existing(folder, header)
        new = listing_of(shard_files(folder), header, [*old.hashed, *hashed], folder)
        kept = {old.lookup.name, new.lookup.name}
        for path in (*folder.glob("store-*.lookup"), *folder.glob("store*.unfinished")):
            if path.name not in kept:
                path.unlink()


def listing_of(
    files: Iterable[Path], header: Header, hashed: Iterable[Hashed], into: Path
) -> Listing:
    """Writes store.index and the lookup file of some shards, and hashes those not in `hashed`."""
    known = {(digest, *file[:2]): file for digest, file in hashed}
    shards, hashes, numbers = [], [torch.empty(0, dtype=torch.int64)], []
    for path in files:
        shard = Shard(path, header)
        file = known.get((shard.digest, path.name, shard.bytes)) or hashed_file(path)
        of_shard, documents = shard.index()
        shards.append(ListedShard(file, len(shard), len(of_shard), shard.digest, shard.starts))
        hashes.append(of_shard)
        numbers.append(documents)
    lookup = _write_lookup(into, torch.cat(hashes), torch.cat([*numbers, torch.empty(0).int()]))
    listing = Listing(header, shards, lookup)
    listing.write(into)
    return listing


def existing(folder: Path, header: Header) -> Listing:
    """The listing in a folder, or an empty one if it is missing or invalid."""
    try:
        return Listing.of_bytes(INDEX, (folder / INDEX).read_bytes())
    except (FileNotFoundError, ValueError):
        return Listing(header, (), Listed("", 0, ""))


def _write_lookup(folder: Path, hashes: Tensor, numbers: Tensor) -> Listed:
    tensors = {"index.hash": hashes, "index.doc": numbers}
    name = f"store-{digest_of(tensors)[:16]}.lookup"
    safetensors.write(folder / name, tensors, {"format": FORMAT, "version": VERSION}, durable=True)
    return hashed_file(folder / name)


def hashed_file(path: Path) -> Listed:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return Listed(path.name, path.stat().st_size, digest.hexdigest())
