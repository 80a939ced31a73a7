"""The pages on promises and on compatibility: each test exists, and each number is in its file."""

import re

from tests.support.paths import ROOT

PROMISES = (ROOT / "docs/promises.md").read_text()
COMPATIBILITY = (ROOT / "docs/compatibility.md").read_text()


def test_each_promise_names_a_test_that_exists():
    rows = re.findall(r"^\| ([A-Z`].*?\.) \| (.*) \|$", PROMISES, re.MULTILINE)
    assert len(rows) > 30
    assert len(rows) == len(re.findall(r"^\| (?!promise|---)", PROMISES, re.MULTILINE))
    for promise, tests in rows:
        named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", tests)
        assert named, promise
        for name, file in named:
            assert re.search(rf"def {name}\(", (ROOT / file).read_text()), f"{file} has no {name}"


def test_runs_are_those_of_the_committed_lists():
    lists = (ROOT / "benchmarks/results/versions.txt").read_text()
    lists += (ROOT / "benchmarks/results/h200/tests-gpu.txt").read_text()
    section = COMPATIBILITY.split("## Versions")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]
    assert len(rows) >= 4
    for row in rows:
        _, python, torch, triton, _, date, commit, passed, failed = row.strip("| ").split(" | ")
        (entry,) = re.findall(rf"[^\n]*{commit}.*?passed[^\n]*", lists, re.DOTALL)[:1]
        for fact in (f"ython {python}", f"torch {torch}", f"triton {triton}", date):
            assert fact in entry, f"{commit}: {fact}"
        assert f"{passed.replace(',', '')} passed" in entry
        assert ("none failed" if failed == "0" else f"{failed} failed") in entry


def test_versions_are_those_that_the_package_asks_for():
    project = (ROOT / "pyproject.toml").read_text()
    for name, text in (("torch", "torch"), ("triton", "triton")):
        least = re.search(rf'"{name}>=([\d.]+)', project)
        assert least is not None
        assert f"{text} {least[1]} or later" in COMPATIBILITY
    least = re.search(r'requires-python = ">=([\d.]+)"', project)
    assert least is not None
    assert f"Python {least[1]} or later" in COMPATIBILITY
