"""The site of docs/: the strict build, its links, and a page for each public name."""

import ast
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import logitless as ll
from tests.support.paths import ROOT

OWN = ROOT / ".venv-docs/bin/python"
# Elements that a browser loads when it opens the page, with the attribute that has the address.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}

REFERENCE = {path.name: path.read_text() for path in sorted((ROOT / "docs/api").glob("*.md"))}

ORDER = [
    "Start", "Recipes", "Concepts", "API reference", "Benchmarks", "Migrating", "Changelog",
]  # fmt: skip
THREE = ["A model", "A head", "Logits"]


def names_of_hf() -> list[str]:
    """What ll.hf defines or exports, read from its source, because it needs transformers."""
    nodes = ast.parse((ROOT / "logitless/hf.py").read_text()).body
    defined = [node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    imported = [name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
    exported = [alias.name for alias in imported if alias.asname == alias.name]
    return [name for name in [*defined, *exported] if not name.startswith("_")]


PUBLIC = [
    *(f"logitless.{name}" for name in ll.__all__ if name not in ("nn", "store")),
    *(f"logitless.nn.{name}" for name in ll.nn.__all__),
    *(f"logitless.store.{name}" for name in ll.store.__all__),
    *(f"logitless.hf.{name}" for name in names_of_hf()),
]


class Parsed(HTMLParser):
    """The ids, the links and the loaded files of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADED.get(tag) in found and found.get("rel") != "canonical":
            self.loaded.append(found[LOADED[tag]])


@cache
def parsed(page: Path) -> Parsed:
    return Parsed(page.read_text())


# `mkdocs build --strict` without search, docstrings and coloured code, in a third of the time.
QUICKLY = """
import logging, sys
from mkdocs.commands import build
from mkdocs.config import load_config
from mkdocs.utils.yaml import yaml_load

logging.basicConfig(level="WARNING")
extensions = yaml_load(open("mkdocs.yml"))["markdown_extensions"]
extensions[extensions.index("pymdownx.highlight")] = {"pymdownx.highlight": {"use_pygments": False}}
how = {"site_dir": sys.argv[1], "markdown_extensions": extensions, "plugins": []}
build.build(load_config("mkdocs.yml", **how))
"""


def build(folder: Path, quick: bool) -> str:
    """Builds the site into a folder. Returns what MkDocs printed."""
    python = str(OWN) if OWN.exists() else sys.executable
    if not OWN.exists() and find_spec("mkdocs") is None:
        pytest.skip("needs MkDocs: make docs")
    whole = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    command = [python, *(["-c", QUICKLY, str(folder)] if quick else whole)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def broken(site: Path) -> list[str]:
    """Links of the site that lead nowhere, and addresses of other hosts that a page loads."""
    problems = []
    for page in sorted(site.rglob("*.html")):
        name = page.relative_to(site)
        if name.name == "404.html":
            continue  # its links are absolute, because a server shows it at any address
        for link in [*parsed(page).links, *parsed(page).loaded]:
            if re.match(r"https?:|//", link):
                problems += [f"{name} loads {link}"] if link in parsed(page).loaded else []
                continue
            file, anchor = map(unquote, urldefrag(link))
            there = (page.parent / file).resolve() if file else page
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                problems.append(f"{name} links to {link}, which does not exist")
            elif anchor and there.suffix == ".html" and anchor not in parsed(there).ids:
                problems.append(f"{name} links to {link}, which has no such section")
    return problems


def test_build(tmp_path, request):
    """The only test that builds the site, because a build takes seconds."""
    quick = request.config.option.few
    assert "WARNING" not in build(tmp_path, quick)
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    expected = {
        str(path.with_suffix(".html")).replace("README.html", "index.html") for path in sources
    }
    assert {*expected, "changelog.html"} <= pages
    assert broken(tmp_path) == []
    api = [*(tmp_path / "api").glob("*.html")]
    described = {i for path in api for i in parsed(path).ids}
    assert quick or [name for name in PUBLIC if name not in described] == []
    # Markdown would read the >>> of an example as a quotation.
    assert not [page for page in api if "<blockquote" in page.read_text()]
    start, concepts = ((tmp_path / name).read_text() for name in ("index.html", "concepts.html"))
    assert re.findall(r'<label for="__tabbed_1_\d">(.*?)</label>', start) == THREE
    assert len(re.findall(r'<svg role="img" aria-label="[^"]{50,}"', concepts)) == 3
    titles = re.findall(r'md-tabs__link">\s*(\S.*?)\s*</a>', start)
    assert titles == ORDER
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert "://" not in sheet.read_text()


def test_each_public_name_has_one_page():
    shown = re.findall(r"^::: (\S+)$", "\n".join(REFERENCE.values()), re.MULTILINE)
    assert sorted(shown) == sorted(PUBLIC)


def test_the_index_of_the_reference_has_each_name_beside_its_page():
    rows = re.findall(r"^\| \[.*?\]\((\w+\.md)\) \| (.*) \|$", REFERENCE["README.md"], re.MULTILINE)
    listed = {page: re.findall(r"`ll\.(\S+)`", names) for page, names in rows}
    shown = {
        page: re.findall(r"^::: logitless\.(\S+)$", text, re.MULTILINE)
        for page, text in REFERENCE.items()
        if page != "README.md"
    }
    assert listed == shown


def test_names_of_hf():
    pytest.importorskip("transformers", reason="needs transformers: requirements/tests.txt")
    assert {"DistillTrainer", "use_in_trl"} <= {*names_of_hf()}
    assert all(hasattr(ll.hf, name) for name in names_of_hf())


def test_the_figures_are_drawn_by_their_script(tmp_path):
    """If not: python docs/figures/draw.py"""
    script = tmp_path / "draw.py"
    script.write_text((ROOT / "docs/figures/draw.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "docs/figures").glob("*.svg")}
    for name in drawn:
        assert f"](figures/{name})" in (ROOT / "docs/concepts.md").read_text()
