"""Measures the size of a store, and the precision of the rows that are read from it.

    python -m benchmarks.store_format --out FOLDER

All stores have V = 151,936. The script measures the bytes per token of files with one document of
8,192 tokens, and the bytes per document of the index. The precision is the mean KL
divergence from the written rows to the rows that are read, in nats, over slots and tail. The
precision is measured for two kinds of rows. In rows of the first kind, the probability falls with a
power of the rank, as in language models. In rows of the second kind, the log-probabilities are
spread evenly. The script writes store-format.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.store_timing import arguments, write
from logitless.store import Header, Writer
from logitless.store.codes import decoded, encoded

VOCAB, ROWS = 151_936, 1000
POWERS = (0.7, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
NATS = (5, 10, 20, 50)
# Largest allowed mean divergences, by K and the kind of rows.
AIMS = {64: (2e-5, 5e-5), 256: (4e-5, 1e-4), 1024: (6e-5, 1.5e-4)}


def targets(logits: Tensor, inside: float = 0.9) -> ll.SparseTargets:
    """Targets with sorted slots, from rows of logits. The slots of a row have the mass `inside`."""
    n, k = logits.shape
    ids = torch.randint(0, VOCAB // k, (n, k)) * k + torch.arange(k)
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    logprobs = logprobs + torch.tensor(inside).log()
    return ll.SparseTargets(ids, logprobs, torch.full((n,), 1 - inside).log())


def divergence(logits: Tensor, values: str) -> float:
    """The mean KL divergence from rows to their encoded and decoded copies, in fp64."""
    want = targets(logits)
    header = Header(VOCAB, want.k, values)
    got = decoded(encoded(want, header), header)
    p, tail = want.logprobs.double(), want.tail.double()
    inside = (p.exp() * (p - got.logprobs.double())).sum(-1)
    return float((inside + tail.exp() * (tail - got.tail.double())).abs().mean())


def precision(k: int, values: str) -> tuple[float, float]:
    """The largest mean divergences for powers of the rank and for evenly spread rows."""
    rank, noise = torch.arange(1, k + 1.0), 0.3 * torch.randn(ROWS, k)
    powers = max(divergence(noise - power * rank.log(), values) for power in POWERS)
    even = max(divergence(-nats * torch.rand(ROWS, k), values) for nats in NATS)
    return powers, even


def bytes_per_token(path: Path, k: int, values: str, length: int, documents: int = 1) -> float:
    """The bytes of all shards per token. The index of a single document is negligible."""
    rows = targets(torch.randn(length, k))
    with Writer(path, vocab_size=VOCAB, k=k, values=values) as writer:
        for _ in range(documents):
            writer.add(torch.randint(0, VOCAB, (length,)), rows)
    size = sum(file.stat().st_size for file in path.glob("*.shard"))
    return size / (length * documents)


def main() -> int:
    """Returns the exit status, which is 1 if a divergence is above its aim."""
    args = arguments(__doc__)
    sizes, errors, missed = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for k in (16, 32, 64, 128, 256):
            row = {"K": str(k)}
            for values in ("u8", "f16"):
                found = bytes_per_token(Path(folder) / f"{k}-{values}", k, values, 8192)
                row[f"bytes per token, {values}"] = f"{found:.1f}"
            row["computed, u8"] = f"{Header(VOCAB, k).token_bytes():.1f}"
            sizes.append(row)
        index = []
        for n in (32, 128, 4096):
            found = bytes_per_token(Path(folder) / f"{n}", 16, "u8", n, 200)
            each = n * (found - Header(VOCAB, 16).token_bytes())
            index.append({"tokens per document": str(n), "bytes of the index": f"{each:.0f}"})
    for values in ("u8", "f16"):
        for k, aims in AIMS.items():
            found = precision(k, values)
            missed += values == "u8" and any(a > b for a, b in zip(found, aims, strict=True))
            errors.append({
                "values": values, "K": str(k),
                "powers 0.7 to 4 of the rank": f"{found[0]:.1e}", "aim": f"{aims[0]:.1e}",
                "evenly over 5 to 50 nats": f"{found[1]:.1e}", "aim ": f"{aims[1]:.1e}",
            })  # fmt: skip
    title = "Size and precision of a store"
    write(args.out / "store-format.md", title, "", sizes, index, errors, times=False)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
