"""Reads the input files of `logitless teacher`. Each line of a file is a document, as text or JSON.

Every error message names the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

WINDOW = 512  # each group of this many documents is sorted by length, to reduce padding
SHOWN = 60  # number of characters of a line that an error message shows


class Line(NamedTuple):
    """One line of a file. Empty lines are skipped."""

    where: str  # file and line number, for errors
    fields: dict[str, Any]
    size: int  # size of the line in bytes


def are_files(paths: list[Path]) -> None:
    for path in paths:
        if not path.is_file():
            got = "a folder" if path.is_dir() else "no such file"
            raise ValueError(f"--data must name files, got {path}: {got}.")


def size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def lines(paths: list[Path]) -> Iterator[Line]:
    """Yields the lines of files. Lines of .txt files are text. Lines of other files are JSON."""
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where}: text must be in UTF-8, got {error}.") from None
                if text.strip():
                    is_text = path.suffix == ".txt"
                    fields = {"text": text} if is_text else _object(where, text)
                    yield Line(where, fields, len(line))


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: a line must be a JSON object, got {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a line must be a JSON object, got {text[:SHOWN]!r}.")
    return value


def check(line: Line, vocab_size: int | None) -> None:
    """Checks that a line has a text or token ids.

    If `vocab_size` is not None, token ids must be below `vocab_size`.
    """
    ids, text = line.fields.get("input_ids"), line.fields.get("text")
    if ids is None and not isinstance(text, str):
        got = sorted(line.fields) if text is None else f"text {text!r:.{SHOWN}}"
        raise ValueError(
            f"{line.where}: a document must have a string as text, or input_ids, got {got}."
        )
    if ids is None:
        return
    if not isinstance(ids, list):
        raise ValueError(f"{line.where}: input_ids must be a list of ids, got {ids!r:.{SHOWN}}.")
    for i in ids:
        if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size):
            below = "" if vocab_size is None else f" below {vocab_size}"
            raise ValueError(
                f"{line.where}: input_ids must be whole numbers from 0{below}, got {i!r:.{SHOWN}}."
            )


def ids_of(line: Line, tokenizer: Any, end: int | None, vocab_size: int) -> list[int]:
    """Returns the `input_ids` of a line, or the token ids of its text.

    If `end` is not None, the id `end` is appended to the ids of a text.
    """
    check(line, vocab_size)
    if line.fields.get("input_ids") is not None:
        return line.fields["input_ids"]
    ids = tokenizer(line.fields["text"])["input_ids"]
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"{line.where}: tokens must be ids of a vocabulary of {vocab_size}, got {max(ids)}."
            " The tokenizer has more tokens than the model's head, or than --vocab-size."
        )
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def batches(
    documents: Iterator[tuple[list[int], int]], most: int, progress: Callable[[int], None]
) -> Iterator[list[list[int]]]:
    """Yields batches. The documents of a batch have similar lengths.

    A batch has at most `most` tokens, including padding. A document with more tokens is a batch of
    its own. `documents` yields the tokens of each document and its size in bytes. `progress` is
    called for each document with the document's size in bytes.
    """
    while window := _window(documents, progress):
        window.sort(key=len)
        batch: list[list[int]] = []
        for tokens in window:
            if batch and len(tokens) * (len(batch) + 1) > most:
                yield batch
                batch = []
            batch.append(tokens)
        yield batch


def _window(documents: Iterator[tuple[list[int], int]], progress: Callable) -> list[list[int]]:
    """Returns the next WINDOW documents that are not empty."""
    window = []
    for tokens, n in documents:
        progress(n)
        if tokens:
            window.append(tokens)
        if len(window) == WINDOW:
            break
    return window
