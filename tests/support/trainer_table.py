"""Reads and writes the table of docs/trainers.md. `make test-trainers` writes the table."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from tests.support.paths import ROOT

PAGE = ROOT / "docs/trainers.md"
BLOCK = re.compile(r"(<!-- trainers -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TITLE = "| library | case | call | equal | lazy |\n|---|---|---|---|---|\n"
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
    from importlib.metadata import version

    order = cases()
    ordered = sorted(rows, key=lambda row: order.index((row.library, row.case)))
    lines = "".join(f"| {' | '.join(row)} |\n" for row in ordered)
    versions = ", ".join(f"{name} {version(name).split('+')[0]}" for name in PACKAGES)
    text = f"{TITLE}{lines}\n{versions}.\n"
    PAGE.write_text(BLOCK.sub(lambda m: f"{m[1]}{text}{m[3]}", PAGE.read_text()))


def read() -> tuple[list[Row], str]:
    """Returns the rows of the committed table, and the line of versions."""
    found = BLOCK.search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no table"
    text = found[2]
    assert text.startswith(TITLE), text[:100]
    *lines, empty, versions = text.removeprefix(TITLE).splitlines()
    assert empty == ""
    return [Row(*line.strip("| ").split(" | ")) for line in lines], versions
