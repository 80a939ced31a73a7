"""What README and docs show is run, and what they claim of a file is in that file."""

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest
import torch

import logitless as ll
from tests.support.pages import PAGES
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


@pytest.fixture(scope="module")
def tables():
    """benchmarks/tables.py"""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks/tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_shows_what_was_measured(tables, tmp_path):
    """From a report with all kinds of cells, and from the committed report."""
    pictures = tables.pictures
    report = tmp_path / "report.md"
    report.write_text(
        "| batch × length | Transformers as it is | ll.fuse(model) |\n| --- | --- | --- |\n"
        "| 1 × 131,072 | out of memory | 9,000 · 26.4 |\n"
        "| 4 × 4,096 | 1 · 2.0 | 3 · 4.0 |\n"
        "| 1 × 4,096 | 40,207 · 6.7 | 41,964 · 2.5 |\n"
        "| 1 × 262,144 | no time left | no time left |\n"
    )
    assert pictures.lengths(report) == [(4096, 6.7, 2.5), (131072, None, 26.4)]
    committed = {step.tokens: step for step in pictures.lengths()}
    plain, fused, *_ = pictures.training_step()
    assert plain.gib == f"{committed[65536].plain:.1f}"
    assert fused.gib == f"{committed[65536].fused:.1f}"
    pytest.importorskip("matplotlib", reason="needs matplotlib: requirements/tests.txt")
    pictures.draw_lengths(tmp_path / "drawn.png", report)
    assert (tmp_path / "drawn.png").stat().st_size > 10_000


def test_links_lead_somewhere():
    for path in (ROOT / page for page in PAGES):
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)]+)\)", text):  # code such as drafts[0](state) is no link
            file, _, section = link.partition("#")
            if "://" not in link:
                there = path.parent / file if file else path
                assert there.exists(), (path, link)
                assert not section or section in anchors(there), (path, link)


def anchors(page: Path) -> list[str]:
    """Its headings, as GitHub makes them into links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]


def test_tables_are_the_committed_results(tables):
    """If not: make tables."""
    for path in (ROOT / page for page in PAGES):
        assert tables.rewritten(path) == path.read_text()


def test_a_table_says_what_was_measured(tables):
    """One cell, from the result by hand; and a table's lines are all of one run."""
    run = tables.newest("logits")
    wanted = {"contender": "logitless", "op": "cross_entropy", "variant": "plain"}
    wanted |= {"mode": "forward + backward", "shape": "8192×128256", "dtype": "bf16"}
    stored = json.loads(run.path.read_text())["rows"]
    rows = [row for row in stored if wanted.items() <= row.items()]
    line = re.search(r"^\| logits 8,192 × 128,256 \|.*$", PERFORMANCE, re.MULTILINE)
    assert line is not None
    assert f"| {rows[0]['ms']:.2f} ({rows[0]['extra_mib']:,.0f}) |" in line[0]
    assert f"commit {run.document['commit']}" in PERFORMANCE
    used = re.findall(r"<!-- table ([\w-]+) -->", "".join((ROOT / p).read_text() for p in PAGES))
    assert {*used} == {*tables.TABLES}


def test_where_liger_is_faster_is_said(tables):
    run = tables.newest("heads")
    for shape in run.shapes(**tables.PLAIN_HEAD, contender="liger"):
        liger, ours = tables.in_liger_memory(run, shape)
        said = f"Liger is faster at {tables.sizes(shape)}." in PERFORMANCE
        assert said == (ours is not None and liger.ms < ours.ms), shape


@pytest.mark.parametrize("thing", [ll.LinearLogits, ll.nn.FusedHead, torch.nn.Linear])
def test_heads_names_every_argument(thing):
    text = (ROOT / "docs/heads.md").read_text()
    names = [name for name in inspect.signature(thing).parameters if name not in ("args", "kwargs")]
    assert [name for name in names if not re.search(rf"`{name}`|[(\s]{name}[,=]", text)] == []


def test_the_options_that_migrating_names_are_there():
    calls = re.findall(r"`ll\.(\w+)\(([^`]*)\)", (ROOT / "docs/migrating.md").read_text())
    assert len(calls) > 10
    for name, arguments in calls:
        legal = inspect.signature(getattr(ll, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in legal.values()):
            legal = {**legal, **inspect.signature(ll.cross_entropy).parameters}
        for option in re.findall(r"(\w+)=(?!=)", arguments):
            if "LinearLogits" not in arguments:
                assert option in legal, (name, option)


def test_the_page_of_the_store_names_every_public_name():
    page = (ROOT / "docs/store.md").read_text()
    left = {"Header", "Report", "DistillLosses", "batch_targets", "tokenizer_hash"}  # docstrings
    assert [name for name in ll.store.__all__ if name not in page and name not in left] == []


def test_every_variable_is_in_the_guide():
    text = (ROOT / "docs/guide.md").read_text()
    sources = (path.read_text() for path in (ROOT / "logitless").rglob("*.py"))
    named = {name for source in sources for name in re.findall(r"LOGITLESS_[A-Z_]+", source)}
    assert named
    assert [name for name in sorted(named) if f"| `{name}` |" not in text] == []
