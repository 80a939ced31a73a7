"""Measures the lookup of padded batches, for documents with and without a shared beginning.

    python -m benchmarks.store_lookup --out FOLDER

Each store has 100,000 documents of 80 tokens. In one store, all documents begin with the same 70
tokens. In the other store, the documents are random. The batches have 8 rows. Each row holds a
whole document that is padded to 96 tokens, or a document that is cut off after 76 tokens. The
script times `batch_targets` with an attention mask, as in `Collator`, and `targets_for` with and
without lengths. The calls for the two stores alternate. The script writes store-lookup.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

import logitless as ll
from benchmarks.store_timing import Call, arguments, medians, write
from logitless.store import Store, Writer, batch_targets

VOCAB, K, DOCUMENTS, TOKENS, SHARED = 32_000, 4, 100_000, 80, 70
ROWS, WIDTH, CUT = 8, 96, 76
AIM = 3.0  # largest allowed ratio of the time with a shared beginning to the time without
AT_ONCE = 1000  # number of documents that are written at once


def store_of(path: Path, shared: int, shard_bytes: int) -> tuple[Store, Tensor]:
    """A store of documents that share `shared` first tokens, and the tokens of all documents."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS))
    tokens[:, :shared] = tokens[0, :shared]
    rows = AT_ONCE * TOKENS
    logprobs = torch.randn(rows, K).log_softmax(-1).sort(-1, descending=True).values - 0.1
    targets = ll.SparseTargets(
        torch.arange(K).expand(rows, K), logprobs, torch.full((rows,), 0.09).log()
    )
    starts = list(range(0, rows + 1, TOKENS))
    with Writer(path, vocab_size=VOCAB, k=K, shard_bytes=shard_bytes) as writer:
        for documents in tokens.split(AT_ONCE):
            writer.extend(documents.flatten(), starts, targets)
    return Store(path), tokens


def calls(store: Store, tokens: Tensor) -> Mapping[str, Call]:
    """The calls that are timed, by name."""
    chosen = tokens[torch.randint(0, DOCUMENTS, (ROWS,))]
    padded = torch.nn.functional.pad(chosen, (0, WIDTH - TOKENS))
    mask = torch.zeros_like(padded)
    mask[:, :TOKENS] = 1
    batch = {"input_ids": padded, "attention_mask": mask}
    cut = chosen[:, :CUT].contiguous()
    return {
        f"{ROWS} × {WIDTH}, attention mask": lambda: batch_targets(store, batch),
        f"{ROWS} × {WIDTH}, no lengths": lambda: store.targets_for(padded),
        f"{ROWS} × {CUT}, documents cut off": lambda: store.targets_for(cut),
        f"{ROWS} × {CUT}, cut off, lengths": lambda: store.targets_for(cut, [CUT] * ROWS),
    }


def main() -> int:
    """Returns the exit status, which is 1 if a ratio is above the aim."""
    args = arguments(__doc__)
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for files, shard_bytes in (("one file", 1 << 30), ("several files", 1 << 25)):
            stores = [
                store_of(Path(folder) / f"{files}-{shared}", shared, shard_bytes)
                for shared in (0, SHARED)
            ]
            without, with_ = (calls(*one) for one in stores)
            for name in without:
                base, shared = medians([without[name], with_[name]], args.budget)
                missed += shared > AIM * base
                rows.append({
                    "": name, "files": f"{files} ({len(stores[0][0].shards)})",
                    "ms without": f"{base:.2f}", "ms with": f"{shared:.2f}",
                    "ratio": f"{shared / base:.2f}", "aim": f"{AIM:.1f}",
                })  # fmt: skip
    title = f"Looking up documents that share {SHARED} of {TOKENS} tokens"
    write(args.out / "store-lookup.md", title, f"{DOCUMENTS:,} documents per store.", rows)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
