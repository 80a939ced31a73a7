"""Finds the files in a store's folder (store/format.py), and reads and writes store.json."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..targets.safetensors import sync
from . import file_checks
from .format import Header
from .lock import Lock

SHARD = re.compile(r"(0|[1-9][0-9]*)-([0-9]{6}|[1-9][0-9]{6,})\.safetensors")
LOOKUP = re.compile(r"store-[0-9a-f]{16}\.lookup")
JOURNAL = re.compile(r"(0|[1-9][0-9]*)\.journal")


def header_of(path: Path) -> Header:
    file_checks.is_store(path)
    file = path / "store.json"
    with open(file, "rb") as f:
        return Header.from_json(file, f.read(1 << 17))


def write_header(path: Path, header: Header) -> Header:
    """Writes store.json if it does not exist, and returns the header in store.json.

    A lock keeps several writers apart, not a hard link, which some file systems lack.
    """
    file = path / "store.json"
    if not file.exists():
        with Lock(path / "store.lock", wait=True):
            for left in path.glob("store.json.*.unfinished"):  # files of a writer that was killed
                left.unlink()
            if not file.exists():
                _write(file, header.to_json())
    return header_of(path)


def _write(file: Path, text: str) -> None:
    """Writes a file atomically and durably."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, file)
        sync(file.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def created(path: Path) -> None:
    """Creates the folder of a store durably."""
    file_checks.folder(path)
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)


def shard_path(path: Path, rank: int | str, number: int) -> Path:
    return path / f"{rank}-{number:06}.safetensors"


def shard_files(path: Path) -> list[Path]:
    """The shards in a folder, sorted by name. Raises for other safetensors files."""
    return [file for file, _ in _named(path, "*.safetensors", SHARD, "RANK-NUMBER.safetensors")]


def last_number(path: Path, rank: int) -> int:
    found = _named(path, "*.safetensors", SHARD, "RANK-NUMBER.safetensors")
    return max((int(name[2]) for _, name in found if int(name[1]) == rank), default=-1)


def journals(path: Path) -> list[tuple[Path, int]]:
    """The path and the rank of each journal in a folder. Raises for other .journal files."""
    found = _named(path, "*.journal", JOURNAL, "RANK.journal")
    return [(file, int(name[1])) for file, name in found]


def _named(
    path: Path, kind: str, pattern: re.Pattern, form: str
) -> Iterator[tuple[Path, re.Match]]:
    for file in sorted(path.glob(kind)):
        name = pattern.fullmatch(file.name)
        if name is None or not file.is_file():
            file_checks.stray_file(file, form)
        yield file, name
