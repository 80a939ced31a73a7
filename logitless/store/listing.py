"""The files store.json and store.index: what a store is, and which documents it has.

Documents are numbered in the order of the lines of store.index, which are only appended, after the
files that they list are on the disk: a number stays the same when documents are added. Files that
no line lists do not belong to the store yet.
"""

import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ..targets.safetensors import replaced, sync
from . import checks
from .format import FORMAT, VERSION, Header
from .lock import Lock
from .lookup import Run
from .shard import File, Listed

Result = TypeVar("Result")
STORE, INDEX = "store.json", "store.index"
RECOVER = "For a local store, call ll.store.recover with its folder"
SHARD = re.compile(r"((0|[1-9][0-9]*)-([0-9]{6}|[1-9][0-9]{6,}))\.shard")
JOURNAL = re.compile(r"(0|[1-9][0-9]*)\.journal")


class Listing:
    """The lines of a store.index, as far as `read` has read them."""

    def __init__(self, where: str | Path):
        self.where, self.shards, self.runs = where, [], []
        self.size, self.crc = 0, 0  # the lines that were read, and the CRC of the last
        self.shards: list[Listed]
        self.runs: list[Run]

    def read(self, data: bytes) -> None:
        """Reads the lines after the last that was read. `data` are all bytes that follow it."""
        lines = data.split(b"\n")
        if lines.pop():
            checks.refuse(self.where, "end with a whole line", f"a part of a line. {RECOVER}")
        for line in lines:
            crc, _, text = line.partition(b" ")
            self.crc = zlib.crc32(text, self.crc)
            if crc != b"%08x" % self.crc:
                rule = f"have the checksum of line {len(self.shards) + 1} that it was written with"
                checks.refuse(self.where, rule, f"another. {RECOVER}")
            fields = json.loads(text)
            self.runs = [Run(*run) for run in fields.pop("runs")]
            self.shards.append(Listed(**fields))
            self.size += len(line) + 1

    def line(self, shard: Listed, runs: Sequence[Run]) -> bytes:
        text = json.dumps({**shard._asdict(), "runs": runs}).encode()
        return b"%08x %s\n" % (zlib.crc32(text, self.crc), text)

    def read_file(self) -> None:
        with open(self.where, "rb") as file:
            file.seek(self.size)
            self.read(file.read())

    def append(self, shard: Listed, runs: Sequence[Run]) -> None:
        """Adds a line durably. The caller holds store.lock and has read all lines."""
        line = self.line(shard, runs)
        with open(self.where, "r+b", buffering=0) as file:
            file.seek(self.size)
            try:
                if file.write(line) < len(line):
                    raise OSError(f"{self.where} must take another line, got a full disk.")
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(self.size)
                raise
        self.read(line)


def listing_of(where: str | Path, data: bytes) -> Listing:
    listing = Listing(where)
    listing.read(data)
    return listing


class Folder:
    """The local folder of a store. `remote.RemoteFolder` is one at an address."""

    def __init__(self, path: Path):
        self.path = path

    def where(self, name: str) -> Path:
        """The path of a file, for errors too."""
        return self.path / name

    def read(self, name: str, parsed: Callable[[bytes], Result]) -> Result:
        if not self.where(STORE).is_file():
            checks.refuse(self.path, "be a folder with a store.json", "none")
        try:
            return parsed(self.where(name).read_bytes())
        except FileNotFoundError:
            advice = "none. Call ll.store.recover with its folder"
            checks.refuse(self.path, f"have a {name}", advice)

    def file(self, name: str, size: int, crc: int) -> File:
        """Opens a file, of which `size` and `crc` are known."""
        return File(self.where(name))


def created(path: Path, header: Header) -> None:
    """Creates the folder, store.json and store.index of a store, if it does not exist."""
    checks.folder(path)
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
    if (path / STORE).exists():
        return
    with Lock(path / "store.lock", wait=True):
        for left in path.glob("*.json.*.unfinished"):  # files of a writer that was killed
            left.unlink()
        if not (path / STORE).exists():
            write(path / INDEX, b"")  # first, because a folder without store.json is no store yet
            fields = {"format": FORMAT, "version": VERSION, "id": uuid.uuid4().hex[:16]}
            write(path / STORE, json.dumps(fields | asdict(header), sort_keys=True).encode())


def write(path: Path, data: bytes) -> None:
    with replaced(path) as file:
        file.write(data)


def shards_in(path: Path) -> list[str]:
    """The names PART-NUMBER of all shards in a folder, sorted. Raises for other .shard files."""
    return sorted(name[1] for name in _named(path, "*.shard", SHARD, "PART-NUMBER.shard"))


def journals(path: Path) -> list[tuple[Path, int]]:
    """The path and the part of each journal in a folder. Raises for other .journal files."""
    found = _named(path, "*.journal", JOURNAL, "PART.journal")
    return [(path / name[0], int(name[1])) for name in found]


def _named(path: Path, kind: str, pattern: re.Pattern, form: str) -> list[re.Match]:
    found = []
    for file in sorted(path.glob(kind)):
        name = pattern.fullmatch(file.name)
        if name is None or not file.is_file():
            rule = f"be named {form}, as a writer names the files of a store"
            got = "another name, or a folder. Move it out of the folder of the store"
            checks.refuse(file, rule, got)
        found.append(name)
    return found
