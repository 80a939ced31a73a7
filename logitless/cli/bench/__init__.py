"""`logitless bench`: is it right, how fast is it, and how fast could anything be?

On whatever machine it finds, every contender's values and gradients are first compared with fp64;
then ours, PyTorch eager, torch.compile and each rival library that imports are timed, beside the
copy bandwidth measured in the same run. Logits are drawn from a normal distribution of variance 4.

    logitless bench                                  the whole table
    logitless bench --op cross_entropy --shape 4096x50257 --dtype bf16
    logitless bench --against eager --against liger  ours beside these two alone
    logitless bench --from-json FILE                 tables and plots of a stored result

Tables go to the terminal; JSON, Markdown and two plots to benchmarks/results/<device>/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

INPUTS = "normal, variance 4; uniform targets"


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="check, then time, against PyTorch and other libraries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    ops = ("cross_entropy", "score", "logsumexp")
    add("--op", action="append", choices=ops, help="only this op (repeatable)")
    add("--shape", action="append", metavar="NxV", help="instead of the table's (repeatable)")
    add("--dtype", action="append", choices=("bf16", "fp16", "fp32"), help="(repeatable)")
    add("--against", action="append", metavar="NAME", help="only these rivals (repeatable)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--quick", action="store_true", help="small shapes, short timing, no torch.compile")
    add("--out", type=Path, metavar="DIR", help="where to write, instead of benchmarks/results/")
    add("--commit", help="what to record as the code under test, where there is no git to ask")
    add("--from-json", type=Path, metavar="FILE", help="show a stored result again; times nothing")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if ours gave a wrong answer or none, 2 for arguments that make no sense."""
    from .. import require

    require("bench", "rich", "matplotlib")
    try:
        document = json.loads(args.from_json.read_text()) if args.from_json else timed(args)
    except (ValueError, OSError) as error:
        print(f"logitless bench: {error}", file=sys.stderr)
        return 2
    from . import report, verdict
    from .runner import Result

    report.show(document)
    for path in write(document, args):
        print(f"wrote {path}")
    return 0 if verdict.all_ours_right([Result(**row) for row in document["rows"]]) else 1


def timed(args: argparse.Namespace) -> dict:
    """Runs the cases and returns the document that is stored."""
    import torch

    from .. import _machine
    from . import contenders, timing, verdict
    from .runner import run_case

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = chosen_cases(args, device)
    loaded, standing = contenders.load(chosen_contenders(args), device)
    document = {
        "device": _machine.device(device),
        "versions": _machine.versions(),
        "contenders": standing,
        "commit": args.commit or _machine.commit(),
        "date": _machine.now(),
        "inputs": INPUTS,
    }
    budget = timing.Budget(5.0, 10.0) if args.quick else timing.Budget()
    ceilings = [timing.copy_bandwidth(device, budget)]
    ran = [(case, run_case(case, loaded, device, budget)) for case in with_progress(cases)]
    with contextlib.suppress(RuntimeError):  # a contender that broke the GPU must not cost the rest
        ceilings.append(timing.copy_bandwidth(device, budget))
    rows = [dataclasses.asdict(result) for result in verdict.judge(ran, max(ceilings))]
    return document | {"copy_tbps": max(ceilings), "copy_tbps_measured": ceilings, "rows": rows}


def chosen_cases(args: argparse.Namespace, device: str) -> list:
    from . import cases

    if args.shape:
        dtypes = args.dtype or (["fp32"] if device == "cpu" else ["bf16"])
        shapes = [cases.Shape(*cases.parse_shape(s), d) for s in args.shape for d in dtypes]
        found = [case for shape in shapes for case in cases.shape_cases(device, shape)]
    else:
        found = cases.default_cases(device, quick=args.quick)
        found = [case for case in found if not args.dtype or case.dtype in args.dtype]
    found = [case for case in found if not args.op or case.op in args.op]
    if not found:
        raise ValueError("no case has this op, shape and dtype.")
    if args.quick:
        found = [case._replace(compiled=False) for case in found]
    return found


def chosen_contenders(args: argparse.Namespace) -> list[str]:
    from .contenders import NAMES, OURS

    unknown = set(args.against or ()) - set(NAMES)
    if unknown:
        raise ValueError(f"--against must be one of {', '.join(NAMES[1:])}, got {min(unknown)!r}.")
    return [OURS, *args.against] if args.against else list(NAMES)


def with_progress(cases: list):
    """Yields each case under a bar on stderr that names it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            name = f"{case.op} {case.shape} {case.dtype}, {case.mode}, {case.variant}"
            progress.update(task, description=name)
            yield case
            progress.advance(task)


def write(document: dict, args: argparse.Namespace) -> list[Path]:
    """JSON, Markdown and plots, in the folder of the device."""
    from .._machine import slug
    from . import plots, report

    default = Path("benchmarks/results") / slug(document["device"]["name"])
    folder = args.out or (args.from_json.parent if args.from_json else default)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench-{document['date'][:10]}"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    stem.with_suffix(".md").write_text(report.markdown(document))
    return [stem.with_suffix(".json"), stem.with_suffix(".md"), *plots.save(document, folder)]
