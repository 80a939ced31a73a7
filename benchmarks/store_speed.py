"""Measures how fast a store is read and written, beside other readers and beside an older commit.

    git worktree add /tmp/old 73dd5451
    python -m benchmarks.store_speed --old /tmp/old --out benchmarks/results

4,096 documents of 128 tokens and 128 documents of 4,096, K = 64 and V = 151,936. Every reader
returns the same encoded rows of 64 random documents, or of 64 random spans of 128 tokens. Calls
alternate in random order, also with those of the older commit, which runs in a process of its own.
Times are CPU times of all threads of a process, in ms per batch with a warm page cache; wall times
where the pages were dropped before each batch. Lance is left out if it is not installed. The last
table has an index of 10 million documents, and a sparse one of a billion. The script writes
store-speed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

import logitless as ll

VOCAB, K, N, ROWS = 151_936, 64, 128, 64 * 128
SHORT, LONG = 4096, 4096  # number of short documents, and length of the long ones
HOW = {"vocab_size": VOCAB, "k": K}
ROUNDS = 30
Call = Callable[[list[int]], object]


def targets() -> ll.SparseTargets:
    """Targets of ROWS rows. The probability falls with a power of the rank."""
    ids = torch.randint(0, VOCAB // K, (ROWS, K)) * K + torch.arange(K)
    logits = 0.3 * torch.randn(ROWS, K) - 1.5 * torch.arange(1, K + 1.0).log()
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    return ll.SparseTargets(ids, logprobs - 0.1, torch.full((ROWS,), 0.09).log())


def write(folder: Path) -> tuple[ll.store.Store, ll.store.Store]:
    """The stores of short and of long documents."""
    torch.manual_seed(0)
    rows, stores = targets(), []
    for name, count, n in (("short", SHORT, N), ("long", SHORT * N // LONG, LONG)):
        tokens = torch.randint(0, VOCAB, (count, n))
        if not (folder / name / "store.json").exists():
            with ll.store.Writer(folder / name, shard_bytes=1 << 24, **HOW) as writer:
                for some in tokens.split(ROWS // n):
                    writer.extend(some.flatten(), list(range(0, ROWS + 1, n)), rows)
        stores.append(ll.store.Store(folder / name))
    return stores[0], stores[1]


def short_tokens() -> torch.Tensor:
    torch.manual_seed(0)
    targets()
    return torch.randint(0, VOCAB, (SHORT, N))


def span(i: int) -> tuple[int, int]:
    """Document and first token of the span with this number, in the store of long documents."""
    return i * N // LONG, random.Random(i).randrange(LONG - N)


def calls(folder: Path, old: bool) -> dict[str, Call]:
    """What is timed, in this version and in the old one."""
    short, long = write(folder)
    tokens, spans = short_tokens(), [span(i) for i in range(SHORT)]
    found: dict[str, Call] = {
        "rows, documents": lambda b: rows_of(short, [(i, 0) for i in b], old),
        "rows, spans": lambda b: rows_of(long, [spans[i] for i in b], old),
        "[store[i] for i in batch]": lambda b: [short[i] for i in b],
        "targets_for, lengths": lambda b: short.targets_for(tokens[b].reshape(1, -1), [[N] * 64]),
    }
    if not old:
        found |= {
            "store[batch]": lambda b: short[b],
            "targets_for, numbers": lambda b: short.targets_for(
                tokens[b].reshape(1, -1), documents=[b]
            ),
        }
    rows, sixes = targets(), torch.randint(0, VOCAB, (64, 6))

    def captured(b: list[int]) -> None:
        with tempfile.TemporaryDirectory() as name, ll.store.Writer(name, **HOW) as writer:
            writer.extend(tokens[b].flatten(), list(range(0, ROWS + 1, N)), rows)

    def added(b: list[int]) -> None:
        with tempfile.TemporaryDirectory() as name, ll.store.Writer(name, **HOW) as writer:
            for document in sixes[:64]:
                writer.add(document, rows[:6])

    return found | {"writing 64 documents of 128": captured, "adding 64 documents of 6": added}


def rows_of(store: ll.store.Store, wanted: list[tuple[int, int]], old: bool) -> object:
    """The encoded rows of N tokens of several documents."""
    if not old:
        return store._rows(store._spans([(i, slice(a, a + N)) for i, a in wanted]))
    by_shard: dict = {}
    for i, a in wanted:
        at = next(s for s, first in enumerate(store.firsts[1:]) if i < first)
        begin, _ = store.shards[at].span(i - store.firsts[at])
        by_shard.setdefault(at, []).append((begin + a, begin + a + N))
    return [store.shards[at].pieces_of(spans) for at, spans in by_shard.items()]


def others(folder: Path, short: ll.store.Store) -> dict[str, Call]:
    """Readers of the same bytes: twelve lines of Python, and Lance."""
    width = short.info.row_bytes
    data = [short.document(i)[1] for i in range(SHORT)]
    (folder / "plain").write_bytes(b"".join(data))
    checksums = [zlib.crc32(document) for document in data]
    file = os.open(folder / "plain", os.O_RDONLY)

    def plain(batch: list[int]) -> list[bytearray]:
        size, found = N * width, []
        for i in batch:
            buffer = bytearray(size)
            os.preadv(file, [buffer], i * size)
            if zlib.crc32(buffer) != checksums[i]:
                raise ValueError(f"document {i} is damaged")
            found.append(buffer)
        return found

    def plain_spans(batch: list[int]) -> list[bytearray]:
        """The same at the places of the spans, whose checksums a plain file would not have."""
        found = []
        for i in batch:
            buffer = bytearray(N * width)
            os.preadv(file, [buffer], (i * N // LONG * LONG + span(i)[1]) * width)
            zlib.crc32(buffer)
            found.append(buffer)
        return found

    found: dict[str, Call] = {"twelve lines": plain, "twelve lines, spans": plain_spans}
    try:
        import lance
        import pyarrow
    except ModuleNotFoundError:
        return found
    table = pyarrow.table({"rows": pyarrow.array(data, pyarrow.large_binary())})
    dataset = lance.write_dataset(table, str(folder / "lance"), mode="overwrite")
    return found | {"Lance": lambda batch: dataset.take(batch)}


def drop(folder: Path) -> None:
    """Drops the pages of all files from the page cache of this machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def once(call: Call, batch: list[int], clock: Callable[[], float] = time.process_time) -> float:
    begin = clock()
    call(batch)
    return 1e3 * (clock() - begin)


def serve(folder: Path) -> None:
    """In the process of the old commit: runs the calls that the other process names."""
    torch.set_num_threads(1)
    mine = calls(folder, old=True)
    print(json.dumps(list(mine)), flush=True)
    for line in sys.stdin:
        name, batch = json.loads(line)
        print(once(mine[name], batch), flush=True)


class Old:
    """The process of the old commit."""

    def __init__(self, tree: Path, folder: Path):
        code = f"import sys; sys.path.insert(0, {str(tree)!r});"
        code += " import runpy; runpy.run_path(sys.argv[1], run_name='old')['serve'](__import__("
        code += "'pathlib').Path(sys.argv[2]))"
        command = [sys.executable, "-c", code, __file__, str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": ""}, **pipes
        )
        self.names = json.loads(self.process.stdout.readline())

    def time(self, name: str, batch: list[int]) -> float:
        self.process.stdin.write(json.dumps([name, batch]) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def opening(folder: Path, documents: int, sparse: bool) -> dict[str, str]:
    """In a process of its own: memory and time of opening a lookup, and of 1,000 searches in it."""
    from logitless.store import lookup

    begin = time.perf_counter()
    torch.manual_seed(0)
    path = folder / f"0-{documents}.lookup"
    if sparse:
        step = 2**62 // documents
        firsts = torch.arange(0, documents, lookup.BLOCK) * step
        keys = firsts[7] + torch.arange(lookup.BLOCK) * step
        block = lookup.bytes_of(torch.cat((keys, torch.arange(lookup.BLOCK))))
        data = lookup.bytes_of(firsts)
        with open(path, "wb") as file:  # only the block of the searches is not sparse
            file.truncate(lookup.run_bytes(documents))
            file.seek(7 * (16 * lookup.BLOCK + 4))
            file.write(block + zlib.crc32(block).to_bytes(4, "little"))
            file.seek(lookup.run_bytes(documents) - len(data) - 4)
            file.write(data + zlib.crc32(data).to_bytes(4, "little"))
        wanted = keys.tolist()[1:] * 4
        del firsts, data
    else:
        keys = torch.randint(0, 2**62, (documents,))
        wanted = keys[torch.randint(0, documents, (1000,))].tolist()
        (run,) = lookup.extended(folder, [], [], (keys, torch.arange(documents)))
        path = folder / run.name
        del keys
    written = time.perf_counter() - begin
    before, begin = _resident(), time.perf_counter()
    found = lookup.RunFile(lookup.File(path), documents)
    opened, begin = time.perf_counter() - begin, time.perf_counter()
    assert all(found.numbers(key, key) for key in wanted[:1000])
    searched = time.perf_counter() - begin
    return {
        "documents": f"{documents:,}" + " (sparse)" * sparse,
        "bytes": f"{path.stat().st_size:,}", "written in s": f"{written:.1f}",
        "opened in ms": f"{1e3 * opened:.1f}",
        "MiB resident": f"{(_resident() - before) / 2**20:.1f}",
        "µs per search": f"{1e3 * searched:.0f}",
    }  # fmt: skip


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the result file")
    parser.add_argument("--old", type=Path, help="a working tree of an older commit")
    parser.add_argument("--opening", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.opening:
        print(json.dumps(opening(args.out, abs(args.opening), args.opening < 0)))
        return 0
    from benchmarks.store_timing import write as write_table

    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        mine = calls(folder / "new", old=False)
        beside = others(folder, ll.store.Store(folder / "new" / "short"))
        old = None if args.old is None else Old(args.old.resolve(), folder / "old")
        draw = random.Random(0)
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS + 1):
            batch = draw.sample(range(SHORT), 64)
            turns = list({**mine, **beside}.items())
            draw.shuffle(turns)  # what comes later finds more in the caches
            for key, call in turns:
                times.setdefault(key, []).append(once(call, batch))
            for key in old.names if old else ():
                times.setdefault(f"old {key}", []).append(old.time(key, batch))
        cold: dict[str, list[float]] = {}
        for _ in range(ROUNDS // 2):
            batch = draw.sample(range(SHORT), 64)
            for key in ("rows, documents", "rows, spans", *beside):
                drop(folder)
                call = {**mine, **beside}[key]
                cold.setdefault(key, []).append(once(call, batch, time.perf_counter))
        middle = {key: statistics.median(of_key[1:]) for key, of_key in times.items()}
        rows = [
            {
                "": key, "ms": f"{middle[key]:.2f}",
                "old": f"{middle[f'old {key}']:.2f}" if f"old {key}" in middle else "",
                "of the twelve lines": f"{middle[key] / middle['twelve lines']:.2f}",
                "cold, ms": f"{statistics.median(cold[key]):.1f}" if key in cold else "",
            }
            for key in [*beside, *mine]
        ]  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.store_speed", "--out", name]
        opened = [
            json.loads(subprocess.check_output([*command, "--opening", str(n)]))
            for n in (10_000_000, -1_000_000_000)
        ]
        opened.append(opening_a_store(folder))
    text = f"One batch: 64 documents or spans of {N} tokens, K = {K}, V = {VOCAB:,}."
    write_table(args.out / "store-speed.md", "Reading and writing a store", text, rows, opened)
    return 0


def opening_a_store(folder: Path) -> dict[str, str]:
    """Opens a store of 10 million documents in 1,000 shards, which are sparse files."""
    from logitless.store.shard import Listed

    path = folder / "many"
    ll.store.Writer(path, vocab_size=VOCAB, k=K).close()
    listing, lines = ll.store.Store(path).listing, []
    for number in range(1000):
        shard = Listed(f"0-{number:06}", 28_570_000, 10_000, 1_280_000, 0)
        (path / shard.name).touch()
        os.truncate(path / shard.name, shard.size)
        lines.append(listing.line(shard, []))
        listing.read(lines[-1])
    (path / "store.index").write_bytes(b"".join(lines))
    before, begin = _resident(), time.perf_counter()
    store = ll.store.Store(path)
    opened = time.perf_counter() - begin
    return {
        "documents": f"{len(store):,}, the whole store",
        "bytes": f"{sum(s.size for s in store.shards):,}", "written in s": "",
        "opened in ms": f"{1e3 * opened:.1f}",
        "MiB resident": f"{(_resident() - before) / 2**20:.1f}", "µs per search": "",
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
