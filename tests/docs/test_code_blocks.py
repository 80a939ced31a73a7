"""Every code block of every page: Python runs when it is pasted, and commands exist."""

import argparse
import re
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from logitless.cli import COMMANDS
from tests.support.pages import PAGES, blocks_of, python_of, run
from tests.support.paths import ROOT

# The number of "py" blocks per page. These blocks are not run, because they need a server, a
# bucket, a dataset, torchdata, vLLM, Liger or TRL.
EXCERPTS = {
    "docs/store.md": 5, "docs/migrating.md": 1, "docs/trainers.md": 1, "docs/recipes/vllm.md": 1,
    "docs/recipes/configured.md": 1,
}  # fmt: skip
# Pages that other tests run: tests/trainers/test_recipes.py and tests/gpu/test_recipes.py.
ELSEWHERE = ("docs/recipes/trl.md", "docs/recipes/liger.md")
SHOW_A_BACKWARD = ("README.md", "docs/guide.md", "docs/heads.md")  # in each block
WITH_PYTHON = [page for page in PAGES if python_of(page)]
COMMAND_LINES = [
    line
    for page in PAGES
    for language, text in blocks_of(page)
    if language in ("bash", "")
    for line in text.splitlines()
    if re.match(r"logitless|make|python|torchrun", line)
]


def test_languages():
    """A block of another language would be run by no test. Trainers' files are sh and yaml."""
    for page in PAGES:
        languages = [language for language, _ in blocks_of(page)]
        others = {"sh", "yaml"} if page == "docs/recipes/configured.md" else set()
        assert {*languages} <= {"python", "bash", "py", ""} | others, page
        assert languages.count("py") <= EXCERPTS.get(page, 0), page


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in ELSEWHERE])
def test_python_runs(page, tmp_path, monkeypatch, request):
    if page == "docs/fuse.md" and request.config.option.few:
        # Compiling Transformers' model takes as long as all other pages together.
        monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    for package in ("transformers", "peft"):
        if package in "".join(python_of(page)):
            pytest.importorskip(package, reason=f"needs {package}: requirements/tests.txt")
    monkeypatch.chdir(tmp_path)
    count = 0
    for block, names in run(page):
        count += 1
        numbers = [t for t in names.values() if isinstance(t, torch.Tensor) and not t.dim()]
        assert all(t.isfinite() for t in numbers), block
        if page in SHOW_A_BACKWARD:
            heads = [m for m in names.values() if isinstance(m, torch.nn.Module)]
            leaves = [t for t in names.values() if isinstance(t, torch.Tensor) and t.is_leaf]
            leaves += [p for head in heads for p in head.parameters()]
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            assert gradients, block
            assert all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients), block
            for leaf in leaves:
                leaf.grad = None
    assert count == len(python_of(page))


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser()
    subparsers = whole.add_subparsers()
    for name in COMMANDS:
        import_module(f"logitless.cli.{name}").add_parser(subparsers)
    return whole


def test_commands_exist():
    """The options of `logitless`, the targets of make, and the files of examples and benchmarks."""
    command, makefile = parser(), (ROOT / "Makefile").read_text()
    for line in COMMAND_LINES:
        words = re.split(r"\s{2,}|#", line)[0].split()  # without the explanation behind a command
        if "logitless" in words[:1] or words[3:5] == ["-m", "logitless"]:
            command.parse_args(words[words.index("logitless") + 1 :])
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        for word in words:
            if re.fullmatch(r"(examples|benchmarks)(\.\w+)+", word):
                assert find_spec(word) is not None, line
            if re.fullmatch(r"(examples|benchmarks|tests|docs)/[\w/.-]+\.py", word):
                assert (ROOT / word).exists(), line


def test_extras_of_the_page_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = re.findall(r"^(\w+) = \[", text.split("[project.scripts]")[0], re.MULTILINE)
    table = (ROOT / "docs/install.md").read_text().split("| extra |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == extras
