"""The long description of the package: README.md without relative links.

A package index shows README.md without the other files of the repository. Relative links and
pictures would lead nowhere there. While the project has no public address, a link becomes the path
of its file in the repository, and a picture becomes its description.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def index_page(readme: str) -> str:
    """The text of README.md for a page of a package index."""
    code = r"(^```.*?^```$)"
    parts = re.split(code, readme, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _without_links(part) for part in parts)


def _without_links(text: str) -> str:
    text = re.sub(r"!\[([^\]]*)\]\((?!\w+://)[^)]+\)", r"*Picture in the repository: \1.*", text)
    return re.sub(r"\[([^\]]+)\]\((?!\w+://)([^)#]*)(?:#[^)]*)?\)", _as_path, text)


def _as_path(link: re.Match) -> str:
    text, path = link.groups()
    return path if text.strip("/") in path else f"{text}: {path}"


class LongDescription(MetadataHookInterface):
    """Sets the field `readme`, which pyproject.toml lists under `dynamic`."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_page(text)}
