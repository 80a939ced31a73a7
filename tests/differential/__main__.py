"""`make fuzz ARGS="--minutes 10"`: as many cases as fit, and what they found."""

import argparse
import sys
import time
import warnings

from .functions import FUNCTIONS
from .search import Tally, search

ROUND = 100  # cases of a function before the next function's turn


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, default=0, help="other cases for every seed")
    parser.add_argument("--function", choices=FUNCTIONS, action="append", help="only these")
    given = parser.parse_args()
    names = tuple(given.function or FUNCTIONS)
    # numpy, under Triton's interpreter, remarks on -inf - -inf and log 0, which kernels mean.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    report, failures = by_time(names, given.seed, given.minutes)
    print(report)
    return 1 if failures else 0


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
