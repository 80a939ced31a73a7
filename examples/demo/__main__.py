"""Trains a teacher, stores its predictions, and distils students.

Four students start from the same seed and train on the same few documents. The first student learns
from the text only. The second student learns from the teacher's whole logits, in plain PyTorch. The
third student learns from the teacher's K most probable tokens, which are computed in each step. The
fourth student reads the teacher's K most probable tokens from the store. In training, the logits of
the third and fourth student are not materialised. The students are compared by their loss on
held-out text.

The demo prints a table, and writes a plot and an HTML report.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from . import report, story


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=300, help="training steps of each student; default: 300"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--out", type=Path, default=Path("logitless-demo.png"),
        help="file of the plot; the HTML report is written beside it",
    )  # fmt: skip
    parser.add_argument(
        "--store", type=Path, help="folder of the store; by default the store is deleted"
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        raise SystemExit(f"--steps must be at least 1, got {args.steps}")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = story.run(args.store or Path(folder) / "store", args.steps, device, args.seed)
    report.show_table(outcome)
    report.save_plot(outcome, args.out)
    report.save_html(outcome, args.out, args.out.with_suffix(".html"))
    print(f"plot: {args.out}\nreport: {args.out.with_suffix('.html')}")


if __name__ == "__main__":
    main()
