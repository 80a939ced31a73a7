"""Draws the pictures of README and docs whose numbers are in reports without a JSON file.

`python -m benchmarks.tables` calls `draw`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from examples.demo import report, story

ROOT = Path(__file__).resolve().parents[1]
STEP = ROOT / "benchmarks/results/h200/training-step-566b4e0.md"
# The report of `python benchmarks/training_step.py --lengths ...`
LENGTHS = ROOT / "benchmarks/results/h200/training-step-lengths.md"
DEMO = ROOT / "benchmarks/results/demo-cpu.md"
LONGEST = "1 × 65,536"  # batch × length of the training step that README shows
VARIANTS = {  # names in the report, and names in README
    "Transformers as it is": "Transformers without changes",
    "ll.fuse(model)": "with `ll.fuse(model)`",
    "Liger's loss": "with Liger's loss only",
    "Liger's whole patch": "with Liger's whole patch, which also replaces norms, activations and"
    " rotary embeddings",
}
GREY, RED, BLUE = "#9aa5b1", "#d1495b", "#7fb7be"


class Step(NamedTuple):
    """One implementation of the training step."""

    name: str  # name in README
    tokens: str  # tokens per second
    gib: str  # peak memory beyond the weights, in GiB


def tables_of(report: Path) -> list[list[list[str]]]:
    """The Markdown tables of a report, each as a list of rows of cells."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", report.read_text(), re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in block.splitlines()] for block in blocks]
    return [[[c.strip() for c in row] for row in (t[0], *t[2:])] for t in rows]


def training_step() -> list[Step]:
    """The results of the longest training step, in the order of README's table."""
    head, *rows = tables_of(STEP)[0]
    (cells,) = (dict(zip(head, row, strict=True)) for row in rows if row[0] == LONGEST)
    return [Step(name, *cells[variant].split(" · ")) for variant, name in VARIANTS.items()]


class Length(NamedTuple):
    """The peak memory beyond the weights of a training step of one sequence, in GiB."""

    tokens: int
    plain: float | None  # None if the step ran out of memory
    fused: float | None


def lengths(report: Path = LENGTHS) -> list[Length]:
    """The peak memory for each length of a single sequence, shortest first."""
    head, *rows = tables_of(report)[0]
    found = []
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        batch, length = cells["batch × length"].replace(",", "").split(" × ")
        both = cells["Transformers as it is"], cells["ll.fuse(model)"]
        if batch == "1" and "no time left" not in both:
            found.append(Length(int(length), *map(gib_of, both)))
    return sorted(found)


def gib_of(cell: str) -> float | None:
    """The GiB of a cell "tokens per second · GiB". None if the step ran out of memory."""
    if cell == "out of memory":
        return None
    return float(cell.split(" · ")[1])


def draw_lengths(path: Path, report: Path = LENGTHS) -> None:
    """Draws the peak memory of the training step against the length of the sequence."""
    from matplotlib.figure import Figure

    steps = lengths(report)
    most = max(y for s in steps for y in (s.plain, s.fused) if y is not None)
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, field, color in (
        ("Transformers without changes", "plain", GREY),
        ("with ll.fuse(model)", "fused", RED),
    ):
        points = [(s.tokens, getattr(s, field)) for s in steps]
        there = [(x, y) for x, y in points if y is not None]
        axes.plot(*zip(*there, strict=True), "o-", color=color, linewidth=2, label=name)
        for x, y in points:
            if 4 * x < steps[-1].tokens:  # labels of short sequences would overlap
                continue
            text = "out of memory" if y is None else f"{y:,.1f}"
            at = (x, 1.1 * most if y is None else y)
            axes.annotate(text, at, (0, 7), textcoords="offset points", ha="center", color=color)
    axes.set(
        xlabel="tokens in the sequence", ylabel="GiB beyond the weights",
        xlim=(0, 1.08 * steps[-1].tokens), ylim=(0, 1.25 * most),
    )  # fmt: skip
    axes.set_xticks([s.tokens for s in steps if 4 * s.tokens >= steps[-1].tokens])
    axes.legend(frameon=False, loc="upper left")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "Peak memory of a training step: 1B-class Llama, vocabulary 128,256, one H200", fontsize=10
    )
    figure.savefig(path, dpi=150)


def draw_training_step(path: Path) -> None:
    """Draws the peak memory and the speed of the training step, as horizontal bars."""
    from matplotlib.figure import Figure

    steps = training_step()
    names = ["Transformers", "logitless: ll.fuse(model)", "Liger's loss", "Liger's whole patch"]
    colors = [GREY, RED, BLUE, BLUE]
    figure = Figure(figsize=(9, 2.5), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    for axes, texts, label in (
        (memory, [s.gib for s in steps], "peak memory beyond the weights, GiB"),
        (speed, [s.tokens for s in steps], "tokens per second"),
    ):
        values = [float(text.replace(",", "")) for text in texts]
        bars = axes.barh(names, values, color=colors)
        axes.bar_label(bars, texts, padding=3)
        axes.set(xlabel=label, xlim=(0, 1.2 * max(values)))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.spines[["top", "right"]].set_visible(False)
    memory.invert_yaxis()
    figure.suptitle(
        "One training step of a 1B-class Llama, vocabulary 128,256, 65,536 tokens, on one H200",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def draw_demo(path: Path) -> None:
    """Draws the picture of `make demo` again, from its stored numbers."""
    (_, loss, seconds, memory), (head, *curves), _ = tables_of(DEMO)
    students = []
    for i, name in enumerate(head[1:], 1):
        curve = [(int(row[0]), float(row[i])) for row in curves]
        mib = int(memory[i + 1].removesuffix(" MiB").replace(",", ""))
        time = float(seconds[i + 1].removesuffix(" s"))
        students.append(story.Student(name, None, curve, time, mib << 20))  # type: ignore
    plan, steps = story.PLANS["cpu"], int(curves[-1][0])
    tokens = plan.student.batch * plan.student.context
    report.save_plot(
        story.Outcome("cpu", steps, tokens, float(loss[1]), students, {}, [], plan), path
    )


def draw() -> None:
    draw_lengths(ROOT / "docs/memory-by-length.png")
    draw_training_step(ROOT / "docs/training-step.png")
    draw_demo(ROOT / "docs/demo.png")
