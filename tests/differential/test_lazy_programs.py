"""Programs over lazy logits: a pinned number of them."""

from collections import Counter

import pytest

from logitless.lazy import recipe

from . import lazy_programs
from .lazy_programs import drawn, search

pytestmark = pytest.mark.filterwarnings("ignore")


def test_programs_over_lazy_logits():
    """As plain logits, or refused."""
    tally = Counter()
    found = search(0, 100, tally)
    assert found is None, f"{found.program}\n{found.difference}"
    assert tally["programs that write"] > 15


@pytest.mark.parametrize("small", [0, 100])
def test_programs_over_logits_for_inference(small, monkeypatch, request):
    """Without gradients, most writes succeed, and change what they change in plain logits."""
    monkeypatch.setattr(recipe, "SMALL", small)
    monkeypatch.setattr(lazy_programs, "start", lazy_programs.start_inference)
    tally = Counter()
    found = search(500, 60 if request.config.option.few else 150, tally)
    assert found is None, f"{found.program}\n{found.difference}"
    writing = [p for p in map(drawn, range(500, 560)) if any(step.writes for step in p.steps)]
    refused = [lazy_programs.outcome(p, True).refused for p in writing]
    assert refused.count(None) > 0.8 * len(refused) > 10
