"""Writes the table of docs/trainers.md from the rows that `make test-trainers` recorded."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.support.paths import ROOT

PAGE = ROOT / "docs/trainers.md"
BLOCK = re.compile(r"(<!-- trainers -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TITLE = (
    "| trainer | what you write | tried with | difference | rows of logits, ours / theirs |\n"
    "|---|---|---|---|---|\n"
)


class Row(NamedTuple):
    """The outcome of one case: a trainer with options, run with and without this library."""

    trainer: str  # with its version
    writes: str
    case: str
    difference: float  # of logged numbers, gradients or trained weights
    tolerance: float
    ours: int  # rows of the largest tensor of logits
    theirs: int


def text(rows: Iterable[Row], missing: Iterable[str]) -> str:
    """A line holds the cases of a trainer that have the same call and the same tolerance."""
    lines: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.trainer, row.writes, row.tolerance), []).append(row)
    found = TITLE
    for (trainer, writes, _), of_line in lines.items():
        cases = "; ".join(dict.fromkeys(row.case for row in of_line))
        far = max(row.difference for row in of_line)
        ours, theirs = (max(getattr(row, n) for row in of_line) for n in ("ours", "theirs"))
        found += f"| {trainer} | {writes} | {cases} | {far:.0e} | {ours} / {theirs} |\n"
    return found + "".join(f"\nCould not be installed: {name}.\n" for name in missing)


def write(rows: Iterable[Row], missing: Iterable[str]) -> None:
    table = text(rows, missing)
    PAGE.write_text(BLOCK.sub(lambda m: m[1] + table + m[3], PAGE.read_text()))


def read() -> list[list[str]]:
    """The cells of each line of the committed table."""
    found = BLOCK.search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no table"
    table = found[2].partition("\n\n")[0].strip()
    assert f"{table}\n".startswith(TITLE), table[:200]
    return [line.strip("| ").split(" | ") for line in table.removeprefix(TITLE).splitlines()]
