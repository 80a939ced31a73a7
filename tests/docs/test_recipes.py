"""The recipes: each is in the index and in the navigation."""

import re

import pytest

from tests.support.forked import printed_by
from tests.support.pages import PAGES, python_of, run
from tests.support.paths import ROOT

RECIPES = [page for page in PAGES if page.startswith("docs/recipes/") and "README" not in page]


def test_the_recipes_are_listed():
    index = (ROOT / "docs/recipes/README.md").read_text()
    listed = re.findall(r"^\| \[(.*?)\]\((.*?)\) \|", index, re.MULTILINE)
    assert sorted(f"docs/recipes/{file}" for _, file in listed) == RECIPES
    navigation = re.findall(r"- recipes/(\S+)", (ROOT / "mkdocs.yml").read_text())
    assert navigation == ["README.md", *(file for _, file in listed)]
    for title, file in listed:
        assert (ROOT / "docs/recipes" / file).read_text().startswith(f"# {title}\n")


def test_the_vocabulary_is_split_over_two_ranks(tmp_path):
    (block,) = python_of("docs/recipes/vocabulary-parallel.md")
    (tmp_path / "shard.py").write_text(block)
    found = re.findall(r"rank (\d) of 2: loss (\S+)", printed_by(tmp_path / "shard.py", ranks=2))
    assert sorted(rank for rank, _ in found) == ["0", "1"]
    assert len({loss for _, loss in found}) == 1


def test_fsdp2_and_tensor_parallelism(tmp_path):
    """Two ranks share the head, and FSDP averages the gradients of two halves of the batch."""
    (block,) = python_of("docs/recipes/fsdp2.md")
    (tmp_path / "sharded.py").write_text(block)
    ((_, names),) = run("docs/recipes/fsdp2.md")
    printed = printed_by(tmp_path / "sharded.py", ranks=4)
    found = [float(loss) for _, loss in sorted(re.findall(r"rank (\d) of 4: loss (\S+)", printed))]
    assert found[0] == found[1] != found[2] == found[3]  # each pair of ranks has its own half
    assert (found[0] + found[2]) / 2 == pytest.approx(names["losses"][-1], abs=2e-4)
