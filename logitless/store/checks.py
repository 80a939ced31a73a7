"""The rules of a teacher store, worded as those of logitless/core/checks.py."""

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
SHOWN = 8  # tokens in a message
_HEADER_BYTES = 1 << 16


def header(h: Any) -> None:
    """Its own fields; `where` it was read is in the message of what raises."""
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


def part(value: Any) -> None:
    _whole("part", value, 0, 10**6)


def header_fields(where: object, text: str | bytes, kind: type) -> dict:
    """A header in JSON, of a file that is not trusted; every field is there, and no other."""
    try:
        found = json.loads(text) if len(text) <= _HEADER_BYTES else None
    except (ValueError, RecursionError):
        found = None
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(found, dict) or found.keys() != names:
        refuse(where, f"hold a header of {', '.join(sorted(names))}", f"{text!r:.100}")
    try:
        kind(**found)
    except (TypeError, ValueError) as error:
        refuse(where, "hold a header that is right", str(error).removesuffix("."))
    return found


def same_header(where: object, got: Any, want: Any, advice: str = "") -> None:
    for field in dataclasses.fields(want):
        mine, theirs = getattr(want, field.name), getattr(got, field.name)
        if mine != theirs:
            refuse(where, f"have {field.name} {mine!r} here", f"{theirs!r}{advice}")


def folder(path: Any) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        refuse(path, "be a folder, or a new one", "a file")


def same_tokenizer(where: object, stored: str, given: str) -> None:
    if stored and given and stored != given:
        refuse(
            where,
            f"be used with the tokenizer it was made with, whose hash is {stored!r:.80}",
            f"one of {given!r:.80}",
        )


def vocabulary(where: object, stored: int, of_student: int | None) -> None:
    if of_student is not None and stored > of_student:
        rule = f"have a vocabulary of at most the model's {of_student}"
        refuse(where, rule, f"{stored}: capture it with vocab_size={of_student}")


def is_store(path: Any) -> None:
    if not os.path.isfile(os.path.join(path, "store.json")):
        refuse(path, "be a folder with a store.json", "none")


def shard_format(path: Any, metadata: dict, form: str, version: str) -> None:
    found = metadata.get("format"), metadata.get("version")
    if found != (form, version):
        refuse(
            path,
            f"be a shard of format {form!r}, version {version!r}",
            f"{found[0]!r:.50}, {found[1]!r:.50}",
        )


def shard_columns(path: Any, entries: dict, wanted: dict) -> None:
    """Names, dtypes and shapes; what is None in a shape may be anything."""
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
            f"have documents that begin one after the other in its {tokens} tokens",
            "other starts",
        )


def in_store(least: int, most: int, documents: int) -> None:
    if least < 0 or most >= documents:
        got = least if least < 0 else most
        raise ValueError(
            f"the index of a store must name its {documents} documents, got number {got}: a file is"
            " damaged."
        )


def ids_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    if ids.numel() and not 0 <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"ids of a store must be below its vocabulary of {vocab_size}, got {int(ids.max())}:"
            " the file is damaged."
        )


def tokens(t: Any, vocab_size: int) -> Tensor:
    """Of one document, (T,): a tensor or a list; as int64 on the CPU."""
    t = torch.as_tensor(t)
    _checks._integer("tokens", t)
    if t.dim() != 1 or t.numel() == 0:
        raise ValueError(f"tokens must be those of one document, (T,), got shape {tuple(t.shape)}.")
    t = t.detach().to("cpu", torch.int64)
    low, high = (int(n) for n in t.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"tokens must be ids of a vocabulary of {vocab_size}, got {low if low < 0 else high}."
        )
    return t


def document(targets: Any, tokens: Tensor, h: Any, kind: type) -> None:
    """Targets of one document: a row for each token, and numbers that can be right."""
    _checks.is_targets(targets, kind)
    if tuple(targets.shape) != (len(tokens),):
        raise ValueError(
            f"targets must have one row for each of the {len(tokens)} tokens,"
            f" got rows {tuple(targets.shape)}."
        )
    if targets.k > h.k:
        raise ValueError(f"targets must have at most the store's {h.k} slots, got {targets.k}.")
    there = torch.ones_like(targets.ids).bool() if targets.mask is None else targets.mask != 0
    bad = there & ((targets.ids < 0) | (targets.ids >= h.vocab_size))
    if bool(bad.any()):
        got = int(targets.ids[bad][0])
        raise ValueError(f"targets.ids must be in the vocabulary of {h.vocab_size}, got {got}.")
    bad = there & ~(targets.logprobs <= 2**-7)  # rounding of 16 bits; NaN is bad too
    if bool(bad.any()):
        got = float(targets.logprobs[bad][0])
        raise ValueError(f"targets.logprobs must be logarithms of probabilities, got {got}.")
    if targets.tail is not None and not bool((targets.tail <= 2**-7).all()):
        raise ValueError(
            "targets.tail must be the logarithm of a mass, "
            f"got {float(targets.tail.max())}."
        )  # fmt: skip


def row_range(index: Any, n: int) -> tuple[int, int]:
    """The part of a document that a slice names."""
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


def lengths(given: Any, rows: int, width: int) -> list[list[int]]:
    """Of the documents of each row: a number or several a row; of one row, without a list more."""
    given = given.tolist() if isinstance(given, Tensor) else list(given)
    if rows == 1 and given and not isinstance(given[0], (list, tuple, Tensor)):
        given = [given]
    if len(given) != rows:
        raise ValueError(f"lengths must have an entry for each of {rows} rows, got {len(given)}.")
    found = [[int(n) for n in (r if isinstance(r, (list, tuple, Tensor)) else [r])] for r in given]
    for row in found:
        if min(row, default=0) < 0 or sum(row) > width:
            raise ValueError(f"lengths must add up to at most {width} tokens a row, got {row}.")
    return [[n for n in row if n] for row in found]


def unknown_document(tokens: Tensor, row: int, start: int, length: int | None) -> KeyError:
    """Of one row of a batch, from a start on; its length where that was given."""
    here = tokens[start : start + min(SHOWN, length or SHOWN)].tolist()
    if start == 0 and length is None and len(here) > 1 and len(set(here)) == 1:
        advice = "Padding comes after the documents of a row."
    elif start and length is None:
        advice = "Separators, and whatever else is between documents, are captured as part of them."
    else:
        advice = "Tokenise as the capture did, special tokens too, and begin at the first token."
    extent = "" if length is None else f" {length} tokens long,"
    return KeyError(
        "input_ids must hold documents of the store, whole or cut off at their end, got"
        f" {here},{extent} at token {start} of row {row}. {advice} What was not captured has no"
        " targets; DistillTrainer evaluates without them by eval_teacher=False."
    )


def some_stores(stores: list) -> None:
    if not stores:
        raise ValueError("stores must name at least one store, got none.")


def is_journal(path: Any, start: bytes, magic: bytes) -> None:
    if start[:4] != magic[: len(start)]:
        refuse(path, f"begin with {magic!r}", repr(start))


def capture(k: Any, most: int) -> None:
    if k is not None:
        _whole("k", k, 1, most)


def batch(given: dict) -> None:
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"a batch must have input_ids of shape (B, T), got {got}.")


def logits_of_batch(logits: Any, ids: Tensor, vocab_size: int) -> None:
    wanted = (*ids.shape, vocab_size)
    got = tuple(getattr(logits, "shape", ()))
    if got[:-1] != wanted[:-1] or got[-1:] < wanted[-1:]:
        raise ValueError(
            f"model must give logits {wanted}, of each token and the store's vocabulary or a larger"
            f" one, got {got}."
        )


def rows_of_teacher(top: Tensor) -> None:
    """Of `capture_topk`: NaN would be read as a row without slots."""
    if not bool(top.isfinite().all()):
        raise ValueError("model must give logits that are finite somewhere in each row, got NaN.")


def server_output(server: str, name: str, entries: Any, tokens: Any) -> None:
    if not isinstance(entries, (list, tuple)):
        raise ValueError(
            f"output must have the {name} of {server}, got {type(entries).__name__}: ask for them."
        )
    if tokens is None:
        raise ValueError(
            "output must have the prompt_token_ids of its prompt, got none: give them as tokens, or"
            " beside the output in its JSON."
        )


def entries(name: str, tokens: list[int], found: list) -> None:
    """Log-probabilities in the place of each token, None in that of the first."""
    if not tokens or len(found) != len(tokens):
        raise ValueError(
            f"{name} must have an entry for each of {len(tokens)} tokens, got {len(found)}: the"
            " whole prompt, from its first token on."
        )
    if found[0] is not None:
        raise ValueError(
            f"{name} must begin with None, since nothing comes before the first token, got a"
            " distribution: it is shifted by one token."
        )
    for place, (token, row) in enumerate(zip(tokens[1:], found[1:], strict=True), start=1):
        if row is None:
            raise ValueError(f"{name} must have a distribution at place {place}, got None.")
        if token not in row:
            raise ValueError(
                f"{name} must have the prompt's own token {token} at place {place}, got"
                f" {list(row)[:5]}: it is of another prompt, or shifted."
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
            f"{name} must give a place a mass of at most 1, got {float(mass[place]):.4g} after"
            f" token {place}: are they probabilities?"
        )


def labels_of(labels: Any, targets: Any) -> None:
    _checks._integer("labels", labels)
    if tuple(labels.shape) != tuple(targets.shape):
        raise ValueError(
            f"labels must have the shape of targets, {tuple(targets.shape)},"
            f" got {tuple(labels.shape)}: the shift by one token is made here."
        )


def one_teacher(store: Any, teacher: Any) -> None:
    if (store is None) == (teacher is None):
        got = "neither" if store is None else "both"
        raise ValueError(f"a teacher must be given as store= or as teacher=, got {got}.")


def same_temperature(where: object, stored: float, wanted: float) -> None:
    if stored != wanted:
        refuse(where, f"have been made at the temperature {wanted} of the student", str(stored))


def not_locked(path: Any) -> None:
    refuse(path, "have one writer at a time", "another that is at work on it")


def is_open(closed: bool) -> None:
    if closed:
        raise ValueError("a writer must be open to add documents: this one was closed.")


def refuse(where: object, rule: str, got: str) -> NoReturn:
    raise ValueError(
        f"{os.fspath(where) if isinstance(where, os.PathLike) else where} must {rule}, got {got}."
    )
