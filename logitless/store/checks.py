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


def header(h: Any) -> None:
    whole("vocab_size", h.vocab_size, 1, 2**32)
    _checks.one_of("values", h.values, VALUES)
    # With values="counts", k is the number of draws, which may exceed the vocabulary.
    whole("k", h.k, 1, 2**16 if h.values == "counts" else min(h.vocab_size, 2**16))
    for name in ("teacher", "tokenizer"):
        value = getattr(h, name)
        if not isinstance(value, str) or len(value) > 1000:
            raise TypeError(
                f"{name} must be a string of at most 1000 characters, got {value!r:.100}."
            )
    _option_checks.temperature(h.temperature)


def whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if not least <= value <= most:
        raise ValueError(f"{name} must lie in [{least}, {most}], got {value}.")


def shard_bytes(value: Any) -> None:
    whole("shard_bytes", value, 1, 2**40)


def part(value: Any) -> None:
    whole("part", value, 0, 10**6)


def tokens(t: Any, vocab_size: int) -> Tensor:
    """Returns one document's tokens, a list or a tensor, as contiguous int64 (T,) on the CPU."""
    t = one_document(t)
    _checks._integer("tokens", t)
    if t.dim() != 1 or t.numel() == 0:
        got = tuple(t.shape)
        raise ValueError(f"tokens must be one document, of shape (T,), got {got}.")
    t = t.detach().to("cpu", torch.int64).contiguous()
    low, high = (int(n) for n in t.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"tokens must be ids of a vocabulary of {vocab_size}, got {low if low < 0 else high}."
        )
    return t


def one_document(tokens: Any) -> Tensor:
    if isinstance(tokens, Tensor):
        return tokens
    try:
        return torch.as_tensor(tokens) if len(tokens) else torch.empty(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a document must be a list or a tensor of token ids, got {tokens!r:.50}."
        ) from None


def starts(value: Any, n: int) -> None:
    """Checks the starts of several documents: the first token of each, and then their total n."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise TypeError(f"starts must be a list of at least two numbers, got {value!r:.50}.")
    increase = all(type(b) is int and a < b for a, b in pairwise(value))
    if type(value[0]) is not int or value[0] != 0 or value[-1] != n or not increase:
        raise ValueError(
            f"starts must increase from 0 to {n}, the number of tokens, got {value!r:.50}."
        )


def document(targets: Any, tokens: Tensor, h: Any, kind: type) -> None:
    _checks.is_targets(targets, kind)
    if tuple(targets.shape) != (len(tokens),):
        raise ValueError(
            f"targets must have one row for each of the {len(tokens)} tokens,"
            f" got rows {tuple(targets.shape)}."
        )
    if targets.k > h.k:
        raise ValueError(f"targets must have at most the store's {h.k} slots, got {targets.k}.")
    ids, logprobs = targets.ids, targets.logprobs
    if targets.mask is not None:
        ids = ids.masked_fill(targets.mask == 0, 0)
        logprobs = logprobs.masked_fill(targets.mask == 0, 0)
    low, high = (int(n) for n in ids.aminmax()) if ids.numel() else (0, 0)
    if low < 0 or high >= h.vocab_size:
        got = low if low < 0 else high
        raise ValueError(f"targets.ids must be in the vocabulary of {h.vocab_size}, got {got}.")
    most = float(logprobs.detach().max()) if logprobs.numel() else 0.0
    if not most <= 2**-7:  # 2^-7 allows for 16-bit rounding; `not <=` also refuses NaN
        raise ValueError(f"targets.logprobs must be logarithms of probabilities, got {most}.")
    tail = 0.0 if targets.tail is None else float(targets.tail.detach().max())
    if not tail <= 2**-7:
        raise ValueError(f"targets.tail must be the logarithm of a mass, got {tail}.")


def draws(targets: Any, counts: Tensor, n: int) -> None:
    """Checks that each log-probability is log(count / n), as in the result of `capture_sampled`."""
    if targets.tail is not None:
        raise ValueError(
            'targets.tail must be None for a store with values="counts", got a Tensor.'
        )
    logprobs = targets.logprobs.detach().double()
    off = torch.where(counts > 0, (logprobs - (counts.double() / n).log()).abs(), 0.0)
    if targets.mask is None:
        off = torch.where(counts > 0, off, 1.0)
    else:
        off = torch.where((counts == 0) & (targets.mask != 0), 1.0, off)
    rule = f'be log(count / {n}) in a store with values="counts", as'
    rule += f" capture_sampled(logits, {n}) returns with proposal=1"
    if off.numel() and float(off.max()) > 1e-6:
        got = float(logprobs.flatten()[off.argmax()])
        raise ValueError(f"targets.logprobs must {rule}, got {got:.6g}.")
    total = counts.sum(-1)
    wrong = (total != n) & (total != 0)
    if bool(wrong.any()):
        got = int(total[wrong][0])
        raise ValueError(f"targets.logprobs must {rule}, got counts that add up to {got}.")
    ids = torch.where(
        counts > 0, targets.ids.long(), -1 - torch.arange(targets.k, device=total.device)
    )
    ids = ids.sort(-1).values
    same = ids[..., 1:] == ids[..., :-1]
    if bool(same.any()):
        raise ValueError(
            f"targets.ids must differ within a row, got {int(ids[..., 1:][same][0])} twice."
        )


def row_range(index: Any, n: int) -> tuple[int, int]:
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise IndexError(f"a range of tokens must be a slice of step 1, got {index!r}.")
    begin, end, _ = index.indices(n)
    return begin, max(begin, end)


def document_number(i: Any, n: int) -> int:
    if isinstance(i, bool) or not hasattr(i, "__index__"):
        raise TypeError(f"a document must be selected by its number, got {i!r}.")
    i = int(i)
    if not -n <= i < n:
        raise IndexError(f"a document's number must be in [0, {n}), got {i}.")
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
        raise ValueError(f"order must have the shape (n,), got {tuple(numbers.shape)}.")
    low, high = (int(n) for n in numbers.aminmax()) if len(numbers) else (0, -1)
    if low < 0 or high >= documents:
        got = low if low < 0 else high
        raise ValueError(f"order must list numbers of documents in [0, {documents}), got {got}.")
    return numbers.long().contiguous()


def input_ids(t: Any) -> None:
    _checks._integer("input_ids", t)
    if t.dim() == 0:
        got = tuple(t.shape)
        raise ValueError(f"input_ids must have tokens in its last dimension, got shape {got}.")


def lengths(value: Any, rows: int, width: int) -> list[list[int]]:
    """Returns the lengths of the documents in each row, without those of 0.

    An entry of `value` is the length of a row's document, or a list of lengths. If the batch has
    only one row, `value` may be this list.
    """
    if not isinstance(value, (list, tuple, Tensor)) or (
        isinstance(value, Tensor) and not value.dim()
    ):
        raise TypeError(
            f"lengths must be a list or a tensor with one entry per row, got {value!r:.50}."
        )
    entries = value.tolist() if isinstance(value, Tensor) else list(value)
    if rows == 1 and entries and not isinstance(entries[0], (list, tuple, Tensor)):
        entries = [entries]
    if len(entries) != rows:
        raise ValueError(f"lengths must have an entry for each of {rows} rows, got {len(entries)}.")
    lists = [e if isinstance(e, (list, tuple, Tensor)) else [e] for e in entries]
    lists = [[_length(n) for n in numbers] for numbers in lists]
    for numbers in lists:
        if min(numbers, default=0) < 0 or sum(numbers) > width:
            rule = f"be at least 0 and add up to at most {width} tokens per row"
            raise ValueError(f"lengths must {rule}, got {numbers}.")
    return [[n for n in numbers if n] for numbers in lists]


def _length(n: Any) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"lengths must be whole numbers, got {n!r:.50}.")
    return int(n)


def documents(value: Any, rows: int, sizes: list[list[int]] | None, n: int) -> list[list[int]]:
    """The numbers of the documents in each row, of n in the store.

    `value` has one number per row, or one list per row, or the numbers of all rows one after the
    other if `sizes`, the lengths of the documents in each row, tells how many each row has.
    """
    if not isinstance(value, (list, tuple, Tensor)) or (
        isinstance(value, Tensor) and not value.dim()
    ):
        raise TypeError(f"documents must be a list or a tensor of numbers, got {value!r:.50}.")
    entries = value.tolist() if isinstance(value, Tensor) else list(value)
    if not any(isinstance(e, (list, tuple, Tensor)) for e in entries):
        flat, entries = iter(entries), [entries] if rows == 1 else [[e] for e in entries]
        if sizes is not None and sum(map(len, sizes)) == len(value):
            entries = [[next(flat) for _ in of_row] for of_row in sizes]
    if len(entries) != rows:
        raise ValueError(
            f"documents must have an entry for each of {rows} rows, got {len(entries)}."
        )
    lists = [list(e) if isinstance(e, (list, tuple, Tensor)) else [e] for e in entries]
    for row, numbers in enumerate(lists):
        if sizes is not None and len(numbers) != len(sizes[row]) != 1:
            rule = f"name the {len(sizes[row])} documents whose lengths row {row} has"
            raise ValueError(f"documents must {rule}, got {len(numbers)}.")
    return [[document_number(number, n) for number in numbers] for numbers in lists]


def length_of_document(n: int, whole: int, number: int, row: int) -> None:
    if not n <= whole:
        raise ValueError(
            f"lengths must be at most {whole} for document {number} in row {row}, got {n}."
        )


def other_tokens(number: int, row: int, at: int) -> ValueError:
    return ValueError(
        f"input_ids must have the tokens of document {number} of the store, got another at token"
        f" {at} of row {row}. The number belongs to another store, or the tokens were changed."
    )


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


def share_of_documents(seed: Any, mixed: Any, rank: Any, world: Any) -> None:
    if seed is not None:
        whole("seed", seed, 0, 2**31)
    whole("mixed", mixed, 1, 10**6)
    whole("world", world, 1, 10**6)
    whole("rank", rank, 0, world - 1)


def state_of_documents(state: Any, fixed: dict[str, Any]) -> None:
    names = {"epoch", "position", *fixed}
    if not isinstance(state, Mapping) or state.keys() != names:
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(f"state must have the keys {', '.join(sorted(names))}, got {got}.")
    for name, value in fixed.items():
        if state[name] != value:
            raise ValueError(
                f"state must have been saved with {name} {value!r} to resume here, got"
                f" {state[name]!r}. Resume with the same store, seed, ranks and workers."
            )
    whole("state['epoch']", state["epoch"], 0, 2**31)
    whole("state['position']", state["position"], 0, fixed["documents"])


def some_documents(documents: Any) -> None:
    if not documents:
        raise ValueError("documents must have at least one document, got none.")


def some_stores(stores: list) -> None:
    if not stores:
        raise ValueError("stores must name at least one store, got none.")


def capture(k: Any, h: Any, generator: Any) -> None:
    if k is not None:
        whole("k", k, h.k if h.sampled else 1, h.k)
    if generator is not None and not h.sampled:
        raise ValueError(
            'generator must be None unless the writer has values="counts", got a generator.'
        )


def batch_of_documents(batch: Any) -> None:
    if isinstance(batch, (str, bytes)) or not hasattr(batch, "__iter__"):
        rule = "be a list of documents, input_ids (B, T) or the arguments of a model"
        raise TypeError(f"a batch must {rule}, got {type(batch).__name__}.")


def batch(inputs: dict) -> None:
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"a batch must have input_ids of shape (B, T), got {got}.")
    _checks._integer("input_ids", ids)


def logits_of_batch(logits: Any, ids: Tensor, vocab_size: int) -> None:
    wanted = (*ids.shape, vocab_size)
    got = tuple(getattr(logits, "shape", ()))
    if got[:-1] != wanted[:-1] or got[-1:] < wanted[-1:]:
        raise ValueError(
            f"model must return logits of shape {wanted}, or logits with a larger vocabulary,"
            f" got {got}."
        )


def rows_of_teacher(field: Tensor, sampled: bool) -> None:
    """Checks that each row has a finite largest log-probability, by its field `top` or `draws`.

    A NaN in `top` marks a row without slots, so a row of NaN cannot be stored. With
    values="counts", it has no draws and is refused too.
    """
    fine = (field != 0).any(-1) if sampled else field.isfinite()
    if not bool(fine.all()):
        raise ValueError("model must return rows whose largest logit is finite, got NaN or inf.")


def is_open(closed: bool, is_mine: bool) -> None:
    if closed:
        raise ValueError("a writer must be open to add documents, got a closed writer.")
    if not is_mine:
        raise ValueError(
            "a writer must be used by the process that opened it, got a forked process."
            " Open a writer with its own part= in each process."
        )


# Files. `where` is a path or an address.


def refuse(where: object, rule: str, got: str) -> NoReturn:
    raise ValueError(
        f"{os.fspath(where) if isinstance(where, os.PathLike) else where} must {rule}, got {got}."
    )


def store_fields(where: object, text: str, kind: Any) -> tuple[Any, str]:
    """The header and the id in the text of store.json. `kind` is the class of the header."""
    fields = _object(text)
    if fields is not None and "version" not in fields and "vocab_size" in fields:
        fields["version"] = "an older version"
    version = None if fields is None else fields.pop("version", None)
    if fields is not None and version not in (None, 5):
        refuse(
            where,
            "be a store of version 5 of the format, the only one that can be read",
            f"{version!r:.50}. Capture the teacher again into another folder",
        )
    if fields is None or fields.pop("format", None) != "logitless.store" or version is None:
        refuse(where, "describe a store of the format logitless.store", f"{text!r:.100}")
    store = fields.pop("id", None)
    if not isinstance(store, str) or len(store) != 16 or not store.isalnum():
        refuse(where, "have an id of 16 digits", f"{store!r:.50}")
    return header_of(where, fields, kind), store


def _object(text: str | bytes) -> dict | None:
    try:
        fields = json.loads(text) if len(text) <= HEADER_BYTES else None
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def header_of(where: object, fields: Any, kind: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    fields = _object(fields) if isinstance(fields, (str, bytes)) else fields
    if fields is None or fields.keys() != names:
        refuse(where, f"have a header of {', '.join(sorted(names))}", f"{fields!r:.100}")
    try:
        return kind(**fields)
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
        refuse(
            where,
            f"be used with the tokenizer of its capture, whose hash is {stored!r:.80}",
            f"a tokenizer whose hash is {passed!r:.80}",
        )


def vocabulary(where: object, stored: int, of_student: int | None) -> None:
    if of_student is not None and stored > of_student:
        rule = f"have a vocabulary of at most the model's {of_student}"
        refuse(where, rule, f"{stored}: capture the teacher with vocab_size={of_student}")


def same_temperature(where: object, stored: float, wanted: float) -> None:
    if stored != wanted:
        refuse(where, f"have been captured at the student's temperature {wanted}", str(stored))


def is_store(path: Any) -> None:
    if not os.path.isfile(os.path.join(path, "store.json")):
        refuse(path, "be a folder with a store.json", "none")


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


def stray_file(path: Any, form: str) -> NoReturn:
    refuse(
        path,
        f"be named {form}, as a writer names the files of a store",
        "another name, or a folder. Move it out of the folder of the store",
    )


def not_locked(path: Any, owner: str, me: int) -> NoReturn:
    where = "in this process: call its close()" if owner == str(me) else f"of process {owner}"
    refuse(path, "have one writer at a time", f"another open writer {where}")


# Addresses and the cache.


def connection(attempts: Any, options: Any) -> None:
    whole("attempts", attempts, 1, 1000)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"storage_options must map names to values, got {options!r:.80}.")


def local_options(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} must be left out for a store in a local folder, got {value!r:.80}. An"
                " address of a remote store has the form s3://bucket/targets."
            )


def missing_package(url: str, missing: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{url} must be read with fsspec and its package for this protocol, got an import error"
        f" ({missing.rstrip('.')}). Run pip install 'logitless[remote]', or in a clone"
        " pip install '.[remote]'."
    )


def unknown_protocol(argument: str, url: str, error: Exception) -> ValueError:
    return ValueError(
        f"{argument} must be an address of a protocol of fsspec, got {url!r:.200}"
        f" ({str(error).rstrip('.')})."
    )


def upload_address(url: Any, is_address: bool) -> None:
    if not is_address:
        raise ValueError(
            f"upload must be an address such as s3://bucket/targets, got {url!r:.200}."
        )
    if url.startswith(("http://", "https://")):
        raise ValueError(
            "upload must be an address that fsspec can write, such as s3://bucket/targets, got"
            f" {url!r}. http and https can only be read."
        )


def missing(where: str) -> FileNotFoundError:
    return FileNotFoundError(f"{where} must exist, got no file.")


def missing_listed(error: FileNotFoundError) -> FileNotFoundError:
    """The error for a missing file of an open store."""
    return FileNotFoundError(
        f"{error} store.index listed this file when the store was opened. If the store has changed"
        " since it was opened, open it again."
    )


def failed(where: str, done: str, attempts: int, error: Any) -> OSError:
    text = str(error).rstrip(".") or "no message"
    return OSError(
        f"{where} must be {done} in {attempts} attempts, got {type(error).__name__}: {text}."
    )


def cache_bytes(limit: Any, largest: int = 1) -> None:
    whole("cache_bytes", limit, 1, 2**60)
    if limit < largest:
        raise ValueError(
            f"cache_bytes must be at least {largest}, the size of the store's largest file,"
            f" got {limit}."
        )


def cache_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"cache must be a folder, got {str(folder)!r}.") from None


def own_address(url: str, same: bool) -> None:
    if not same:
        raise ValueError(f"upload must be an address without another store, got {url}.")


def uploaded(url: str, errors: dict[str, Exception]) -> None:
    if not errors:
        return
    names = list(errors)
    error = errors[names[0]]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    why = f"{type(error).__name__}: {str(error).rstrip('.')}"
    raise OSError(
        f"{url} must have all shards of the store, got an upload without {shown} ({why}). The local"
        " store is complete. Open a writer again with the same arguments to upload the rest."
    ) from error


def no_remote_store(url: str, name: str) -> FileNotFoundError:
    return FileNotFoundError(f"{url} must be the folder of a store, got no {name}.")


# Training, with a store or with a teacher model.


def labels_of(labels: Any, targets: Any) -> None:
    _checks._integer("labels", labels)
    if tuple(labels.shape) != tuple(targets.shape):
        raise ValueError(
            f"labels must have the shape of targets, {tuple(targets.shape)},"
            f" got {tuple(labels.shape)}. Do not shift the labels, because distill_loss shifts"
            " them."
        )


def own_loss(compute_loss_func: Any) -> None:
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func must be None, because DistillTrainer computes the loss itself, got"
            f" {compute_loss_func!r:.80}. For your own loss, use Trainer with"
            " ll.store.distill_loss."
        )


def trainer_arguments(args: Any) -> None:
    """Refuses TrainingArguments that would have no effect, or would replace the loss."""
    if args is None:
        return
    if args.label_smoothing_factor:
        raise ValueError(
            "label_smoothing_factor must be 0, because DistillTrainer's cross-entropy has no label"
            f" smoothing, got {args.label_smoothing_factor}. The teacher's distribution replaces"
            " label smoothing."
        )
    if getattr(args, "use_liger_kernel", False):
        raise ValueError(
            "use_liger_kernel must be False, because Liger's models return no logits in training,"
            " got True. DistillTrainer fuses the head itself."
        )


def batch_of_trainer(inputs: Any) -> None:
    for name in ("input_ids", "labels"):
        if inputs.get(name) is None:
            raise ValueError(
                f"a batch must have {name}, got {sorted(inputs)}. Use a data_collator that"
                " returns input_ids and labels, such as"
                " DataCollatorForLanguageModeling(tokenizer, mlm=False)."
            )


def one_teacher(store: Any, teacher: Any) -> None:
    if (store is None) == (teacher is None):
        got = "neither" if store is None else "both"
        raise ValueError(f"a teacher must be given as store= or as teacher=, got {got}.")


def divergences(divergence: Any) -> dict[str, float]:
    """{name: weight} of the divergences of support="whole", a name or a mapping."""
    if not isinstance(divergence, Mapping):
        _option_checks.check(divergence=divergence)
        return {divergence: 1.0}
    if not divergence:
        raise ValueError("divergence must name at least one divergence, got an empty mapping.")
    for name, weight in divergence.items():
        _option_checks.check(divergence=name)
        _option_checks.factor(f"divergence[{name!r}]", weight)
    return dict(divergence)


def sparse_options(divergence: Any, support: Any) -> None:
    _checks.one_of("support", support, (*_option_checks.SUPPORTS, "whole"))
    if isinstance(divergence, Mapping):
        raise ValueError(
            "divergence must be one name, because only support='whole' adds several divergences,"
            f" got {divergence!r:.100}."
        )
    _option_checks.check(divergence=divergence)


def live_teacher(store: Any, support: Any, on_policy: Any, generation_config: Any) -> None:
    _option_checks.fraction("on_policy", on_policy)
    if store is not None and support == "whole":
        raise ValueError(
            "support must not be 'whole' with store=, because a store has only the top-k of each"
            " row, got 'whole'. Pass the teacher model as teacher=."
        )
    if store is not None and on_policy:
        raise ValueError(
            "on_policy must be 0 with store=, because a store has no targets for sampled tokens,"
            f" got {on_policy}. Pass the teacher model as teacher=."
        )
    if generation_config is not None and not on_policy:
        raise ValueError(
            "generation_config must be None without on_policy, because nothing is sampled, got"
            f" on_policy={on_policy}."
        )


def support_of_store(support: Any, sampled: bool) -> None:
    if sampled and support in ("tail", "renorm"):
        raise ValueError(
            'support must be "truncate" or "renorm_teacher" for a store with values="counts",'
            f" because sampled targets have no tail, got {support!r}."
        )


def whole_vocabulary(student: int | None, teacher: int | None) -> None:
    if student is not None and teacher is not None and teacher < student:
        raise ValueError(
            f"teacher must return at least as many logits per token as the student ({student})"
            f" with support='whole', got {teacher}."
        )


# The output of inference servers.


def slots(k: Any) -> None:
    whole("k", k, 1, 2**16)


def is_choice(choice: Any, n: int) -> None:
    whole("choice", choice, 0, n - 1)


def completions(name: str, several: Any) -> None:
    if not isinstance(several, (list, tuple)) or not several:
        got = "none" if isinstance(several, (list, tuple)) else type(several).__name__
        raise ValueError(f"output must have a list of completions in its {name}, got {got}.")


def is_list(name: str, value: Any) -> Any:
    if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__getitem__"):
        raise ValueError(f"{name} must be a list, got {type(value).__name__}.")
    return value


def is_entry(name: str, place: int, value: Any) -> None:
    if not hasattr(value, "items"):
        got = f"{type(value).__name__} at position {place}"
        raise ValueError(f"{name} must map ids to log-probabilities, got {got}.")


def is_pair(name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise ValueError(f"{name} must have lists of (logprob, id, text), got {value!r:.50}.")


def same_number(name: str, got: int, tokens: int) -> None:
    if got != tokens:
        raise ValueError(f"{name} must have an entry for each of {tokens} tokens, got {got}.")


def token_id(name: str, value: Any) -> int:
    if isinstance(value, str):
        raise ValueError(
            f"{name} must name tokens by their ids, got {value!r:.50}. A server returns ids if the"
            " request sets return_tokens_as_token_ids=True."
        )
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise ValueError(f"{name} must have whole numbers as token ids, got {value!r:.50}.")
    return int(value)


def below_2_63(name: str) -> NoReturn:
    raise ValueError(f"{name} must have token ids below 2^63, got a larger number.")


def logprob(name: str, place: int, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or math.isnan(value):
        raise ValueError(
            f"{name} must hold logarithms of probabilities, got {value!r:.50} at position {place}."
        )
    return float(value)


def server_output(prompt: Any, generated: Any, completion: bool) -> None:
    if completion and (generated.entries is None or generated.tokens is None):
        wanted = f"{generated.name} and the ids of its completion"
        wanted = wanted if prompt.entries is not None else f"{prompt.name}, or {wanted}"
        raise ValueError(
            f"output must have {wanted}, got an output without them. Request log-probabilities from"
            " the server. vLLM returns at most 20 log-probabilities per token, unless vLLM is"
            " started with max_logprobs=k."
        )
    if not completion and prompt.entries is None:
        raise ValueError(f"output must have {prompt.name} with completion=False, got none.")
    if prompt.tokens is None:
        raise ValueError(
            "output must have the prompt_token_ids of its prompt, got none. Pass the ids as"
            " `tokens`, or add prompt_token_ids to the JSON of the output."
        )


def entries(name: str, tokens: list[int], rows: list | None, is_prompt: bool) -> None:
    """Checks that every token has log-probabilities, except the first token of a prompt."""
    if rows is None:
        return
    if not tokens or len(rows) != len(tokens):
        raise ValueError(
            f"{name} must have an entry for each of {len(tokens)} tokens, got {len(rows)}."
            " Request entries for all tokens, starting with the first."
        )
    if is_prompt and rows[0] is not None:
        raise ValueError(
            f"{name} must begin with None, because the first token has no distribution, got a"
            " distribution. The entries are shifted by one token."
        )
    for place in range(int(is_prompt), len(tokens)):
        token, row = tokens[place], rows[place]
        if row is None:
            raise ValueError(f"{name} must have a distribution at position {place}, got None.")
        if token not in row:
            raise ValueError(
                f"{name} must include token {token}, the token of the text at position {place}, got"
                f" {list(row)[:5]}. The entries belong to another text, or the entries are shifted."
            )
        if max(row.values()) > 1e-3:
            raise ValueError(
                f"{name} must hold logarithms of probabilities, got {max(row.values())} at position"
                f" {place}."
            )


def masses(name: str, mass: Tensor) -> None:
    if bool((mass > 1.01).any()):
        place = int((mass > 1.01).nonzero()[0])
        raise ValueError(
            f"{name} must have probabilities that add up to at most 1 at each position, got"
            f" {float(mass[place]):.4g} after the token at position {place}. Are the entries"
            " probabilities instead of logarithms?"
        )


# Parquet files.


def pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "parquet files must be written and read with pyarrow, got an import error"
            f" ({str(error).rstrip('.')}). Run pip install 'logitless[parquet]', or in a clone"
            " pip install '.[parquet]'."
        ) from error
    return pyarrow, pyarrow.parquet


def no_parquet(folder: Path) -> None:
    for path in sorted(folder.glob("*.parquet")):
        refuse(folder, "have no parquet files before the export", path.name)
