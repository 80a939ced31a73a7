"""Random changes to the files of a store: each must be refused, or change nothing that is read.

    python -m tests.support.store_damage 1000

A change is a flipped bit, another byte, 16 zeros, a cut or an extension, at a random place of a
random file, or two pieces as wide as a row that change places, some rows apart. The store is then
opened, every document is read by number, found by its tokens and looked up in a batch, and the
store is merged into another. What a cut of store.index at the end of a line removes, `verify` must
report, because a killed writer leaves the same.
"""

import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from logitless.cli import machine
from logitless.store import Store, merge
from tests.support import stores
from tests.support.stores import document

KINDS = ("bit", "byte", "zeros", "cut", "longer", "moved")
LENGTHS = (300, 7, 64, 1, 120, 80, 33)


def changed(data: bytes, kind: str, draw: random.Random, width: int) -> bytes:
    place = draw.randrange(len(data))
    if kind == "moved":
        a, b = sorted((place, place % width + width * draw.randrange(len(data) // width + 1)))
        one, two = data[a : a + width], data[b : b + width]
        if len(two) < width or a == b:
            return data
        return data[:a] + two + data[a + width : b] + one + data[b + width :]
    if kind == "bit":
        return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    if kind == "byte":
        return data[:place] + draw.randbytes(1) + data[place + 1 :]
    if kind == "zeros":
        return data[:place] + bytes(len(data[place : place + 16])) + data[place + 16 :]
    if kind == "cut":
        return data[:place]
    return data + draw.randbytes(draw.randrange(1, 40))


def read(path: Path) -> list[tuple]:
    """All that can be read of a store, by every way to read it."""
    store, found = Store(path), []
    for number in range(len(store)):
        tokens, targets = store[number]
        again = store[store.find(tokens)][1]
        padded = torch.nn.functional.pad(tokens, (0, 3), value=-1)
        batch = store.targets_for(padded[None])[0, : len(tokens)]
        for got in (targets, again, batch):
            parts = (tokens, got.ids, got.logprobs, got.tail, got.mask)
            found.append(tuple(None if t is None else t.tolist() for t in parts))
    return found


def rounds(n: int, seed: int, folder: Path) -> Counter:
    """How many of n changes were refused, changed nothing, or gave other data."""
    draw, counts = random.Random(seed), Counter()
    documents = [document(length, i) for i, length in enumerate(LENGTHS)]
    for values in ("u8", "f16"):
        stores.write(folder / values, documents, values=values, shard_bytes=30_000)
    want = {values: read(folder / values) for values in ("u8", "f16")}
    width = {values: Store(folder / values).info.row_bytes for values in want}
    for number in range(n):
        values, kind = draw.choice(("u8", "f16")), draw.choice(KINDS)
        path = folder / "damaged"
        shutil.copytree(folder / values, path)
        files = sorted(
            f for f in path.iterdir() if f.suffix in (".shard", ".json", ".index", ".lookup")
        )
        file = draw.choices(files, [f.stat().st_size for f in files])[0]
        file.write_bytes(changed(file.read_bytes(), kind, draw, width[values]))
        for name, look in (("read", read), ("merged", lambda p: merged(p, folder / "merged"))):
            try:
                same = look(path) == want[values]
                outcome = "nothing changed" if same else "OTHER DATA"
                if not same and not Store(path).verify():
                    outcome = "reported by verify"
            except (ValueError, KeyError) as error:
                named = path.name in str(error)
                outcome = "refused by name" if named else f"REFUSED: {error}"[:100]
            if outcome.startswith(("OTHER", "REFUSED")):
                print(f"change {number}: {kind} of {file.name}, {name}: {outcome}")
            counts[f"{kind}, {name}: {outcome}"] += 1
        shutil.rmtree(path)
    return counts


def merged(path: Path, to: Path) -> list[tuple]:
    try:
        merge(to, [path])
        return read(to)
    finally:
        shutil.rmtree(to, ignore_errors=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        total = rounds(int(sys.argv[1]), 0, Path(temporary))
    print(f"{sys.argv[1]} random changes to files of a store, commit {machine.commit()}")
    for outcome, times in sorted(total.items()):
        print(f"{times:6}  {outcome}")
    raise SystemExit(any(word in outcome for outcome in total for word in ("OTHER", "REFUSED")))
