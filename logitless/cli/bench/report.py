"""Tables of a benchmark result, for the terminal and for a file.

A table is plain data, so that rich and Markdown show the same cells. All of them are made from the
stored document alone: an old result can be shown again, without its machine.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from .cases import BACKWARD, FEW, FORWARD, HOST, INPLACE
from .contenders import OURS
from .runner import OVERWRITES, Result

WIDTH = 160  # of a terminal that is none
NUMBERS = ("time", "TB/s", "× floor", "extra memory", "allowed", "ours", "ours faster")
SHORT = {FORWARD: "fwd", BACKWARD: "fwd+bwd", INPLACE: "in place", FEW: "few rows", HOST: "host"}


class Table(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(document: dict) -> list[Table]:
    """One for each kind of work, and last the one to look at first: targets."""
    results = [Result(**row) for row in document["rows"]]
    groups = list(dict.fromkeys(result.group for result in results))
    made = [group_table(group, [r for r in results if r.group == group]) for group in groups]
    return [*made, targets_table(results)]


def group_table(group: str, results: list[Result]) -> Table:
    columns = (
        *("op", "shape", "dtype", "contender", "time", "TB/s", "× floor", "extra memory"),
        *("error, of gradient", "target", "note"),
    )
    return Table(group, columns, [group_row(result) for result in results])


def group_row(r: Result) -> tuple[str, ...]:
    share = "" if r.mode == HOST or r.extra_x is None else f" ({r.extra_x:.2f} B)"
    return (
        work_name(r),
        f"{r.rows}×{r.vocab}",
        r.dtype,
        r.contender,
        time_text(r.ms) if r.status == "ok" else r.status,
        number(r.tbps, ".3g"),
        number(r.floor_x, ".2f"),
        number(r.extra_mib, ".1f", " MiB") + share,
        f"{number(r.value_error, '.0e')}, {number(r.grad_error, '.0e')}",
        f"{r.target}: {verdict(r.reached)}" if r.target else "",
        r.note,
    )


def targets_table(results: list[Result]) -> Table:
    columns = (
        *("op", "work", "shape", "dtype", "target", "allowed", "ours", "reached"),
        *("extra memory", "best other", "ours faster"),
    )
    ours = [r for r in results if r.contender == OURS]
    return Table("targets", columns, [targets_row(r, best_rival(r, results)) for r in ours])


def targets_row(r: Result, rival: Result | None) -> tuple[str, ...]:
    faster = rival.ms / r.ms if rival and rival.ms and r.ms else None
    return (
        work_name(r),
        SHORT[r.mode],
        f"{r.rows}×{r.vocab}",
        r.dtype,
        r.target or "–",
        time_text(r.limit_ms),
        time_text(r.ms) if r.status == "ok" else r.status,
        verdict(r.reached),
        memory_text(r),
        f"{rival.contender} {time_text(rival.ms)}" if rival else "–",
        number(faster, ".2f", " ×"),
    )


def memory_text(r: Result) -> str:
    if r.memory_limit_mib is None:
        return number(r.extra_mib, ".1f", " MiB")
    found = number(r.extra_mib, ".1f")
    return f"{found} of {r.memory_limit_mib:.0f} MiB: {verdict(r.memory_reached)}"


def best_rival(ours: Result, results: list[Result]) -> Result | None:
    """The fastest of the others at the same work. One that destroys the logits isn't doing it."""

    def same_work(r: Result) -> bool:
        honest = r.mode != BACKWARD or OVERWRITES not in r.note
        return key(r) == key(ours) and r.contender != OURS and r.ms is not None and honest

    return min(filter(same_work, results), key=lambda r: r.ms or 0.0, default=None)


def key(r: Result) -> tuple:
    return r.mode, r.op, r.variant, r.rows, r.vocab, r.dtype


def work_name(r: Result) -> str:
    if r.variant == "plain":
        return r.op
    return r.variant if r.op == "cross_entropy" else f"{r.op}, {r.variant}"


def time_text(ms: float | None) -> str:
    if ms is None:
        return "–"
    return f"{ms * 1e3:.1f} µs" if ms < 0.2 else f"{ms:.3f} ms"


def number(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{spec}}{unit}"


def verdict(reached: bool | None) -> str:
    return "–" if reached is None else "yes" if reached else "NO"


def preamble(document: dict) -> list[str]:
    """What was run, where and when, one fact a line."""
    device, versions, standing = document["device"], document["versions"], document["contenders"]
    present = {name: text for name, text in standing.items() if not text.startswith("absent")}
    facts = [
        f"device: {', '.join(f'{v}' for v in device.values() if v)}",
        f"versions: {', '.join(f'{k} {v}' for k, v in versions.items() if v)}",
        f"contenders: {', '.join(f'{k} {v}' for k, v in present.items())}",
        *(f"{name} {text}" for name, text in standing.items() if name not in present),
        f"commit: {document['commit'] or 'unknown'}, date: {document['date']}",
        f"ceiling C: {document['copy_tbps']:.3f} TB/s, a copy's bytes read plus bytes written",
        "B: bytes of the logits; floor: bytes that must move, over C; times are medians",
        f"inputs: {document['inputs']}",
    ]
    reached = [row["reached"] for row in document["rows"] if row["reached"] is not None]
    return [*facts, f"targets reached: {sum(reached)} of {len(reached)}"]


def markdown(document: dict) -> str:
    *groups, targets = tables(document)
    parts = ["# Benchmark", "\n".join(f"- {fact}" for fact in preamble(document))]
    for table in (targets, *groups):
        lines = [table.columns, ("---",) * len(table.columns), *table.rows]
        cells = ([cell.replace("|", "/") for cell in line] for line in lines)
        body = "\n".join(f"| {' | '.join(line)} |" for line in cells)
        parts.append(f"## {table.title.capitalize()}\n\n{body}")
    return "\n\n".join(parts) + "\n"


def show(document: dict) -> None:
    """Everything, to the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for table in tables(document):
        shown = RichTable(
            title=table.title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0)
        )
        for column in table.columns:
            justify = "right" if column in NUMBERS else "left"
            shown.add_column(column, justify=justify, no_wrap=column != "note")
        for row in table.rows:
            shown.add_row(*row, style=row_style(row))
        console.print(shown)
    for fact in preamble(document):
        console.print(fact, markup=False)


def row_style(row: tuple[str, ...]) -> str | None:
    if "wrong" in row or "failed" in row:
        return "red"
    return "bold" if OURS in row else None
