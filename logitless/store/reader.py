"""Reads the documents of a store by their numbers, and the targets of batches."""

import functools
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets, unchecked
from . import checks
from .codes import EMPTY, decoded, rows_in, tokens_of
from .device import on_cpu
from .format import Header, bytes_of, view_of
from .listing import INDEX, STORE, Folder, Listing, listing_of
from .lookup import FIRST, Hashes, Lookup, RunFile, hashes_of, keys_from, run_bytes
from .remote import Cache, Prefetch, Remote, RemoteFolder, is_address
from .shard import Entry, File, Shard
from .verify import Report, verify

AT_ONCE = 8192  # number of rows that `groups` reads at once
Result = TypeVar("Result")


RowSpan = tuple[int, Entry | None, int, int]  # rows a to b - 1; None for padding


class Span(NamedTuple):
    """A document of a batch: the tokens [begin, begin + length) of the flat batch."""

    begin: int
    length: int
    number: int  # number of the document in the store


class Group(NamedTuple):
    """Documents, one after the other. `starts` also has the number of tokens."""

    tokens: Tensor
    starts: list[int]
    rows: Tensor
    first: int  # number of the first document


class Store:
    """Reads the documents of a store, and the teacher's distribution of each next token.

    `path` is a local folder, or an address such as s3://bucket/targets. Rows are read from the
    files only when they are needed. To refuse a store that was captured with another tokenizer,
    pass the `tokenizer_hash` of yours as `tokenizer`.

    From an address, whole shards are fetched into the folder `cache`, at most `cache_bytes` bytes
    (64 GiB by default). `cache` is by default the folder that the environment variable
    LOGITLESS_CACHE names, or ~/.cache/logitless. A request gets up to `attempts` attempts (5).
    `storage_options` are the keyword arguments of fsspec's file system. `progress` is called with
    the number of bytes that arrive.

    >>> store = Store("targets")
    >>> tokens, targets = store[0]  # targets[i] describes the token after tokens[i]
    >>> tokens, targets = store[0, 128:256]  # a range of its tokens
    >>> documents = store[[4, 2]]  # several documents in one batched read
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
        attempts: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Callable[[int], None] | None = None,
    ):
        self._arguments: dict[str, Any] = {
            "cache": cache, "cache_bytes": cache_bytes, "attempts": attempts,
            "storage_options": storage_options,
        }  # fmt: skip
        self.path: str | Path = str(path) if is_address(path) else Path(path).absolute()
        if isinstance(self.path, Path):
            checks.local_options(self._arguments)
            self._folder: Folder | RemoteFolder = Folder(self.path)
        else:
            remote = Remote(
                self.path, attempts=5 if attempts is None else attempts, options=storage_options
            )
            self._folder = RemoteFolder(remote, Cache(cache, cache_bytes), progress)
        # store.index is read last: it lists only shards of this store.json.
        self.text = self._folder.read(STORE, _text)
        self.info, self.id = checks.store_fields(self._folder.where(STORE), self.text, Header)
        checks.same_tokenizer(self.path, self.info.tokenizer, tokenizer)
        where = self._folder.where(INDEX)
        self.listing = self._folder.read(INDEX, lambda data: listing_of(where, data))
        self._lookup: Lookup | None = None
        self.shards: list[Shard] = []
        self._first = [0]  # number of each shard's first document, then the number of all
        self._add_shards()
        self._prefetch: Prefetch | None = None
        if isinstance(self._folder, RemoteFolder):
            self._folder.store = self.id
            limit = self._folder.cache.limit
            largest = max((shard.size for shard in self.shards), default=1)
            checks.cache_bytes(limit, largest)
            self._prefetch = Prefetch(len(self.shards), self._fetched, limit // largest)

    def _add_shards(self) -> None:
        for listed in self.listing.shards[len(self.shards) :]:
            first = self._first[-1]
            self.shards.append(Shard(listed, first, self._folder, self.info, self.text))
            self._first.append(first + listed.documents)
            if isinstance(self._folder, Folder):
                checks.listed_file(self.shards[-1].name, listed.size)
        self._lookup = None

    def refresh(self) -> None:
        """Reads what writers have added to a local store since it was opened."""
        self.listing.read_file()
        self._add_shards()

    def _fetched(self, number: int) -> File:
        listed = self.shards[number].listed
        return self._folder.file(listed.name, listed.size, listed.crc)

    def reading(self, shard: Shard, read: Callable[..., Result], *args: Any) -> Result:
        """Calls `read`, which reads a shard. A damaged file in the cache is fetched once more."""
        if self._prefetch is None:
            return read(*args)
        self._prefetch.reading(bisect_right(self._first, shard.first) - 1)
        try:
            return read(*args)
        except ValueError:
            shard.close()
            assert isinstance(self._folder, RemoteFolder)
            self._folder.discard(shard.listed.name, shard.listed.crc)
            return read(*args)
        finally:
            shard.close()  # an open file would keep its bytes on the disk after its deletion

    @property
    def lookup(self) -> Lookup:
        """The hashes of all documents, opened at the first lookup."""
        if self._lookup is None:
            try:
                self._lookup = self._opened_lookup(self.listing)
            except FileNotFoundError:  # a writer has merged the files meanwhile
                if isinstance(self._folder, RemoteFolder):
                    raise
                newer = Listing(self.listing.where)
                newer.read_file()
                self._lookup = self._opened_lookup(newer)
        return self._lookup

    def _numbers(self, low: int, high: int) -> list[int]:
        """The documents with keys in [low, high]. Damaged files in the cache are fetched again."""
        try:
            return self.lookup.numbers(low, high)
        except ValueError:
            if not isinstance(self._folder, RemoteFolder):
                raise
            for run in self.listing.runs:
                self._folder.discard(run.name, self.listing.crc)
            self._lookup = None
            return self.lookup.numbers(low, high)

    def _opened_lookup(self, listing: Listing) -> Lookup:
        files = []
        for run in listing.runs:
            n = sum(listed.documents for listed in listing.shards[run.begin : run.end])
            file = self._folder.file(run.name, run_bytes(n), listing.crc)
            files.append(RunFile(file, n, self._folder.where(run.name)))
        return Lookup(files)

    def prefetch(self, order: Any = None, *, ahead: int = 2, mixed: int = 1) -> None:
        """Fetches shards of a remote store in the background, before their rows are read.

        `order` lists the numbers of the documents in the order in which you will read them, from
        first to last by default. While you read a shard, the next `ahead` shards are fetched, or
        fewer if the cache has no room for (ahead + mixed); `mixed` is the number of shards whose
        documents are shuffled together. Shards read in ascending order are fetched two ahead even
        without this call. For a local store, only the arguments are checked.
        """
        order = checks.order(order, len(self), ahead, mixed)
        if self._prefetch is not None:
            if order is not None:
                shards = torch.bucketize(order, torch.tensor(self._first[1:]), right=True)
                order = list(dict.fromkeys(shards.tolist()))
            self._prefetch.follow(order, ahead, mixed)

    def __len__(self) -> int:
        """The number of documents."""
        return self._first[-1]

    @property
    def digest(self) -> str:
        """A hash of what store.index lists, the same for a local store and its remote copy."""
        listed = repr([self.id, *self.listing.shards]).encode()
        return hashlib.sha256(listed).hexdigest()

    @property
    def firsts(self) -> list[int]:
        """The number of each shard's first document. The last entry is the number of documents."""
        return self._first

    @property
    def tokens(self) -> int:
        """The number of tokens in all documents."""
        return sum(listed.tokens for listed in self.listing.shards)

    @property
    @on_cpu
    def lengths(self) -> Tensor:
        """The number of tokens in each document."""
        lengths = [self.reading(shard, shard.entries)[:, 4] for shard in self.shards]
        return torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)

    def __getitem__(self, index: Any) -> Any:
        """`store[i]` returns the tokens and targets of document i.

        `store[i, a:b]` returns only its tokens a to b - 1, and their targets. `store[[i, j]]`
        returns a list of documents, which are read together.
        """
        if isinstance(index, (list, Tensor)) and not (
            isinstance(index, Tensor) and not index.dim()
        ):
            return self._several([checks.document_number(i, len(self)) for i in index])
        i, tokens = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        i = checks.document_number(i, len(self))
        shard, document = self._place(i)
        entry = self.reading(shard, shard.entry, document)
        a, b = checks.row_range(tokens, entry.tokens)
        data = bytearray((b - a) * self.info.row_bytes)
        self.reading(shard, shard.read_rows, document, entry, a, b, memoryview(data))
        rows = rows_in(data, self.info)
        return tokens_of(rows, self.info), decoded(rows, self.info)

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, SparseTargets]]:
        """What a DataLoader calls for a batch."""
        return self[numbers]

    @on_cpu
    def _several(self, numbers: list[int]) -> list[tuple[Tensor, SparseTargets]]:
        entries = self.entries(numbers)
        sizes = [entry.tokens for entry in entries]
        rows = self._rows([(i, e, 0, e.tokens) for i, e in zip(numbers, entries, strict=True)])
        tokens, t = tokens_of(rows, self.info).split(sizes), decoded(rows, self.info)
        none = (None,) * len(numbers)
        parts = (
            none if part is None else part.split(sizes)
            for part in (t.ids, t.logprobs, t.tail, t.mask)
        )
        return list(zip(tokens, map(unchecked, *parts), strict=True))

    def _place(self, number: int) -> tuple[Shard, int]:
        shard = self.shards[bisect_right(self._first, number) - 1]
        return shard, number - shard.first

    def entry(self, number: int) -> Entry:
        """Where a document is, and its number of tokens."""
        shard, document = self._place(number)
        return self.reading(shard, shard.entry, document)

    def entries(self, numbers: Sequence[int]) -> list[Entry]:
        by_shard: dict[int, list[int]] = {}
        for number in numbers:
            by_shard.setdefault(bisect_right(self._first, number) - 1, []).append(number)
        found: dict[int, Entry] = {}
        for at, of_shard in by_shard.items():
            found |= self.reading(self.shards[at], _entries, self.shards[at], of_shard)
        return [found[number] for number in numbers]

    def _rows(self, spans: Sequence[RowSpan]) -> Tensor:
        """The rows of several spans, uint8 (T, row_bytes)."""
        width = self.info.row_bytes
        rows = torch.empty(sum(b - a for _, _, a, b in spans), width, dtype=torch.uint8)
        data, place = view_of(rows), 0
        wanted: dict[int, list[tuple[int, Entry, int, int, memoryview]]] = {}
        for number, entry, a, b in spans:
            begin, place = place, place + (b - a) * width
            if entry is None:
                data[begin:place] = _empty_row(self.info) * (b - a)
            else:
                at = bisect_right(self._first, number) - 1
                wanted.setdefault(at, []).append((number, entry, a, b, data[begin:place]))
        for at, of_shard in wanted.items():
            self.reading(self.shards[at], _read_rows, self.shards[at], of_shard)
        return rows

    def document(self, number: int) -> tuple[Entry, bytes]:
        """The bytes of a document on disk, compared with their checksums."""
        shard, document = self._place(number)
        return self.reading(shard, _document, shard, document)

    def groups(self, numbers: Sequence[int]) -> Iterator[Group]:
        """Yields documents in groups of about AT_ONCE rows."""
        waiting, tokens = [], 0
        for number in numbers:
            entry = self.entry(number)
            waiting.append((number, entry, 0, entry.tokens))
            tokens += entry.tokens
            if tokens >= AT_ONCE or number == numbers[-1]:
                rows = self._rows(waiting)
                starts = list(accumulate((b for _, _, _, b in waiting), initial=0))
                yield Group(tokens_of(rows, self.info), starts, rows, waiting[0][0])
                waiting, tokens = [], 0

    @on_cpu
    def find(self, tokens: Any) -> int:
        """Returns the number of the document with exactly these tokens, or raises KeyError."""
        tokens = checks.tokens(tokens, self.info.vocab_size)
        number = self._found(tokens, whole=True)
        if number is None or not self._begins(number, tokens):
            got = f"{len(tokens)} tokens that match no document"
            raise KeyError(f"tokens must be a document of the store, got {got}.")
        return number

    @on_cpu
    def targets_for(
        self, input_ids: Tensor, lengths: Any = None, documents: Any = None
    ) -> SparseTargets:
        """Returns the targets of a batch. The target at position t describes the next token.

        `documents` has the numbers of the documents: one per row, or a list per row of those that
        are packed into it, one after the other. `lengths` has their numbers of tokens in the same
        form, or that of all tokens in a row. A document may be cut off at its end, and everything
        after the last document of a row is padding, whose slots are all masked.

        Without `documents`, they are found by their tokens, of which a document that is cut off
        must have at least 32. Without `lengths` too, a row has one document, and then negative ids
        or repetitions of one id. Raises KeyError if tokens match no document of the store.
        """
        checks.input_ids(input_ids)
        flat = input_ids.detach().to("cpu", torch.int64).reshape(-1).contiguous()
        width = input_ids.shape[-1]
        rows = len(flat) // width if width else 0
        sizes = None if lengths is None else checks.lengths(lengths, rows, width)
        if documents is not None:
            numbers = checks.documents(documents, rows, sizes, len(self))
            spans = self._numbered(numbers, sizes, width)
        else:
            spans = self._searched(flat, sizes, rows, width)
        targets = self._compared(flat, spans, width).reshape(*input_ids.shape)
        return targets if input_ids.device.type == "cpu" else targets.to(input_ids.device)

    for_tokens = targets_for

    def _numbered(
        self, numbers: list[list[int]], sizes: list[list[int]] | None, width: int
    ) -> list[Span]:
        spans = []
        for row, of_row in enumerate(numbers):
            begin, of_lengths = row * width, None if sizes is None else sizes[row]
            end = begin + (width if of_lengths is None else sum(of_lengths))
            for i, number in enumerate(of_row):
                whole = self.entry(number).tokens
                if of_lengths is None or len(of_lengths) != len(of_row):
                    n = min(whole, end - begin)
                else:
                    n = of_lengths[i]
                checks.length_of_document(n, whole, number, row)
                if n:
                    spans.append(Span(begin, n, number))
                begin += n
        return spans

    def _searched(
        self, flat: Tensor, sizes: list[list[int]] | None, rows: int, width: int
    ) -> list[Span]:
        spans = []
        for row in range(rows):
            tokens, begin = flat[row * width : (row + 1) * width], 0
            for n in [None] if sizes is None else sizes[row]:
                found = self._of_row(tokens) if n is None else self._of_length(tokens, begin, n)
                if found is None:
                    raise checks.unknown_document(tokens, row, begin, n)
                number, n = found
                if n:
                    spans.append(Span(row * width + begin, n, number))
                begin += n
        return spans

    def _of_length(self, tokens: Tensor, begin: int, n: int) -> tuple[int, int] | None:
        number = self._found(tokens[begin : begin + n], whole=False)
        return None if number is None else (number, n)

    def _of_row(self, tokens: Tensor) -> tuple[int, int] | None:
        """The number and the length of the document that a row begins with, if padding follows."""
        negative = (tokens < 0).nonzero()
        if len(negative):
            n = int(negative[0])
            if n == 0 or bool((tokens[n:] >= 0).any()):
                return None if n else (0, 0)
            return self._of_length(tokens, 0, n)
        number = self._found(tokens, whole=False)
        if number is not None:
            return number, len(tokens)
        other = (tokens != tokens[-1]).nonzero()
        least = max(1, int(other[-1]) + 1 if len(other) else 1)  # the rest may be padding
        if len(tokens) > FIRST:
            longest = None
            for candidate in self._numbers(*keys_from(tokens)):
                n = self._length_of(candidate)
                longer = least <= n < len(tokens) and (longest is None or n > longest[1])
                if longer and self._begins(candidate, tokens[:n]):
                    longest = candidate, n
            if longest is not None:
                return longest
        for n in range(min(FIRST, len(tokens) - 1), least - 1, -1):
            if (number := self._found(tokens[:n], whole=True)) is not None:
                return number, n
        return None

    def _found(self, tokens: Tensor, whole: bool) -> int | None:
        """A document with these tokens, or one that begins with them if `whole` is False.

        Whole documents are compared by their hashes, of 88 bits together.
        """
        key, check = hashes_of(tokens)
        for number in self._numbers(key, key):
            if self._is(number, check, len(tokens)):
                return number
        if whole or len(tokens) < FIRST:
            return None
        for number in self._numbers(*keys_from(tokens)):
            if self._length_of(number) > len(tokens) and self._begins(number, tokens):
                return number
        return None

    def has(self, hashes: Hashes, n: int) -> bool:
        """Whether a document has these hashes and this length."""
        return any(self._is(d, hashes.check, n) for d in self._numbers(*2 * hashes[:1]))

    def _is(self, number: int, check: int, n: int) -> bool:
        if number >= len(self):  # a writer has added it since this store was opened
            return False
        entry = self.entry(number)
        return entry.check == check and entry.tokens == n

    def _length_of(self, number: int) -> int:
        return self.entry(number).tokens if number < len(self) else -1

    def _begins(self, number: int, tokens: Tensor) -> bool:
        """Whether a document begins with these tokens. Its last rows are compared first.

        Of documents that share a beginning, few have the same tokens after it.
        """
        entry, last = self.entry(number), (len(tokens) - 1) // FIRST * FIRST
        for a, b in ((last, len(tokens)), (0, last)):
            rows = self._rows([(number, entry, a, b)])
            if not torch.equal(tokens_of(rows, self.info), tokens[a:b]):
                return False
        return True

    def _compared(self, flat: Tensor, spans: list[Span], width: int) -> SparseTargets:
        """Reads the rows of a batch with padding in the gaps, and compares their tokens."""
        entries = self.entries([span.number for span in spans])
        wanted: list[RowSpan] = []
        is_padding, place = torch.zeros(len(flat), dtype=torch.bool), 0
        for (begin, n, number), entry in zip(spans, entries, strict=True):
            if begin > place:
                wanted.append((-1, None, place, begin))
                is_padding[place:begin] = True
            wanted.append((number, entry, 0, n))
            place = begin + n
        if place < len(flat):
            wanted.append((-1, None, place, len(flat)))
            is_padding[place:] = True
        rows = self._rows(wanted)
        differs = (tokens_of(rows, self.info) != flat) & ~is_padding
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            number = next(s.number for s in spans if s.begin <= at < s.begin + s.length)
            raise checks.other_tokens(number, *divmod(at, width))
        return decoded(rows, self.info)

    @on_cpu
    def verify(self) -> Report:
        """Checks the files and rows of the store. A report that lists problems is falsy."""
        return verify(self)

    def __reduce__(self):
        """Pickles the arguments and the digest, and each DataLoader worker opens the files itself.

        Unpickling raises if the digest has changed.
        """
        return _reopened, (self.path, self._arguments, self.digest)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, {len(self)} documents, {self.tokens} tokens, {self.info})"
        )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _document(shard: Shard, document: int) -> tuple[Entry, bytes]:
    entry = shard.entry(document)
    return entry, shard.document(document, entry)


def _entries(shard: Shard, numbers: list[int]) -> dict[int, Entry]:
    return {number: shard.entry(number - shard.first) for number in numbers}


def _read_rows(shard: Shard, spans: list[tuple[int, Entry, int, int, memoryview]]) -> None:
    for number, entry, a, b, into in spans:
        shard.read_rows(number - shard.first, entry, a, b, into)


def _reopened(path: str | Path, arguments: dict[str, Any], digest: str) -> Store:
    store = Store(path, **arguments)
    if store.digest != digest:
        got = "other shards. Open the store again"
        checks.refuse(path, "have the shards of the pickled Store", got)
    return store


@functools.lru_cache
def _empty_row(header: Header) -> bytes:
    row = torch.zeros(1, header.row_bytes, dtype=torch.uint8)
    if not header.sampled:
        header.column(row, "top").fill_(torch.nan)
    if header.values == "u8":
        header.field(row, "codes").fill_(EMPTY)
    return bytes_of(row)
