"""Reading a store: documents by their number, by their tokens, and batches of them."""

import bisect
import functools
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets
from . import checks as rules
from .format import Columns, Header, decoded, joined, without_slots
from .lookup import Found, Hashes, Index
from .shard import header_of, shards_of
from .verify import Report, verify


class Store:
    """The documents of a store, and what its teacher says of each token.

    Nothing is read before it is asked for, and then from files mapped into memory. A store given
    `tokenizer`, the `tokenizer_hash` of yours, refuses to open if it was made with another.

    >>> store = Store("targets")
    >>> tokens, targets = store[0]  # targets[i] is of the token after tokens[i]
    >>> tokens, targets = store[0, 128:256]  # a part of it
    >>> targets = store.targets_for(input_ids)  # of a batch, shaped like it
    """

    def __init__(self, path: str | os.PathLike, *, tokenizer: str = ""):
        self.path = Path(path)
        self.info: Header = header_of(self.path)
        rules.same_tokenizer(self.path, self.info.tokenizer, tokenizer)
        self.shards = shards_of(self.path, self.info)
        self._first = list(accumulate(map(len, self.shards), initial=0))

    @functools.cached_property
    def index(self) -> Index:
        """Made when a document is first looked for."""
        return Index(self.shards)

    def __len__(self) -> int:
        """Documents."""
        return self._first[-1]

    @property
    def tokens(self) -> int:
        """Of all documents together."""
        return sum(int(shard.starts[-1]) for shard in self.shards)

    @property
    def lengths(self) -> Tensor:
        """Of each document, in tokens."""
        found = [shard.starts.diff() for shard in self.shards]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def __getitem__(self, index: Any) -> tuple[Tensor, SparseTargets]:
        """A document, store[i], or a range of its tokens, store[i, a:b]."""
        i, part = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        i = rules.document_number(i, len(self))
        which = bisect.bisect_right(self._first, i) - 1
        shard = self.shards[which]
        begin, end = shard.span(i - self._first[which])
        a, b = rules.row_range(part, end - begin)
        rows = decoded(shard.rows_of(begin + a, begin + b), self.info)
        return shard.tokens(begin + a, begin + b), rows

    def find(self, tokens: Any) -> int:
        """The number of the document that has these tokens; KeyError where there is none."""
        tokens = rules.tokens(tokens, self.info.vocab_size)
        found = self.index.document(tokens)
        if found is None:
            raise KeyError(f"tokens must be those of a document, got {len(tokens)} that are not.")
        return self._first[self.shards.index(found.shard)] + found.document

    def targets_for(self, input_ids: Tensor, lengths: Any = None) -> SparseTargets:
        """What the teacher says of a batch, in its shape: row t is of the token after input_ids[t].

        A row of the batch holds documents of the store one after the other, each whole or cut off
        at its end, and padding; of padding the teacher says nothing, its slots are masked. With
        `lengths`, of each document in a row, what follows the last is padding: a number a row, or
        several for rows that are packed. Without, documents are found one by one, and what is left
        must be one token, repeated; rows of negative ids are padding. Elsewhere than in the store's
        documents: KeyError.
        """
        rules.input_ids(input_ids)
        flat = input_ids.detach().to("cpu", torch.int64).reshape(-1)
        width = input_ids.shape[-1]
        rows = len(flat) // width if width else 0
        if lengths is None:
            spans = self._packed(flat, rows, width)
        else:
            spans = self._cut(flat, rules.lengths(lengths, rows, width), width)
        found = decoded(self._rows(spans), self.info).reshape(*input_ids.shape)
        return found if input_ids.device.type == "cpu" else found.to(input_ids.device)

    for_tokens = targets_for  # the same, for who looks for it by that name

    def verify(self) -> Report:
        """Whether it is whole, and what it says can be right; false where something is not."""
        return verify(self)

    def _cut(self, flat: Tensor, lengths: list[list[int]], width: int) -> list["Span"]:
        """The documents of lengths that are known, all looked up at once."""
        starts, limits = [], []
        for row, many in enumerate(lengths):
            starts += list(accumulate(many, initial=row * width))[:-1]
            limits += many
        found = self.index.match(flat, Hashes(flat), starts, limits, whole=True)
        for at, limit, one in zip(starts, limits, found, strict=True):
            if one is None:
                row, start = divmod(at, width)
                raise rules.unknown_document(flat[row * width :], row, start, limit)
        return _with_gaps(starts, found, len(flat))

    def _packed(self, flat: Tensor, rows: int, width: int) -> list["Span"]:
        """Documents found one after the other; those that are likely to be there, all at once."""
        hashes = Hashes(flat)
        likely = self.index.likely_starts(hashes, len(flat))
        known = dict(zip(likely, self._longest(flat, hashes, likely, width), strict=True))
        starts, found = [], []
        for row in range(rows):
            at, end = row * width, (row + 1) * width
            while at < end:
                one = known.get(at) or self._longest(flat, hashes, [at], width)[0]
                if one is None:
                    break
                starts.append(at)
                found.append(one)
                at += one.length
            nothing = at == row * width and int(flat[at]) >= 0
            if nothing or bool((flat[at:end] != flat[at : at + 1]).any()):
                raise rules.unknown_document(flat[row * width : end], row, at - row * width, None)
        return _with_gaps(starts, found, len(flat))

    def _longest(self, flat: Tensor, hashes: Hashes, starts: list[int], width: int):
        limits = [width - at % width for at in starts]
        return self.index.match(flat, hashes, starts, limits, whole=False)

    def _rows(self, spans: list["Span"]) -> Columns:
        parts = []
        for found, n in spans:
            if found is None:
                parts.append(without_slots(n, self.info))
            else:
                begin, _ = found.shard.span(found.document)
                parts.append(found.shard.rows_of(begin, begin + n))
        return joined(parts or [without_slots(0, self.info)])

    def __reduce__(self):
        """For the workers of a DataLoader, which map the files themselves."""
        return Store, (self.path,)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, {len(self)} documents, {self.tokens} tokens, {self.info})"
        )


Span = tuple[Found | None, int]  # rows of a document from its begin, or rows of padding


def _with_gaps(starts: Sequence[int], found: Sequence[Found], total: int) -> list[Span]:
    """In the order of the batch, with padding between."""
    spans: list[Span] = []
    place = 0
    for start, one in sorted(zip(starts, found, strict=True), key=lambda pair: pair[0]):
        if start > place:
            spans.append((None, start - place))
        spans.append((one, one.length))
        place = start + one.length
    if place < total:
        spans.append((None, total - place))
    return spans
