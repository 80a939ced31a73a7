"""A folder of fetched files with a limit in bytes, which the processes of a machine share.

    SHA256         a fetched file, named after its SHA-256
    SHA256.part    a file that is being fetched; it has its full size from the beginning
    SHA256.lock    locked while the file is fetched or deleted; locked as shared while it is read
    cache.lock     locked while a process makes room for a file

A file is fetched under the name SHA256.part and then renamed, so that a reader never sees a part of
a file. Only one process fetches a file, and the other processes wait for it. If there is no room,
the least recently used files are deleted, except files that are being read or fetched. If all files
are being read or fetched, a process waits until one of them is free. A process holds the shared
lock only during a read, so this wait ends. The system releases the locks of a killed process. Files
named SHA256.lock are never deleted, because another process could wait for the deleted file.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import remote_checks as checks
from .lock import Lock
from .remote import Listed

LIMIT = 1 << 36  # bytes, 64 GiB
POLL = 0.02  # seconds between two attempts to make room


def default_folder() -> Path:
    """The folder LOGITLESS_CACHE, or the folder `logitless` in the user's cache."""
    if chosen := os.environ.get("LOGITLESS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


class Cache:
    """The cache in one folder. `limit` is the largest size of all its files together, in bytes."""

    def __init__(self, folder: str | os.PathLike | None = None, limit: int | None = None):
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = LIMIT if limit is None else limit
        checks.cache_bytes(self.limit)
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, listed: Listed) -> bool:
        return (self.folder / listed.sha256).exists()

    @contextlib.contextmanager
    def reading(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> Iterator[Path]:
        """Yields the path of a file, which is not deleted inside the with block.

        `fetch` writes the file into an open local file, if the cache does not have the file.
        """
        path = self.folder / listed.sha256
        while True:
            with Lock(self._lock(path), wait=True, shared=True):
                if path.exists():
                    os.utime(path)  # the time of the last use
                    yield path
                    return
            self.fetched(listed, fetch)

    def fetched(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> None:
        """Fetches a file, if the cache does not have the file."""
        path = self.folder / listed.sha256
        if path.exists():
            return
        with Lock(self._lock(path), wait=True):
            if path.exists():
                return
            part = path.with_name(f"{path.name}.part")
            self._reserve(part, listed.bytes)
            try:
                with open(part, "r+b") as file:
                    fetch(listed, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)

    def discard(self, listed: Listed) -> None:
        """Deletes a file after all processes have finished reading it."""
        path = self.folder / listed.sha256
        with Lock(self._lock(path), wait=True):
            path.unlink(missing_ok=True)

    def _lock(self, path: Path) -> Path:
        return path.with_name(f"{path.name.removesuffix('.part')}.lock")

    def _reserve(self, part: Path, size: int) -> None:
        """Creates a file of `size` bytes, after it has deleted other files to make room."""
        checks.cache_bytes(self.limit, size)
        part.unlink(missing_ok=True)  # of a process that was killed
        while True:
            with Lock(self.folder / "cache.lock", wait=True):
                if self._has_room(size):
                    with open(part, "wb") as file:
                        file.truncate(size)
                    return
            time.sleep(POLL)

    def _has_room(self, size: int) -> bool:
        """Whether `size` more bytes fit below the limit, after files were deleted if needed."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted by another process
                if path.suffix != ".lock":
                    files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        room = self.limit - sum(of_file for _, of_file, _ in files)
        for _, of_file, path in sorted(files):
            if room >= size:
                break
            with contextlib.suppress(ValueError):  # locked, because it is being read or fetched
                with Lock(self._lock(path)):
                    path.unlink(missing_ok=True)
                room += of_file
        return room >= size
