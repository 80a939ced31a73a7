"""Reads and writes files at an address, such as s3://bucket/targets.

http and https are read with Python's standard library; everything else is read and written with the
package fsspec. A request that fails is repeated after a wait that doubles each time. Fetched bytes
of a wrong size or SHA-256, if these are known, count as a failure, so a file that was cut off or
changed during the transfer is fetched again.
"""

import functools
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from . import remote_checks as checks

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two attempts
PIECE = 1 << 24  # largest number of bytes per call of `read`
LARGEST = 1 << 36  # if the size of a file is not known, at most this many bytes are read
# A folder is created before a file is written into it only for these protocols: elsewhere, this
# could create a new bucket with a misspelt name.
FOLDERS = {"file", "local", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav"}
TRY_AGAIN = {408, 425, 429}  # HTTP statuses below 500 after which another attempt can succeed
Result = TypeVar("Result")


class Listed(NamedTuple):
    """A file in store.index."""

    name: str
    bytes: int
    sha256: str


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def is_address(path: Any) -> bool:
    """Whether a path is an address, such as s3://bucket/targets, and not a local folder."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", path) is not None


class Remote:
    """The folder at an address.

    A request over http or https fails if the server sends nothing for `timeout` seconds. `options`
    are the keyword arguments of fsspec's file system, or `headers` for http and https, which are
    not sent to another host after a redirection. Errors call the address by the name `argument`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        attempts: int = 5,
        options: Mapping[str, Any] | None = None,
        argument: str = "path",
    ):
        checks.connection(timeout, attempts, options)
        self.is_http = re.match(r"https?://", url) is not None
        self.url = url if self.is_http else url.rstrip("/")  # the query of a URL can end with "/"
        self.timeout, self.attempts = timeout, attempts
        self.options, self.argument = dict(options or {}), argument
        self.pause: Callable[[float], Any] = time.sleep
        if self.is_http:
            checks.http_options(self.options)
        else:
            _ = self._system  # raises an error if a package is missing

    def address(self, name: str) -> str:
        """The address of a file, with the query of the folder's address."""
        if not self.is_http:
            return f"{self.url}/{name}"
        parts = urllib.parse.urlsplit(self.url)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()

    def read(self, name: str, parsed: Callable[[str, bytes], Result]) -> Result:
        """Returns `parsed(address, bytes)` of a whole file, read again after a ValueError."""

        def attempt() -> Result:
            with self._opened(name) as (file, size):
                data = b"".join(_pieces(file, LARGEST if size is None else size + 1))
            checks.whole_file(self.address(name), len(data), size)
            return parsed(self.address(name), data)

        return self._repeated(name, attempt)

    def fetch(self, listed: Listed, into: Any, attempts: int | None = None) -> None:
        """Writes a listed file into an open local file, and checks its size and SHA-256."""
        where = self.address(listed.name)

        def attempt() -> None:
            digest, done = hashlib.sha256(), 0
            into.seek(0)
            with self._opened(listed.name) as (file, _):
                for piece in _pieces(file, listed.bytes + 1):
                    done += len(piece)
                    if done > listed.bytes:
                        break
                    digest.update(piece)
                    _locally(into.write, piece)
            checks.listed_file(where, done, digest.hexdigest(), listed)

        self._repeated(listed.name, attempt, attempts=attempts)

    def write(self, path: Path, name: str) -> None:
        checks.can_write(self.url, self.is_http)
        size = path.stat().st_size

        def attempt() -> None:
            system, folder = self._system
            if FOLDERS & {system.protocol, *system.protocol}:
                system.makedirs(folder, exist_ok=True)
            system.put_file(os.fspath(path), f"{folder}/{name}")
            system.invalidate_cache(folder)
            checks.uploaded(self.address(name), system.info(f"{folder}/{name}")["size"], size)

        self._repeated(name, attempt, "written")

    def size(self, name: str) -> int | None:
        """A file's size in bytes, or None if it does not exist."""

        def attempt() -> int | None:
            system, folder = self._system
            system.invalidate_cache(folder)
            path = f"{folder}/{name}"
            return system.info(path)["size"] if system.exists(path) else None

        return self._repeated(name, attempt)

    def _repeated(
        self,
        name: str,
        attempt: Callable[[], Result],
        done: str = "read",
        attempts: int | None = None,
    ) -> Result:
        """Calls `attempt` until it succeeds, or at once raises an error that would not go away."""
        wait, last, attempts = FIRST_WAIT, None, attempts or self.attempts
        for number in range(attempts):
            if number:
                self.pause(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            try:
                return attempt()
            except FileNotFoundError as error:
                raise checks.missing(self.address(name)) from error
            except (PermissionError, ImportError):
                raise
            except _LocalError as error:
                raise error.error from None
            except urllib.error.HTTPError as error:
                error.close()
                if error.code < 500 and error.code not in TRY_AGAIN:
                    checks.refused(self.address(name), error)
                last = error
            except Exception as error:  # each file system of fsspec raises its own kinds of errors
                last = error
        raise checks.failed(self.address(name), done, attempts, last) from last

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[Readable, int | None]]:
        """Yields an open file and its size in bytes, or None if that is not known."""
        if self.is_http:
            with _opener().open(self._request(name), timeout=self.timeout) as file:
                yield file, _length(file)
        else:
            system, folder = self._system
            with system.open(f"{folder}/{name}", "rb", cache_type="none") as file:
                yield file, None

    def _request(self, name: str) -> urllib.request.Request:
        request = urllib.request.Request(self.address(name), headers={"User-Agent": "logitless"})
        for header, value in self.options.get("headers", {}).items():
            request.add_unredirected_header(header, value)
        return request

    @property
    def _system(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path of the folder in it.

        A forked process creates its own, because processes cannot share connections.
        """
        return self._system_of(os.getpid())

    @functools.cached_property
    def _system_of(self) -> Callable[[int], tuple[Any, str]]:
        return functools.lru_cache(maxsize=1)(lambda _: self._new_system())

    def _new_system(self) -> tuple[Any, str]:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise checks.missing_package(self.url, "fsspec") from error
        try:
            return fsspec.core.url_to_fs(self.url, **self.options)
        except ImportError as error:
            raise checks.missing_package(self.url, str(error)) from error
        except ValueError as error:
            raise checks.unknown_protocol(self.argument, self.url, error) from error

    def __reduce__(self):
        how = {"timeout": self.timeout, "attempts": self.attempts, "options": self.options}
        return functools.partial(Remote, **how), (self.url,)


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Sends the headers of `Remote` again after a redirection to the same host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and (new.type, new.host) == (req.type, req.host):
            new.unredirected_hdrs.update(req.unredirected_hdrs)
        return new


@functools.lru_cache(maxsize=1)
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_SameHost)


class _LocalError(Exception):
    """An error of the local disk, after which the request is not repeated."""

    def __init__(self, error: OSError):
        super().__init__(str(error))
        self.error = error


def _locally(write: Callable[[bytes], Any], piece: bytes) -> None:
    try:
        write(piece)
    except OSError as error:
        raise _LocalError(error) from error


def _pieces(file: Readable, most: int) -> Iterator[bytes]:
    while most > 0 and (piece := file.read(min(PIECE, most))):
        most -= len(piece)
        yield piece


def _length(response: http.client.HTTPResponse) -> int | None:
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None
