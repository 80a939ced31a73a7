"""Measures the speed of reading a store, relative to simpler work on the same machine.

    python -m benchmarks.store_speed --out FOLDER

The store has K = 64 and V = 151,936, and is read on one thread. The script times a slice of 8,192
tokens of one document with and without checksums, and a packed batch of 64 documents with and
without their lengths. The script also times the opening of a store of 100,800 documents. Each time
is a median. The calls alternate with the simpler work, so a slow or busy machine does not change
the ratio. The script writes store-speed.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from logitless.cli import machine as _machine
from logitless.cli.clocks import wall_times
from logitless.cli.report import table
from logitless.store import Store, Writer

VOCAB, K, TOKENS, DOCUMENTS = 151_936, 64, 8192, 64
FILES, IN_A_FILE = 84, 1200  # as many documents as a store of 100 million tokens may have
# Largest allowed ratios of our time to the time of the simpler work.
SLICE, CHECKED, PACKED, OPENING = 8.0, 1.5, 4.0, 3.0


def targets(rows: int) -> ll.SparseTargets:
    """Targets of random rows. No row repeats an id."""
    ids = torch.randint(0, VOCAB // K, (rows, K)) * K + torch.arange(K)
    logprobs = torch.randn(rows, K).mul_(2).log_softmax(-1).sort(-1, descending=True).values
    return ll.SparseTargets(ids, logprobs - 0.1, torch.full((rows,), 0.09).log())


def packed_store(path: Path) -> tuple[Store, Tensor]:
    """A store of one document of 8,192 tokens and 64 short documents, and the short tokens.

    The short documents have 8,192 tokens together and the same targets as the long document.
    """
    tokens, rows = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS // DOCUMENTS)), targets(TOKENS)
    with Writer(path, vocab_size=VOCAB, k=K) as writer:
        writer.add(torch.randint(0, VOCAB, (TOKENS,)), rows)
        for document, part in zip(tokens, rows.reshape(tokens.shape), strict=True):
            writer.add(document, part)
    return Store(path), tokens.flatten()


def long_store(path: Path) -> Path:
    """A store of many short documents, which consists of 84 hard links to one shard."""
    with Writer(path, vocab_size=VOCAB, k=K) as writer:
        for document, part in zip(
            torch.randint(0, VOCAB, (IN_A_FILE, 2)),
            targets(2 * IN_A_FILE).reshape(IN_A_FILE, 2),
            strict=True,
        ):
            writer.add(document, part)
    (file,) = path.glob("*.safetensors")
    for i in range(1, FILES):
        (path / f"0-{i:06}.safetensors").hardlink_to(file)
    return path


def headers(path: Path) -> None:
    """Reads the header and the starts of documents of each file, which opening must read too."""
    from safetensors import safe_open

    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as found:
            found.get_tensor("starts")


def main() -> int:
    """Returns the exit status, which is 1 if a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--budget", type=float, default=3000.0, help="milliseconds for each line")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store, tokens = packed_store(Path(folder) / "packed")
        many = long_store(Path(folder) / "long")
        lengths, whole = [TOKENS // DOCUMENTS] * DOCUMENTS, store[0][1]
        for given in (None, lengths):
            assert torch.equal(store.targets_for(tokens, given).ids, whole.ids)
        assert len(Store(many)) == FILES * IN_A_FILE
        a_slice = f"a slice of {TOKENS:,} tokens", lambda: store[0, :TOKENS]
        copy = "a copy of what it returns", lambda: [t.clone() for t in vars(whole).values()
                                                      if t is not None]  # fmt: skip
        unchecked = Store(store.path)
        unchecked.shards[0].blocks.checked = False
        works = [
            (*a_slice, *copy, SLICE),
            (*a_slice, "without comparing checksums", lambda: unchecked[0, :TOKENS], CHECKED),
            ("a packed batch, lengths given", lambda: store.targets_for(tokens, [lengths]),
             *a_slice, PACKED),
            ("a packed batch", lambda: store.targets_for(tokens), *a_slice, PACKED),
            (f"opening {FILES * IN_A_FILE:,} documents", lambda: Store(many),
             "headers and starts, by safetensors", lambda: headers(many), OPENING),
        ]  # fmt: skip
        rows, missed = [], 0
        for name, ours, beside, other, aim in works:
            works_in_turn = [(lambda: None, lambda _, f=f: f()) for f in (ours, other)]
            mine, theirs = wall_times("cpu", works_in_turn, args.budget)
            missed += mine > aim * theirs
            rows.append({
                "": name, "ms": f"{mine:.2f}", "beside": beside, "its ms": f"{theirs:.2f}",
                "ratio": f"{mine / theirs:.1f}", "aim": f"{aim:.0f}",
            })  # fmt: skip
    about = f"{_machine.device('cpu')['name']}, torch {torch.__version__}"
    text = f"# Reading a store\n\n{about}, commit {_machine.commit()}; one thread.\n\n"
    text += table(rows) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "store-speed.md").write_text(text)
    print(text)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
