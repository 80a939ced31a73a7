"""Measures how many short documents per second a writer and an import add to a store.

    python -m benchmarks.store_writes --out FOLDER

The documents have 6 tokens. The script measures `Writer.add` with K = 2 and K = 64, including the
writing of the shard. The script also measures by how many bytes per document the process grows,
before the shard is written. `logitless teacher import` reads vLLM's JSON with 20 log-probabilities
per token. The script measures the whole import and each stage of the import. The last table shows
the peak memory of writing a shard. The script writes store-writes.md.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import logitless as ll
from benchmarks.store_timing import arguments, write
from logitless import cli
from logitless.cli import teacher_data, teacher_import
from logitless.store import Writer
from logitless.store.importers import tensors_of

VOCAB, TOKENS, DOCUMENTS = 151_936, 6, 20_000
OF_SERVER = 20  # log-probabilities per token in vLLM's JSON
SHARD = 1 << 26  # bytes per shard, for the measurement of memory
AIM = 2000  # documents per second of CPU time


def documents(k: int) -> tuple[torch.Tensor, ll.SparseTargets]:
    """The tokens of all documents, and the targets. All documents have the same targets."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (DOCUMENTS, TOKENS))
    ids = torch.randint(0, VOCAB // k, (TOKENS, k)) * k + torch.arange(k)
    logprobs = torch.randn(TOKENS, k).log_softmax(-1).sort(-1, descending=True).values - 0.1
    return tokens, ll.SparseTargets(ids, logprobs, torch.full((TOKENS,), 0.09).log())


def added(path: Path, k: int) -> tuple[float, float]:
    """Adds documents to a store. Returns documents per second, and bytes of memory per document."""
    tokens, targets = documents(k)
    with Writer(path, vocab_size=VOCAB, k=k) as writer:
        for document in tokens[:100]:  # the first calls also load code
            writer.add(document, targets)
        before, start = _resident(), time.process_time()
        for document in tokens[100:]:
            writer.add(document, targets)
        grown = _resident() - before
        writer.flush()
        seconds = time.process_time() - start
    return (DOCUMENTS - 100) / seconds, grown / (DOCUMENTS - 100)


def write_json(file: Path) -> None:
    """Writes outputs as vLLM's server returns them, one per line."""
    tokens, targets = documents(OF_SERVER)
    with open(file, "w") as lines:
        for document in tokens.tolist():
            rows = zip(targets.ids.tolist(), targets.logprobs.tolist(), document[1:], strict=False)
            entries: list[Any] = [None]
            for ids, logprobs, own in rows:
                entry = {str(i): {"logprob": p} for i, p in zip(ids, logprobs, strict=True)}
                entries.append({**entry, str(own): {"logprob": -9.0}})
            output = {"prompt_token_ids": document, "choices": [{"prompt_logprobs": entries}]}
            lines.write(json.dumps(output) + "\n")


def imported(data: Path, path: Path) -> float:
    """Runs `logitless teacher import`, and returns the number of documents per second."""
    how = ["--format", "vllm", "--vocab-size", str(VOCAB), "--k", str(OF_SERVER + 1)]
    start = time.process_time()
    status = cli.main(["teacher", "import", "--data", str(data), "--out", str(path), *how])
    assert status == 0
    return DOCUMENTS / (time.process_time() - start)


def stages(data: Path, path: Path) -> list[dict[str, str]]:
    """The microseconds per document of each stage of an import."""
    rows = []

    def timed(name: str, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        start = time.process_time()
        results = [work(item) for item in items]
        each = 1e6 * (time.process_time() - start) / DOCUMENTS
        rows.append({"stage": name, "µs per document": f"{each:.0f}"})
        return results

    lines = timed("read and parse JSON", lambda line: line, teacher_data.lines([data]))
    found = timed(
        "check entries, move them to rows",
        lambda line: next(teacher_import._documents(line, "vllm", None)),
        lines,
    )
    size = teacher_import.AT_ONCE // TOKENS
    groups = [found[i : i + size] for i in range(0, len(found), size)]
    k = OF_SERVER + 1
    tensors = timed("sort slots, create tensors", lambda group: tensors_of(group, k), groups)
    with Writer(path, vocab_size=VOCAB, k=k) as writer:
        timed("check, encode, append to the journal", lambda t: writer.extend(*t), tensors)
        timed("write the shard and its index", lambda _: writer.flush(), [None])
    return rows


def shard_memory(path: Path, tokens: int, k: int) -> dict[str, str]:
    """The peak of the memory that writing a shard takes, relative to its shard_bytes."""
    logprobs = torch.randn(tokens, k).log_softmax(-1) - 0.1
    targets = ll.SparseTargets(torch.arange(k).expand(tokens, k), logprobs)
    before = peak = 0
    with Writer(path, vocab_size=VOCAB, k=k, shard_bytes=SHARD) as writer:
        while not writer.shards:
            before = _resident()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
            writer.add(torch.randint(0, VOCAB, (tokens,)), targets)
        lines = Path("/proc/self/status").read_text().splitlines()
        (peak,) = (1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return {
        "documents": f"{tokens} tokens, K = {k}", "shard_bytes": f"{SHARD >> 20} MiB",
        "peak of memory": f"{(peak - before) / SHARD:.1f} × shard_bytes",
    }  # fmt: skip


def _resident() -> int:
    """Bytes of memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> int:
    """Returns the exit status, which is 1 if a rate is below the aim."""
    args = arguments(__doc__)
    rates, rows = [], []

    def row(name: str, rate: float, grown: str) -> None:
        rates.append(rate)
        rows.append({
            "": name, "documents per second": f"{rate:,.0f}", "aim": f"{AIM:,}",
            "bytes of memory per document": grown,
        })  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        for k in (2, 64):
            rate, grown = added(Path(folder) / f"{k}", k)
            row(f"Writer.add, K = {k}", rate, f"{grown:,.0f}")
        data = Path(folder) / "answers.jsonl"
        write_json(data)
        row(f"teacher import, K = {OF_SERVER}", imported(data, Path(folder) / "imported"), "")
        of_stages = stages(data, Path(folder) / "stages")
        memory = [
            shard_memory(Path(folder) / f"{tokens} {k}", tokens, k)
            for tokens, k in ((512, 64), (6, 64), (6, 2))
        ]
    title = f"Writing {DOCUMENTS:,} documents of {TOKENS} tokens"
    write(args.out / "store-writes.md", title, "", rows, of_stages, memory)
    return int(min(rates) < AIM)


if __name__ == "__main__":
    raise SystemExit(main())
