"""Programs over lazy logits: a pinned number of them, and bugs put in on purpose."""

from collections import Counter

import pytest

from logitless.lazy import recipe

from . import lazy_programs
from .lazy_bugs import BUGS, planted
from .lazy_programs import difference, drawn, search

pytestmark = pytest.mark.filterwarnings("ignore")


def test_programs_over_lazy_logits():
    """HUNT 1, 2, 3, 4, 14; CLIENTS C7: as plain logits, or refused."""
    tally = Counter()
    found = search(0, 100, 60.0, tally)
    assert found is None, f"{found.program}\n{found.difference}"
    assert tally["programs that write"] > 15


@pytest.mark.parametrize("small", [0, 100])
def test_programs_over_logits_for_inference(small, monkeypatch):
    """Without gradients, most writes succeed, and change what they change in plain logits."""
    monkeypatch.setattr(recipe, "SMALL", small)
    monkeypatch.setattr(lazy_programs, "start", lazy_programs.start_inference)
    tally = Counter()
    found = search(500, 150, 60.0, tally)
    assert found is None, f"{found.program}\n{found.difference}"
    writing = [p for p in map(drawn, range(500, 560)) if any(step.writes for step in p.steps)]
    refused = [lazy_programs.outcome(p, True).refused for p in writing]
    assert refused.count(None) > 0.8 * len(refused) > 10


# A program that finds each bug, from `python -m tests.differential.lazy_programs --mutations`.
FINDS = {
    "a column can be written to": 305,
    "out= and lists are not seen as writes": 62,
    "-logits loses the sign of a gradient": 163,
    "a second derivative in silence": 5,
    "the gradient that is read is one of several": 0,
}


def test_every_bug_has_its_program():
    assert FINDS.keys() == BUGS.keys()


@pytest.mark.parametrize("bug", FINDS)
def test_bugs_put_in_on_purpose_are_found(bug):
    program = drawn(FINDS[bug])
    assert difference(program) is None
    with planted(bug):
        assert difference(program) is not None
