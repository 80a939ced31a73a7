"""Compares targets/safetensors.py and store/blocks.py with the package safetensors.

    python -m benchmarks.store_safetensors --out FOLDER

The script times the rows of a packed batch: 64 slices of 128 rows from each column of a shard, with
K = 64 and V = 151,936. It also cuts off a file that is open in another process, and reads a file
whose bool tensor has bytes other than 0 and 1. The script writes store-safetensors.txt.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors
import torch
from safetensors import safe_open

from benchmarks.store_speed import packed_store
from benchmarks.store_timing import arguments, medians
from logitless.cli import machine
from logitless.store.shard import Shard
from logitless.targets import safetensors as ours

SLICES, ROWS = 64, 128
OURS = """
import os, sys
from pathlib import Path
from logitless.store.blocks import Blocks
from logitless.targets.safetensors import read_header
header = read_header(sys.argv[1])
blocks = Blocks(Path(sys.argv[1]), header.start, header.entries["a"].end, checked=False)
blocks.read(0, 8)
os.truncate(sys.argv[1], 1 << 16)
blocks.read(header.entries["a"].end - 8, header.entries["a"].end)
"""
PACKAGE = """
import os, sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    os.truncate(sys.argv[1], 1 << 16)
    file.get_slice("a")[-8:].sum()
"""


def times(shard: Shard, budget: float) -> list[float]:
    """Milliseconds of our reader with and without checksums, and of the package."""
    places = torch.randint(0, int(shard.starts[-1]) - ROWS, (SLICES,)).tolist()
    spans = [(a, a + ROWS) for a in places]
    sizes = shard.header.sizes()
    ranges = [
        (shard.entries[name].begin + a * size, shard.entries[name].begin + b * size)
        for name, size in sizes.items()
        for a, b in spans
    ]

    def unchecked() -> object:
        shard.blocks.checked = False
        try:
            return shard.blocks.pieces(ranges)
        finally:
            shard.blocks.checked = True

    with safe_open(shard.path, "pt") as file:
        columns = [file.get_slice(name) for name in sizes]
        return medians(
            [
                lambda: shard.pieces_of(spans),
                unchecked,
                lambda: [[column[a:b] for a, b in spans] for column in columns],
            ],
            budget,
        )


def ending(code: str, path: Path) -> str:
    """How a process ends that reads a file after the file was cut off."""
    ours.write(path, {"a": torch.zeros(1 << 22)}, {})
    done = subprocess.run(
        [sys.executable, "-c", code, os.fspath(path)], capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        return f"the process is killed by signal {-done.returncode}"
    error = done.stderr.strip().splitlines()[-1:] or ["no error"]
    return error[0].replace(os.fspath(path), path.name)


def bools(path: Path) -> list[list[int]]:
    """The bytes of a bool tensor that was written with the bytes 0, 1, 2 and 255."""
    text = b'{"a":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}'
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([0, 1, 2, 255]))
    with safe_open(path, "pt") as file:
        theirs = file.get_tensor("a")
    mine = ours.read(path, ours.read_header(path))["a"]
    return [t.view(torch.uint8).tolist() for t in (mine, theirs)]


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store, _ = packed_store(folder / "store")
        checked, plain, package = times(store.shards[0], args.budget)
        cut = [ending(code, folder / "cut") for code in (OURS, PACKAGE)]
        mine, theirs = bools(folder / "bools")
    lines = [
        f"Our reader and the package safetensors {safetensors.__version__},"
        f" torch {torch.__version__}, commit {machine.commit()}; CPU times of one thread",
        "",
        f"{SLICES} slices of {ROWS} rows from each column of a shard, K = 64:",
        f"{checked:8.2f} ms   ours, with checksums",
        f"{plain:8.2f} ms   ours, without checksums",
        f"{package:8.2f} ms   the package, which has no checksums",
        "",
        "a slice of a file that was cut off after it was opened:",
        f"    ours: {cut[0]}",
        f"    the package: {cut[1]}",
        "",
        "a bool tensor with the bytes 0, 1, 2 and 255, as it is read:",
        f"    ours: {mine}",
        f"    the package: {theirs}",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "store-safetensors.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
