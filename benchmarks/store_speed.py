"""How fast a store is read: each time beside that of simpler work on the same machine.

    python -m benchmarks.store_speed --out FOLDER

8,192 tokens of K = 64 and V = 151,936, on one thread: a slice of one document, and a packed batch
of 64 documents with their lengths given and without; then opening a store of 100,800 documents.
Every time is a median of calls that alternate with those of the work beside it, so that a slow or a
busy machine slows both, and the ratio stays. Writes store-speed.md.
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
FILES, IN_A_FILE = 84, 1200  # documents of 1,000 tokens, if the store had 100 million of them
# Our time over that of the work beside it.
SLICE, PACKED, OPENING = 8.0, 4.0, 3.0


def targets(rows: int) -> ll.SparseTargets:
    """Random rows, in which no id is repeated."""
    ids = torch.randint(0, VOCAB // K, (rows, K)) * K + torch.arange(K)
    logprobs = torch.randn(rows, K).mul_(2).log_softmax(-1).sort(-1, descending=True).values
    return ll.SparseTargets(ids, logprobs - 0.1, torch.full((rows,), 0.09).log())


def packed_store(path: Path) -> tuple[Store, Tensor]:
    """A document of 8,192 tokens and 64 that fill as many, and the tokens of the 64."""
    tokens, rows = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS // DOCUMENTS)), targets(TOKENS)
    with Writer(path, vocab_size=VOCAB, k=K) as writer:
        writer.add(torch.randint(0, VOCAB, (TOKENS,)), rows)
        for document, part in zip(tokens, rows.reshape(tokens.shape), strict=True):
            writer.add(document, part)
    return Store(path), tokens.flatten()


def long_store(path: Path) -> Path:
    """One file of many short documents under 84 names; opening reads where documents begin."""
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
    """What opening cannot do without: the header of each file, and its documents' starts."""
    from safetensors import safe_open

    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as found:
            found.get_tensor("starts")


def main() -> int:
    """Exit status: 1 if a ratio is above its aim."""
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
        works = [
            (*a_slice, *copy, SLICE),
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
