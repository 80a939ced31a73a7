"""Measures how fast one process reads a remote store, if each request takes 30 ms longer.

    python -m benchmarks.store_remote --out FOLDER

A server of HTTP in another process waits 30 ms before each answer. The store has K = 64 and
V = 151,936. The script reads all documents with an empty cache: in order, in order without
prefetching, shuffled, and in order by two processes that share a cache. It also reads the local
store. All documents are compared with the local store before the times are taken. The script writes
store-remote.txt.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import tempfile
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from benchmarks.store_speed import VOCAB, K, targets
from logitless.cli import machine
from logitless.store import Documents, Store, Writer

LATENCY = 0.03  # seconds before each answer
AIM = 50_000  # tokens per second and process
DOCUMENT, DOCUMENTS = 512, 2048  # tokens per document, and documents
SHARD_BYTES = 1 << 25


class Slow(SimpleHTTPRequestHandler):
    """Serves a folder after a wait."""

    def do_GET(self) -> None:
        time.sleep(LATENCY)
        super().do_GET()

    def log_message(self, *_) -> None:
        pass


def serve(folder: str, connection) -> None:
    os.chdir(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    connection.send(server.server_port)
    server.serve_forever()


def written(path: Path) -> Store:
    """A store of random documents. The rows of a group of documents are repeated."""
    rows = targets(64 * DOCUMENT)
    starts = list(range(0, 64 * DOCUMENT + 1, DOCUMENT))
    with Writer(path, vocab_size=VOCAB, k=K, shard_bytes=SHARD_BYTES) as writer:
        for _ in range(DOCUMENTS // 64):
            writer.extend(torch.randint(0, VOCAB, (64 * DOCUMENT,)), starts, rows)
    return Store(path)


def read(url: str | Path, cache: Path | None, seed: int | None = None, ahead: bool = True) -> float:
    """Reads all documents once, and returns the number of tokens per second."""
    torch.set_num_threads(1)
    begin, tokens = time.perf_counter(), 0
    store = Store(url, cache=cache) if cache is not None else Store(url)
    if not ahead:
        store.prefetch = lambda *_, **__: None
        store._files.prefetch.reading = lambda _: None
    for _, rows in Documents(store, seed=seed, rank=0, world=1):
        tokens += len(rows)
    return tokens / (time.perf_counter() - begin)


def compare(url: str, local: Store, cache: Path) -> None:
    remote = Store(url, cache=cache)
    for i in range(len(local)):
        (a, b), (c, d) = remote[i], local[i]
        same = torch.equal(a, c) and torch.equal(b.ids, d.ids)
        if not same or not torch.equal(b.logprobs, d.logprobs) or not torch.equal(b.tail, d.tail):
            raise SystemExit(f"document {i} must be the same as in the local store, got another")


def measured(folder: Path) -> list[tuple[str, float]]:
    local = written(folder / "store")
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(str(folder / "store"), theirs), daemon=True
    )
    process.start()
    url = f"http://127.0.0.1:{mine.recv()}"
    try:
        compare(url, local, folder / "compared")
        found = [
            ("local, in order", read(local.path, None)),
            ("remote, in order", read(url, folder / "a")),
            ("remote, in order, without prefetching", read(url, folder / "b", ahead=False)),
            ("remote, shuffled", read(url, folder / "c", seed=0)),
            ("remote, in order, everything in the cache", read(url, folder / "a")),
        ]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            speeds = pool.starmap(read, [(url, folder / "d")] * 2)
        return [*found, ("remote, in order, the slower of 2 processes with one cache", min(speeds))]
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    out = parser.parse_args().out
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    lines = [
        f"Reading a remote store over HTTP, {1000 * LATENCY:.0f} ms of latency per request",
        f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()},"
        f" torch {torch.__version__}, commit {machine.commit()}, {datetime.date.today()}",
        f"{DOCUMENTS} documents of {DOCUMENT} tokens, K = {K}, V = {VOCAB}, shards of"
        f" {SHARD_BYTES >> 20} MiB; one thread per process; the cache is empty at first",
        "",
        *(f"{speed:12,.0f} tokens/s   {name}" for name, speed in rows),
        "",
        f"aim: {AIM:,} tokens/s per process in order:"
        f" {'reached' if dict(rows)['remote, in order'] >= AIM else 'missed'}",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "store-remote.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
