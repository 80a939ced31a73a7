"""Checks of arguments, files, addresses and the output of inference servers.

Errors have the form `<argument or file> must <rule>, got <value>.`
"""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core import option_checks as _option_checks
from ..core import tensor_checks as _checks

VALUES = ("u8", "f16", "counts")
SHOWN = 8  # number of tokens that an error message shows
HEADER_BYTES = 1 << 16
# Errors of the local disk, after which a request to a remote store is not repeated.
LOCAL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE}


def refuse(
    what: object,
    rule: str,
    got: object,
    kind: type[Exception] = ValueError,
    cause: Exception | None = None,
) -> NoReturn:
    """Raises the error that `what`, an argument, a file or an address, breaks a rule."""
    raise kind(f"{what} must {rule}, got {got}.") from cause


def header(h: Any) -> None:
    whole("vocab_size", h.vocab_size, 1, 2**32)
    _checks.one_of("values", h.values, VALUES)
    # With values="counts", k is the number of draws, which may exceed the vocabulary.
    whole("k", h.k, 1, 2**16 if h.values == "counts" else min(h.vocab_size, 2**16))
    for name in ("teacher", "tokenizer"):
        value = getattr(h, name)
        if not isinstance(value, str) or len(value) > 1000:
            refuse(name, "be a string of at most 1000 characters", f"{value!r:.100}", TypeError)
    _option_checks.temperature(h.temperature)


def whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(name, "be a whole number", repr(value), TypeError)
    if not least <= value <= most:
        refuse(name, f"lie in [{least}, {most}]", value)


def below(n: int, t: Tensor, what: str, rule: str) -> None:
    """Checks that all numbers are in [0, n)."""
    low, high = (int(x) for x in t.aminmax()) if t.numel() else (0, -1)
    if low < 0 or high >= n:
        refuse(what, rule, low if low < 0 else high)


def tokens(t: Any, vocab_size: int) -> Tensor:
    """Returns one document's tokens, a list or a tensor, as contiguous int64 (T,) on the CPU."""
    t = one_document(t)
    _checks._integer("tokens", t)
    if t.dim() != 1 or t.numel() == 0:
        refuse("tokens", "be one document, of shape (T,)", tuple(t.shape))
    t = t.detach().to("cpu", torch.int64).contiguous()
    below(vocab_size, t, "tokens", f"be ids of a vocabulary of {vocab_size}")
    return t


def one_document(tokens: Any) -> Tensor:
    if isinstance(tokens, Tensor):
        return tokens
    try:
        return torch.as_tensor(tokens) if len(tokens) else torch.empty(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        rule = "be a list or a tensor of token ids"
        refuse("a document", rule, f"{tokens!r:.50}", TypeError)


def starts(value: Any, n: int) -> None:
    """Checks the starts of several documents: the first token of each, and then their total n."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        refuse("starts", "be a list of at least two numbers", f"{value!r:.50}", TypeError)
    increase = all(type(b) is int and a < b for a, b in pairwise(value))
    if type(value[0]) is not int or value[0] != 0 or value[-1] != n or not increase:
        refuse("starts", f"increase from 0 to {n}, the number of tokens", f"{value!r:.50}")


def document(targets: Any, tokens: Tensor, h: Any, kind: type) -> None:
    _checks.is_targets(targets, kind)
    shape, n = tuple(targets.shape), len(tokens)
    if shape != (n,):
        refuse("targets", f"have one row for each of the {n} tokens", f"rows {shape}")
    if targets.k > h.k:
        refuse("targets", f"have at most the store's {h.k} slots", targets.k)
    ids, logprobs = targets.ids, targets.logprobs
    if targets.mask is not None:
        ids = ids.masked_fill(targets.mask == 0, 0)
        logprobs = logprobs.masked_fill(targets.mask == 0, 0)
    below(h.vocab_size, ids, "targets.ids", f"be in the vocabulary of {h.vocab_size}")
    most = float(logprobs.detach().max()) if logprobs.numel() else 0.0
    if not most <= 2**-7:  # 2^-7 allows for 16-bit rounding; `not <=` also refuses NaN
        refuse("targets.logprobs", "be logarithms of probabilities", most)
    tail = 0.0 if targets.tail is None else float(targets.tail.detach().max())
    if not tail <= 2**-7:
        refuse("targets.tail", "be the logarithm of a mass", tail)


def draws(targets: Any, counts: Tensor, n: int) -> None:
    """Checks that each log-probability is log(count / n), as in the result of `capture_sampled`."""
    if targets.tail is not None:
        refuse("targets.tail", 'be None for a store with values="counts"', "a Tensor")
    kept = torch.ones_like(counts) if targets.mask is None else targets.mask != 0
    logprobs = targets.logprobs.detach().double()
    off = torch.where(counts > 0, (logprobs - (counts.double() / n).log()).abs(), kept.double())
    rule = f'be log(count / {n}) in a store with values="counts", as'
    rule += f" capture_sampled(logits, {n}) returns with proposal=1"
    if off.numel() and float(off.max()) > 1e-6:
        refuse("targets.logprobs", rule, f"{float(logprobs.flatten()[off.argmax()]):.6g}")
    total = counts.sum(-1)
    wrong = (total != n) & (total != 0)
    if bool(wrong.any()):
        refuse("targets.logprobs", rule, f"counts that add up to {int(total[wrong][0])}")
    others = -1 - torch.arange(targets.k, device=total.device)  # for slots without draws
    ids = torch.where(counts > 0, targets.ids.long(), others).sort(-1).values
    same = ids[..., 1:] == ids[..., :-1]
    if bool(same.any()):
        refuse("targets.ids", "differ within a row", f"{int(ids[..., 1:][same][0])} twice")


def document_number(i: Any, n: int) -> int:
    if isinstance(i, bool) or not hasattr(i, "__index__"):
        refuse("a document", "be selected by its number", repr(i), TypeError)
    i = int(i)
    if not -n <= i < n:
        refuse("a document's number", f"be in [0, {n})", i, IndexError)
    return i % n


def order(numbers: Any, documents: int, ahead: Any, mixed: Any) -> Tensor | None:
    whole("ahead", ahead, 1, 1000)
    whole("mixed", mixed, 1, 10**6)
    if numbers is None:
        return None
    numbers = numbers if isinstance(numbers, Tensor) else torch.tensor([*numbers], device="cpu")
    numbers = numbers.detach().cpu()
    numbers = numbers if numbers.numel() else numbers.long()
    _checks._integer("order", numbers)
    if numbers.dim() != 1:
        refuse("order", "have the shape (n,)", tuple(numbers.shape))
    below(documents, numbers, "order", f"list numbers of documents in [0, {documents})")
    return numbers.long().contiguous()


def lengths(value: Any, rows: int, width: int) -> list[list[int]]:
    """Returns the lengths of the documents in each row, without those of 0.

    An entry of `value` is the length of a row's document, or a list of lengths. If the batch has
    only one row, `value` may be this list.
    """
    entries = _entries("lengths", value, "with one entry per row")
    if rows == 1 and entries and not isinstance(entries[0], SEVERAL):
        entries = [entries]
    lists = [[_length(n) for n in numbers] for numbers in _by_row("lengths", entries, rows)]
    for numbers in lists:
        if min(numbers, default=0) < 0 or sum(numbers) > width:
            refuse(
                "lengths", f"be at least 0 and add up to at most {width} tokens per row", numbers
            )
    return [[n for n in numbers if n] for numbers in lists]


def _length(n: Any) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        refuse("lengths", "be whole numbers", f"{n!r:.50}", TypeError)
    return int(n)


def documents(value: Any, rows: int, sizes: list[list[int]] | None, n: int) -> list[list[int]]:
    """The numbers of the documents in each row, of n in the store.

    `value` has one number per row, or one list per row, or the numbers of all rows one after the
    other if `sizes`, the lengths of the documents in each row, tells how many each row has.
    """
    entries = _entries("documents", value, "of numbers")
    if not any(isinstance(e, SEVERAL) for e in entries):
        flat = iter(entries)
        if sizes is not None and sum(map(len, sizes)) == len(entries):
            entries = [[next(flat) for _ in of_row] for of_row in sizes]
        elif rows == 1:
            entries = [entries]
    lists = _by_row("documents", entries, rows)
    for row, numbers in enumerate(lists):
        if sizes is not None and len(numbers) != len(sizes[row]) != 1:
            rule = f"name the {len(sizes[row])} documents whose lengths row {row} has"
            refuse("documents", rule, len(numbers))
    return [[document_number(number, n) for number in numbers] for numbers in lists]


def input_ids(t: Any) -> None:
    _checks._integer("input_ids", t)
    if t.dim() == 0:
        refuse("input_ids", "have tokens in its last dimension", "shape ()")


SEVERAL = (list, tuple, Tensor)


def _entries(name: str, value: Any, of: str) -> list:
    if not isinstance(value, SEVERAL) or (isinstance(value, Tensor) and not value.dim()):
        refuse(name, f"be a list or a tensor {of}", f"{value!r:.50}", TypeError)
    return value.tolist() if isinstance(value, Tensor) else list(value)


def _by_row(name: str, entries: list, rows: int) -> list[list]:
    if len(entries) != rows:
        refuse(name, f"have an entry for each of {rows} rows", len(entries))
    return [list(e) if isinstance(e, SEVERAL) else [e] for e in entries]


def other_tokens(number: int, row: int, at: int) -> NoReturn:
    got = f"another at token {at} of row {row}"
    advice = "The number belongs to another store, or the tokens were changed"
    refuse("input_ids", f"have the tokens of document {number} of the store", f"{got}. {advice}")


def unknown_document(tokens: Tensor, row: int, start: int, length: int | None) -> KeyError:
    """The error for tokens of a batch row that match no document. Without lengths, it is None."""
    here = tokens[start : start + min(SHOWN, length or SHOWN)].tolist()
    here = [token for token in here if token >= 0] or here  # negative ids are padding
    if start == 0 and length is None and len(here) > 1 and len(set(here)) == 1:
        advice = "Padding comes after the document of a row."
    elif length is None:
        advice = (
            "A row that several documents are packed into needs `lengths` or `documents`; a"
            " collator that packs should return position_ids."
        )
    else:
        advice = "A document that is cut off is found by its first 32 tokens, or by `documents`."
    extent = "" if length is None else f" {length} tokens long,"
    return KeyError(
        "input_ids must hold documents of the store, whole or cut off at their end, got"
        f" {here},{extent} at token {start} of row {row}. {advice} Tokenise as the capture did,"
        " including special tokens, and begin at a document's first token. A document that was not"
        " captured has no targets; DistillTrainer(eval_teacher=False) evaluates such documents."
    )


def state_of_documents(state: Any, fixed: dict[str, Any]) -> None:
    names = {"epoch", "position", *fixed}
    if not isinstance(state, Mapping) or state.keys() != names:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        refuse("state", f"have the keys {', '.join(sorted(names))}", got)
    for name, value in fixed.items():
        if state[name] != value:
            advice = "Resume with the same store, seed, ranks and workers"
            rule = f"have been saved with {name} {value!r} to resume here"
            refuse("state", rule, f"{state[name]!r}. {advice}")
    whole("state['epoch']", state["epoch"], 0, 2**31)
    whole("state['position']", state["position"], 0, fixed["documents"])


def capture(k: Any, h: Any, generator: Any) -> None:
    if k is not None:
        whole("k", k, h.k if h.sampled else 1, h.k)
    if generator is not None and not h.sampled:
        refuse("generator", 'be None unless the writer has values="counts"', "a generator")


def batch(inputs: dict) -> None:
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        refuse("a batch", "have input_ids of shape (B, T)", got)
    _checks._integer("input_ids", ids)


def logits_of_batch(logits: Any, ids: Tensor, vocab_size: int) -> None:
    wanted = (*ids.shape, vocab_size)
    got = tuple(getattr(logits, "shape", ()))
    if got[:-1] != wanted[:-1] or got[-1:] < wanted[-1:]:
        refuse("model", f"return logits of shape {wanted}, or logits with a larger vocabulary", got)


def rows_of_teacher(field: Tensor) -> None:
    """Checks that each row has a finite largest log-probability, by its field `top` or `draws`.

    A NaN in `top` marks a row without slots, so a row of NaN cannot be stored. With
    values="counts", it has no draws and is refused too.
    """
    fine = field.isfinite() if field.is_floating_point() else (field != 0).any(-1)
    if not bool(fine.all()):
        refuse("model", "return rows whose largest logit is finite", "NaN or inf")


def is_open(closed: bool, is_mine: bool) -> None:
    if closed:
        refuse("a writer", "be open to add documents", "a closed writer")
    if not is_mine:
        advice = "Open a writer with its own part= in each process"
        refuse("a writer", "be used by the process that opened it", f"a forked process. {advice}")


# Files. `where` is a path or an address.


def store_fields(where: object, text: str, kind: Any) -> tuple[Any, str]:
    """The header and the id in the text of store.json. `kind` is the class of the header."""
    try:
        fields = json.loads(text) if len(text) <= HEADER_BYTES else None
    except (ValueError, RecursionError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    version = fields.pop("version", "an older version" if "vocab_size" in fields else None)
    if version not in (None, 5):
        rule = "be a store of version 5 of the format, the only one that can be read"
        refuse(where, rule, f"{version!r:.50}. Capture the teacher again into another folder")
    if version is None or fields.pop("format", None) != "logitless.store":
        refuse(where, "describe a store of the format logitless.store", f"{text!r:.100}")
    store = fields.pop("id", None)
    if not isinstance(store, str) or len(store) != 16 or not store.isalnum():
        refuse(where, "have an id of 16 digits", f"{store!r:.50}")
    names = sorted(field.name for field in dataclasses.fields(kind))
    if sorted(fields) != names:
        refuse(where, f"have a header of {', '.join(names)}", f"{fields!r:.100}")
    try:
        return kind(**fields), store
    except (TypeError, ValueError) as error:
        refuse(where, "have a valid header", f"an error: {error}".removesuffix("."))


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
        rule = f"be used with the tokenizer of its capture, whose hash is {stored!r:.80}"
        refuse(where, rule, f"a tokenizer whose hash is {passed!r:.80}")


def listed_file(path: Path, size: int) -> None:
    advice = "If you have removed the shard, call ll.store.recover with its folder"
    try:
        got = path.stat().st_size
    except FileNotFoundError:
        refuse(path, "exist, because store.index lists it", f"no file. {advice}")
    if got != size:
        refuse(path, f"have the {size} bytes that store.index lists", f"{got}. {MEND}")


MEND = "To mend the store, remove the file, call ll.store.recover, and run the capture again"


def damaged(path: object, place: str) -> NoReturn:
    rule = "have the bytes it was written with (CRC-32)"
    refuse(path, rule, f"other bytes {place}. {MEND}")


def end_of_shard(path: object, right: bool) -> None:
    if not right:
        refuse(path, "end as a finished shard", f"another end. {MEND}")


def size_of_file(where: object, got: int, wanted: int) -> None:
    if got != wanted:
        refuse(where, f"have {wanted} bytes", str(got))


def lookup_bytes(where: object, right: bool) -> None:
    if not right:
        rule = "have the bytes it was written with (CRC-32)"
        refuse(where, rule, "other bytes. For a local store, call ll.store.recover with its folder")


def not_locked(path: Any, owner: str, me: int) -> NoReturn:
    where = "in this process: call its close()" if owner == str(me) else f"of process {owner}"
    refuse(path, "have one writer at a time", f"another open writer {where}")


# Addresses and the cache.


def local_options(given: dict[str, Any]) -> None:
    advice = "An address of a remote store has the form s3://bucket/targets"
    for name, value in given.items():
        if value is not None:
            rule = "be left out for a store in a local folder"
            refuse(name, rule, f"{value!r:.80}. {advice}")


def missing_package(what: str, rule: str, extra: str, error: Exception) -> NoReturn:
    install = f"pip install 'logitless[{extra}]', or in a clone pip install '.[{extra}]'"
    got = f"an import error ({str(error).rstrip('.')}). Run {install}"
    refuse(what, rule, got, ModuleNotFoundError, error)


def upload_address(url: Any, is_address: bool) -> None:
    if not is_address:
        refuse("upload", "be an address such as s3://bucket/targets", f"{url!r:.200}")
    if url.startswith(("http://", "https://")):
        rule = "be an address that fsspec can write, such as s3://bucket/targets"
        refuse("upload", rule, f"{url!r}. http and https can only be read")


def failed(
    where: str, done: str, attempts: int, error: Any, kind: type[OSError] = OSError
) -> OSError:
    got = f"{type(error).__name__}: {str(error).rstrip('.') or 'no message'}"
    return kind(f"{where} must be {done} in {attempts} attempts, got {got}.")


def cache_bytes(limit: Any, largest: int = 1) -> None:
    whole("cache_bytes", limit, 1, 2**60)
    if limit < largest:
        refuse("cache_bytes", f"be at least {largest}, the size of the store's largest file", limit)


def uploaded(url: str, errors: dict[str, Exception]) -> None:
    if not errors:
        return
    names = list(errors)
    error = errors[names[0]]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    got = f"an upload without {shown} ({type(error).__name__}: {str(error).rstrip('.')})"
    advice = "Open a writer again with the same arguments to upload the rest"
    got = f"{got}. The local store is complete. {advice}"
    refuse(url, "have all shards of the store", got, OSError, error)


# Training.


def labels_of(labels: Any, targets: Any) -> None:
    _checks._integer("labels", labels)
    if tuple(labels.shape) != tuple(targets.shape):
        advice = "Do not shift the labels, because distill_loss shifts them"
        rule = f"have the shape of targets, {tuple(targets.shape)}"
        refuse("labels", rule, f"{tuple(labels.shape)}. {advice}")


# The output of inference servers.


def is_list(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__getitem__"):
        refuse(name, "be a list", type(value).__name__)
    return value


def token_id(name: str, value: Any) -> int:
    if isinstance(value, str):
        advice = "A server returns ids if the request sets return_tokens_as_token_ids=True"
        refuse(name, "name tokens by their ids", f"{value!r:.50}. {advice}")
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        refuse(name, "have whole numbers as token ids", f"{value!r:.50}")
    return int(value)


def logprob(name: str, place: int, value: Any, most: float = math.inf) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value) or value > most:
        refuse(name, "hold logarithms of probabilities", f"{value!r:.50} at position {place}")
    return float(value)


def masses(name: str, mass: Tensor) -> None:
    """Checks the sums of the probabilities of all rows."""
    if bool((mass > 1.01).any()):
        place = int((mass > 1.01).nonzero()[0])
        got = f"{float(mass[place]):.4g} after the token at position {place}"
        advice = "Are the entries probabilities instead of logarithms?"
        rule = "have probabilities that add up to at most 1 at each position"
        raise ValueError(f"{name} must {rule}, got {got}. {advice}")


# Parquet files.


def pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        missing_package("parquet files", "be written and read with pyarrow", "parquet", error)
    return pyarrow, pyarrow.parquet
