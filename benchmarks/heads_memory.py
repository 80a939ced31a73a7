"""Time against memory of a loss over a head: ours in every workspace, and the rivals.

    python -m benchmarks.heads_memory --out benchmarks/results/h200     some two minutes on a GPU
    python -m benchmarks.heads_memory --both                            each workspace cut both ways
    python -m benchmarks.heads_memory --study exactness                 the sums over chunks
    python -m benchmarks.heads_memory --study growing                   memory of more and more rows

Cross-entropy, forward + backward, at three shapes; then what logits in fp32 cost. Every answer is
compared with fp64 before it is timed. Writes JSON and a report, and of the first a plot. --both is
for the constants in logitless/heads/plan.py: it forces whole rows, and then columns, wherever both
are possible. The other two studies are of the errors of the weight's gradient and of peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from logitless.cli.bench import contenders, results, runner
from logitless.cli.bench.cases import EAGER, MIB, OURS, Case, Mode
from logitless.cli.bench.results import Result
from logitless.cli.report import table
from logitless.heads import plan as _cut

SHAPES = ("8192×4096×128256", "8192×2048×151936", "16384×2304×256000")
WORKSPACES = (1024, 512, 256, 128, 64, 32)  # MiB
RIVALS = ("liger", "cce")
OWN_MEMORY = "in its own memory"
UNFUSED = "beside an unfused head"
FP32 = {"logits_dtype": torch.float32}
SMALL = {"workspace": 64 * MIB}
SPEND = 200.0  # ms of timing for each
COLORS = {OURS: "#d1495b", "liger": "#33658a", "cce": "#86a873"}


def head(op: str, variant: str, given: dict, mode: str = Mode.BACKWARD) -> Case:
    return Case("heads", op, mode, variant, given, compiled=False)


def workspaces(shape: str) -> list[Case]:
    """Ours in each workspace, then the rivals; at the first shape, results a row and fp32 too."""
    ours = [head("cross_entropy", f"{mib} MiB", {"workspace": mib * MIB}) for mib in WORKSPACES]
    found = [*ours, head("cross_entropy", OWN_MEMORY, {})]
    if shape == SHAPES[0]:
        found += [
            head("cross_entropy", "fp32 logits, 1536 MiB", FP32),
            head("cross_entropy", "fp32 logits, 64 MiB", FP32 | SMALL),
            head("score", "1024 MiB", {}),
            head("score", "64 MiB", SMALL),
            head("score", "fp32 logits, 1536 MiB", FP32),
            head("cross_entropy", "64 MiB, no gradients", SMALL, Mode.FORWARD),
        ]
    return found


def exactness(shape: str) -> list[Case]:
    """The weight's gradient summed over more and more chunks, beside that of a head without any."""
    rows, _, vocab = map(int, shape.split("×"))
    found = [head("cross_entropy", UNFUSED, {})]
    for chunks, way in product((1, 2, 4, 8, 16, 64), ("auto", "fp32", "weight")):
        given = {"workspace": rows // chunks * vocab * 2, "accumulate": way}
        found.append(head("cross_entropy", f"{chunks} chunks, accumulate={way}", given))
    return found


def growing(_: str) -> list[Case]:
    given = {"default workspace": {}, "128 MiB": {"workspace": 128 * MIB}}
    return [head("cross_entropy", name, how) for name, how in given.items()]


STUDIES = {  # the cases of a shape, and the shapes
    "workspaces": (workspaces, SHAPES),
    "exactness": (exactness, ("8192×1024×32768",)),
    "growing": (growing, tuple(f"{2**n}×4096×128256" for n in range(12, 17))),
}


@contextlib.contextmanager
def forced(gain: float) -> Iterator[None]:
    """Columns are chosen where they save at least this, of a GEMM."""
    before, _cut.MIN_GAIN = _cut.MIN_GAIN, gain
    _cut.choose.cache_clear()
    try:
        yield
    finally:
        _cut.MIN_GAIN = before
        _cut.choose.cache_clear()


def measure(study: str, both: bool, loaded: dict) -> list[Result]:
    found, (cases, shapes) = [], STUDIES[study]
    for case in (case.at(shape, "bf16") for shape in shapes for case in cases(shape)):
        others = {OWN_MEMORY: RIVALS, UNFUSED: (OURS, EAGER)}.get(case.variant, (OURS,))
        who = {name: find for name, find in loaded.items() if name in others}
        ways = {"": None}
        if both and "workspace" in case.options:
            ways = {", by rows": 1e9, ", by columns": -1e9}
        for name, gain in ways.items():
            with contextlib.nullcontext() if gain is None else forced(gain):
                named = dataclasses.replace(case, variant=case.variant + name)
                measured = runner.run_case(named, who, "cuda", SPEND)
            for r in measured:
                print(*results.work_row(r).values(), sep=" | ", flush=True)
            found += measured
    return found


def draw(document: dict, path: Path) -> None:
    """One panel a shape: milliseconds over MiB, ours as a curve and each rival as a point."""
    from matplotlib.figure import Figure

    plain = [r for r in document["rows"] if r.op == "cross_entropy" and r.ms]
    shapes = list(dict.fromkeys(r.shape for r in plain))
    figure = Figure(figsize=(4.2 * len(shapes), 3.6), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for name, color in COLORS.items():
            ours = [f"{mib} MiB" for mib in WORKSPACES]
            wanted = ours if name == OURS else [OWN_MEMORY]
            at = [r for r in plain if (r.shape, r.contender) == (shape, name)]
            at = [r for r in at if r.variant in wanted]
            memory = [max(r.spare_mib or 0.0, 1.0) for r in at]
            axes.plot(memory, [r.ms for r in at], "o-", color=color, label=name)
        axes.set(
            title=shape, xscale="log", xlabel="MiB beyond inputs and gradients", ylim=(0, None)
        )
    first = figure.axes[0]
    first.set(ylabel="ms, forward + backward")
    first.legend()
    where = f"{document['device']['name']}, torch {document['versions']['torch']}"
    figure.suptitle(f"cross-entropy over a head, bf16: {where}")
    figure.savefig(path, format="png", dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--study", choices=STUDIES, default="workspaces")
    parser.add_argument("--both", action="store_true", help="force rows, then columns")
    parser.add_argument("--commit", help="the code under test, where there is no git to ask")
    args = parser.parse_args()
    loaded, versions = contenders.load((OURS, EAGER, *RIVALS), "cuda")
    document = results.new_document("cuda", versions, args.commit)
    document["rows"] = found = measure(args.study, args.both, loaded)
    what = "-both" if args.both else "" if args.study == "workspaces" else f"-{args.study}"
    stem = args.out / f"heads-memory{what}-{document['date'][:10]}"
    facts = "\n".join(f"- {fact}" for fact in results.about(document))
    lines = table([results.work_row(r) for r in found])
    made = results.write(document, f"# Heads: time against memory\n\n{facts}\n\n{lines}\n", stem)
    if not what:
        made.append(args.out / "heads-memory.png")
        draw(document, made[-1])
    print("wrote", *made)
    return int(any(r.status != "ok" for r in found if r.contender == OURS))


if __name__ == "__main__":
    sys.exit(main())
