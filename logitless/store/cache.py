"""A cache folder of fetched files, with a limited size. All processes of a machine share the cache.

    SHA256         a fetched file, named after its SHA-256
    SHA256.part    a file that is being fetched; the file has its full size from the beginning
    SHA256.lock    locked while the file is fetched or deleted; locked as shared while it is read
    cache.lock     locked while a process deletes files to make room for another file

A file is fetched under the name SHA256.part and then renamed, so that a reader never sees a part of
a file. Only one process fetches a file, and the other processes wait for this process. If there is
no room for a file, the least recently used files are deleted, except files that are being read or
fetched. If all files are being read or fetched, the process waits until one file is free. This wait
ends, because a process holds the shared lock only during a read. The system releases the locks of a
killed process. Files named SHA256.lock are never deleted, because another process could be waiting
for the lock of the deleted file.
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
    """Returns the folder in LOGITLESS_CACHE, or the folder `logitless` in the user's cache."""
    if chosen := os.environ.get("LOGITLESS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


class Cache:
    """The cache in one folder. `limit` is the largest total size of its files, in bytes."""

    def __init__(self, folder: str | os.PathLike | None = None, limit: int | None = None):
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = LIMIT if limit is None else limit
        checks.cache_bytes(self.limit)
        self.folder.mkdir(parents=True, exist_ok=True)

    def has(self, listed: Listed) -> bool:
        return (self.folder / listed.sha256).exists()

    @contextlib.contextmanager
    def reading(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> Iterator[Path]:
        """Yields the path of a file. The file is not deleted inside the with block.

        If the cache does not have the file, `fetch` writes its bytes into an open local file.
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
        """Deletes other files until there is room, and creates the file `part` of `size` bytes."""
        checks.cache_bytes(self.limit, size)
        part.unlink(missing_ok=True)  # the file of a process that was killed
        while True:
            with Lock(self.folder / "cache.lock", wait=True):
                if self._has_room(size):
                    with open(part, "wb") as file:
                        file.truncate(size)
                    return
            time.sleep(POLL)

    def _has_room(self, size: int) -> bool:
        """Deletes files if needed, and returns whether `size` more bytes fit below the limit."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted by another process
                if path.suffix != ".lock":
                    files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        room = self.limit - sum(of_file for _, of_file, _ in files)
        for _, of_file, path in sorted(files):
            if room >= size:
                break
            with contextlib.suppress(ValueError):  # another process reads or fetches the file now
                with Lock(self._lock(path)):
                    path.unlink(missing_ok=True)
                room += of_file
        return room >= size
