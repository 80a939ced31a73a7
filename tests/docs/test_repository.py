"""The files that hosts and indexes of packages read: forms, workflows, citation and metadata."""

import re
import sys

import pytest

import logitless as ll
from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="tomllib is part of Python 3.11")
yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Transformers and pre-commit bring")

YAML = [
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / ".github").rglob("*.yml")),
    ".pre-commit-config.yaml",
    "CITATION.cff",
]
WORKFLOWS = [name for name in YAML if "/workflows/" in name]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)}


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text())


def jobs() -> dict[str, dict]:
    """Each job of each workflow, by its file and name."""
    return {
        f"{name} {job}": content
        for name in WORKFLOWS
        for job, content in read(name)["jobs"].items()
    }


def targets_of(job: dict) -> list[str]:
    """The targets of make that a job names, with the values of its matrix."""
    cases = job.get("strategy", {"matrix": {"include": []}})["matrix"]["include"]
    found = []
    for step in job["steps"]:
        for target in re.findall(r"make (\$\{\{.*?\}\}|[\w-]+)", step.get("run", "")):
            from_matrix = target == "${{ matrix.target }}"
            found += [case["target"] for case in cases] if from_matrix else [target]
    return found


def test_yaml_parses():
    assert all(map(read, YAML))


def test_workflows_call_targets_of_the_makefile():
    named = {job: targets_of(content) for job, content in jobs().items()}
    assert all(named.values()), named
    assert {target for targets in named.values() for target in targets} <= TARGETS
    assert named[".github/workflows/tests.yml tests"] == ["test-oldest", "test", "test-newest"]
    assert named[".github/workflows/release.yml release"] == ["release"]


def test_workflows_can_only_read_upload_nothing_and_have_the_oldest_python():
    assert all(read(name)["permissions"] == {"contents": "read"} for name in WORKFLOWS)
    text = "".join((ROOT / name).read_text() for name in WORKFLOWS)
    assert not re.search(r"twine upload|pypi-publish|secrets\.", text)
    assert all("timeout-minutes" in job for job in jobs().values())
    cases = read(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]["include"]
    (oldest,) = [case["python"] for case in cases if case["versions"] == "oldest"]
    assert PROJECT["requires-python"] == f">={oldest}"


def test_the_citation_is_of_this_package():
    citation = read("CITATION.cff")
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == ll.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert {*citation["keywords"]} <= {*PROJECT["keywords"]}


def test_the_version_is_the_newest_of_the_changelog_and_of_the_pages():
    found = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found[0] == ll.__version__
    assert found == sorted(found, key=lambda v: [*map(int, v.split("."))], reverse=True)
    wheels = re.findall(r"logitless-([\d.]+)-py3", (ROOT / "docs/install.md").read_text())
    assert wheels == [ll.__version__]


def test_the_makefile_lists_each_target():
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert {*phony[1].split()} == TARGETS


def test_the_page_of_versions_has_those_that_the_package_asks_for():
    page = (ROOT / "docs/install.md").read_text()
    asked = "\n".join([*PROJECT["dependencies"], f"Python{PROJECT['requires-python']}"])
    for name in ("torch", "triton", "Python"):
        least = re.search(rf"{name}>=([\d.]+)", asked)
        assert least is not None
        assert f"{name} {least[1]} or later" in page
