"""`logitless bench`: is it right, how fast is it, and how fast could anything be?

On whatever machine it finds, every contender's values and gradients are first compared with fp64;
then ours, PyTorch eager, torch.compile and each rival library that imports are timed. On a GPU they
stand beside the copy bandwidth and the matrix products of the same run, on a CPU beside PyTorch.

    logitless bench                                  everything: logits, teachers, heads
    logitless bench --family heads                   losses over a head alone
    logitless bench --op cross_entropy --shape 4096x50257 --dtype bf16
    logitless bench --against eager --against liger  ours beside these two alone
    logitless bench --from-json FILE                 report and plots of a stored result

The report goes to the terminal and, with JSON and plots, to the folder of --out; nothing elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

WIDTH = 170  # of a terminal that is none


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "bench",
        help="check, then time, against PyTorch and other libraries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    families, dtypes = ("logits", "teachers", "heads"), ("bf16", "fp16", "fp32")
    add("--family", action="append", choices=families, help="only these cases (repeatable)")
    add("--op", action="append", help="only this op (repeatable)")
    add("--shape", action="append", help="ROWSxVOCAB, or ROWSxWIDTHxVOCAB of a head (repeatable)")
    add("--dtype", action="append", choices=dtypes, help="(repeatable)")
    add("--against", action="append", metavar="NAME", help="only these rivals (repeatable)")
    add("--device", choices=("cuda", "cpu"), help="default: a GPU where there is one")
    add("--quick", action="store_true", help="small shapes, short timing, no torch.compile")
    add("--out", type=Path, metavar="DIR", help="default: benchmarks/results/<device>")
    add("--commit", help="what to record as the code under test, where there is no git to ask")
    again = "show a stored result, or several as one (repeatable); times nothing"
    add("--from-json", type=Path, action="append", metavar="FILE", help=again)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit status: 1 if ours gave a wrong answer or none, 2 for arguments that make no sense."""
    from .. import _machine, require

    require("bench", "rich", "matplotlib")
    from rich.console import Console
    from rich.markdown import Markdown

    from . import plots, report

    try:
        document = stored(args.from_json) if args.from_json else timed(args)
    except (ValueError, OSError) as error:
        print(f"logitless bench: {error}", file=sys.stderr)
        return 2
    text = report.markdown(document)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(Markdown(text))
    default = Path("benchmarks/results") / _machine.slug(document["device"]["name"])
    folder = args.out or (args.from_json[0].parent if args.from_json else default)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / "-".join(["bench", *(args.family or ()), document["date"][:10]])
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    stem.with_suffix(".md").write_text(text)
    made = [stem.with_suffix(".json"), stem.with_suffix(".md"), *plots.save(document, folder)]
    print(*(f"wrote {path}" for path in made), sep="\n")
    ours = [row for row in document["rows"] if row["contender"] == "logitless"]
    return int(any(row["status"] != "ok" for row in ours))


def stored(paths: list[Path]) -> dict:
    """Of several files, the facts of the first and the rows of all."""
    from .runner import Result

    documents = [json.loads(path.read_text()) for path in paths]
    rows = [row for document in documents for row in document["rows"]]
    known = {field.name for field in dataclasses.fields(Result)}
    if any(row.keys() != known for row in rows):
        raise ValueError("--from-json must be a result of this version of the benchmark.")
    return documents[0] | {"rows": rows}


def timed(args: argparse.Namespace) -> dict:
    """Runs the cases under a bar on stderr, and returns the document that is stored."""
    from rich.console import Console
    from rich.progress import Progress

    from .. import _machine, chosen_device
    from . import contenders, runner, table, timing, verdict

    device = chosen_device(args.device)
    names = [contenders.OURS, *args.against] if args.against else list(contenders.NAMES)
    if unknown := set(names) - set(contenders.NAMES):
        known = ", ".join(contenders.NAMES[1:])
        raise ValueError(f"--against must be one of {known}, got {min(unknown)!r}.")
    how = {"families": args.family, "ops": args.op, "shapes": args.shape, "dtypes": args.dtype}
    cases = table.choose(device, quick=args.quick, **how)
    loaded, standing = contenders.load(names, device)
    budget = timing.Budget(5.0, 10.0) if args.quick else timing.Budget()
    budget = budget.longer() if device == "cpu" else budget
    ceilings = [timing.copy_bandwidth(budget)] if device == "cuda" else []
    ran = []
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases):
            progress.update(progress.task_ids[0], description=case.name)
            spend = budget.longer() if case.family == "heads" else budget
            ran.append((case, runner.run_case(case, loaded, device, spend)))
    with contextlib.suppress(RuntimeError):  # a contender that broke the GPU must not cost the rest
        ceilings += [timing.copy_bandwidth(budget)] if device == "cuda" else []
    ceiling = max(ceilings, default=None)
    return {
        "device": _machine.device(device),
        "versions": _machine.versions(),
        "contenders": standing,
        "commit": args.commit or _machine.commit(),
        "date": _machine.now(),
        "copy_tbps": ceiling,
        "rows": [dataclasses.asdict(result) for result in verdict.judge(ran, ceiling)],
    }
