"""`logitless demo`: a teacher is trained, captured once into a store, and a student learns from it.

Four students start from one seed and see the same documents, few of them. One has the text alone;
one the teacher itself, its whole logits, in plain PyTorch; one the teacher's K most probable
tokens, and one the same from the store, both through a head whose logits are never made. What
counts is the loss on text that nobody has seen.

Ends with a table, a picture and a report in one HTML file.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from logitless.cli import chosen_device, require
from logitless.cli.demo.small import (  # what examples and benchmarks use of it
    MAX_CHARS,
    SCALES,
    VOCAB,
    Batch,
    Learner,
    Scale,
    Transformer,
    draw_batches,
    encode,
    largest_difference,
    loss_memory,
    read_sources,
    train,
    train_with_progress,
)

__all__ = [
    "MAX_CHARS",
    "SCALES",
    "VOCAB",
    "Batch",
    "Learner",
    "Scale",
    "Transformer",
    "draw_batches",
    "encode",
    "largest_difference",
    "loss_memory",
    "read_sources",
    "train",
    "train_with_progress",
]


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a teacher, capture it into a store, distil a student from it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="of each student; default: 300")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU, if there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--out", type=Path, default=Path("logitless-demo.png"),
        help="the picture; the report is beside it, in HTML",
    )  # fmt: skip
    parser.add_argument("--store", type=Path, help="where to keep the store; default: nowhere")


def run(args: argparse.Namespace) -> None:
    require("demo", "rich", "matplotlib")
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    from logitless.cli.demo import report, story

    device = chosen_device(args.device)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        told = story.tell(args.store or Path(folder) / "store", args.steps, device, args.seed)
    report.show_table(told)
    report.save_picture(told, args.out)
    report.save_html(told, args.out, args.out.with_suffix(".html"))
    print(f"picture: {args.out}\nreport: {args.out.with_suffix('.html')}")
