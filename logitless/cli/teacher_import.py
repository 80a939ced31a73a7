"""Adds the output of an inference server to a store, for `logitless teacher import`.

Documents are added in groups, because PyTorch takes as long for one short document as for hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from logitless.store import Writer
from logitless.store.importers import READERS, Document, choices_of, tensors_of

from .teacher_data import Line

AT_ONCE = 4096  # documents are added to the store as soon as they have this many tokens in total


class Group(NamedTuple):
    """Documents that are added in one call, each with the file and the line that it comes from."""

    documents: list[tuple[str, Document]]
    size: int  # size of the lines in bytes
    tokens: int


def add_outputs(
    writer: Writer,
    lines: Iterable[Line],
    form: str,
    completion: bool | None,
    progress: Callable[..., None],
) -> None:
    """Adds the documents of all lines, those before an error before the error is raised."""
    for group in _groups(lines, form, completion):
        _add(writer, group.documents)
        progress(group.size, tokens=group.tokens)


def _groups(lines: Iterable[Line], form: str, completion: bool | None) -> Iterator[Group]:
    documents, size, tokens = [], 0, 0
    try:
        for line in lines:
            for document in _documents(line, form, completion):
                documents.append((line.where, document))
                tokens += len(document.tokens)
            size += line.size
            if tokens >= AT_ONCE:
                yield Group(documents, size, tokens)
                documents, size, tokens = [], 0, 0
    except Exception:
        yield Group(documents, size, tokens)
        raise
    yield Group(documents, size, tokens)


def _documents(line: Line, form: str, completion: bool | None) -> Iterator[Document]:
    """Yields the documents of one server output, one per completion."""
    output: dict[str, Any] = line.fields
    try:
        for choice in range(choices_of(output)):
            yield READERS[form](output, output.get("prompt_token_ids"), completion, choice)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{line.where}: {error}") from None


def _add(writer: Writer, documents: list[tuple[str, Document]]) -> None:
    """Adds documents in one call, or after an error one by one, so that it names its line."""
    k = writer.header.k
    if not documents:
        return
    try:
        writer.extend(*tensors_of([document for _, document in documents], k))
    except (TypeError, ValueError):
        for where, document in documents:
            try:
                writer.extend(*tensors_of([document], k))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from None
