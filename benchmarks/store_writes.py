"""How many short documents per second a writer takes, and what they cost in memory.

    python -m benchmarks.store_writes --out FOLDER

Documents of 6 tokens: `Writer.add` of K = 2 and K = 64, and `logitless teacher import` of outputs
of vLLM with K = 20, all on one thread. Memory is the growth of the process per document, before the
first file is written. Writes store-writes.md. The aim of `Writer.add` is 2,000 documents per
second. The import also parses JSON and checks every number of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

import logitless as ll
from logitless import cli
from logitless.cli import machine as _machine
from logitless.cli.report import table
from logitless.store import Writer

VOCAB, TOKENS, DOCUMENTS, AIM = 151_936, 6, 20_000, 2000


def documents(k: int):
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS))
    ids = torch.randint(0, VOCAB // k, (TOKENS, k)) * k + torch.arange(k)
    logprobs = torch.randn(TOKENS, k).log_softmax(-1).sort(-1, descending=True).values - 0.1
    return tokens, ll.SparseTargets(ids, logprobs, torch.full((TOKENS,), 0.09).log())


def added(path: Path, k: int) -> dict[str, str]:
    tokens, targets = documents(k)
    with Writer(path, vocab_size=VOCAB, k=k) as writer:
        for document in tokens[:100]:  # the first ones also load code
            writer.add(document, targets)
        before, start = _resident(), time.perf_counter()
        for document in tokens[100:]:
            writer.add(document, targets)
        seconds = time.perf_counter() - start
        grown = _resident() - before
    n = DOCUMENTS - 100
    return _row(f"Writer.add, K = {k}", n / seconds, f"{grown / n:,.0f}")


def imported(path: Path) -> dict[str, str]:
    tokens, targets = documents(20)
    data = path.with_suffix(".jsonl")
    with open(data, "w") as file:
        for document in tokens.tolist():
            rows = zip(targets.ids.tolist(), targets.logprobs.tolist(), document[1:], strict=False)
            entries = [None]
            for ids, logprobs, own in rows:
                entry = {str(i): {"logprob": p} for i, p in zip(ids, logprobs, strict=True)}
                entries.append({**entry, str(own): {"logprob": -9.0}})
            output = {"prompt_token_ids": document, "choices": [{"prompt_logprobs": entries}]}
            file.write(json.dumps(output) + "\n")
    how = ["--format", "vllm", "--vocab-size", str(VOCAB), "--k", "21"]
    start = time.perf_counter()
    status = cli.main(["teacher", "import", "--data", str(data), "--out", str(path), *how])
    assert status == 0
    return _row("teacher import, K = 20", DOCUMENTS / (time.perf_counter() - start), "")


def _row(name: str, rate: float, grown: str) -> dict[str, str]:
    return {"": name, "documents per second": f"{rate:,.0f}", "bytes of memory each": grown}


def _resident() -> int:
    """Bytes of memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> int:
    """Exit status: 1 if a rate is below its aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [added(Path(folder) / f"{k}", k) for k in (2, 64)]
        rows.append(imported(Path(folder) / "imported"))
    about = f"{_machine.device('cpu')['name']}, torch {torch.__version__}"
    text = f"# Writing {DOCUMENTS:,} documents of {TOKENS} tokens\n\n"
    text += f"{about}, commit {_machine.commit()}; one thread.\n\n{table(rows)}\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "store-writes.md").write_text(text)
    print(text)
    rates = [float(row["documents per second"].replace(",", "")) for row in rows[:2]]
    return int(min(rates) < AIM)


if __name__ == "__main__":
    raise SystemExit(main())
