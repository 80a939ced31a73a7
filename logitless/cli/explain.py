"""Explains how a loss over a linear head is computed on a GPU. No GPU is needed.

    logitless explain --rows 8192 --width 4096 --vocab 128256 --workspace 64

The command prints how the logits are split, how much memory they take, and how many GEMMs run. The
expected speed is an estimate (logitless/heads/choose_cut.py), not a measurement.
"""

from __future__ import annotations

import argparse

import torch

import logitless as ll

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="explain how a loss over a head is computed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows of hidden states (tokens)")
    parser.add_argument("--width", type=int, default=4096, help="width of the hidden states")
    parser.add_argument("--vocab", type=int, default=128256, help="size of the vocabulary")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the head")
    parser.add_argument("--logits-dtype", choices=("fp32",), help="dtype of the logits")
    parser.add_argument("--workspace", type=int, metavar="MIB", help="limit for logits, in MiB")
    parser.add_argument("--accumulate", choices=("auto", "fp32", "weight"), default="auto")
    parser.add_argument("--reduction", choices=("mean", "sum", "none"), default="mean")
    parser.add_argument("--no-gradient", action="store_true", help="explain a loss in evaluation")


def run(args: argparse.Namespace) -> int:
    for name in ("rows", "width", "vocab", "workspace"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise SystemExit(f"--{name} must be at least 1, got {value}.")
    dtype = getattr(torch, DTYPES[args.dtype])
    hidden = torch.empty(args.rows, args.width, device="meta", dtype=dtype)
    weight = torch.empty(args.vocab, args.width, device="meta", dtype=dtype)
    logits = ll.LinearLogits(
        hidden, weight, workspace=args.workspace and args.workspace << 20,
        logits_dtype=torch.float32 if args.logits_dtype else None, accumulate=args.accumulate,
    )  # fmt: skip
    print(logits.explain(args.reduction, gradient=not args.no_gradient))
    return 0
