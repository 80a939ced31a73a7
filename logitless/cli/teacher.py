"""`logitless teacher`: what a teacher says of documents, captured once into a store.

capture runs a model of Transformers over documents; import reads what vLLM or SGLang answered;
verify checks a store, info describes it, merge makes one of several. Under torchrun, capture works
on every rank; a run that was stopped is resumed by running it again.
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

WINDOW = 512  # documents that are sorted by length, so that batches have little padding


def add_parser(subparsers) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "teacher",
        help="capture a teacher into a store, and look after stores",
        description=__doc__,
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="action", metavar="action", required=True)

    one = commands.add_parser("capture", help="run a model of Transformers over documents")
    one.add_argument("--model", required=True, help="a name or a folder")
    _input(one, "a line is a document: text; in .jsonl an object with `text` or `input_ids`")
    _output(one)
    one.add_argument("--eos", action="store_true", help="end each text by the end-of-text token")
    one.add_argument(
        "--max-length", type=int, default=4096, help="tokens of a document at most; default: 4096"
    )
    one.add_argument(
        "--batch-tokens", type=int, default=16_384, help="at once, with padding; default: 16384"
    )
    one.add_argument(
        "--vocab-size", type=int,
        help="default: that of the head; that of the student, where the teacher's head is padded",
    )  # fmt: skip
    one.add_argument(
        "--temperature", type=float, default=1.0, help="that of the later training; default: 1"
    )
    one.add_argument("--device", help="default: a GPU where there is one")
    one.add_argument("--dtype", default="auto", help="of the model: auto, bfloat16, float32, ...")

    two = commands.add_parser("import", help="read the answers of vLLM or SGLang, one JSON a line")
    two.add_argument("--format", required=True, choices=("vllm", "sglang"))
    _input(two, "JSON, one answer a line; `prompt_token_ids` may stand beside it")
    _output(two)
    two.add_argument("--vocab-size", type=int, required=True, help="ids are below it")
    two.add_argument("--teacher", default="", help="its name")
    two.add_argument(
        "--tokenizer", help="a name or a folder: training with another is then refused"
    )

    three = commands.add_parser("verify", help="checksums, masses, and whether it is one token off")
    three.add_argument("store", type=Path)

    four = commands.add_parser("info", help="what is in a store")
    four.add_argument("store", type=Path)
    four.add_argument(
        "--plot", type=Path, help="mass covered by K, entropy, rank of the next token"
    )

    five = commands.add_parser("merge", help="one store of several")
    five.add_argument("out", type=Path, help="the new store, a folder")
    five.add_argument("stores", type=Path, nargs="+")
    five.add_argument(
        "--shard-bytes", type=int, default=1 << 28, help="of a file, about; default: 256 MiB"
    )


def _input(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=what)


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="the store, a folder")
    parser.add_argument(
        "--k", type=int, default=64, help="most probable tokens that are kept; default: 64"
    )
    parser.add_argument(
        "--values", choices=("u8", "f16"), default="u8",
        help="log-probabilities in 8 bits or in 16; default: u8",
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
    about = {"vocab_size": vocab_size, "k": args.k, "values": args.values}
    about |= {"teacher": args.model, "temperature": args.temperature}
    about |= {"tokenizer": store.tokenizer_hash(tokenizer)}
    with store.Writer(args.out, **about) as writer, bar("capture", _size(args.data)) as advance:
        documents = (
            (_ids(line, tokenizer, end)[: args.max_length], size)
            for line, size in store.share(_lines(args.data))
        )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        batches = _batches(documents, args.batch_tokens, lambda size: advance(size * world))
        added = store.capture(model, batches, writer, progress=lambda n: advance(0, tokens=n))
        told = f"{added} documents added, {len(writer) - added} were there: {args.out}"
    print(f"rank {os.environ.get('RANK', '0')}: {told}" if world > 1 else told)


def import_(args: argparse.Namespace) -> None:
    from logitless import store
    from logitless.store.importers import READERS

    about = {"vocab_size": args.vocab_size, "k": args.k, "values": args.values}
    about |= {"teacher": args.teacher, "tokenizer": _tokenizer_hash(args.tokenizer)}
    with store.Writer(args.out, **about) as writer, bar("import", _size(args.data)) as advance:
        for number, (answer, size) in enumerate(_lines(args.data), start=1):
            try:
                tokens, targets = READERS[args.format](
                    answer, answer.get("prompt_token_ids"), k=args.k
                )
                writer.add(tokens, targets)
            except ValueError as error:
                raise ValueError(f"answer {number}: {error}") from None
            advance(size, tokens=len(tokens))
        told = f"{len(writer)} documents: {args.out}"
    print(told)


def verify(args: argparse.Namespace) -> int:
    from logitless.store import Store
    from logitless.store.verify import verify

    store = Store(args.store)
    with bar("verify", store.tokens) as advance:
        report = verify(store, progress=lambda n: advance(n, tokens=n))
    print(report)
    _tell_unfinished(args.store)
    return 0 if report else 1


def info(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from logitless.store import Store
    from logitless.store.summary import summary

    store = Store(args.store)
    found = summary(store)
    size = sum(shard.path.stat().st_size for shard in store.shards)
    table = Table("", "", title=str(args.store), show_header=False)
    rows = {"documents": f"{len(store):,}", "tokens": f"{store.tokens:,}"}
    rows |= {"bytes a token": f"{size / max(store.tokens, 1):.1f}", "files": f"{len(store.shards)}"}
    rows |= {name: str(value) for name, value in vars(store.info).items()}
    k = store.info.k
    rows[f"mass of the {k} slots"] = f"{float(found.covered[-1]):.4f}"
    entropy = f"{float(found.entropy.mean()):.3f} nats" if found.rows else "-"
    rows["entropy, the rest as one token"] = entropy
    rows["next token is the first slot"] = f"{found.within(1):.1%}"
    rows["next token is among the slots"] = f"{found.within(k):.1%}"
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    _tell_unfinished(args.store)
    if args.plot is not None:
        require("teacher", "matplotlib")
        _plot(found, k, args.plot)
        print(f"plot: {args.plot}")


def _tell_unfinished(path: Path) -> None:
    from ..store.journal import unfinished

    if waiting := unfinished(path):
        print(f"up to {waiting:,} bytes of documents are not in it yet: a writer is at work,")
        print("or was stopped and goes on when it is run again")


def merge(args: argparse.Namespace) -> None:
    from logitless import store

    for path in args.stores:
        store.recover(path)  # what a worker that died has left
    opened = [store.Store(path) for path in args.stores]
    with bar("merge", sum(one.tokens for one in opened)) as advance:
        documents = store.merge(
            args.out, opened, shard_bytes=args.shard_bytes,
            progress=lambda n: advance(n, tokens=n),
        )  # fmt: skip
    print(f"{documents} documents: {args.out}")


ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "capture": capture, "import": import_, "verify": verify, "info": info, "merge": merge,
}  # fmt: skip


def _default_device() -> str:
    there = torch.cuda.is_available()
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if there else "cpu"


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
    """Documents, or answers, and how many bytes of a file each took; empty lines are none."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8", errors="strict").strip()
                if not text:
                    continue
                found = {"text": text}
                if path.suffix != ".txt":
                    found = _object(path, number, text)
                yield found, len(line)


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} must have JSON in line {number}, got {error}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must have a JSON object in line {number}, got {text[:50]!r}.")
    return found


def _ids(document: dict[str, Any], tokenizer: Any, end: int | None) -> list[int]:
    """Of a document that has them, or a text; a text ends by `end`, if that is an id."""
    if document.get("input_ids") is not None:
        return document["input_ids"]
    if not isinstance(document.get("text"), str):
        raise ValueError(f"a document must have text or input_ids, got {sorted(document)}.")
    found = tokenizer(document["text"])["input_ids"]
    return found if end is None or found[-1:] == [end] else [*found, end]


def _batches(
    documents: Iterator[tuple[list[int], int]], most: int, drawn: Callable[[int], None]
) -> Iterator[list[list[int]]]:
    """Documents of like lengths, at most so many tokens with their padding."""
    while window := _some(documents, drawn):
        window.sort(key=len)
        batch: list[list[int]] = []
        for tokens in window:
            if batch and len(tokens) * (len(batch) + 1) > most:
                yield batch
                batch = []
            batch.append(tokens)
        yield batch


def _some(documents: Iterator[tuple[list[int], int]], drawn: Callable) -> list[list[int]]:
    found = []
    for tokens, size in documents:
        drawn(size)
        if tokens:
            found.append(tokens)
        if len(found) == WINDOW:
            break
    return found


def _plot(found: Any, k: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    covered, entropy, rank = figure.subplots(1, 3)
    covered.plot(range(1, k + 1), found.covered.tolist())
    covered.set(xscale="log", xlabel="K", ylabel="mass of the K most probable", ylim=(0, 1.02))
    entropy.hist(found.entropy.tolist(), bins=50)
    entropy.set(xlabel="entropy of a row, the rest as one token, nats", ylabel="rows")
    shares = [found.within(n) for n in range(1, k + 1)]
    rank.plot(range(1, k + 1), shares)
    rank.set(xscale="log", xlabel="K", ylabel="next token is among the K", ylim=(0, 1.02))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=150)
