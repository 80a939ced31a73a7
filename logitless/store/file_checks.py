"""Checks the files of a store. Errors have the form `<file> must <rule>, got <value>.`"""

import dataclasses
import json
import os
from typing import Any, NoReturn

from torch import Tensor

_HEADER_BYTES = 1 << 16


def refuse(where: object, rule: str, got: str) -> NoReturn:
    raise ValueError(
        f"{os.fspath(where) if isinstance(where, os.PathLike) else where} must {rule}, got {got}."
    )


def header_fields(where: object, text: str | bytes, kind: type) -> dict:
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
    """Checks that the header `got` of `where` equals the header `want` of `of`."""
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
            f"be used with the tokenizer of its capture, whose hash is {stored!r:.80}",
            f"a tokenizer whose hash is {passed!r:.80}",
        )


def vocabulary(where: object, stored: int, of_student: int | None) -> None:
    if of_student is not None and stored > of_student:
        rule = f"have a vocabulary of at most the model's {of_student}"
        refuse(where, rule, f"{stored}: capture the teacher with vocab_size={of_student}")


def is_store(path: Any) -> None:
    if not os.path.isfile(os.path.join(path, "store.json")):
        refuse(path, "be a folder with a store.json", "none")


def same_store(path: Any, same: bool) -> None:
    if not same:
        refuse(path, "have the shards of the pickled Store", "other shards. Open the store again")


def shard_format(path: Any, metadata: dict, form: str, versions: tuple[str, ...]) -> str:
    stored = metadata.get("format"), metadata.get("version")
    if stored[0] != form or stored[1] not in versions:
        known = " or ".join(map(repr, versions))
        refuse(
            path,
            f"be a shard of format {form!r}, version {known}",
            f"{stored[0]!r:.50}, {stored[1]!r:.50}",
        )
    return str(stored[1])


def shard_columns(path: Any, entries: dict, wanted: dict) -> None:
    if entries.keys() != wanted.keys():
        refuse(path, f"hold the columns {', '.join(sorted(wanted))}", repr(sorted(entries))[:200])
    for name, (dtype, shape) in wanted.items():
        entry = entries[name]
        if entry.dtype != dtype or entry.shape != shape:
            refuse(
                path, f"have {name} of {dtype} and shape {shape}", f"{entry.dtype}, {entry.shape}"
            )
        if entry.begin % dtype.itemsize:
            refuse(path, f"have {name} at a multiple of {dtype.itemsize} bytes", str(entry.begin))


def checksums_come_last(path: Any, begin: int, size: int) -> None:
    if begin != size:
        refuse(path, f"have the column crc after the {size} bytes of the other columns", str(begin))


def changed_block(path: Any, place: int) -> NoReturn:
    refuse(
        path,
        "have the bytes it was written with (CRC-32)",
        f"other bytes after byte {place}. Remove the file and run the capture again",
    )


def same_digest(path: Any, same: bool) -> None:
    if not same:
        refuse(
            path,
            "have the bytes it was written with (SHA-256)",
            "other bytes. Remove the file and run the capture again",
        )


def shorter(path: Any) -> NoReturn:
    refuse(path, "keep its length while it is read", "a shorter file")


def replaced(path: Any) -> NoReturn:
    refuse(path, "stay the same file while its store is open", "another file. Open the store again")


def shard_starts(path: Any, starts: Tensor, tokens: int) -> None:
    right = int(starts[0]) == 0 and int(starts[-1]) == tokens
    if not right or not bool((starts[1:] > starts[:-1]).all()):
        refuse(
            path,
            f"have starts that increase from 0 to {tokens}, its number of tokens",
            "other starts",
        )


def shard_slots(path: Any, slots: Tensor, lengths: dict[str, tuple[int, int]]) -> None:
    """Checks the column `slots`. `lengths` has each column's actual and expected length."""
    if int(slots[0]) != 0 or not bool((slots[1:] >= slots[:-1]).all()):
        refuse(path, "have slots that start at 0 and never decrease", "other slots")
    for name, (got, want) in lengths.items():
        if got != want:
            refuse(path, f"have {want} elements in {name}, for {int(slots[-1])} slots", str(got))


def slots_in_shard(path: Any, end: int, slots: int) -> None:
    if end > slots:
        refuse(path, f"have at most {slots} slots in its draws", f"{end}. The shard is damaged")


def in_store(number: int, documents: int) -> None:
    if number >= documents:
        raise ValueError(
            f"the index of a store must hold document numbers below {documents}, got {number}."
            " A shard is damaged."
        )


def ids_in_vocabulary(ids: Tensor, vocab_size: int) -> None:
    if ids.numel() and not 0 <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"ids of a store must be below its vocabulary of {vocab_size}, got {int(ids.max())}."
            " A shard is damaged."
        )


def is_journal(path: Any, start: bytes, magic: bytes) -> None:
    if start[: len(magic)] != magic:
        refuse(
            path,
            f"begin with {magic!r}",
            f"{start!r}. The file is damaged, or was written by another version of logitless."
            " Remove the file and run the capture again to restore its documents",
        )


def same_record(path: Any, same: bool) -> None:
    if not same:
        refuse(path, "keep its documents while its writer is open", "other bytes")


def stray_file(path: Any, form: str) -> NoReturn:
    refuse(
        path,
        f"be named {form}, as a writer names the files of a store",
        "another name, or a folder. Move it out of the folder of the store",
    )


def same_temperature(where: object, stored: float, wanted: float) -> None:
    if stored != wanted:
        refuse(where, f"have been captured at the student's temperature {wanted}", str(stored))


def not_locked(path: Any, owner: str, me: int) -> NoReturn:
    where = "in this process: call its close()" if owner == str(me) else f"of process {owner}"
    refuse(path, "have one writer at a time", f"another open writer {where}")
