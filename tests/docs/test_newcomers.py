"""What new users looked for, and did not find (NEWCOMER in tests/regressions.md)."""

import re

import pytest

from tests.support.paths import ROOT


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, title: str) -> str:
    """The text of a section of a page, up to the next section."""
    found = re.search(rf"^##+ {title}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[0]


def test_how_to_install():
    """NEWCOMER B1."""
    text = section(page("README.md"), "Install")
    assert "pip install" in text
    assert "clone" in text or "pip install logitless" in text


def test_where_the_project_is():
    """NEWCOMER B1: pyproject.toml names authors and an address, which README has too."""
    project = page("pyproject.toml")
    if "[project.urls]" not in project:
        pytest.xfail("the project has no public address yet")
    assert re.search(r"^authors = \[", project, re.MULTILINE)
    urls = section_of_toml(project, "project.urls")
    addresses = re.findall(r'"(https?://[^"]+)"', urls)
    assert addresses
    assert any(address.removesuffix(".git") in page("README.md") for address in addresses)


def section_of_toml(text: str, name: str) -> str:
    found = re.search(rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no [{name}]"
    return found[1]


@pytest.mark.parametrize("name", ["docs/fuse.md", "docs/migrating.md"])
def test_what_fuse_does_in_trainers_of_trl(name):
    """NEWCOMER B2."""
    text = page(name)
    for trainer in ("SFT", "DPO", "GRPO"):
        lines = [line for line in re.split(r"\n\n|\n\|", text) if trainer in line]
        assert any("TRL" in line and "head" in line for line in lines), trainer


def test_the_limit_of_vllm():
    """NEWCOMER B3: where the page tells how to ask vLLM, it names the option."""
    text = page("docs/store.md")
    assert "prompt_logprobs" in text
    assert "max_logprobs" in text
    assert "--max-logprobs" in text


def test_which_machines():
    """NEWCOMER B6: README and a table say of each kind of machine whether it was tried."""
    text = page("docs/compatibility.md")
    for machine in ("H200", "A100", "MI300", "CPU", "macOS", "Windows"):
        assert machine in page("README.md"), f"README does not name {machine}"
        rows = [line for line in text.splitlines() if line.startswith("|") and machine in line]
        assert rows, f"no row of a table on {machine}"
