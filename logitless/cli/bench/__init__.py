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
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

from .. import _machine, chosen_device, require
from . import cases, contenders, plots, results, runner, timing
from .results import Result

WIDTH = 170  # of a terminal that is none


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
    add(
        "--resume",
        type=Path,
        metavar="FILE",
        help="add what this result lacks or where ours failed",
    )
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

    try:
        document = joined(*map(read, args.from_json)) if args.from_json else timed(args)
    except (ValueError, OSError) as error:
        print(f"logitless bench: {error}", file=sys.stderr)
        return 2
    text = results.markdown(document)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(Markdown(text))
    files = args.from_json or ([args.resume] if args.resume else [])
    default = Path("benchmarks/results") / _machine.slug(document["device"]["name"])
    folder = args.out or (files[0].parent if files else default)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "-".join(["bench", *(args.family or ()), document["date"][:10]])
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    stem.with_suffix(".md").write_text(text)
    made = [stem.with_suffix(".json"), stem.with_suffix(".md"), *plots.save(document, folder)]
    print(*(f"wrote {path}" for path in made), sep="\n")
    ours = [row for row in document["rows"] if row["contender"] == cases.OURS]
    return int(any(row["status"] != "ok" for row in ours))


def read(path: Path) -> dict:
    document = json.loads(path.read_text())
    if any(row.keys() != {field.name for field in fields(Result)} for row in document["rows"]):
        raise ValueError(f"{path} must be a result of this version of the benchmark.")
    return document


def joined(first: dict, *others: dict) -> dict:
    """The facts of the first, which must be those of all, and the rows of all."""
    for fact in ("device", "versions", "contenders", "commit"):
        if differs := [part[fact] for part in others if part[fact] != first[fact]]:
            raise ValueError(f"{fact} must be {first[fact]} in every part, got {differs[0]}.")
    parts = (first, *others)
    ceiling = max(part["copy_tbps"] or 0.0 for part in parts) or None
    return first | {"copy_tbps": ceiling, "rows": [row for part in parts for row in part["rows"]]}


def timed(args: argparse.Namespace) -> dict:
    """Runs the cases under a bar on stderr, and returns the document that is stored."""
    from rich.console import Console
    from rich.progress import Progress

    end, device = time.monotonic() + 60 * args.minutes, chosen_device(args.device)
    how = {"families": args.family, "ops": args.op, "shapes": args.shape, "dtypes": args.dtype}
    chosen = cases.choose(device, quick=args.quick, **how)
    names = (cases.OURS, *args.against) if args.against else contenders.NAMES
    loaded, standing = contenders.load(names, device)
    document = {
        "device": _machine.device(device),
        "versions": _machine.versions(),
        "contenders": standing,
        "commit": args.commit or _machine.commit(),
        "date": _machine.now(),
        "copy_tbps": None,
        "rows": [],
    }
    document = joined(read(args.resume), document) if args.resume else document
    found = [Result(**row) for row in document["rows"]]
    done = {r.name for r in found if r.contender == cases.OURS and r.status == "ok"}
    left = [case for case in chosen if case.name not in done]
    found = [r for r in found if r.name not in {case.name for case in left}]
    spend = (10.0 if args.quick else 60.0) * (5 if device == "cpu" else 1)
    ceilings = [document["copy_tbps"] or 0.0]
    if device == "cuda":
        ceilings.append(timing.copy_bandwidth(spend))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(left))
        while left and (not found or time.monotonic() < end):
            case = left.pop(0)
            progress.update(bar, description=case.name)
            longer = 5 if case.family == "heads" else 1  # tens of milliseconds: until clocks settle
            found += runner.run_case(case, loaded, device, longer * spend)
            progress.advance(bar)
    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # of a contender that broke the GPU
            ceilings.append(timing.copy_bandwidth(spend))
    ceiling = max(ceilings) or None
    # Rows of a part before this one are judged again: the ceiling may have risen.
    results.judge([*cases.choose(device, quick=args.quick), *chosen], found, ceiling)
    rows = [asdict(result) for result in found]
    return document | {"copy_tbps": ceiling, "rows": rows, "left": len(left)}
