"""Turns docstrings, which are plain text, into Markdown for the API reference.

Griffe calls this extension. Griffe reads the sources of the package, and does not import them.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object


def markdown(text: str) -> str:
    """The text, with examples as code blocks and names of pages as links."""
    text = re.sub(
        r"^>>> .*\n?(?:^\S.*\n?|^ +\S.*\n?)*",
        lambda match: f"```pycon\n{match[0].rstrip()}\n```\n",
        text,
        flags=re.MULTILINE,
    )
    return re.sub(r"`?\bdocs/(\w+)\.md`?", r"[docs/\1.md](../\1.md)", text)


def comment_of(field: Attribute) -> str | None:
    """The comment behind a field of a class, and on the lines of comments that follow."""
    assert field.lineno is not None
    first, *rest = field.parent.module.lines_collection[field.filepath][field.lineno - 1 :]
    found = re.search(r"  # (.*)$", first)
    if found is None:
        return None
    parts = [found[1]]
    for line in rest:
        more = re.match(r" {8,}# (.*)$", line)
        if more is None:
            break
        parts.append(more[1])
    text = " ".join(parts)
    shape = re.match(r"(\(.*?\)) +(.*)$", text)
    return f"`{shape[1]}` {shape[2]}" if shape else text


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_class:
            comment = comment_of(attr)
            if comment is not None:
                attr.docstring = Docstring(comment, parent=attr)
