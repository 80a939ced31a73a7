"""Writers that are killed at random moments: nothing that `add` has accepted is lost or doubled.

    python -m tests.support.store_kills 200

In each round one or two processes write to a store, with files of a random size and with or
without an upload, a third may merge the store into another, and all are killed after a random time.
The next round goes on with the same stores. At the end the store, its uploaded copy and the merged
store must have all documents that were reported as added, each once, with its targets, and `verify`
must find nothing.
"""

import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from logitless.cli import machine
from logitless.store import Store, merge, recover
from tests.support.forked import FORKED, start
from tests.support.stores import assert_near, document, joined, open_writer


def length(i: int) -> int:
    """Short and long documents, no two of which are equal."""
    return 3 + i * 7 % 90


def add(path: Path, part: int, shard_bytes: int, upload: str | None, sender) -> None:
    """In a process: adds one to four documents at once and sends their numbers, until killed."""
    with contextlib.suppress(BrokenPipeError):
        writer = open_writer(path, part=part, shard_bytes=shard_bytes, upload=upload)
        for turn in range(10**9):
            count = 1 + turn % 4
            first = 10 * (turn // 4) + count * (count - 1) // 2
            numbers = [part + 2 * i for i in range(first, first + count)]
            found = [document(length(i), i) for i in numbers]
            added = writer.add(*found[0]) if count == 1 else writer.extend(*joined(found))
            for i in numbers if added else ():
                sender.send(i)


def copy(path: Path, to: Path) -> None:
    """In a process: merges the store into another, until killed."""
    while True:
        merge(to, [path], shard_bytes=5000)


def rounds(n: int, seed: int, path: Path) -> int:
    """The number of documents that were reported as added."""
    draw, told = random.Random(seed), set()
    bucket, merged = path.with_name("bucket"), path.with_name("merged")
    for number in range(n):
        processes = []
        for part in range(draw.choice((1, 2))):
            receiver, sender = FORKED.Pipe(duplex=False)
            shard_bytes = draw.choice((2000, 20_000, 1 << 28))
            upload = draw.choice((None, f"file://{bucket}"))
            process = start(add, path, part, shard_bytes, upload, sender)
            sender.close()
            processes.append((process, receiver))
        copying = start(copy, path, merged) if number and draw.random() < 0.3 else None
        with contextlib.suppress(EOFError):
            told.add(processes[0][1].recv())  # it has begun
        time.sleep(draw.random() * 0.2)
        if copying is not None:
            copying.kill()
            copying.join()
        for process, receiver in processes:
            process.kill()
            process.join()
            with contextlib.suppress(EOFError):
                while True:
                    told.add(receiver.recv())
    recover(path)
    open_writer(path, upload=f"file://{bucket}").close()
    merge(merged, [path])
    for where in (path, merged, f"file://{bucket}"):
        store = Store(where, cache=path.with_name("cache")) if "://" in str(where) else Store(where)
        assert store.verify(), store.verify()
        tokens = {tuple(store[i][0].tolist()) for i in range(len(store))}
        assert len(tokens) == len(store), "a document is there twice"
        for i in told:
            found, targets = document(length(i), i)
            assert_near(store[store.find(found)][1], targets)
        assert len(store) >= len(told)
    return len(told)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        number = rounds(int(sys.argv[1]), 0, Path(temporary) / "store")
    print(f"{sys.argv[1]} rounds of kill -9, commit {machine.commit()}")
    print(f"{number} documents were reported as added;")
    print("none is missing, none is different, none is there twice, verify is right")
