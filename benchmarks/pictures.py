"""Draws the pictures of README and docs whose numbers are in reports without a JSON file.

`python -m benchmarks.tables` calls `draw`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from logitless.cli.demo import report, story

ROOT = Path(__file__).resolve().parents[1]
STEP = ROOT / "benchmarks/results/h200/training-step-566b4e0.md"
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
    """Draws the picture of `logitless demo` again, from its stored numbers."""
    (_, loss, seconds, memory), (head, *curves), _ = tables_of(DEMO)
    students = []
    for i, name in enumerate(head[1:], 1):
        curve = [(int(row[0]), float(row[i])) for row in curves]
        mib = int(memory[i + 1].removesuffix(" MiB").replace(",", ""))
        time = float(seconds[i + 1].removesuffix(" s"))
        students.append(story.Student(name, None, curve, time, mib << 20))  # pyright: ignore
    plan, steps = story.PLANS["cpu"], int(curves[-1][0])
    tokens = plan.student.batch * plan.student.context
    report.save_plot(
        story.Outcome("cpu", steps, tokens, float(loss[1]), students, {}, [], plan), path
    )


def draw() -> None:
    draw_training_step(ROOT / "docs/training-step.png")
    draw_demo(ROOT / "docs/demo.png")
