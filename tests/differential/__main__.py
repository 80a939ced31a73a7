"""`make fuzz ARGS="--minutes 10"`: as many cases as fit, and what they found."""

import argparse
import itertools
import sys
import time
import warnings
from collections import Counter

import hypothesis

from .check import check
from .functions import FUNCTIONS
from .strategies import cases

ROUND = 100  # cases of a function before the next function's turn


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to draw cases")
    parser.add_argument("--seed", type=int, default=0, help="other cases for every seed")
    parser.add_argument("--function", choices=FUNCTIONS, action="append", help="only these")
    given = parser.parse_args()
    # numpy, under Triton's interpreter, remarks on -inf - -inf and log 0, which kernels mean.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    until, drawn, failures = time.monotonic() + 60 * given.minutes, Counter(), []
    for turn, name in enumerate(itertools.cycle(given.function or FUNCTIONS)):
        if time.monotonic() > until:
            break
        failure = failure_of(name, given.seed + 1_000_003 * turn, drawn)
        if failure is not None:
            failures.append(failure)
            print(f"{name}: {failure}", flush=True)
    for name, count in drawn.items():
        print(f"{name:28}{count:11,}")
    print(f"{drawn.total():,} cases, {len(failures)} functions failed")
    return 1 if failures else 0


def failure_of(name: str, seed: int, drawn: Counter) -> str | None:
    """What the smallest case raises that fails, of so many cases of one function."""
    last = None

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(cases(name))
    def each(case):
        nonlocal last
        last = case
        drawn[name] += 1
        check(case)

    try:
        each()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n\n{last.script()}"  # the last is the smallest
    return None


if __name__ == "__main__":
    sys.exit(main())
