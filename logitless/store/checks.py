"""All checks of store/: `<argument or file> must <rule>, got <value>.`

Functions that take a path check files, which are never trusted. The other functions check the
arguments of Writer, Store, capture, the importers and the training functions.
"""

import dataclasses
import json
import os
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core import checks as _checks
from ..core import options as _options

VALUES = ("u8", "f16")
ALIGNMENTS = ("next",)
SHOWN = 8  # number of tokens that an error message shows
_HEADER_BYTES = 1 << 16


def header(h: Any) -> None:
    """Checks the fields of a header."""
    _whole("vocab_size", h.vocab_size, 1, 2**32)
    _whole("k", h.k, 1, min(h.vocab_size, 2**16))
    _checks.one_of("values", h.values, VALUES)
    _checks.one_of("alignment", h.alignment, ALIGNMENTS)
    for name in ("teacher", "tokenizer"):
        value = getattr(h, name)
        if not isinstance(value, str) or len(value) > 1000:
            raise TypeError(
                f"{name} must be a string of at most 1000 characters, got {value!r:.100}."
            )
    _options.temperature(h.temperature)


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if not least <= value <= most:
        raise ValueError(f"{name} must lie in [{least}, {most}], got {value}.")


def shard_bytes(value: Any) -> None:
    _whole("shard_bytes", value, 1, 2**40)


def rank(value: Any) -> None:
    _whole("part", value, 0, 10**6)


def header_fields(where: object, text: str | bytes, kind: type) -> dict:
    """The fields of a header in JSON; refuses missing, unknown and invalid fields."""
    try:
        fields = json.loads(text) if len(text) <= _HEADER_BYTES else None
    except (ValueError, RecursionError):
        fields = None
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(fields, dict) or fields.keys() != names:
        refuse(where, f"hold a header with the fields {', '.join(sorted(names))}", f"{text!r:.100}")
    try:
        kind(**fields)
    except (TypeError, ValueError) as error:
        refuse(where, "hold a valid header", f"an error: {error}".removesuffix("."))
    return fields


def same_header(where: object, got: Any, want: Any, of: object, advice: str = "") -> None:
    """Checks that a header equals `want`, which is the header of `of`."""
    for field in dataclasses.fields(want):
        expected, value = getattr(want, field.name), getattr(got, field.name)
        if expected != value:
            refuse(where, f"have {field.name} {expected!r} to match {of}", f"{value!r}{advice}")


def folder(path: Any) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        refuse(path, "be a folder, or not exist yet", "a file")


def same_tokenizer(where: object, stored: str, passed: str) -> None:
    if stored and passed and stored != passed:
        refuse(
            where,
            f"be used with the tokenizer it was made with, whose hash is {stored!r:.80}",
            f"a tokenizer whose hash is {passed!r:.80}",
        )


def vocabulary(where: object, stored: int, of_student: int | None) -> None:
    if of_student is not None and stored > of_student:
        rule = f"have a vocabulary of at most the model's {of_student}"
        refuse(where, rule, f"{stored}: capture it with vocab_size={of_student}")


def is_store(path: Any) -> None:
    if not os.path.isfile(os.path.join(path, "store.json")):
        refuse(path, "be a folder with a store.json", "none")


def shard_format(path: Any, metadata: dict, form: str, version: str) -> None:
    stored = metadata.get("format"), metadata.get("version")
    if stored != (form, version):
        refuse(
            path,
            f"be a shard of format {form!r}, version {version!r}",
            f"{stored[0]!r:.50}, {stored[1]!r:.50}",
        )


def shard_columns(path: Any, entries: dict, wanted: dict) -> None:
    """Checks the names, dtypes and shapes of the columns in a shard."""
    if entries.keys() != wanted.keys():
        refuse(path, f"hold the columns {', '.join(sorted(wanted))}", repr(sorted(entries))[:200])
    for name, (dtype, shape) in wanted.items():
        entry = entries[name]
        if entry.dtype != dtype or entry.shape != shape:
            refuse(
                path, f"have {name} of {dtype} and shape {shape}", f"{entry.dtype}, {entry.shape}"
            )


def shard_starts(path: Any, starts: Tensor, tokens: int) -> None:
    right = int(starts[0]) == 0 and int(starts[-1]) == tokens
    if not right or not bool((starts[1:] > starts[:-1]).all()):
        refuse(
            path,
            f"have starts that increase from 0 to {tokens}, its number of tokens",
            "other starts",
        )


def in_store(least: int, most: int, documents: int) -> None:
    if least < 0 or most >= documents:
        got = least if least < 0 else most
        raise ValueError(
            f"the index of a store must name its {documents} documents, got number {got}. A shard"
            " is damaged."
        )


def ids_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    if ids.numel() and not 0 <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"ids of a store must be below its vocabulary of {vocab_size}, got {int(ids.max())}."
            " A shard is damaged."
        )


def tokens(t: Any, vocab_size: int) -> Tensor:
    """The tokens of one document, (T,), as int64 on the CPU; a list is accepted as well."""
    t = torch.as_tensor(t)
    _checks._integer("tokens", t)
    if t.dim() != 1 or t.numel() == 0:
        got = tuple(t.shape)
        raise ValueError(f"tokens must be those of one document, of shape (T,), got {got}.")
    t = t.detach().to("cpu", torch.int64)
    low, high = (int(n) for n in t.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"tokens must be ids of a vocabulary of {vocab_size}, got {low if low < 0 else high}."
        )
    return t


def document(targets: Any, tokens: Tensor, h: Any, kind: type) -> None:
    """Checks the targets of one document: one row per token, ids and log-probabilities in range."""
    _checks.is_targets(targets, kind)
    if tuple(targets.shape) != (len(tokens),):
        raise ValueError(
            f"targets must have one row for each of the {len(tokens)} tokens,"
            f" got rows {tuple(targets.shape)}."
        )
    if targets.k > h.k:
        raise ValueError(f"targets must have at most the store's {h.k} slots, got {targets.k}.")
    valid = torch.ones_like(targets.ids).bool() if targets.mask is None else targets.mask != 0
    bad = valid & ((targets.ids < 0) | (targets.ids >= h.vocab_size))
    if bool(bad.any()):
        got = int(targets.ids[bad][0])
        raise ValueError(f"targets.ids must be in the vocabulary of {h.vocab_size}, got {got}.")
    bad = valid & ~(targets.logprobs <= 2**-7)  # allows for 16-bit rounding; NaN is bad
    if bool(bad.any()):
        got = float(targets.logprobs[bad][0])
        raise ValueError(f"targets.logprobs must be logarithms of probabilities, got {got}.")
    if targets.tail is not None and not bool((targets.tail <= 2**-7).all()):
        raise ValueError(
            "targets.tail must be the logarithm of a mass, "
            f"got {float(targets.tail.max())}."
        )  # fmt: skip


def row_range(index: Any, n: int) -> tuple[int, int]:
    """Begin and end of a slice of a document with n tokens."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise IndexError(f"a range of tokens must be a slice of step 1, got {index!r}.")
    begin, end, _ = index.indices(n)
    return begin, max(begin, end)


def document_number(i: Any, n: int) -> int:
    if isinstance(i, bool) or not hasattr(i, "__index__"):
        raise TypeError(f"a document must be named by its number, got {i!r}.")
    i = int(i)
    if not -n <= i < n:
        raise IndexError(f"a document's number must be in [0, {n}), got {i}.")
    return i % n


def input_ids(t: Any) -> None:
    _checks._integer("input_ids", t)
    if t.dim() == 0:
        got = tuple(t.shape)
        raise ValueError(f"input_ids must have tokens in its last dimension, got shape {got}.")


def lengths(value: Any, rows: int, width: int) -> list[list[int]]:
    """The lengths of the documents in each row, without zeros.

    A row's entry may be one number or several. The only row of a batch may come without its list.
    """
    entries = value.tolist() if isinstance(value, Tensor) else list(value)
    if rows == 1 and entries and not isinstance(entries[0], (list, tuple, Tensor)):
        entries = [entries]
    if len(entries) != rows:
        raise ValueError(f"lengths must have an entry for each of {rows} rows, got {len(entries)}.")
    lists = [e if isinstance(e, (list, tuple, Tensor)) else [e] for e in entries]
    lists = [[int(n) for n in numbers] for numbers in lists]
    for numbers in lists:
        if min(numbers, default=0) < 0 or sum(numbers) > width:
            rule = f"add up to at most {width} tokens per row"
            raise ValueError(f"lengths must {rule}, got {numbers}.")
    return [[n for n in numbers if n] for numbers in lists]


def unknown_document(tokens: Tensor, row: int, start: int, length: int | None) -> KeyError:
    """The error for tokens of one row that match no document.

    `length` is the document's length if the caller passed lengths.
    """
    here = tokens[start : start + min(SHOWN, length or SHOWN)].tolist()
    if start == 0 and length is None and len(here) > 1 and len(set(here)) == 1:
        advice = "Padding comes after the documents of a row."
    elif start and length is None:
        advice = "Separators, and whatever else is between documents, are captured with them."
    else:
        advice = (
            "Tokenise as the capture did, including special tokens, and begin at a document's"
            " first token."
        )
    extent = "" if length is None else f" {length} tokens long,"
    return KeyError(
        "input_ids must hold documents of the store, whole or cut off at their end, got"
        f" {here},{extent} at token {start} of row {row}. {advice} A document that was not captured"
        " has no targets; DistillTrainer(eval_teacher=False) evaluates such documents without them."
    )


def some_stores(stores: list) -> None:
    if not stores:
        raise ValueError("stores must name at least one store, got none.")


def is_journal(path: Any, start: bytes, magic: bytes) -> None:
    if start[: len(magic)] != magic[: len(start)]:
        refuse(path, f"begin with {magic!r}", repr(start))


def capture(k: Any, most: int) -> None:
    if k is not None:
        _whole("k", k, 1, most)


def batch(inputs: dict) -> None:
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"a batch must have input_ids of shape (B, T), got {got}.")


def logits_of_batch(logits: Any, ids: Tensor, vocab_size: int) -> None:
    wanted = (*ids.shape, vocab_size)
    got = tuple(getattr(logits, "shape", ()))
    if got[:-1] != wanted[:-1] or got[-1:] < wanted[-1:]:
        raise ValueError(
            f"model must give logits of shape {wanted}, or of a larger vocabulary than the store's,"
            f" got {got}."
        )


def rows_of_teacher(top: Tensor) -> None:
    """Checks that `top` is finite, because NaN would be read as a row without slots."""
    if not bool(top.isfinite().all()):
        raise ValueError("model must give logits that are finite somewhere in each row, got NaN.")


def server_output(server: str, name: str, entries: Any, tokens: Any) -> None:
    if not isinstance(entries, (list, tuple)):
        raise ValueError(
            f"output must have the {name} of {server}, got {type(entries).__name__}."
            f" Request {name} from the server."
        )
    if tokens is None:
        raise ValueError(
            "output must have the prompt_token_ids of its prompt, got none. Pass them as tokens, or"
            " add them to the JSON of the output."
        )


def entries(name: str, tokens: list[int], rows: list) -> None:
    """Checks that every token has log-probabilities, except the first, which has None."""
    if not tokens or len(rows) != len(tokens):
        raise ValueError(
            f"{name} must have an entry for each of {len(tokens)} tokens, got {len(rows)}."
            " Request entries for the whole prompt, from its first token."
        )
    if rows[0] is not None:
        raise ValueError(
            f"{name} must begin with None, since nothing comes before the first token, got a"
            " distribution. The entries are shifted by one token."
        )
    for place, (token, row) in enumerate(zip(tokens[1:], rows[1:], strict=True), start=1):
        if row is None:
            raise ValueError(f"{name} must have a distribution at place {place}, got None.")
        if token not in row:
            raise ValueError(
                f"{name} must have the prompt's own token {token} at place {place}, got"
                f" {list(row)[:5]}. The entries belong to another prompt, or are shifted."
            )
        if not all(p <= 1e-3 for p in row.values()):
            raise ValueError(
                f"{name} must hold logarithms of probabilities, got {max(row.values())} at place"
                f" {place}."
            )


def masses(name: str, mass: Tensor) -> None:
    if bool((mass > 1.01).any()):
        place = int((mass > 1.01).nonzero()[0])
        raise ValueError(
            f"{name} must give every token a mass of at most 1, got {float(mass[place]):.4g} after"
            f" token {place}. Are the entries probabilities instead of logarithms?"
        )


def labels_of(labels: Any, targets: Any) -> None:
    _checks._integer("labels", labels)
    if tuple(labels.shape) != tuple(targets.shape):
        raise ValueError(
            f"labels must have the shape of targets, {tuple(targets.shape)},"
            f" got {tuple(labels.shape)}. Pass labels without a shift: distill_loss shifts them."
        )


def one_teacher(store: Any, teacher: Any) -> None:
    if (store is None) == (teacher is None):
        got = "neither" if store is None else "both"
        raise ValueError(f"a teacher must be given as store= or as teacher=, got {got}.")


def same_temperature(where: object, stored: float, wanted: float) -> None:
    if stored != wanted:
        refuse(where, f"have been captured at the student's temperature {wanted}", str(stored))


def not_locked(path: Any) -> None:
    refuse(path, "have one writer at a time", "another open writer")


def is_open(closed: bool) -> None:
    if closed:
        raise ValueError("a writer must be open to add documents, got a closed writer.")


def refuse(where: object, rule: str, got: str) -> NoReturn:
    """Raises the error for the file or folder `where`."""
    raise ValueError(
        f"{os.fspath(where) if isinstance(where, os.PathLike) else where} must {rule}, got {got}."
    )
