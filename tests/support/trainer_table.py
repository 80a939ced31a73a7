"""Reads and writes the table of docs/trainers.md. `make test-trainers` writes the table."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.support.paths import ROOT

PAGE = ROOT / "docs/trainers.md"
BLOCK = re.compile(r"(<!-- trainers -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TITLE = "| trainer | with | call | equal | lazy |\n|---|---|---|---|---|\n"
PLAIN = "its defaults"
PACKAGES = ("trl", "peft", "accelerate", "lightning", "transformers", "torch")


class Row(NamedTuple):
    """The outcome of one case: a trainer with options, run with and without this library."""

    library: str
    case: str
    call: str  # the functions of this library that the case calls
    equal: str  # yes or no
    lazy: str  # yes or no


def cases() -> list[tuple[str, str]]:
    """Returns (library, name) of every case, in the order of the table."""
    from tests.support import loop_cases, trl_cases

    of_trl = (*trl_cases.ADAPTED, *trl_cases.FUSED, *trl_cases.BY_KERNEL)
    others = [(case.library, case.name) for case in loop_cases.CASES]
    return [*(("TRL", case.name) for case in of_trl), *others]


def is_complete(rows: Iterable[Row]) -> bool:
    return {(row.library, row.case) for row in rows} == {*cases()}


def write(rows: Iterable[Row]) -> None:
    """A line holds the cases of one trainer (of TRL) or library that have the same outcome."""
    from importlib.metadata import version

    order = cases()
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: order.index((row.library, row.case))):
        trainer, _, options = (
            row.case.partition(", ") if row.library == "TRL" else ("", "", row.case)
        )
        named = f"{row.library} {trainer}".strip()
        lines.setdefault((named, *row[2:]), []).append(options or PLAIN)
    text = "".join(
        f"| {trainer} | {'; '.join(options)} | {' | '.join(outcome)} |\n"
        for (trainer, *outcome), options in lines.items()
    )
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in PACKAGES)
    text = f"{TITLE}{text}\n{versions}.\n"
    PAGE.write_text(BLOCK.sub(lambda m: f"{m[1]}{text}{m[3]}", PAGE.read_text()))


def read() -> tuple[list[Row], str]:
    """Returns the rows of the committed table, and the line of versions."""
    found = BLOCK.search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no table"
    text = found[2]
    assert text.startswith(TITLE), text[:100]
    *lines, empty, versions = text.removeprefix(TITLE).splitlines()
    assert empty == ""
    rows = []
    for line in lines:
        named, options, *outcome = line.strip("| ").split(" | ")
        library, _, trainer = named.partition(" ")
        for option in options.split("; "):
            case = ", ".join(filter(None, (trainer, "" if option == PLAIN else option)))
            rows.append(Row(library, case, *outcome))
    return rows, versions
