"""`make fuzz ARGS="--minutes 10"`: as many cases as fit, and what they found."""

import argparse
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import triton

from .functions import FUNCTIONS
from .search import Tally, search

ROUND = 100  # cases of a function before the next function's turn


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, default=0, help="other cases for every seed")
    parser.add_argument("--function", choices=FUNCTIONS, action="append", help="only these")
    parser.add_argument("--log", type=Path, help="a file that the report is written to")
    given = parser.parse_args()
    names = tuple(given.function or FUNCTIONS)
    # numpy, under Triton's interpreter, remarks on -inf - -inf and log 0, which kernels mean.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    report, failures = [heading(given.seed)], 0
    if given.minutes > 0:
        text, failures = by_time(names, given.seed, given.minutes)
        report.append(text)
    print("\n\n".join(report))
    if given.log:
        given.log.write_text("\n\n".join(report) + "\n")
    return 1 if failures else 0


def heading(seed: int) -> str:
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"Differential tests of {commit or 'no commit'}, {time.strftime('%Y-%m-%d')}, seed {seed}\n"
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"triton {triton.__version__}"
    )


def by_time(names: tuple[str, ...], seed: int, minutes: float) -> tuple[str, int]:
    """Cases of each function in turn, until time is up."""
    tally, failures, turn = Tally(), [], 0
    start = time.monotonic()
    until = start + 60 * minutes
    while time.monotonic() < until:
        for name in names:
            failure = search(name, seed + 1_000_003 * turn, ROUND, tally, until)
            if failure is not None:
                failures.append(failure)
                print(f"{name}: {failure}", flush=True)
        turn += 1
        if sys.stderr.isatty():
            print(
                f"\r{tally.drawn.total():,} cases, {len(failures)} failures",
                end="",
                file=sys.stderr,
            )
    took = (time.monotonic() - start) / 60
    lines = [tally.table(), f"{took:.1f} minutes, {len(failures)} failures"]
    lines += [f"{i}. {failure}" for i, failure in enumerate(failures, 1)]
    return "\n\n".join(lines), len(failures)


if __name__ == "__main__":
    sys.exit(main())
