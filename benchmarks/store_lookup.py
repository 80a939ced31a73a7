"""How long a padded batch is looked up in, among documents with and without a shared beginning.

    python -m benchmarks.store_lookup --out FOLDER

100,000 documents of 80 tokens, in one store without a shared beginning and in one whose documents
all begin with the same 70 tokens. `batch_targets` of 8 rows padded to 96: with an attention mask,
as `Collator` calls it, and `targets_for` without lengths; whole documents, and documents cut off at
76 tokens. Every time is a median of calls that alternate between the two stores. Writes
store-lookup.md. The aim is at most 3 times the time without a shared beginning.
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
from logitless.store import Store, Writer, batch_targets
from logitless.store.rows import encoded

VOCAB, K, DOCUMENTS, TOKENS, SHARED, AIM = 32_000, 4, 100_000, 80, 70, 3.0
ROWS, WIDTH, CUT = 8, 96, 76


def store_of(path: Path, shared: int, shard_bytes: int) -> tuple[Store, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS))
    tokens[:, :shared] = tokens[0, :shared]
    ids = torch.arange(K).expand(TOKENS, K)
    logprobs = torch.randn(TOKENS, K).log_softmax(-1).sort(-1, descending=True).values - 0.1
    targets = ll.SparseTargets(ids, logprobs, torch.full((TOKENS,), 0.09).log())
    with Writer(path, vocab_size=VOCAB, k=K, shard_bytes=shard_bytes) as writer:
        rows = encoded(targets, writer.header)
        for document in tokens:
            writer.append(document, rows)
    return Store(path), tokens


def calls(store: Store, tokens: Tensor):
    """What is timed, by name."""
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
    """Exit status: 1 if a ratio is above its aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--budget", type=float, default=3000.0, help="milliseconds for each line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for files, shard_bytes in (("one file", 1 << 30), ("several files", 1 << 25)):
            stores = [
                store_of(Path(folder) / f"{files}-{shared}", shared, shard_bytes)
                for shared in (0, SHARED)
            ]
            names = f"{files} ({len(stores[0][0].shards)})"
            without, with_ = (calls(*one) for one in stores)
            for name in without:
                works = [(lambda: None, lambda _, f=f: f()) for f in (without[name], with_[name])]
                base, shared = wall_times("cpu", works, args.budget)
                missed += shared > AIM * base
                rows.append({
                    "": name, "files": names, "ms without": f"{base:.2f}",
                    "ms with": f"{shared:.2f}", "ratio": f"{shared / base:.2f}",
                })  # fmt: skip
    about = f"{_machine.device('cpu')['name']}, torch {torch.__version__}"
    text = f"# Looking up documents that share {SHARED} of {TOKENS} tokens\n\n"
    text += f"{DOCUMENTS:,} documents; {about}, commit {_machine.commit()}; one thread.\n\n"
    text += table(rows) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "store-lookup.md").write_text(text)
    print(text)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
