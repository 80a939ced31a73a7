"""What the demo shows: a table, a picture, and both in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from logitless.cli.demo.story import ALONE, CE, KD, LIVE, STORED, WHOLE, Told

from .. import machine as _machine

COLORS = {ALONE: "0.55", WHOLE: "C1", LIVE: "C2", STORED: "C0"}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>logitless demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
        color: #222; background: #fff }}
 table {{ border-collapse: collapse; margin: 1rem 0; width: 100% }}
 th, td {{ text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #ddd }}
 td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums }}
 img {{ max-width: 100% }} pre {{ white-space: pre-wrap; margin: 0; font-size: 13px }}
 .bar {{ display: inline-block; height: .7em; background: #1f77b4 }}
 .hit {{ font-weight: bold; color: #1a7f37 }} small {{ color: #666 }}
</style></head><body>
<h1>A student that learns from a store</h1>
<p>{summary}</p>
{results}
<img alt="Held-out loss of the students over their steps, and the memory of a step's loss"
     src="data:image/png;base64,{picture}">
<details><summary>The curves in numbers</summary>{curves}</details>
<h2>The store</h2>
{store}
<h2>What it says</h2>
<p>Some places of the text, the word that follows, and the teacher's five most probable.</p>
{words}
<p><small>{machine}</small></p>
</body></html>
"""


def results(told: Told) -> list[tuple[str, ...]]:
    """Rows of the table, its head first."""
    head = ("", "teacher", *(student.name for student in told.students))
    loss = [f"{told.teacher_loss:.3f}", *(f"{s.curve[-1][1]:.3f}" for s in told.students)]
    seconds = ["", *(f"{s.seconds:.1f} s" for s in told.students)]
    memory = ["", *(f"{s.memory / 2**20:,.0f} MiB" for s in told.students)]
    rows, vocab = told.plan.memory_rows, told.plan.memory_vocab
    return [
        head,
        ("held-out loss, nats a token", *loss),
        ("training time", *seconds),
        (f"peak memory of a step's loss,\n{rows:,} tokens × {vocab:,}", *memory),
    ]


def curves(told: Told) -> list[tuple[str, ...]]:
    """Held-out losses by step, the head first."""
    steps = [step for step, _ in told.students[0].curve]
    losses = [[f"{loss:.4f}" for _, loss in student.curve] for student in told.students]
    head = ("step", *(student.name for student in told.students))
    return [head, *zip(map(str, steps), *losses, strict=True)]


def store_rows(told: Told) -> list[tuple[str, str]]:
    about = told.store
    means = ", ".join(f"{at:+d}: {mean:.2f}" for at, mean in about["label log-probability"].items())
    whole = about["bytes of whole rows, fp16"]
    verdict = "right" if about["right"] else "too little learnt to tell"
    return [
        ("documents, tokens", f"{about['documents']:,}, {about['tokens']:,}"),
        ("bytes a token", f"{about['bytes a token']:.0f}, where whole rows in fp16 are {whole:,}"),
        (f"mass of the {told.plan.k} slots", f"{about['mass of the slots']:.3f}"),
        ("captured in", f"{about['seconds']:.1f} s"),
        ("label log-probability, by offset", f"{means}: {verdict}"),
    ]


def show_table(told: Told) -> None:
    from rich.console import Console
    from rich.table import Table

    head, *rows = results(told)
    table = Table(title=f"{told.steps} steps of {told.tokens:,} tokens on {told.device}")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    table = Table("the store", "", show_header=True)
    for row in store_rows(told):
        table.add_row(*row)
    Console().print(table)


def save_picture(told: Told, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, memory = figure.subplots(1, 2, width_ratios=(2, 1))
    for student in told.students:
        steps, losses = zip(*student.curve, strict=True)
        style = ":" if student.name == LIVE else "-"
        curves.plot(
            steps,
            losses,
            style,
            color=COLORS[student.name],
            label=student.name,
            marker=".",
            linewidth=4 if student.name == LIVE else 1.5,
        )
    curves.axhline(told.teacher_loss, color="0.8", label="the teacher itself")
    curves.set(xlabel="step", ylabel="held-out loss, nats a token", title="A student learns from")
    curves.legend()
    sizes = [student.memory / 2**20 for student in told.students]
    names = [student.name.replace("teacher's ", "teacher's\n") for student in told.students]
    bars = memory.barh(names, sizes, color=[COLORS[student.name] for student in told.students])
    memory.bar_label(bars, [f" {size:,.0f}" for size in sizes])
    memory.invert_yaxis()
    memory.margins(x=0.2)
    rows, vocab = told.plan.memory_rows, told.plan.memory_vocab
    memory.set(xlabel="MiB", title=f"Peak memory of a step's loss,\n{rows:,} tokens × {vocab:,}")
    figure.savefig(path, format="png", dpi=150)


def save_html(told: Told, picture: Path, path: Path) -> None:
    losses = {student.name: student.curve[-1][1] for student in told.students}
    summary = (
        f"Four students of one seed saw the same {told.store['documents']:,} documents in"
        f" {told.steps} steps. On text that nobody has seen, the one with the text alone comes to"
        f" {losses[ALONE]:.3f} nats a token, the one with the teacher's whole logits to"
        f" {losses[WHOLE]:.3f}, the one with its {told.plan.k} largest to {losses[LIVE]:.3f}, and"
        f" the one with the store, which holds the same {told.plan.k}, to {losses[STORED]:.3f}, by"
        f" {CE:g} · cross-entropy + {KD:g} · KL divergence through a head whose logits were never"
        f" made. The teacher itself has {told.teacher_loss:.3f}."
    )
    machine = f"{_machine.device(told.device)['name']}, torch {_machine.versions()['torch']}"
    page = PAGE.format(
        summary=escape(summary),
        results=_html_table(results(told), numbers=True),
        curves=_html_table(curves(told), numbers=True),
        store=_html_table([("", ""), *store_rows(told)]),
        words=_words(told),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        machine=escape(machine),
    )
    path.write_text(page, encoding="utf-8")


def _html_table(rows: list, numbers: bool = False) -> str:
    head, *rest = rows
    kind = ' class="number"' if numbers else ""
    lines = []
    for tag, row in [("th", head), *(("td", row) for row in rest)]:
        if any(row):
            cells = [f"<{tag}>{escape(row[0])}</{tag}>"]
            cells += [f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell in row[1:]]
            lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _words(told: Told) -> str:
    lines = []
    for text, following, best in told.words:
        says = "".join(
            f'<div><span class="bar" style="width:{100 * p:.0f}px"></span> '
            f'<span class="{"hit" if word == following else ""}">{escape(repr(word))}</span>'
            f" {p:.2f}</div>"
            for word, p in best
        )
        lines.append(
            f"<tr><td><pre>{escape(text[-160:])}</pre></td>"
            f"<td><pre>{escape(repr(following))}</pre></td><td>{says}</td></tr>"
        )
    return f"<table><tr><th>text</th><th>next</th><th>teacher</th></tr>{''.join(lines)}</table>"
