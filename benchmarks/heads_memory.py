"""Measures time and memory of losses over a head, with several workspaces and in other libraries.

    python -m benchmarks.heads_memory --out benchmarks/results/h200     about two minutes on a GPU
    python -m benchmarks.heads_memory --both                            both splits per workspace
    python -m benchmarks.heads_memory --study exactness                 errors of sums over chunks
    python -m benchmarks.heads_memory --study growing                   memory by number of rows

The first command measures forward + backward of cross-entropy at three shapes. At the first shape,
the command also measures fp32 logits. Every result is compared with fp64 before the timing. Each
command writes JSON and a report. The first command also writes a plot. The option --both measures
each workspace with a split by rows and with a split by columns, if both splits are possible. The
constants in logitless/heads/choose_cut.py were chosen from the results of --both. The study
"exactness" measures the errors of the weight's gradient. The study "growing" measures peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import torch

from benchmarks.bench import contenders, plots, results, runner
from benchmarks.bench.cases import COMPILED, EAGER, MIB, OURS, PLAIN, Case, Mode
from benchmarks.bench.results import Result
from logitless.cli.report import sizes, table
from logitless.heads import choose_cut

SHAPES = ("8192×4096×128256", "8192×2048×151936", "16384×2304×256000")
WORKSPACES = (1024, 512, 256, 128, 64, 32)  # MiB
RIVALS = ("liger", "cce")
OWN_MEMORY = "in its own memory"
UNFUSED = "beside an unfused head"
FP32 = {"logits_dtype": torch.float32}
SMALL = {"workspace": 64 * MIB}
BUDGET = 200.0  # milliseconds of timing per case and contender
COLORS = {EAGER: "#7d8793", COMPILED: "#b9c0c8", OURS: "#d1495b"}
COLORS |= {"liger": "#33658a", "cce": "#86a873"}


def head(op: str, variant: str, options: dict, mode: str = Mode.BACKWARD) -> Case:
    return Case("heads", op, mode, variant, options, compiled=False)


def workspaces(shape: str) -> list[Case]:
    """Cases for each workspace, and for other libraries. The first shape has more cases."""
    ours = [head("cross_entropy", f"{mib} MiB", {"workspace": mib * MIB}) for mib in WORKSPACES]
    cases = [*ours, head("cross_entropy", OWN_MEMORY, {})]
    if shape == SHAPES[0]:
        cases += [
            head("cross_entropy", "fp32 logits, 1536 MiB", FP32),
            head("cross_entropy", "fp32 logits, 64 MiB", FP32 | SMALL),
            head("score", "1024 MiB", {}),
            head("score", "64 MiB", SMALL),
            head("score", "fp32 logits, 1536 MiB", FP32),
            head("cross_entropy", "64 MiB, no gradients", SMALL, Mode.FORWARD),
        ]
    return cases


def exactness(shape: str) -> list[Case]:
    """Cases in which the weight's gradient is summed over 1 to 64 chunks, or computed at once."""
    rows, _, vocab = map(int, shape.split("×"))
    cases = [head("cross_entropy", UNFUSED, {})]
    for chunks, dtype in product((1, 2, 4, 8, 16, 64), ("auto", "fp32", "weight")):
        options = {"workspace": rows // chunks * vocab * 2, "accumulate": dtype}
        cases.append(head("cross_entropy", f"{chunks} chunks, accumulate={dtype}", options))
    return cases


def growing(_: str) -> list[Case]:
    """Cases with two workspaces. The shapes of the study "growing" differ in the number of rows."""
    variants = {"default workspace": {}, "128 MiB": {"workspace": 128 * MIB}}
    return [head("cross_entropy", name, options) for name, options in variants.items()]


STUDIES = {  # for each study, a function that maps a shape to cases, and the shapes
    "workspaces": (workspaces, SHAPES),
    "exactness": (exactness, ("8192×1024×32768",)),
    "growing": (growing, tuple(f"{2**n}×4096×128256" for n in range(12, 17))),
}


@contextlib.contextmanager
def forced(gain: float) -> Iterator[None]:
    """Sets MIN_GAIN, the fraction of a GEMM's time that a split by columns must save."""
    before, choose_cut.MIN_GAIN = choose_cut.MIN_GAIN, gain
    choose_cut.choose.cache_clear()
    try:
        yield
    finally:
        choose_cut.MIN_GAIN = before
        choose_cut.choose.cache_clear()


def measure(study: str, both: bool, loaded: dict) -> list[Result]:
    rows, (cases, shapes) = [], STUDIES[study]
    for case in (case.at(shape, "bf16") for shape in shapes for case in cases(shape)):
        names = {OWN_MEMORY: RIVALS, UNFUSED: (OURS, EAGER)}.get(case.variant, (OURS,))
        finders = {name: find for name, find in loaded.items() if name in names}
        cuts = {"": None}
        if both and "workspace" in case.options:
            cuts = {", by rows": 1e9, ", by columns": -1e9}
        for name, gain in cuts.items():
            with contextlib.nullcontext() if gain is None else forced(gain):
                named = dataclasses.replace(case, variant=case.variant + name)
                measured = runner.run_case(named, finders, "cuda", BUDGET)
            for r in measured:
                print(*results.work_row(r).values(), sep=" | ", flush=True)
            rows += measured
    return rows


def draw(document: dict, path: Path, others: Iterable[Result] = ()) -> None:
    """Draws time against memory: a panel per shape, a curve for logitless, a dot per other library.

    `others` are results of contenders that the run `document` did not measure.
    """
    from matplotlib.figure import Figure

    plain = [r for r in (*document["rows"], *others) if r.op == "cross_entropy" and r.ms]
    shapes = list(dict.fromkeys(r.shape for r in document["rows"]))
    figure = Figure(figsize=(4.6 * len(shapes), 4.2), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for name, color in COLORS.items():
            variants = [f"{mib} MiB" for mib in WORKSPACES] if name == OURS else [OWN_MEMORY, PLAIN]
            at = [r for r in plain if (r.shape, r.contender) == (shape, name)]
            at = [r for r in at if r.variant in variants]
            memory = [max(r.spare_mib or 0.0, 1.0) for r in at]
            label = plots.LABELS.get(name, name)
            axes.plot(memory, [r.ms for r in at], "o-", color=color, label=label)
            if name == OURS:
                label_workspaces(axes, at)
        axes.set(
            title=sizes(shape), xscale="log", xlim=(1, 50_000), ylim=(0, None),
            xlabel="MiB beyond inputs and gradients",
        )  # fmt: skip
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set(ylabel="ms, forward + backward")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(COLORS), loc="outside lower center", frameon=False)
    where = f"{document['device']['name']}, torch {document['versions']['torch']}"
    figure.suptitle(
        f"Cross-entropy over a head in bf16: time against memory, lower left is better\n{where}."
        " The numbers at the points are workspaces in MiB."
    )
    figure.savefig(path, format="png", dpi=120)


def label_workspaces(axes, ours: list[Result]) -> None:
    """Labels each point with its workspace in MiB.

    The labels are below the points. If two points are close, the right label is above its point.
    """
    for r, smaller in zip(ours, [*ours[1:], None], strict=True):
        near = smaller is not None and smaller.spare_mib > 0.7 * r.spare_mib
        axes.annotate(
            f"{int(r.variant.removesuffix(' MiB')):,}", (r.spare_mib, r.ms), fontsize=7,
            xytext=(0, 6 if near else -14), textcoords="offset points", ha="center",
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--study", choices=STUDIES, default="workspaces")
    parser.add_argument(
        "--both", action="store_true", help="force a split by rows, then a split by columns"
    )
    parser.add_argument(
        "--commit", help="commit to record in the result, if git cannot find the commit"
    )
    args = parser.parse_args()
    loaded, versions = contenders.load((OURS, EAGER, *RIVALS), "cuda")
    document = results.new_document("cuda", versions, args.commit)
    document["rows"] = rows = measure(args.study, args.both, loaded)
    suffix = "-both" if args.both else "" if args.study == "workspaces" else f"-{args.study}"
    stem = args.out / f"heads-memory{suffix}-{document['date'][:10]}"
    facts = "\n".join(f"- {fact}" for fact in results.about(document))
    lines = table([results.work_row(r) for r in rows])
    written = results.write(document, f"# Heads: time against memory\n\n{facts}\n\n{lines}\n", stem)
    if not suffix:
        written.append(args.out / "heads-memory.png")
        draw(document, written[-1])
    print("wrote", *written)
    return int(any(r.status != "ok" for r in rows if r.contender == OURS))


if __name__ == "__main__":
    sys.exit(main())
