"""For developers: measures how fast a store is read, relative to simpler work.

    python -m benchmarks.store_speed --out FOLDER

The store has K = 64 and V = 151,936. The script times a slice of 8,192 tokens of one document, with
and without checksums. Packed batches of 64 documents are timed with and without their lengths.
The documents of a batch are adjacent in the store, or chosen from 4,096 documents in several files.
The script also times the opening of a store of 100,800 documents. Each call alternates with its
simpler work. The script writes store-speed.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.store_timing import arguments, medians, write
from logitless.store import Store, Writer

VOCAB, K, TOKENS, DOCUMENTS = 151_936, 64, 8192, 64
SPREAD = 4096  # number of documents in the store of spread documents
FILES, IN_A_FILE = 84, 1200  # as many documents as a store of 100 million tokens may have
# Largest allowed ratios of our time to the time of the simpler work.
SLICE, CHECKED, PACKED, OPENING = 5.0, 1.5, 2.5, 3.0


def targets(rows: int) -> ll.SparseTargets:
    """Targets of random rows, without repeated ids.

    The probability falls with a power of the rank, as in language models.
    """
    ids = torch.randint(0, VOCAB // K, (rows, K)) * K + torch.arange(K)
    logits = 0.3 * torch.randn(rows, K) - 1.5 * torch.arange(1, K + 1.0).log()
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    return ll.SparseTargets(ids, logprobs - 0.1, torch.full((rows,), 0.09).log())


def packed_store(path: Path) -> tuple[Store, Tensor]:
    """A store, and the tokens of its 64 short documents.

    The store also has one long document of 8,192 tokens. The short documents together have 8,192
    tokens and the targets of the long document.
    """
    tokens, rows = torch.randint(0, VOCAB, (TOKENS,)), targets(TOKENS)
    with Writer(path, vocab_size=VOCAB, k=K) as writer:
        writer.add(torch.randint(0, VOCAB, (TOKENS,)), rows)
        writer.extend(tokens, list(range(0, TOKENS + 1, TOKENS // DOCUMENTS)), rows)
    return Store(path), tokens


def spread_store(path: Path) -> tuple[Store, Tensor]:
    """A store of many short documents in several files, and the tokens of 64 documents."""
    n = TOKENS // DOCUMENTS
    tokens, rows = torch.randint(0, VOCAB, (SPREAD, n)), targets(TOKENS)
    with Writer(path, vocab_size=VOCAB, k=K, shard_bytes=1 << 24) as writer:
        for documents in tokens.split(DOCUMENTS):
            writer.extend(documents.flatten(), list(range(0, TOKENS + 1, n)), rows)
    return Store(path), tokens[torch.randperm(SPREAD)[:DOCUMENTS]].flatten()


def long_store(path: Path) -> Path:
    """A store of many short documents, which consists of 84 hard links to one shard."""
    tokens = torch.randint(0, VOCAB, (2 * IN_A_FILE,))
    with Writer(path, vocab_size=VOCAB, k=K) as writer:
        writer.extend(tokens, list(range(0, len(tokens) + 1, 2)), targets(len(tokens)))
    (file,) = path.glob("*.safetensors")
    for i in range(1, FILES):
        (path / f"0-{i:06}.safetensors").hardlink_to(file)
    return path


def headers(path: Path) -> None:
    """Reads the header and the document starts of each file, as opening a store does."""
    from safetensors import safe_open

    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as found:
            found.get_tensor("starts")


def main() -> int:
    """Returns the exit status, which is 1 if a ratio is above its limit."""
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        store, tokens = packed_store(Path(folder) / "packed")
        spread, spread_tokens = spread_store(Path(folder) / "spread")
        many = long_store(Path(folder) / "long")
        lengths, whole = [TOKENS // DOCUMENTS] * DOCUMENTS, store[0][1]
        for given in (None, lengths):
            assert torch.equal(store.targets_for(tokens, given).ids, whole.ids)
            assert spread.targets_for(spread_tokens, given).mask is None
        assert len(Store(many)) == FILES * IN_A_FILE
        returned = [t for t in vars(whole).values() if t is not None]
        a_slice = f"a slice of {TOKENS:,} tokens", lambda: store[0, :TOKENS]
        unchecked = Store(store.path)
        unchecked.shards[0].blocks.checked = False
        works = [
            (*a_slice, "a copy of the result", lambda: [t.clone() for t in returned], SLICE),
            (*a_slice, "without comparing checksums", lambda: unchecked[0, :TOKENS], CHECKED),
            ("a packed batch, lengths given", lambda: store.targets_for(tokens, [lengths]),
             *a_slice, PACKED),
            ("a packed batch", lambda: store.targets_for(tokens), *a_slice, PACKED),
            (f"a packed batch, spread over {len(spread.shards)} files",
             lambda: spread.targets_for(spread_tokens), *a_slice, PACKED),
            (f"opening {FILES * IN_A_FILE:,} documents", lambda: Store(many),
             "headers and starts, by safetensors", lambda: headers(many), OPENING),
        ]  # fmt: skip
        rows, missed = [], 0
        for name, ours, beside, other, aim in works:
            mine, theirs = medians([ours, other], args.budget)
            missed += mine > aim * theirs
            rows.append({
                "": name, "ms": f"{mine:.2f}", "beside": beside, "its ms": f"{theirs:.2f}",
                "ratio": f"{mine / theirs:.1f}", "aim": f"{aim:.1f}",
            })  # fmt: skip
    write(args.out / "store-speed.md", "Reading a store", "", rows)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
