"""tests/regressions.md has every number, and names tests that exist."""

import ast
import re

import pytest

from tests.support.paths import ROOT, TESTS
from tests.support.replay import FILES

ROWS = {}
for part in re.split(r"^## ", (TESTS / "regressions.md").read_text(), flags=re.MULTILINE)[1:]:
    source = part.split()[0]
    for number, what, tests in re.findall(r"^\| (\w+) \| (.+) \| (.+) \|$", part, re.MULTILINE):
        if number != "number":
            ROWS[f"{source} {number}"] = (what, re.findall(r"tests/\S+?::[\w:]+", tests))
PENDING = {"NEWCOMER B1"}  # the project has no public address yet


def test_every_number_has_a_row_and_is_replayed():
    numbers = [f"HUNT {n}" for n in range(1, 25)]
    for letter, count in (("W", 2), ("C", 8), ("M", 5), ("X", 4)):
        numbers += [f"CLIENTS {letter}{n}" for n in range(1, count + 1)]
    numbers += ["CLIENTS TABLE", *(f"NEWCOMER B{n}" for n in range(1, 7))]
    assert list(ROWS) == numbers
    sources = "".join((TESTS / "support" / file).read_text() for file in FILES)
    replayed = re.findall(r"^def ((?:hunt|clients|newcomer)_\w+)", sources, re.MULTILINE)
    assert [name.replace("_", " ").upper() for name in replayed] == numbers


@pytest.mark.parametrize("number", ROWS)
def test_its_tests_exist(number):
    what, tests = ROWS[number]
    assert what.endswith(".")
    assert tests
    for test in tests:
        file, *names = test.split("::")
        body = ast.parse((ROOT / file).read_text()).body
        for name in names:
            (found,) = [node for node in body if getattr(node, "name", None) == name]
            assert isinstance(found, (ast.ClassDef, ast.FunctionDef))
            body = found.body


def test_the_outputs_of_both_commits():
    """The stored outputs have every number: wrong at the first commit, and right now."""
    old, new = (ROOT / "benchmarks/results/replay.txt").read_text().split("\n\n")[-2:]
    for text, word in ((old, "wrong"), (new, "right")):
        found = re.findall(r"^((?:HUNT|CLIENTS|NEWCOMER) \w+): (\w+)", text, re.MULTILINE)
        assert [number for number, _ in found] == list(ROWS)
        assert {number for number, said in found if said != word} <= PENDING
    assert old.startswith("logitless fc4811b")
