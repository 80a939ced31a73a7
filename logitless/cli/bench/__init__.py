"""`logitless bench`: is it right, how fast is it, and how fast could anything be?

On whatever machine it finds, every contender's values and gradients are first compared with fp64;
then ours, PyTorch eager, torch.compile and each rival library that imports are timed. On a GPU they
stand beside the copy bandwidth and the matrix products of the same run, on a CPU beside PyTorch.

    logitless bench                                  everything: logits, teachers, heads
    logitless bench --family heads                   losses over a head alone
    logitless bench --op cross_entropy --shape 4096x50257 --dtype bf16
    logitless bench --against eager --against liger  ours beside these two alone
    logitless bench --from-json FILE                 report and plots of a stored result

A long family can be run in parts, by one commit on one kind of machine, that end as one result:

    logitless bench --family heads --minutes 8       says which FILE it wrote
    logitless bench --family heads --resume FILE     what FILE lacks; the report is of both

The report goes to the terminal and, with JSON and plots, to the folder of --out; nothing elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from .. import chosen_device, require
from .. import clocks as _clocks
from .. import machine as _machine
from ..progress import bar
from . import cases, contenders, plots, results, runner

WIDTH = 170  # columns of the report where stdout is not a terminal


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="check, then time, against PyTorch and other libraries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, rivals = parser.add_argument, contenders.NAMES[1:]
    add("--family", action="append", choices=cases.FAMILIES, help="only these (repeatable)")
    add("--op", action="append", help="only this op (repeatable)")
    add("--shape", action="append", help="ROWSxVOCAB, or ROWSxWIDTHxVOCAB of a head (repeatable)")
    add("--dtype", action="append", choices=tuple(cases.DTYPES), help="(repeatable)")
    add("--against", action="append", choices=rivals, help="only these rivals (repeatable)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--quick", action="store_true", help="small shapes, short timing, no torch.compile")
    add("--minutes", type=float, default=float("inf"), help="after these, no further case begins")
    add("--resume", type=Path, metavar="FILE", help="add what this lacks, or where ours failed")
    add("--out", type=Path, metavar="DIR", help="default: FILE's, or benchmarks/results/<device>")
    add("--commit", help="what to record as the code under test, where there is no git to ask")
    again = "show a stored result, or several as one (repeatable); times nothing"
    add("--from-json", type=Path, action="append", metavar="FILE", help=again)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if ours gave a wrong answer or none, 2 for arguments that make no sense."""
    require("bench", "rich", "matplotlib")
    from rich.console import Console
    from rich.markdown import Markdown

    files = args.from_json or ([args.resume] if args.resume else [])
    try:
        stored = [results.read(path) for path in files]
        document = results.joined(*stored) if args.from_json else timed(args, stored)
    except (ValueError, OSError) as error:
        print(f"logitless bench: {error}", file=sys.stderr)
        return 2
    text = results.markdown(document)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(Markdown(text))
    default = Path("benchmarks/results") / _machine.slug(document["device"]["name"])
    folder = args.out or (files[0].parent if files else default)
    stem = folder / "-".join(["bench", *(args.family or ()), document["date"][:10]])
    made = results.write(document, text, stem) + plots.save(document, folder)
    print(*(f"wrote {path}" for path in made), sep="\n")
    return int(any(r.status != "ok" for r in document["rows"] if r.contender == cases.OURS))


def timed(args: argparse.Namespace, stored: list[dict]) -> dict:
    """Runs the cases that no stored part has, under a bar on stderr; the document of all."""
    end, device = time.monotonic() + 60 * args.minutes, chosen_device(args.device)
    how = {"families": args.family, "ops": args.op, "shapes": args.shape, "dtypes": args.dtype}
    chosen = cases.choose(device, quick=args.quick, **how)
    names = (cases.OURS, *args.against) if args.against else contenders.NAMES
    loaded, versions = contenders.load(names, device)
    document = results.joined(*stored, results.new_document(device, versions, args.commit))
    done = {r.name for r in document["rows"] if r.contender == cases.OURS and r.status == "ok"}
    left = {case.name: case for case in chosen if case.name not in done}
    found = [r for r in document["rows"] if r.name not in left]
    budget = (10.0 if args.quick else 60.0) * (5 if device == "cpu" else 1)
    ceilings = [document["copy_tbps"] or 0.0, _clocks.copy_bandwidth(device, budget)]
    with bar("bench", len(left)) as advance:
        while left and (not found or time.monotonic() < end):
            name, case = next(iter(left.items()))
            advance(0, name)
            longer = 5 if case.family == "heads" else 1  # tens of milliseconds: until clocks settle
            found += runner.run_case(left.pop(name), loaded, device, longer * budget)
            advance(1, name)
    with contextlib.suppress(RuntimeError):  # of a contender that broke the GPU
        ceilings.append(_clocks.copy_bandwidth(device, budget))
    ceiling = max(ceilings) or None
    # Rows of a part before this one are judged again: the ceiling may have risen.
    results.judge([*cases.choose(device, quick=args.quick), *chosen], found, ceiling)
    return document | {"copy_tbps": ceiling, "rows": found, "left": len(left)}
