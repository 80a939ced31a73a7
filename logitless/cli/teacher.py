"""`logitless teacher`: captures a teacher's top-k distributions into a store.

capture runs a Transformers model over documents. import reads the output of vLLM or SGLang. verify
checks a store, info describes it, and merge joins several stores into one. Under torchrun, capture
runs on every rank. If a capture was stopped, the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from logitless.cli import require

from .progress import bar

WINDOW = 512  # documents that are sorted by length together, so that batches have little padding


def add_parser(subparsers) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "teacher",
        help="capture a teacher into a store; check, describe and merge stores",
        description=__doc__,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)

    capture = commands.add_parser("capture", help="run a Transformers model over documents")
    add = capture.add_argument
    add("--model", required=True, help="name or folder of the model")
    _add_input(
        capture,
        "files with one document per line: text, or in .jsonl an object with `text` or `input_ids`",
    )
    _add_output(capture)
    add("--eos", action="store_true", help="append the end-of-text token to each text")
    add("--max-length", type=int, default=4096, help="most tokens per document; default: 4096")
    add("--batch-tokens", type=int, default=16_384, help="per batch, with padding; default: 16384")
    add(
        "--vocab-size",
        type=int,
        help="the student's, if the teacher's head is padded; default:"
        " the size of the teacher's head",
    )
    add("--temperature", type=float, default=1.0, help="temperature of the training; default: 1")
    add("--device", help="default: a GPU if there is one")
    add("--dtype", default="auto", help="of the model: auto, bfloat16, float32, ...")

    import_ = commands.add_parser("import", help="read the output of vLLM or SGLang")
    add = import_.add_argument
    add("--format", required=True, choices=("vllm", "sglang"))
    _add_input(
        import_, "files with one JSON output per line; `prompt_token_ids` may be added to it"
    )
    _add_output(import_)
    add("--vocab-size", type=int, required=True, help="all ids are below this number")
    add("--teacher", default="", help="name of the teacher")
    add("--tokenizer", help="name or folder; training with another tokenizer is then refused")

    verify = commands.add_parser("verify", help="check checksums, ids, masses and alignment")
    verify.add_argument("store", type=Path)

    info = commands.add_parser("info", help="describe a store")
    info.add_argument("store", type=Path)
    info.add_argument("--plot", type=Path, help="file for a plot of mass, entropy and rank")

    merge = commands.add_parser("merge", help="join several stores into one")
    add = merge.add_argument
    add("out", type=Path, help="folder of the new store")
    add("stores", type=Path, nargs="+")
    add("--shard-bytes", type=int, default=1 << 28, help="approximate file size; default: 256 MiB")


def _add_input(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument(
        "--k", type=int, default=64, help="number of most probable tokens to keep; default: 64"
    )
    parser.add_argument(
        "--values", choices=("u8", "f16"), default="u8",
        help="log-probabilities in 8 or 16 bits; default: u8",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    require("teacher", "rich")
    try:
        return ACTIONS[args.action](args) or 0
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def capture(args: argparse.Namespace) -> None:
    require("teacher", "transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from logitless import store

    device = torch.device(args.device or _default_device())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).to(device)

    end = tokenizer.eos_token_id if args.eos else None
    if args.eos and end is None:
        raise ValueError("--eos must have a tokenizer with an end-of-text token, got none.")

    vocab_size = args.vocab_size or model.get_output_embeddings().weight.shape[0]
    header = {"vocab_size": vocab_size, "k": args.k, "values": args.values}
    header |= {"teacher": args.model, "temperature": args.temperature}
    header |= {"tokenizer": store.tokenizer_hash(tokenizer)}
    with store.Writer(args.out, **header) as writer, bar("capture", _size(args.data)) as advance:
        documents = (
            (_ids(line, tokenizer, end)[: args.max_length], size)
            for line, size in store.share(_lines(args.data))
        )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        batches = _batches(documents, args.batch_tokens, lambda size: advance(size * world))
        added = store.capture(model, batches, writer, progress=lambda n: advance(0, tokens=n))
        text = f"{added} documents added, {len(writer) - added} were already in {args.out}"
    print(f"rank {os.environ.get('RANK', '0')}: {text}" if world > 1 else text)


def import_(args: argparse.Namespace) -> None:
    from logitless import store
    from logitless.store.importers import READERS

    header = {"vocab_size": args.vocab_size, "k": args.k, "values": args.values}
    header |= {"teacher": args.teacher, "tokenizer": _tokenizer_hash(args.tokenizer)}
    with store.Writer(args.out, **header) as writer, bar("import", _size(args.data)) as advance:
        for number, (output, size) in enumerate(_lines(args.data), start=1):
            try:
                tokens, targets = READERS[args.format](
                    output, output.get("prompt_token_ids"), k=args.k
                )
                writer.add(tokens, targets)
            except ValueError as error:
                raise ValueError(f"output {number}: {error}") from None
            advance(size, tokens=len(tokens))
        text = f"{len(writer)} documents in {args.out}"
    print(text)


def verify(args: argparse.Namespace) -> int:
    from logitless.store import Store
    from logitless.store.verify import verify

    store = Store(args.store)
    with bar("verify", store.tokens) as advance:
        report = verify(store, progress=lambda n: advance(n, tokens=n))
    print(report)
    _print_unfinished(args.store)
    return 0 if report else 1


def info(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from logitless.store import Store
    from logitless.store.summary import summary

    store = Store(args.store)
    statistics = summary(store)
    size = sum(shard.path.stat().st_size for shard in store.shards)
    table = Table("", "", title=str(args.store), show_header=False)
    rows = {"documents": f"{len(store):,}", "tokens": f"{store.tokens:,}"}
    rows |= {
        "bytes per token": f"{size / max(store.tokens, 1):.1f}",
        "files": f"{len(store.shards)}",
    }
    rows |= {name: str(value) for name, value in vars(store.info).items()}
    k = store.info.k
    rows[f"mass of the {k} slots"] = f"{float(statistics.covered[-1]):.4f}"
    entropy = f"{float(statistics.entropy.mean()):.3f} nats" if statistics.rows else "-"
    rows["entropy, the tail as one token"] = entropy
    rows["next token is the first slot"] = f"{statistics.within(1):.1%}"
    rows["next token is among the slots"] = f"{statistics.within(k):.1%}"
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    _print_unfinished(args.store)
    if args.plot is not None:
        require("teacher", "matplotlib")
        _plot(statistics, k, args.plot)
        print(f"plot: {args.plot}")


def _print_unfinished(path: Path) -> None:
    from ..store.journal import unfinished

    if size := unfinished(path):
        print(f"up to {size:,} bytes of documents are not in the store yet: a writer is open,")
        print("or was stopped; run the capture again to add these documents")


def merge(args: argparse.Namespace) -> None:
    from logitless import store

    for path in args.stores:
        store.recover(path)  # adds the documents that killed writers left
    stores = [store.Store(path) for path in args.stores]
    with bar("merge", sum(s.tokens for s in stores)) as advance:
        documents = store.merge(
            args.out, stores, shard_bytes=args.shard_bytes,
            progress=lambda n: advance(n, tokens=n),
        )  # fmt: skip
    print(f"{documents} documents in {args.out}")


ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "capture": capture, "import": import_, "verify": verify, "info": info, "merge": merge,
}  # fmt: skip


def _default_device() -> str:
    has_gpu = torch.cuda.is_available()
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu else "cpu"


def _tokenizer_hash(name: str | None) -> str:
    if not name:
        return ""
    require("teacher", "transformers")
    from transformers import AutoTokenizer

    from logitless.store import tokenizer_hash

    return tokenizer_hash(AutoTokenizer.from_pretrained(name))


def _size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _lines(paths: list[Path]) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects in files, one per line, and their sizes in bytes. Empty lines are skipped."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8", errors="strict").strip()
                if not text:
                    continue
                document = {"text": text}
                if path.suffix != ".txt":
                    document = _object(path, number, text)
                yield document, len(line)


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} must have JSON in line {number}, got {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must have a JSON object in line {number}, got {text[:50]!r}.")
    return value


def _ids(document: dict[str, Any], tokenizer: Any, end: int | None) -> list[int]:
    """The input_ids of a document, or those of its text, to which `end` is appended."""
    if document.get("input_ids") is not None:
        return document["input_ids"]
    if not isinstance(document.get("text"), str):
        raise ValueError(f"a document must have text or input_ids, got {sorted(document)}.")
    ids = tokenizer(document["text"])["input_ids"]
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _batches(
    documents: Iterator[tuple[list[int], int]], most: int, progress: Callable[[int], None]
) -> Iterator[list[list[int]]]:
    """Batches of documents of similar lengths, with at most `most` tokens including padding.

    `documents` yields tokens and sizes in bytes; `progress` is called with the size of each.
    """
    while window := _window(documents, progress):
        window.sort(key=len)
        batch: list[list[int]] = []
        for tokens in window:
            if batch and len(tokens) * (len(batch) + 1) > most:
                yield batch
                batch = []
            batch.append(tokens)
        yield batch


def _window(documents: Iterator[tuple[list[int], int]], progress: Callable) -> list[list[int]]:
    """The next WINDOW documents that are not empty."""
    window = []
    for tokens, size in documents:
        progress(size)
        if tokens:
            window.append(tokens)
        if len(window) == WINDOW:
            break
    return window


def _plot(statistics: Any, k: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    covered, entropy, rank = figure.subplots(1, 3)
    covered.plot(range(1, k + 1), statistics.covered.tolist())
    covered.set(xscale="log", xlabel="K", ylabel="mass of the K most probable", ylim=(0, 1.02))
    entropy.hist(statistics.entropy.tolist(), bins=50)
    entropy.set(xlabel="entropy of a row, the tail as one token, nats", ylabel="rows")
    shares = [statistics.within(n) for n in range(1, k + 1)]
    rank.plot(range(1, k + 1), shares)
    rank.set(xscale="log", xlabel="K", ylabel="next token is among the K", ylim=(0, 1.02))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
