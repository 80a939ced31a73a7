"""A server of HTTP for the tests, which fails in a chosen way.

fsspec reads http with the package aiohttp. `Loopback` is a file system of fsspec that needs nothing
but Python's standard library, so that the tests run without aiohttp too.
"""

import contextlib
import threading
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from logitless.store import remote

FAULTS = (
    "refuse", "busy", "reset", "stall", "stall inside", "truncate", "shorten", "wrong", "longer",
)  # fmt: skip
TIMEOUT = 0.2  # seconds; only a stall waits this long
PROTOCOLS = ["loopback", "http"]


class Loopback(AbstractFileSystem):
    protocol = "loopback"
    cachable = False

    def cat_file(self, path, start=None, end=None, **_):
        with self._opened(path) as file:
            return file.read()

    def get_file(self, rpath, lpath, callback=fsspec.callbacks.NoOpCallback(), **_):  # noqa: B008
        with self._opened(rpath) as file, open(lpath, "wb") as into:
            while piece := file.read(1 << 12):
                callback.relative_update(into.write(piece))

    def _opened(self, path):
        request = urllib.request.Request(f"http://{path}", headers=self.storage_options)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError(path) from None
            kind = PermissionError if error.code == 403 else OSError
            raise kind(f"HTTP status {error.code}") from None


fsspec.register_implementation("loopback", Loopback, clobber=True)


def options_of(protocol: str) -> dict:
    """`storage_options` with a short timeout. Skips a test of http without aiohttp."""
    if protocol == "loopback":
        return {}
    aiohttp = pytest.importorskip("aiohttp")
    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_read=TIMEOUT)}}


class Server:
    """Serves a folder. `faults` lists, for a file name, the failures of the next requests."""

    def __init__(self, folder: Path):
        self.folder, self.requests = folder, Counter()
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always: dict[str, str] = {}  # failures of all requests, by file name
        self.ended = threading.Event()
        self.headers: list[str | None] = []  # the header Authorization of each request

        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = self.address("loopback")

    def address(self, protocol: str) -> str:
        return f"{protocol}://127.0.0.1:{self.http.server_port}/store"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.removeprefix("/store/")
        self.requests[name] += 1
        self.headers.append(request.headers.get("Authorization"))
        queue = self.faults[name]
        fault = queue.pop(0) if queue else self.always.get(name)
        path = self.folder / name
        status = {"busy": 503, "refuse": 403}.get(fault or "", 200 if path.is_file() else 404)
        if fault == "reset":
            request.connection.close()
            return
        if fault == "stall":
            self.ended.wait()
            return
        data = path.read_bytes() if status == 200 else b"an error"
        body = self._changed(data, fault)
        request.send_response(status)
        announced = len(data) if fault in ("truncate", "stall inside") else len(body)
        request.send_header("Content-Length", str(announced))
        request.end_headers()
        request.wfile.write(body)
        if fault == "stall inside":
            self.ended.wait()

    def _changed(self, data: bytes, fault: str | None) -> bytes:
        half = len(data) // 2
        if fault in ("truncate", "shorten", "stall inside"):
            return data[:half]
        if fault == "wrong":
            return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        return data + b"more" if fault == "longer" else data


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serves a folder in a thread. Leaving the block ends all requests that stall."""
    server = Server(folder)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


@contextlib.contextmanager
def served_store(store) -> Iterator[Server]:
    """Serves a local store, without waits between attempts."""
    with pytest.MonkeyPatch.context() as patch, served(store.path) as server:
        patch.setattr(remote, "FIRST_WAIT", 0.0)
        yield server
