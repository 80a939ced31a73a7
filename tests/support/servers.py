"""A server of HTTP for the tests, which fails in a chosen way."""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from logitless.store import remote

FAULTS = (
    "refuse", "busy", "reset", "stall", "stall inside", "truncate", "shorten", "wrong", "longer",
)  # fmt: skip
TIMEOUT = 0.1  # seconds; only a stall waits this long


class Server:
    """Serves a folder. `faults` lists, for a file name, the failures of the next requests."""

    def __init__(self, folder: Path):
        self.folder, self.requests = folder, Counter()
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.always: dict[str, str] = {}  # failures of all requests, by file name
        self.ended = threading.Event()
        self.headers: list[str | None] = []  # the header Authorization of each request
        self.redirect: str | None = None  # an address that requests are redirected to

        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/store"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.partition("?")[0].removeprefix("/moved").removeprefix("/store/")
        self.requests[name] += 1
        self.headers.append(request.headers.get("Authorization"))
        if self.redirect is not None and not request.path.startswith("/moved"):
            request.send_response(302)
            request.send_header("Location", f"{self.redirect}/{name}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
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
