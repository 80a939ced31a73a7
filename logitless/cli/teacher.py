"""`logitless teacher`: captures a teacher's top-k distributions into a store.

    capture     runs a Transformers model over documents
    import      reads the output of vLLM or SGLang
    verify      checks a store
    info        describes a store
    merge       joins several stores into one
    to-parquet  writes a store as parquet files, for dataset viewers
    size        computes how large a store will be

Under torchrun, every rank captures a part of the documents. Running the same command again resumes
a capture that was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from logitless.cli import require

from . import teacher_data as _data
from .progress import bar
from .teacher_size import Pace as _Pace
from .teacher_size import expected as _expected
from .teacher_size import sentence as _sentence
from .teacher_size import size

STORE = "folder of a store, or an address such as s3://bucket/targets"
K, VALUES = 64, "u8"  # the defaults of --k and --values


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
    add(
        "--max-length", type=_positive, default=4096, help="most tokens per document; default: 4096"
    )
    add(
        "--batch-tokens",
        type=_positive,
        default=16_384,
        help="most tokens per batch, including padding; default: 16384",
    )
    add(
        "--vocab-size",
        type=_positive,
        help="size of the student's head, if the teacher's head is larger; default:"
        " the size of the teacher's head",
    )
    add("--temperature", type=float, default=1.0, help="temperature of the training; default: 1")
    add(
        "--sample", type=_draws, metavar="N",
        help="store the counts of N random draws per token, instead of the K most probable tokens",
    )  # fmt: skip
    add("--seed", type=int, help="seed of the draws of --sample; default: 0")
    add("--device", help="default: a GPU if there is one")
    add("--dtype", default="auto", help="dtype of the model: auto, bfloat16, float32, ...")

    import_ = commands.add_parser("import", help="read the output of vLLM or SGLang")
    add = import_.add_argument
    add("--format", required=True, choices=("vllm", "sglang"))
    _add_input(
        import_, "files with one JSON output per line; you may add `prompt_token_ids` to an output"
    )
    _add_output(import_)
    add(
        "--completions", action="store_true",
        help="import each prompt with its completion; default: only if an output has no"
        " log-probabilities of the prompt",
    )  # fmt: skip
    add("--vocab-size", type=_positive, required=True, help="all ids are below this number")
    add("--teacher", default="", help="name of the teacher")
    add("--tokenizer", help="name or folder; training must use the same tokenizer")

    verify = commands.add_parser("verify", help="check checksums, ids, masses and alignment")
    verify.add_argument("store", type=_store, help=STORE)

    info = commands.add_parser("info", help="describe a store")
    info.add_argument("store", type=_store, help=STORE)
    info.add_argument("--plot", type=Path, help="file for a plot of mass, entropy and rank")

    merge = commands.add_parser("merge", help="join several stores into one")
    add = merge.add_argument
    add("out", type=Path, help="folder of the new store")
    add("stores", type=_store, nargs="+", help=STORE)
    add(
        "--shard-bytes",
        type=_positive,
        default=1 << 28,
        help="approximate file size; default: 256 MiB",
    )

    to_parquet = commands.add_parser("to-parquet", help="write a store as parquet files")
    to_parquet.add_argument("store", type=_store, help=STORE)
    to_parquet.add_argument("out", type=Path, help="folder of the parquet files")

    size = commands.add_parser("size", help="how large a store will be")
    add = size.add_argument
    add("--tokens", type=_tokens, required=True, help="number of tokens, such as 1e9")
    add("--vocab", "--vocab-size", type=_positive, required=True, help="size of the vocabulary")
    add("--k", type=_positive, nargs="+", help="values of K; default: a table")
    add("--sample", type=_draws, nargs="+", metavar="N", help="numbers of draws, instead of --k")
    add("--distinct", type=float, help="distinct ids per token with --sample; default: 0.3 N")
    _add_values(size)


def _store(text: str) -> Path | str:
    """Returns a local folder as a Path.

    A URL is returned as a string, because Path would change the slashes.
    """
    return text if "://" in text else Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        rule = "must be a whole number of at least 1"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return int(text)


def _draws(text: str) -> int:
    if _positive(text) > 2**16:
        raise argparse.ArgumentTypeError(f"must be at most {2**16}, got {text!r}")
    return int(text)


def _tokens(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"must be a number of tokens such as 1e9, got {text!r}")
    return number


def _add_input(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=text)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the store")
    parser.add_argument(
        "--upload",
        help="address such as s3://bucket/targets, to which finished files are also uploaded",
    )
    parser.add_argument(
        "--k",
        type=_positive,
        help=f"number of most probable tokens to keep; default: {K}",
    )
    _add_values(parser)


def _add_values(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--values", choices=("u8", "f16"),
        help=f"log-probabilities in 8 or 16 bits; default: {VALUES}",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    require("teacher", "rich")
    try:
        return ACTIONS[args.action](args) or 0
    except (TypeError, ValueError, OSError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1


def capture(args: argparse.Namespace) -> None:
    require("teacher", "transformers")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from logitless import store
    from logitless.store import checks, remote

    # All arguments are checked before the model is loaded and the folder is created.
    _data.are_files(args.data)
    checks.folder(args.out)
    if args.upload is not None:
        remote.destination(args.upload)
    device, dtype = _device(args.device), _dtype(args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    end = tokenizer.eos_token_id if args.eos else None
    if args.eos and end is None:
        raise ValueError("the tokenizer must have an end-of-text token for --eos, got none.")
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    expected = args.vocab_size or getattr(config, "vocab_size", None)
    fields = {**_slots(args.k, args.values, args.sample, args.seed), "teacher": args.model}
    fields |= {"temperature": args.temperature, "tokenizer": store.tokenizer_hash(tokenizer)}
    header = store.Header(expected or 2**32, **fields)
    amount = _expected(_data.lines(args.data), tokenizer, end, args.max_length, expected)
    if os.environ.get("RANK", "0") == "0":
        print(_sentence(header, amount, args.out), flush=True)

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    head = model.get_output_embeddings().weight.shape[0]
    if args.vocab_size is not None and args.vocab_size > head:
        rule = f"must be at most the size of the teacher's head, {head}"
        raise ValueError(f"--vocab-size {rule}, got {args.vocab_size}.")
    vocab_size = args.vocab_size or head
    with (
        store.Writer(args.out, vocab_size=vocab_size, upload=args.upload, **fields) as writer,
        bar("capture", _data.size(args.data)) as advance,
    ):
        documents = (
            (_data.ids_of(line, tokenizer, end, vocab_size)[: args.max_length], line.size)
            for line in store.share(_data.lines(args.data))
        )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        batches = _data.batches(documents, args.batch_tokens, lambda size: advance(size * world))
        generator = None
        if args.sample:
            # Ranks and resumed runs have different seeds, so that their random draws differ.
            seed = (args.seed or 0) + 1_000_003 * writer.part + len(writer)
            generator = torch.Generator(device).manual_seed(seed)
        pace = _Pace(header, amount, world)

        def progress(tokens: int) -> None:
            advance(0, tokens=tokens, written=writer.written)
            pace.batch(tokens)

        added = store.capture(model, batches, writer, generator=generator, progress=progress)
        text = f"{added} documents added, {len(writer) - added} were already in {args.out}"
    print(f"rank {os.environ.get('RANK', '0')}: {text}" if world > 1 else text)


def _slots(
    k: int | None, values: str | None, sample: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Returns the fields `k` and `values` of a store's header."""
    if sample is None:
        if seed is not None:
            raise ValueError(f"--seed must be passed with --sample, got {seed} without --sample.")
        return {"k": k or K, "values": values or VALUES}
    for name, value in (("--k", k), ("--values", values)):
        if value is not None:
            raise ValueError(f"{name} must not be passed together with --sample, got {value}.")
    return {"k": sample, "values": "counts"}


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or _default_device())
        torch.empty(0, device=device)
        usable = device.type != "meta"
    except (RuntimeError, AssertionError, ValueError, NotImplementedError):
        usable = False
    if not usable:
        raise ValueError(f"--device must be a device that PyTorch can use here, got {name!r}.")
    return device


def _dtype(name: str) -> str | torch.dtype:
    dtype = getattr(torch, name, None)
    if name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"--dtype must be auto, bfloat16, float16 or float32, got {name!r}.")
    return "auto" if name == "auto" else dtype


def import_(args: argparse.Namespace) -> None:
    from logitless import store

    from .teacher_import import add_outputs

    _data.are_files(args.data)
    header = {"vocab_size": args.vocab_size, **_slots(args.k, args.values)}
    header |= {"teacher": args.teacher, "tokenizer": _tokenizer_hash(args.tokenizer)}
    store.Header(**header)
    with (
        store.Writer(args.out, upload=args.upload, **header) as writer,
        bar("import", _data.size(args.data)) as advance,
    ):
        completion = True if args.completions else None
        add_outputs(writer, _data.lines(args.data), args.format, completion, advance)
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
    from .teacher_info import print_info

    print_info(args.store, args.plot)
    _print_unfinished(args.store)


def _print_unfinished(path: Path | str) -> None:
    from ..store.journal import unfinished

    if isinstance(path, str):
        return
    if size := unfinished(path):
        print(f"up to {size:,} bytes of documents are not in the store yet, because a writer is")
        print("open or was stopped; run the capture again to add these documents")


def merge(args: argparse.Namespace) -> None:
    from logitless import store

    from ..store.journal import unfinished

    for path in (path for path in args.stores if isinstance(path, Path) and unfinished(path)):
        store.recover(path)  # moves documents of killed writers from journals to shards
    stores = [store.Store(path) for path in args.stores]
    with bar("merge", sum(s.tokens for s in stores)) as advance:
        documents = store.merge(
            args.out, stores, shard_bytes=args.shard_bytes,
            progress=lambda n: advance(n, tokens=n),
        )  # fmt: skip
    print(f"{documents} documents in {args.out}")


def to_parquet(args: argparse.Namespace) -> None:
    from logitless import store

    opened = store.Store(args.store)
    with bar("to-parquet", opened.tokens) as advance:
        documents = store.to_parquet(opened, args.out, progress=lambda n: advance(n, tokens=n))
    print(f"{documents} documents in {args.out}")


ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "capture": capture, "import": import_, "verify": verify, "info": info, "merge": merge,
    "to-parquet": to_parquet, "size": size,
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
