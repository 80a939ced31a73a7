"""Creates the output of the demo: a table, a plot, and an HTML file with both."""

from __future__ import annotations

import base64
import platform
from html import escape
from pathlib import Path

import torch

from .story import ALONE, CE, KD, LIVE, STORED, WHOLE, Outcome

COLORS = {ALONE: "0.55", WHOLE: "C1", LIVE: "C2", STORED: "C0"}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>logitless demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
 body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
        color: #222; background: #fff }}
 .wide {{ overflow-x: auto }}
 table {{ border-collapse: collapse; margin: 1rem 0; width: 100% }}
 th, td {{ text-align: left; padding: .35rem .8rem; border-bottom: 1px solid #ddd }}
 td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums }}
 img {{ max-width: 100% }} pre {{ white-space: pre-wrap; margin: 0; font-size: 13px }}
 .bar {{ display: inline-block; height: .7em; background: #1f77b4 }}
 .hit {{ font-weight: bold; color: #1a7f37 }} small {{ color: #666 }}
</style></head><body>
<h1>A student that learns from a store</h1>
<p>logitless is a PyTorch library. It computes the losses of language models without storing all
logits in memory, and keeps the predictions of a teacher on disk. This report shows a small teacher,
a store of its predictions, and four students.</p>
<p>{summary}</p>
{results}
<img alt="Held-out loss of the students over their steps, and the memory of a step's loss"
     src="data:image/png;base64,{plot}">
<details><summary>The curves in numbers</summary>{curves}</details>
<h2>The store</h2>
{store}
<h2>Predictions of the teacher</h2>
<p>Some beginnings of documents, the next word, and the teacher's five most probable words.</p>
{words}
<h2>Next</h2>
<p>To distil your own models, capture your teacher with
<code>logitless teacher capture --model NAME --data documents.jsonl --out targets</code>, and train
from the store as docs/store.md shows.</p>
<p><small>{machine}</small></p>
</body></html>
"""


def results(outcome: Outcome) -> list[tuple[str, ...]]:
    """Returns the rows of the table of results. The first row holds the headings."""
    head = ("", "teacher", *(student.name for student in outcome.students))
    loss = [f"{outcome.teacher_loss:.3f}", *(f"{s.curve[-1][1]:.3f}" for s in outcome.students)]
    seconds = ["", *(f"{s.seconds:.1f} s" for s in outcome.students)]
    memory = ["", *(f"{s.memory / 2**20:,.0f} MiB" for s in outcome.students)]
    rows, vocab = outcome.plan.memory_rows, outcome.plan.memory_vocab
    return [
        head,
        ("held-out loss, nats per token", *loss),
        ("training time", *seconds),
        (f"peak memory of a step's loss,\n{rows:,} tokens × {vocab:,}", *memory),
    ]


def curves(outcome: Outcome) -> list[tuple[str, ...]]:
    """Returns the rows of a table of held-out losses per step. The first row holds the headings."""
    steps = [step for step, _ in outcome.students[0].curve]
    losses = [[f"{loss:.4f}" for _, loss in student.curve] for student in outcome.students]
    head = ("step", *(student.name for student in outcome.students))
    return [head, *zip(map(str, steps), *losses, strict=True)]


def store_rows(outcome: Outcome) -> list[tuple[str, str]]:
    store = outcome.store
    means = ", ".join(f"{at:+d}: {mean:.2f}" for at, mean in store["label log-probability"].items())
    whole = store["bytes of whole rows, fp16"]
    verdict = "right" if store["right"] else "the teacher has learnt too little for this test"
    return [
        ("documents, tokens", f"{store['documents']:,}, {store['tokens']:,}"),
        ("bytes per token", f"{store['bytes per token']:.0f}; whole rows in fp16 take {whole:,}"),
        (f"mass of the {outcome.plan.k} slots", f"{store['mass of the slots']:.3f}"),
        ("captured in", f"{store['seconds']:.1f} s"),
        ("label log-probability, by offset", f"{means}: {verdict}"),
    ]


def show_table(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    head, *rows = results(outcome)
    table = Table(title=f"{outcome.steps} steps of {outcome.tokens:,} tokens on {outcome.device}")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    table = Table("the store", "", show_header=True)
    for row in store_rows(outcome):
        table.add_row(*row)
    Console().print(table)


def save_plot(outcome: Outcome, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, memory = figure.subplots(1, 2, width_ratios=(2, 1))
    k = f"top {outcome.plan.k:,}"
    names = [student.name.replace("top K", k) for student in outcome.students]
    names = [f"{name}, {k}" if name == STORED else name for name in names]
    for student, name in zip(outcome.students, names, strict=True):
        steps, losses = zip(*student.curve, strict=True)
        style = ":" if student.name == LIVE else "-"
        curves.plot(
            steps,
            losses,
            style,
            color=COLORS[student.name],
            label=name,
            marker=".",
            linewidth=4 if student.name == LIVE else 1.5,
        )
    curves.axhline(outcome.teacher_loss, color="0.8", label="the teacher itself")
    curves.set(
        xlabel="step",
        ylabel="held-out loss, nats per token",
        title="A student that learns from ...",
    )
    curves.legend()
    sizes = [student.memory / 2**20 for student in outcome.students]
    for i, student in enumerate(outcome.students):
        by = "PyTorch's loss" if student.name in (ALONE, WHOLE) else "logitless"
        names[i] = f"{names[i]}\n({by})"
    bars = memory.barh(names, sizes, color=[COLORS[student.name] for student in outcome.students])
    memory.bar_label(bars, [f" {size:,.0f}" for size in sizes])
    memory.xaxis.set_major_formatter("{x:,g}")
    memory.invert_yaxis()
    memory.margins(x=0.2)
    rows, vocab = outcome.plan.memory_rows, outcome.plan.memory_vocab
    memory.set(xlabel="MiB", title=f"Peak memory of a step's loss,\n{rows:,} tokens × {vocab:,}")
    figure.savefig(path, format="png", dpi=150)


def save_html(outcome: Outcome, plot: Path, path: Path) -> None:
    summary = (
        f"Four students with the same seed trained on the same {outcome.store['documents']:,}"
        f" documents for {outcome.steps} steps. The table shows their losses on held-out text."
        f' "The top K" are the teacher\'s {outcome.plan.k} most probable tokens per position. The'
        " store holds the same tokens. The students with a teacher minimise"
        f" {CE:g} · cross-entropy + {KD:g} · KL divergence. The logits of the students with the"
        " top K and with the store are not materialised in training."
    )
    name = torch.cuda.get_device_name() if outcome.device == "cuda" else f"{platform.machine()} CPU"
    footer = f"{name}, torch {torch.__version__}"
    page = PAGE.format(
        summary=escape(summary),
        results=_html_table(results(outcome), numbers=True),
        curves=_html_table(curves(outcome), numbers=True),
        store=_html_table([("", ""), *store_rows(outcome)]),
        words=_words(outcome),
        plot=base64.b64encode(plot.read_bytes()).decode(),
        machine=escape(footer),
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
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _words(outcome: Outcome) -> str:
    lines = []
    for text, next_word, best in outcome.words:
        predictions = "".join(
            f'<div><span class="bar" style="width:{100 * p:.0f}px"></span> '
            f'<span class="{"hit" if word == next_word else ""}">{escape(repr(word))}</span>'
            f" {p:.2f}</div>"
            for word, p in best
        )
        lines.append(
            f"<tr><td><pre>{escape(text[-160:])}</pre></td>"
            f"<td><pre>{escape(repr(next_word))}</pre></td><td>{predictions}</td></tr>"
        )
    head = "<tr><th>text</th><th>next</th><th>teacher</th></tr>"
    return f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'
