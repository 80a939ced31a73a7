"""Checks the arguments of `Writer`, `Store`, `capture` and the training functions.

Errors have the form `<argument> must <rule>, got <value>.`; file_checks.py checks files, and
server_checks.py the output of inference servers.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core import option_checks as _option_checks
from ..core import tensor_checks as _checks

VALUES = ("u8", "f16", "counts")
ALIGNMENTS = ("next",)
SHOWN = 8  # number of tokens that an error message shows


def header(h: Any) -> None:
    whole("vocab_size", h.vocab_size, 1, 2**32)
    _checks.one_of("values", h.values, VALUES)
    # With values="counts", k is the number of draws, which may exceed the vocabulary.
    whole("k", h.k, 1, 2**16 if h.values == "counts" else min(h.vocab_size, 2**16))
    _checks.one_of("alignment", h.alignment, ALIGNMENTS)
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


def rank(value: Any) -> None:
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


def starts(value: Any, n: int) -> None:
    """Checks the starts of several documents: the first token of each, and then their total n."""
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise TypeError(f"starts must be a list of at least two numbers, got {value!r:.50}.")
    increase = all(type(b) is int and a < b for a, b in pairwise(value))
    if type(value[0]) is not int or value[0] != 0 or value[-1] != n or not increase:
        raise ValueError(
            f"starts must increase from 0 to {n}, the number of tokens, got {value!r:.50}."
        )


def one_document(tokens: Any) -> Tensor:
    if isinstance(tokens, Tensor):
        return tokens
    try:
        return torch.as_tensor(tokens) if len(tokens) else torch.empty(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a document must be a list or a tensor of token ids, got {tokens!r:.50}."
        ) from None


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


def unknown_document(tokens: Tensor, row: int, start: int, length: int | None) -> KeyError:
    """The error for tokens of a batch row that match no document. Without lengths, it is None."""
    here = tokens[start : start + min(SHOWN, length or SHOWN)].tolist()
    here = [token for token in here if token >= 0] or here  # negative ids are padding
    if start == 0 and length is None and len(here) > 1 and len(set(here)) == 1:
        advice = "Padding comes after the documents of a row."
    elif start and length is None:
        advice = "Capture separators and other tokens between documents as part of a document."
    else:
        advice = (
            "Tokenise as the capture did, including special tokens, and begin at a document's"
            " first token."
        )
    extent = "" if length is None else f" {length} tokens long,"
    return KeyError(
        "input_ids must hold documents of the store, whole or cut off at their end, got"
        f" {here},{extent} at token {start} of row {row}. {advice} A document that was not captured"
        " has no targets. DistillTrainer(eval_teacher=False) evaluates documents without targets."
    )


def documents(seed: Any, mixed: Any, rank: Any, world: Any) -> None:
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


def rows_of_teacher(rows: dict[str, Tensor]) -> None:
    """Checks that each row has a finite largest log-probability.

    A NaN in the column `top` marks a row without slots, so a row of NaN cannot be stored. With
    values="counts", it has no draws and is refused too.
    """
    fine = rows["top"].isfinite() if "top" in rows else (rows["draws"] != 0).any(-1)
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
