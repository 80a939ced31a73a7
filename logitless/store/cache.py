"""A cache folder of fetched files, with a limited size. All processes of a machine share the cache.

    SHA256         a fetched file, named after its SHA-256
    SHA256.part    a file that is being fetched; the file has its full size from the beginning
    SHA256.lock    locked while the file is fetched or deleted; locked as shared while it is read
    SHA256.failed  the error of the last fetch that failed
    cache.lock     locked while a process makes room for another file, or renames a fetched file

A file is fetched as SHA256.part and then renamed, so that no reader finds an incomplete one. One
process fetches it while the others wait, and if the fetch fails, they raise the same error instead
of repeating it one after the other. Room is made by deleting the least recently used files that
nobody reads or fetches, after a wait if necessary; the wait ends, because a file is locked only
during a read, and the system releases the locks of a killed process. SHA256.lock is never deleted,
because a process may be waiting for it. Files with other names are neither counted nor deleted.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import remote_checks as checks
from .lock import Lock
from .remote import Listed

LIMIT = 1 << 36  # bytes, 64 GiB
POLL = 0.02  # seconds between two attempts to make room
COUNTED = re.compile(r"[0-9a-f]{64}(\.part)?")  # names of the files that the limit applies to


def default_folder() -> Path:
    """LOGITLESS_CACHE, or else `logitless` in the user's cache folder."""
    if chosen := os.environ.get("LOGITLESS_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"


class Cache:
    """The cache in one folder. `limit` is the largest total size of its files, in bytes."""

    def __init__(self, folder: str | os.PathLike | None = None, limit: int | None = None):
        self.folder = Path(folder) if folder is not None else default_folder()
        self.limit = LIMIT if limit is None else limit
        checks.cache_bytes(self.limit)
        checks.cache_folder(self.folder)
        for path in self._files():
            if path.suffix == ".part":  # a process that was killed can leave such a file
                self._deleted(path)

    def use(self, listed: Listed) -> bool:
        """Whether the cache has a file. Sets the time of its last use."""
        try:
            os.utime(self.folder / listed.sha256)
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def reading(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> Iterator[Path]:
        """Yields the path of a file, which is not deleted inside the `with` block.

        If the cache does not have the file, `fetch` writes its bytes into an open local file.
        """
        path = self.folder / listed.sha256
        while True:
            before = self._failure(listed)
            with Lock(self._lock(path), wait=True, shared=True):
                if self.use(listed):
                    yield path
                    return
            self._fetched(listed, fetch, before)

    def _failure(self, listed: Listed) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{listed.sha256}.failed").read_text()
        return ""

    def _fetched(self, listed: Listed, fetch: Callable[[Listed, Any], None], before: str) -> None:
        """Fetches a file, if the cache does not have it.

        `before` is what `_failure` returned before the wait for the file: if the text has changed,
        another process failed to fetch the file meanwhile, and its error is raised.
        """
        path = self.folder / listed.sha256
        with Lock(self._lock(path), wait=True):
            if not path.exists():
                checks.failed_meanwhile(before, self._failure(listed))
                try:
                    self._fetch(listed, fetch)
                except (FileNotFoundError, PermissionError):
                    raise  # not recorded, because another fetch would fail without delay
                except OSError as error:
                    failed = path.with_name(f"{path.name}.failed")
                    _replace(failed, f"{uuid.uuid4()}\n{error}")
                    raise

    def prefetched(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> None:
        """Fetches a file in the background, if the cache does not have it.

        Raises a ValueError if another process reads or fetches the file. An error of `fetch` is
        not recorded for other processes.
        """
        path = self.folder / listed.sha256
        with Lock(self._lock(path)):
            if not path.exists():
                self._fetch(listed, fetch)

    def discard(self, listed: Listed) -> None:
        path = self.folder / listed.sha256
        with Lock(self._lock(path), wait=True):
            path.unlink(missing_ok=True)

    def _lock(self, path: Path) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.name.removesuffix('.part')}.lock")

    def _fetch(self, listed: Listed, fetch: Callable[[Listed, Any], None]) -> None:
        """Fetches a file, whose lock the caller holds."""
        path = self.folder / listed.sha256
        part = path.with_name(f"{path.name}.part")
        self._reserve(part, listed.bytes)
        try:
            with open(part, "r+b") as file:
                fetch(listed, file)
                file.flush()
                os.fsync(file.fileno())
            # Without the lock, a file renamed while `_has_room` reads the sizes would not be found
            # under its old name, and its size would count as free.
            with Lock(self.folder / "cache.lock", wait=True):
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _reserve(self, part: Path, size: int) -> None:
        """Makes room, and creates the file `part` with its full size."""
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
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):  # another process deleted the file
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        room = self.limit - sum(of_file for _, of_file, _ in files)
        for _, of_file, path in sorted(files):
            if room >= size:
                break
            if self._deleted(path):
                room += of_file
        return room >= size

    def _files(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if COUNTED.fullmatch(path.name)]

    def _deleted(self, path: Path) -> bool:
        """Deletes a file unless it is locked, and returns whether it was deleted."""
        try:
            with Lock(self._lock(path)):
                path.unlink(missing_ok=True)
        except ValueError:  # the file is locked
            return False
        return True


def _replace(path: Path, text: str) -> None:
    """Replaces a file's text atomically."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)
