"""Checks and times this library, PyTorch and other libraries.

The contenders are logitless, PyTorch eager, torch.compile, and all other supported libraries that
can be imported. Before any time is measured, the values and gradients of every contender are
compared with formulas in fp64. On a GPU, the time of a contender is compared with a lower bound.
The lower bound is the time of a memory copy, or of the GEMMs of a head, in the same run. On a CPU,
the time of a contender is compared with the time of PyTorch.

    python -m benchmarks.bench                                  all cases: logits, teachers, heads
    python -m benchmarks.bench --family heads                   losses over a head only
    python -m benchmarks.bench --op cross_entropy --shape 4096x50257 --dtype bf16
    python -m benchmarks.bench --against eager --against liger  logitless beside these two only
    python -m benchmarks.bench --from-json FILE                 report and plots of a stored result

A family of cases that takes long can be run in several parts. All parts must be run at the same
commit and on the same kind of machine. With --resume, the command runs the missing cases, and joins
the results of all parts:

    python -m benchmarks.bench --family heads --minutes 8   writes a part and prints its FILE
    python -m benchmarks.bench --family heads --resume FILE   runs the rest; reports all cases

The command prints a report, and writes the report, a JSON file and plots to the folder of --out.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from logitless.cli import chosen_device, machine
from logitless.cli.progress import bar

from . import cases, clocks, contenders, plots, results, runner

WIDTH = 170  # characters per line of the report if stdout is not a terminal


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, rivals = parser.add_argument, contenders.NAMES[1:]
    add("--family", action="append", choices=cases.FAMILIES, help="only this family (repeatable)")
    add("--op", action="append", help="only this op (repeatable)")
    add("--shape", action="append", help="ROWSxVOCAB, or ROWSxWIDTHxVOCAB for a head (repeatable)")
    add(
        "--dtype", action="append", choices=tuple(cases.DTYPES), help="only this dtype (repeatable)"
    )
    add("--against", action="append", choices=rivals, help="only this other library (repeatable)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    add("--quick", action="store_true", help="small shapes, short timing, no torch.compile")
    add("--minutes", type=float, default=float("inf"), help="begin no new case after this time")
    add("--resume", type=Path, metavar="FILE", help="run the missing and failed cases of FILE")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: the folder of FILE, or benchmarks/results/<device>",
    )
    add("--commit", help="commit to record in the result, if git cannot find the commit")
    from_json = "report stored results without timing; several files are joined (repeatable)"
    add("--from-json", type=Path, action="append", metavar="FILE", help=from_json)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if logitless is wrong or fails in a case, 2 for bad arguments."""
    args = arguments(argv)
    files = args.from_json or ([args.resume] if args.resume else [])
    try:
        stored = [results.read(path) for path in files]
        document = results.joined(*stored) if args.from_json else timed(args, stored)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    text = results.markdown(document)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(Markdown(text))
    default = Path("benchmarks/results") / machine.slug(document["device"]["name"])
    folder = args.out or (files[0].parent if files else default)
    stem = folder / "-".join(["bench", *(args.family or ()), document["date"][:10]])
    written = results.write(document, text, stem) + plots.save(document, folder)
    print(*(f"wrote {path}" for path in written), sep="\n")
    return int(any(r.status != "ok" for r in document["rows"] if r.contender == cases.OURS))


def timed(args: argparse.Namespace, stored: list[dict]) -> dict:
    """Runs the chosen cases.

    A case is skipped if `stored` has a correct result of logitless for this case.

    Returns a dictionary with the stored results and the new results.
    """
    end, device = time.monotonic() + 60 * args.minutes, chosen_device(args.device)
    filters = {"families": args.family, "ops": args.op, "shapes": args.shape, "dtypes": args.dtype}
    chosen = cases.choose(device, quick=args.quick, **filters)
    names = (cases.OURS, *args.against) if args.against else contenders.NAMES
    loaded, versions = contenders.load(names, device)
    document = results.joined(*stored, results.new_document(device, versions, args.commit))
    done = {r.name for r in document["rows"] if r.contender == cases.OURS and r.status == "ok"}
    left = {case.name: case for case in chosen if case.name not in done}
    rows = [r for r in document["rows"] if r.name not in left]
    budget = (10.0 if args.quick else 60.0) * (5 if device == "cpu" else 1)
    ceilings = [document["copy_tbps"] or 0.0, clocks.copy_bandwidth(device, budget)]
    with bar("bench", len(left)) as advance:
        while left and (not rows or time.monotonic() < end):
            name, case = next(iter(left.items()))
            advance(0, name)
            # The time budget of a loss over a head is five times the budget of other losses,
            # because one call over a head takes tens of milliseconds. In a short run, the GPU's
            # clock rate would not become stable.
            longer = 5 if case.family == "heads" else 1
            rows += runner.run_case(left.pop(name), loaded, device, longer * budget)
            advance(1, name)
    with contextlib.suppress(RuntimeError):  # a contender's error can leave the GPU unusable
        ceilings.append(clocks.copy_bandwidth(device, budget))
    ceiling = max(ceilings) or None
    # The time limits depend on the copy bandwidth. If this run has measured a higher copy bandwidth
    # than the stored run, the time limits of the stored results change. So all results are checked
    # again.
    results.judge([*cases.choose(device, quick=args.quick), *chosen], rows, ceiling)
    return document | {"copy_tbps": ceiling, "rows": rows, "left": len(left)}


if __name__ == "__main__":
    sys.exit(main())
