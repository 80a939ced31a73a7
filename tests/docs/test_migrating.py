"""docs/migrating.md names functions and options that exist."""

import inspect
import re

import logitless as ll
from tests.support.paths import ROOT

PAGE = ROOT / "docs/migrating.md"


def test_what_it_names_is_there():
    text = PAGE.read_text()
    calls = re.findall(r"`ll\.(\w+)\(([^`]*)\)", text)
    assert len(calls) > 10
    for name, arguments in calls:
        legal = inspect.signature(getattr(ll, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in legal.values()):
            legal = {**legal, **inspect.signature(ll.cross_entropy).parameters}
        for option in re.findall(r"(\w+)=(?!=)", arguments):
            if "LinearLogits" not in arguments:
                assert option in legal, (name, option)


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
