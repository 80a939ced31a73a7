"""The files of a store at an address such as s3://bucket/targets, and the cache that they pass.

All requests go through a file system of fsspec. A request that fails is repeated after a wait that
doubles each time. Whole files are fetched into a cache folder of limited size, which all processes
of a machine share; fsspec's own caches have no limit, and leave half a file after an error. The
bytes of a file are compared with its checksums when they are read, and a damaged one is fetched
again once.

    NAME         a fetched file; NAME has the id of the store, the file's name and a checksum
    NAME.part    the file while it is fetched, NAME.room a sparse file of the size it will have
    NAME.lock    locked while the file is fetched or deleted
    cache.lock   locked while a process makes room

Room is made by deleting the files that were used least recently. A process that still reads one
keeps its bytes until it closes the file.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from . import checks
from .lock import Lock
from .shard import File, Listed

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts
SILENCE = 60  # seconds without a byte, after which a request over http fails
LIMIT = 1 << 36  # bytes of the cache, 64 GiB
POLL = 0.02  # seconds between two attempts to make room
COUNTED = re.compile(r"[0-9a-f]{16}-.*(\.shard|\.lookup)-[0-9a-f]{8}(\.room)?")
# A folder is created before a file is written into it only for these protocols: elsewhere, this
# could create a new bucket with a misspelt name.
FOLDERS = {"file", "local", "memory", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav"}
Result = TypeVar("Result")


def is_address(path: Any) -> bool:
    """Whether a path is an address, such as s3://bucket/targets, and not a local folder."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", path) is not None


class Remote:
    """The folder at an address. `options` are the arguments of fsspec's file system."""

    def __init__(
        self, url: str, *, attempts: int, options: Mapping[str, Any] | None, argument: str = "path"
    ):
        checks.whole("attempts", attempts, 1, 1000)
        if options is not None and not isinstance(options, Mapping):
            got = f"{options!r:.80}"
            checks.refuse("storage_options", "map names to values", got, TypeError)
        self.url, self.attempts, self.argument = url.rstrip("/"), attempts, argument
        self.options = dict(options or {})
        self.pause: Callable[[float], Any] = time.sleep
        _ = self._system  # raises an error if a package is missing

    def address(self, name: str) -> str:
        return f"{self.url}/{name}"

    def read(self, name: str, parsed: Callable[[bytes], Result]) -> Result:
        """Returns `parsed(bytes)` of a whole file, read again after a ValueError."""
        return self._repeated(name, lambda fs, path: parsed(fs.cat_file(path)))

    def fetch(self, name: str, size: int, into: Path, progress: Callable[[int], None]) -> None:
        """Writes a file of `size` bytes to a local path."""

        def attempt(fs: Any, path: str) -> None:
            from fsspec.callbacks import Callback

            class Progress(Callback):
                def relative_update(self, inc: int = 1) -> None:
                    progress(inc)

            fs.get_file(path, os.fspath(into), callback=Progress())
            checks.size_of_file(self.address(name), into.stat().st_size, size)

        self._repeated(name, attempt)

    def write(self, path: Path, name: str) -> None:
        def attempt(fs: Any, place: str) -> None:
            folder = place.rpartition("/")[0]
            if FOLDERS & {*([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)}:
                fs.makedirs(folder, exist_ok=True)
            fs.put_file(os.fspath(path), place)
            fs.invalidate_cache(folder)
            checks.size_of_file(self.address(name), fs.info(place)["size"], path.stat().st_size)

        self._repeated(name, attempt, "written")

    def size(self, name: str) -> int | None:
        """A file's size in bytes, or None if it does not exist."""

        def attempt(fs: Any, path: str) -> int | None:
            fs.invalidate_cache(path.rpartition("/")[0])
            return fs.info(path)["size"] if fs.exists(path) else None

        return self._repeated(name, attempt)

    def _repeated(
        self, name: str, attempt: Callable[[Any, str], Result], done: str = "read"
    ) -> Result:
        """Calls `attempt` until it succeeds, or at once raises an error that would not go away."""
        wait, last = FIRST_WAIT, None
        for number in range(self.attempts):
            if number:
                self.pause(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            try:
                fs, folder = self._system
                return attempt(fs, f"{folder}/{name}")
            except FileNotFoundError as error:
                checks.refuse(self.address(name), "exist", "no file", FileNotFoundError, error)
            except (PermissionError, ImportError):
                raise
            except Exception as error:  # each file system of fsspec raises its own kinds of errors
                if getattr(error, "status", None) in (401, 403):  # of aiohttp
                    where, attempts = self.address(name), number + 1
                    raise checks.failed(where, done, attempts, error, PermissionError) from error
                if getattr(error, "errno", None) in checks.LOCAL_ERRORS:
                    raise
                last = error
        raise checks.failed(self.address(name), done, self.attempts, last) from last

    @property
    def _system(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path of the folder in it.

        fsspec keeps one per process and set of options, so that a forked process gets its own.
        """
        try:
            import fsspec

            options = dict(self.options)
            if re.match(r"https?://", self.url) and "client_kwargs" not in options:
                from aiohttp import ClientTimeout

                limit = ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
                options["client_kwargs"] = {"timeout": limit}
            return fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            rule = "be read with fsspec and its package for this protocol"
            checks.missing_package(self.url, rule, "remote", error)
        except ValueError as error:
            got = f"{self.url!r:.200} ({str(error).rstrip('.')})"
            rule = "be an address of a protocol of fsspec"
            checks.refuse(self.argument, rule, got, cause=error)


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            got = repr(str(self.folder))
            checks.refuse("cache", "be a folder", got, NotADirectoryError)

    def file(self, name: str, size: int, fetch: Callable[[Path], None]) -> File:
        """Opens a file, which `fetch` writes if the cache does not have it.

        It is open, because any process may delete the file of a path.
        """
        path, file = self.folder / name, None
        with contextlib.suppress(FileNotFoundError):
            file = File(path)
        if file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(name):  # with it, nobody deletes the file
                if not path.exists():
                    self._fetched(path, size, fetch)
                file = File(path)
        os.utime(file.number)  # of its last use
        return file

    def discard(self, name: str) -> None:
        with self._lock(name):
            (self.folder / name).unlink(missing_ok=True)

    def _lock(self, name: str, wait: bool = True) -> Lock:
        return Lock(self.folder / f"{name}.lock", wait=wait)

    def _fetched(self, path: Path, size: int, fetch: Callable[[Path], None]) -> None:
        part, room = (path.with_name(f"{path.name}.{kind}") for kind in ("part", "room"))
        checks.cache_bytes(self.limit, size)
        room.unlink(missing_ok=True)  # the file of a process that was killed
        try:
            while not self._has_room(room, size):
                time.sleep(POLL)
            fetch(part)
            # Under the lock, because a file must not count twice while `_has_room` adds sizes.
            with Lock(self.folder / "cache.lock", wait=True):
                room.unlink()
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
            room.unlink(missing_ok=True)

    def _has_room(self, room: Path, size: int) -> bool:
        """Reserves `size` bytes, if deleting files that nobody fetches leaves as many."""
        with Lock(self.folder / "cache.lock", wait=True):
            files = []
            for path in self.folder.iterdir():
                if COUNTED.fullmatch(path.name):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
            left = self.limit - sum(of_file for _, of_file, _ in files)
            for _, of_file, path in sorted(files):
                if left >= size:
                    break
                if self._deleted(path):
                    left += of_file
            if left < size:
                return False
            with open(room, "wb") as file:
                file.truncate(size)
            return True

    def _deleted(self, path: Path) -> bool:
        """Deletes a file unless it is being fetched, and returns whether it was deleted."""
        try:
            with self._lock(path.name.removesuffix(".room"), wait=False):
                path.unlink(missing_ok=True)
        except ValueError:  # the file is locked
            return False
        return True


class RemoteFolder:
    """The folder of a store at an address, read through a cache. `store` is the store's id."""

    store = ""
    prefetch: "Prefetch"

    def __init__(
        self,
        url: str,
        *,
        cache: str | os.PathLike | None,
        cache_bytes: int | None,
        attempts: int | None,
        storage_options: Mapping[str, Any] | None,
        progress: Callable[[int], None] | None,
    ):
        attempts = 5 if attempts is None else attempts
        self.remote = Remote(url, attempts=attempts, options=storage_options)
        self.cache = Cache(cache, cache_bytes)
        self.progress = progress or (lambda _: None)

    def opened(self, store: str, shards: Sequence[Listed]) -> None:
        """Called when the id and the shards of the store are known."""
        self.store, self.prefetch = store, Prefetch(self, shards)

    def where(self, name: str) -> str:
        return self.remote.address(name)

    def read(self, name: str, parsed: Callable[[bytes], Result]) -> Result:
        try:
            return self.remote.read(name, parsed)
        except FileNotFoundError as error:
            rule, got = "be the folder of a store", f"no {name}"
            checks.refuse(self.remote.url, rule, got, FileNotFoundError, error)

    def file(self, name: str, size: int, crc: int) -> File:
        try:
            return self.cache.file(
                self._cached(name, crc),
                size,
                lambda into: self.remote.fetch(name, size, into, self.progress),
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error} store.index listed this file when the store was opened. If the store has"
                " changed since it was opened, open it again."
            ) from error

    def discard(self, name: str, crc: int) -> None:
        self.cache.discard(self._cached(name, crc))

    def _cached(self, name: str, crc: int) -> str:
        return f"{self.store}-{name}-{crc:08x}"


class Prefetch:
    """Fetches the shards that will be read next, in background threads.

    The order is known from `follow`, or the shards are read one after the other. An error is
    ignored, because the reader fetches the shard itself, and raises if that fails too.
    """

    def __init__(self, folder: RemoteFolder, shards: Sequence[Listed]):
        limit, largest = folder.cache.limit, max((shard.size for shard in shards), default=1)
        checks.cache_bytes(limit, largest)
        self.folder, self.shards, self.room = folder, shards, limit // largest
        self._of_process: tuple[int, ThreadPoolExecutor | None] = (0, None)
        self.follow(None, ahead=2)

    def follow(self, order: list[int] | None, ahead: int, mixed: int = 1) -> None:
        """Sets the order of the shards, by default that of the store.

        `mixed` shards are read at the same time, because their documents are shuffled together.
        """
        self.ahead = max(0, min(ahead, self.room - mixed))
        self.known, self.at = order is not None, -1
        self.order = list(range(len(self.shards))) if order is None else order
        self.places = {shard: place for place, shard in enumerate(self.order)}
        if self.known:
            self._start(0)

    def reading(self, shard: int) -> None:
        """Starts to fetch the shards after this one. Called before each read."""
        before, self.at = self.at, self.places.get(shard, self.at)
        if self.at != before and (self.known or self.at == before + 1):
            self._start(self.at + 1)

    def _start(self, place: int) -> None:
        pid, pool = self._of_process
        if pid != os.getpid() or pool is None:  # a fork copies no threads
            pool = ThreadPoolExecutor(2, "logitless prefetch")
            self._of_process = (os.getpid(), pool)
        for shard in self.order[place : place + self.ahead]:
            pool.submit(self._quietly, shard)

    def _quietly(self, shard: int) -> None:
        with contextlib.suppress(Exception):
            listed = self.shards[shard]
            self.folder.file(listed.name, listed.size, listed.crc)


class Uploads:
    """Uploads the finished shards of a writer in a background thread.

    A shard is at the address if a file of its name and size is there, because store.json, which is
    written first, has the id of the store.
    """

    def __init__(self, remote: Remote, folder: Path, names: Iterable[str]):
        self.remote, self.folder = remote, folder
        self._stopping = threading.Event()
        remote.pause = self._pause
        with contextlib.suppress(FileNotFoundError):
            mine = (folder / "store.json").read_bytes()
            # A killed writer may have uploaded a part.
            same = mine.startswith(remote.read("store.json", bytes))
            if not same:
                checks.refuse("upload", "be an address without another store", remote.url)
        remote.write(folder / "store.json", "store.json")
        self._pool = ThreadPoolExecutor(1, "logitless upload")
        self._done: set[str] = set()
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self._pool.submit(self._upload, name)

    def finish(self, names: Iterable[str], index: Iterable[str]) -> None:
        """Waits for all uploads, and then uploads the rest of `names`, and `index`.

        `names` are all shards of the store, of other parts too. The caller holds store.lock.
        """
        self._pool.shutdown()
        failed = {name: error for name in names if (error := self._upload(name)) is not None}
        checks.uploaded(self.remote.url, failed)
        for name in index:
            self.remote.write(self.folder / name, name)

    def stop(self) -> None:
        """Stops the thread after its current upload, without waiting for it."""
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _upload(self, name: str) -> Exception | None:
        if name in self._done:
            return None
        path = self.folder / name
        try:
            if self.remote.size(name) != path.stat().st_size:
                self.remote.write(path, name)
            self._done.add(name)
        except Exception as error:  # `finish` uploads the file again, and raises
            return error
        return None

    def _pause(self, seconds: float) -> None:
        if self._stopping.wait(seconds):
            raise InterruptedError("the upload was stopped")


def destination(url: str, options: Mapping[str, Any] | None = None) -> Remote:
    checks.upload_address(url, is_address(url))
    return Remote(url, attempts=8, options=options, argument="upload")  # waits of one minute
