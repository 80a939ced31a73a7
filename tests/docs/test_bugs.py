"""Every bug of docs/bugs.md has a test that names it."""

import re

from tests.support.paths import ROOT, TESTS


def test_every_bug_is_named_by_a_test():
    numbers = re.findall(r"^\| (\d+) \|", (ROOT / "docs/bugs.md").read_text(), re.MULTILINE)
    assert len(numbers) == 24
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert [n for n in numbers if f"def test_bug_{int(n):02d}_" not in sources] == []
