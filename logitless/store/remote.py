"""Reads and writes files at an address, such as s3://bucket/targets.

Files at http and https addresses are read with Python's standard library. Files at all other
addresses are read and written with the package fsspec. A request that fails is repeated after a
wait. Each wait is twice as long as the previous wait, up to LONGEST_WAIT. The fetched bytes are
compared with the size and the SHA-256 of the file, if these are known. A difference counts as a
failed request. So a file that was cut off or changed during the transfer is fetched again.
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
# For these protocols, a folder is created before a file is written into the folder. For other
# protocols, folders are not created, because this could create a new bucket with a misspelt name.
FOLDERS = {"file", "local", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav"}
TRY_AGAIN = {408, 425, 429}  # HTTP statuses below 500 after which another attempt can succeed
Result = TypeVar("Result")


class Listed(NamedTuple):
    """The name, the size and the SHA-256 of a file, from store.index."""

    name: str
    bytes: int
    sha256: str


class Readable(Protocol):
    """An open file. Only the method `read` is used."""

    def read(self, size: int, /) -> bytes: ...


def is_address(path: Any) -> bool:
    """Returns whether a path is an address, such as s3://bucket/targets, and not a local folder."""
    return isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)", path) is not None


class Remote:
    """The folder at an address.

    A request over http or https fails if the server sends nothing for `timeout` seconds. `options`
    are the keyword arguments of fsspec's file system, for example timeouts. For http and https, the
    only option is `headers`. If a server redirects a request to another host, `headers` are not
    sent to this host. In error messages, `argument` is the name of the argument with the address.
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
        """Returns the address of a file. A query at the end of the folder's address is kept."""
        if not self.is_http:
            return f"{self.url}/{name}"
        parts = urllib.parse.urlsplit(self.url)
        return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()

    def read(self, name: str, parsed: Callable[[str, bytes], Result]) -> Result:
        """Reads a whole file into memory, and returns the result of `parsed(address, bytes)`.

        If `parsed` raises a ValueError, the file is read again. Raises FileNotFoundError if the
        file does not exist.
        """

        def attempt() -> Result:
            with self._opened(name) as (file, size):
                data = b"".join(_pieces(file, LARGEST if size is None else size + 1))
            checks.whole_file(self.address(name), len(data), size)
            return parsed(self.address(name), data)

        return self._repeated(name, attempt)

    def fetch(self, listed: Listed, into: Any, attempts: int | None = None) -> None:
        """Writes a listed file into an open local file, and checks the file's size and SHA-256.

        Makes at most `attempts` attempts. The default is the constructor's argument `attempts`.
        """
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
        """Uploads a local file, and checks the size of the uploaded file."""
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
        """Returns the size of a file in bytes, or None if the file does not exist."""

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
        """Calls `attempt` up to `attempts` times, until a call succeeds, and returns its result.

        An error is raised immediately if another attempt would fail too, for example if the file
        does not exist.
        """
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
        """Yields an open file and its size in bytes. The size is None if the size is not known."""
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
        """The file system of fsspec, and the path of the folder in this file system.

        A forked process creates its own file system, because processes cannot share connections.
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
    """An error of the local disk. After this error, the request is not repeated."""

    def __init__(self, error: OSError):
        super().__init__(str(error))
        self.error = error


def _locally(write: Callable[[bytes], Any], piece: bytes) -> None:
    try:
        write(piece)
    except OSError as error:
        raise _LocalError(error) from error


def _pieces(file: Readable, most: int) -> Iterator[bytes]:
    """Yields the first `most` bytes of an open file, in several pieces."""
    while most > 0 and (piece := file.read(min(PIECE, most))):
        most -= len(piece)
        yield piece


def _length(response: http.client.HTTPResponse) -> int | None:
    """Returns the number in the header Content-Length, or None if the header has no number."""
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None
