"""Tests that every bug of planted_bugs.py can be planted. `make planted` plants the bugs."""

import pytest

from tests.support.paths import ROOT
from tests.support.planted import occurrences
from tests.support.planted_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_its_text_occurs_once(bug):
    assert occurrences(bug, ROOT) == 1
    assert bug.right != bug.wrong
    assert all((ROOT / test).exists() for test in bug.tests)


def test_names_differ():
    assert len({bug.name for bug in BUGS}) == len(BUGS)
