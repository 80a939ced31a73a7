"""The differences between docs/ on a code host and docs/ as a site, applied by MkDocs.

On a code host, a page can link to any file of the repository, and a list of headings stands for
tabs. For the site, these hooks

- publish each file of the repository that a page links to, under `repository/`;
- turn the headings between `<!-- tabs -->` and `<!-- end tabs -->` into tabs;
- put each SVG into its page, so that the figure has the colours of the page, light or dark.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end tabs -->$", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r'<img alt="([^"]*)" src="((?:\.\./)*figures/[\w-]+\.svg)"\s*/?>')
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(generated(config, "changelog.md", (ROOT / "CHANGELOG.md").read_text()))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        for path in outside(waiting.pop(), files):
            uri = published(path)
            if files.get_file_from_path(uri) is None:
                files.append(copied(config, path))
                waiting += [uri] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    markdown = outside_code(markdown, lambda text: LINK.sub(lambda m: link(m[1], uri), text))
    return TABS.sub(lambda match: tabs(match[1]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = ROOT / "docs" / posixpath.dirname(page.file.src_uri)

    def inline(match: re.Match) -> str:
        svg = (folder / match[2]).read_text()
        return svg[svg.index("<svg") :].replace(
            "<svg", f'<svg role="img" aria-label="{match[1]}"', 1
        )

    return FIGURE.sub(inline, html)


def outside(uri: str, files: Files) -> list[Path]:
    """The files of the repository, not of docs/, that a page links to."""
    file = files.get_file_from_path(uri)
    assert file is not None
    found = []
    outside_code(file.content_string, lambda text: found.extend(LINK.findall(text)) or text)
    paths = [target(link, uri) for link in found]
    return [path for path in paths if path.exists() and not in_docs(path)]


def in_docs(path: Path) -> bool:
    """Whether MkDocs publishes the file itself. Scripts in docs/ are excluded in mkdocs.yml."""
    return path.is_relative_to(ROOT / "docs") and path.suffix != ".py"


def target(link: str, uri: str) -> Path:
    """The file that a link of the page leads to, in the repository."""
    if uri == "changelog.md":
        page = "CHANGELOG.md"
    elif uri.startswith("repository/"):
        page = uri.removeprefix("repository/")
    else:
        page = f"docs/{uri}"
    return ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def link(link: str, uri: str) -> str:
    """The link, as it is on the site."""
    path = target(link, uri)
    if not path.exists():
        return link  # MkDocs reports the link
    if in_docs(path):
        there = path.relative_to(ROOT / "docs").as_posix()
    else:
        there = published(path)
    return posixpath.relpath(there, posixpath.dirname(uri) or ".")


def published(path: Path) -> str:
    """The path of a file of the repository on the site. Sources and folders become pages."""
    name = path.relative_to(ROOT).as_posix()
    if name == "CHANGELOG.md":
        return "changelog.md"
    as_is = path.suffix in (".md", ".png", ".svg")
    return f"repository/{name}" if as_is else f"repository/{name}.md"


def copied(config: MkDocsConfig, path: Path) -> File:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in (".png", ".svg"):
        return File.generated(config, published(path), content=path.read_bytes())
    if path.is_dir():
        names = (p.name for p in sorted(path.iterdir()) if not p.name.startswith((".", "__")))
        text = f"# {name}\n\n" + "\n".join(f"- `{entry}`" for entry in names)
    elif path.suffix == ".md":
        text = path.read_text()
    else:
        language = LANGUAGES.get(path.suffix, "text")
        text = f"# {name}\n\n````{language}\n{path.read_text()}\n````\n"
    return generated(config, published(path), f"---\nsearch:\n  exclude: true\n---\n{text}")


def generated(config: MkDocsConfig, uri: str, text: str) -> File:
    return File.generated(config, uri, content=text)


def tabs(text: str) -> str:
    """The sections of a text as tabs. Each tab has the title of its heading."""
    _, *parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    titles, bodies = parts[::2], parts[1::2]
    indented = (re.sub(r"^(?=.)", "    ", body, flags=re.MULTILINE) for body in bodies)
    return "\n".join(f'=== "{t}"\n{body}' for t, body in zip(titles, indented, strict=True))


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else change(part) for part in parts)
