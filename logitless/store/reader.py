"""Reads the documents of a store by their numbers, and the targets of batches by their tokens."""

import bisect
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets
from . import checks, file_checks, remote_checks
from .cache import Cache
from .device import on_cpu
from .folder import header_of
from .format import Header
from .index import Hashes
from .lookup import Index, Match
from .prefetch import without_repetitions
from .remote import Remote, is_address
from .remote_shard import RemoteFiles
from .rows import Pieces, decoding_of, empty_pieces, table_of
from .shard import Shard, shards_of
from .verify import Report, verify

# A document likely starts where the hash of the next 16 or 4 tokens is in the index.
LIKELY = (16, 4)
SLOTS = 1 << 19  # number of slots that are read and decoded at once


class Store:
    """Reads the documents of a store, and the teacher's distribution of each next token.

    `path` is a local folder, or an address such as s3://bucket/targets. Rows are read from the
    files only when they are needed. To refuse a store that was captured with another tokenizer,
    pass the `tokenizer_hash` of yours as `tokenizer`.

    From an address, whole shards are fetched into the folder `cache`, at most `cache_bytes` bytes
    (64 GiB by default). `cache` is by default the folder that the environment variable
    LOGITLESS_CACHE names, or ~/.cache/logitless. A request gets up to `attempts` attempts (5), and
    one over http or https fails if the server sends nothing for `timeout` seconds (60).
    `storage_options` are the keyword arguments of fsspec's file system, or `{"headers": {...}}` for
    http and https.

    >>> store = Store("targets")
    >>> tokens, targets = store[0]  # targets[i] describes the token after tokens[i]
    >>> tokens, targets = store[0, 128:256]  # a range of its tokens
    >>> targets = store.targets_for(input_ids)  # a batch; targets have the shape of input_ids
    """

    @on_cpu
    def __init__(
        self,
        path: str | os.PathLike,
        *,
        tokenizer: str = "",
        cache: str | os.PathLike | None = None,
        cache_bytes: int | None = None,
        timeout: float | None = None,
        attempts: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ):
        self._arguments: dict[str, Any] = {
            "cache": cache, "cache_bytes": cache_bytes, "timeout": timeout, "attempts": attempts,
            "storage_options": storage_options,
        }  # fmt: skip
        self.path = path if is_address(path) else Path(path)
        self._files = _remote_files(path, **self._arguments) if is_address(path) else None
        if self._files is None:
            remote_checks.local_options(self._arguments)
        self.info: Header = self._files.listing.header if self._files else header_of(self.path)
        file_checks.same_tokenizer(self.path, self.info.tokenizer, tokenizer)
        self.shards = self._files.shards() if self._files else shards_of(self.path, self.info)
        self._first = list(accumulate(map(len, self.shards), initial=0))

    @functools.cached_property
    def index(self) -> Index:
        """The index of all shards, which is built at the first lookup."""
        return Index(self.shards)

    def prefetch(self, order: Any = None, *, ahead: int = 2, mixed: int = 1) -> None:
        """Fetches shards of a remote store in the background, before their rows are read.

        `order` lists the numbers of the documents in the order in which you will read them, from
        first to last by default. While you read a shard, the next `ahead` shards are fetched, or
        fewer if the cache has no room for (ahead + mixed); `mixed` is the number of shards whose
        documents are shuffled together. Shards read in ascending order are fetched two ahead even
        without this call. For a local store, only the arguments are checked.
        """
        order = checks.order(order, len(self), ahead, mixed)
        if self._files is not None:
            if order is not None:
                firsts = torch.tensor(self._first[1:])
                order = without_repetitions(torch.bucketize(order, firsts, right=True))
            self._files.prefetch.follow(order, ahead, mixed)

    def __len__(self) -> int:
        """The number of documents."""
        return self._first[-1]

    @property
    def digest(self) -> str:
        """A SHA-256 of all shards, the same for a local store and its remote copy."""
        return hashlib.sha256("".join(shard.digest for shard in self.shards).encode()).hexdigest()

    @property
    def firsts(self) -> list[int]:
        """The number of each shard's first document. The last entry is the number of documents."""
        return self._first

    @property
    def tokens(self) -> int:
        """The number of tokens in all documents."""
        return sum(int(shard.starts[-1]) for shard in self.shards)

    @property
    @on_cpu
    def lengths(self) -> Tensor:
        """The number of tokens in each document."""
        lengths = [shard.starts.diff() for shard in self.shards]
        return torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)

    @on_cpu
    def __getitem__(self, index: Any) -> tuple[Tensor, SparseTargets]:
        """`store[i]` returns the tokens and targets of document i.

        `store[i, a:b]` returns only its tokens a to b - 1, and their targets.
        """
        i, tokens = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        i = checks.document_number(i, len(self))
        number = bisect.bisect_right(self._first, i) - 1
        shard = self.shards[number]
        begin, end = shard.span(i - self._first[number])
        a, b = checks.row_range(tokens, end - begin)
        targets = self._decoded([(shard, begin + a, b - a)])
        return shard.tokens(begin + a, begin + b), targets

    @on_cpu
    def find(self, tokens: Any) -> int:
        """Returns the number of the document with exactly these tokens, or raises KeyError."""
        tokens = checks.tokens(tokens, self.info.vocab_size)
        match = self.index.document(tokens)
        if match is None:
            got = f"{len(tokens)} tokens that match no document"
            raise KeyError(f"tokens must be a document of the store, got {got}.")
        return self._first[self.shards.index(match.shard)] + match.document

    @on_cpu
    def targets_for(self, input_ids: Tensor, lengths: Any = None) -> SparseTargets:
        """Returns the targets of a batch. The target at position t describes the next token.

        A row of the batch holds documents of the store one after the other, each whole or cut off
        at its end, and then padding, whose slots are all masked. `lengths` has one entry per row,
        the length of its document or a list of lengths, and everything after them is padding.
        Without it, documents are found one by one, and the padding of a row must be one id; a row
        of negative ids is padding. Raises KeyError if tokens match no document of the store.
        """
        checks.input_ids(input_ids)
        flat = input_ids.detach().to("cpu", torch.int64).reshape(-1).contiguous()
        width = input_ids.shape[-1]
        rows = len(flat) // width if width else 0
        if lengths is None:
            spans = self._packed(flat, rows, width)
        else:
            spans = self._of_lengths(flat, checks.lengths(lengths, rows, width), width)
        targets = self._decoded(spans).reshape(*input_ids.shape)
        return targets if input_ids.device.type == "cpu" else targets.to(input_ids.device)

    for_tokens = targets_for

    @on_cpu
    def verify(self) -> Report:
        """Checks the files and rows of the store. A report that lists problems is falsy."""
        return verify(self)

    def _of_lengths(self, flat: Tensor, lengths: list[list[int]], width: int) -> list["Span"]:
        starts, limits = [], []
        for row, of_row in enumerate(lengths):
            starts += list(accumulate(of_row, initial=row * width))[:-1]
            limits += of_row
        matches = self.index.match(flat, Hashes(flat), starts, limits, whole=True)
        for at, limit, match in zip(starts, limits, matches, strict=True):
            if match is None:
                row, start = divmod(at, width)
                raise checks.unknown_document(flat[row * width :], row, start, limit)
        return _with_padding(starts, matches, len(flat))

    def _packed(self, flat: Tensor, rows: int, width: int) -> list["Span"]:
        """Finds the documents of a batch whose lengths are not known, from left to right.

        Each lookup searches all rows at once: first at the starts of rows and other likely starts,
        then at the ends of the documents found and at less likely starts.
        """
        hashes = Hashes(flat)
        known: dict[int, Match | None] = {}
        ends = [row * width for row in range(rows)]  # end of the documents found so far, per row
        found: list[list[Match]] = [[] for _ in range(rows)]
        wanted, turn = {*ends, *self.index.likely_starts(hashes, len(flat), LIKELY[0])}, 0
        while wanted:
            new = sorted(wanted)
            known.update(zip(new, self._longest(flat, hashes, new, width), strict=True))
            wanted = set()
            for row, of_row in enumerate(found):
                while (match := known.get(ends[row])) and ends[row] < (row + 1) * width:
                    of_row.append(match)
                    ends[row] += match.length
                if ends[row] < (row + 1) * width and ends[row] not in known:
                    wanted.add(ends[row])
            turn += 1
            if wanted and turn == 2:
                wanted.update(self.index.likely_starts(hashes, len(flat), LIKELY[1]))
                wanted -= known.keys()
        starts, matches = [], []
        for row, of_row in enumerate(found):
            if of_row := self._with_rest(flat, hashes, row, width, of_row):
                starts += accumulate((match.length for match in of_row[:-1]), initial=row * width)
                matches += of_row
        return _with_padding(starts, matches, len(flat))

    def _with_rest(
        self, flat: Tensor, hashes: Hashes, row: int, width: int, matches: list[Match]
    ) -> list[Match]:
        """Returns the documents of a row, of which `matches` were found from left to right.

        If more than padding follows them, other documents that fill the row are searched for.
        Raises KeyError if there are none.
        """
        begin, end = row * width, (row + 1) * width
        at = begin + sum(match.length for match in matches)
        if at == end:
            return matches
        rest = flat[at:end]
        is_padding = bool((rest == rest[0]).all()) and (at > begin or int(rest[0]) < 0)
        if not is_padding or (len(rest) == 1 and int(rest[0]) >= 0):
            # A single last token can be padding, or the last token of another document.
            matches = self._other_reading(flat, hashes, begin, end) or matches
            if not is_padding and sum(match.length for match in matches) == at - begin:
                raise checks.unknown_document(flat[begin:end], row, at - begin, None)
        return matches

    def _other_reading(self, flat: Tensor, hashes: Hashes, begin: int, end: int) -> list[Match]:
        """Consecutive documents that together fill a row, up to its negative ids, or [].

        Longer documents are tried first, and each position only once.
        """
        while end > begin and int(flat[end - 1]) < 0:
            end -= 1
        matches: list[Match] = []
        options = [self._options(flat, hashes, begin, end)]
        seen, at = {begin}, begin
        while options and at < end:
            match = next(options[-1], None)
            if match is None:
                options.pop()
                at -= matches.pop().length if matches else 0
            elif at + match.length not in seen:
                at += match.length
                seen.add(at)
                matches.append(match)
                options.append(self._options(flat, hashes, at, end))
        return matches if self.index.agree(flat, begin, matches) else []

    def _options(self, flat: Tensor, hashes: Hashes, at: int, end: int) -> Iterator[Match]:
        """Yields documents that may begin at `at`, longest first.

        The caller must compare their tokens with `Index.agree`.
        """
        if at < end:
            longest = self.index.match(flat, hashes, [at], [end - at], whole=True)[0]
            yield from [] if longest is None else [longest]
            yield from self.index.whole_documents(hashes, at, end - at)

    def _longest(self, flat: Tensor, hashes: Hashes, starts: list[int], width: int):
        limits = [width - at % width for at in starts]
        return self.index.match(flat, hashes, starts, limits, whole=False)

    def _decoded(self, spans: list["Span"]) -> SparseTargets:
        """Reads and decodes rows in portions."""
        decoding = decoding_of(sum(n for _, _, n in spans), self.info)
        for portion in _portions(spans, max(1, SLOTS // self.info.k)):
            decoding.add(table_of(self._pieces(portion), self.info))
        return decoding.targets()

    def _pieces(self, spans: list["Span"]) -> Pieces:
        """The bytes of all rows in `spans`, column by column."""
        by_shard: dict[Shard | None, list[int]] = {}
        for i, (shard, _, _) in enumerate(spans):
            by_shard.setdefault(shard, []).append(i)
        pieces: dict[str, list] = {name: [None] * len(spans) for name in self.info.layout()}
        for shard, places in by_shard.items():
            if shard is None:
                of_shard = [empty_pieces(spans[i][2], self.info) for i in places]
                found = {name: [piece[name] for piece in of_shard] for name in pieces}
            else:
                found = shard.pieces_of([(begin, begin + n) for _, begin, n in
                                         (spans[i] for i in places)])  # fmt: skip
            for name, of_column in found.items():
                for i, piece in zip(places, of_column, strict=True):
                    pieces[name][i] = piece
        return pieces

    def __reduce__(self):
        """Pickles the arguments and the digest, and each DataLoader worker opens the files itself.

        Unpickling raises if the digest has changed, because documents may have other numbers.
        """
        return _reopened, (self.path, self._arguments, self.digest)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, {len(self)} documents, {self.tokens} tokens, {self.info})"
        )


def _reopened(path: str | Path, arguments: dict[str, Any], digest: str) -> Store:
    store = Store(path, **arguments)
    file_checks.same_store(path, store.digest == digest)
    return store


def _remote_files(
    url: str,
    cache: str | os.PathLike | None,
    cache_bytes: int | None,
    storage_options: Mapping[str, Any] | None,
    **given: Any,
) -> RemoteFiles:
    how = {name: value for name, value in given.items() if value is not None}
    remote = Remote(url, options=storage_options, **how)
    return RemoteFiles(remote, Cache(cache, cache_bytes))


Span = tuple[Shard | None, int, int]  # shard (None for padding), first row, number of rows


def _with_padding(starts: Sequence[int], matches: Sequence[Match], total: int) -> list[Span]:
    """The spans of the matches and of all padding, in the order of the batch."""
    spans: list[Span] = []
    place = 0
    for start, match in sorted(zip(starts, matches, strict=True), key=lambda pair: pair[0]):
        if start > place:
            spans.append((None, 0, start - place))
        spans.append((match.shard, match.shard.span(match.document)[0], match.length))
        place = start + match.length
    if place < total:
        spans.append((None, 0, total - place))
    return spans


def _portions(spans: list[Span], rows: int) -> Iterator[list[Span]]:
    """Yields the spans in groups of `rows` rows, cutting long ones."""
    portion, room = [], rows
    for shard, begin, n in spans:
        while n:
            taken = min(n, room)
            portion.append((shard, begin, taken))
            begin, n, room = begin + taken, n - taken, room - taken
            if not room:
                yield portion
                portion, room = [], rows
    if portion:
        yield portion
