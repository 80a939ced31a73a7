"""Reads the documents of a store by their numbers, and the targets of batches."""

import functools
import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..targets.sparse import SparseTargets, unchecked
from . import checks
from .codes import EMPTY, decoded, empty_rows, tokens_of
from .device import on_cpu
from .format import Header, bytes_of
from .listing import INDEX, STORE, Folder, Listing, listing_of
from .lookup import FIRST, Hashes, RunFile, hashes_of, keys_from, run_bytes
from .remote import RemoteFolder, is_address
from .shard import Entry, Shard, Span, named
from .verify import Report, verify

AT_ONCE = 8192  # number of rows that `groups` reads at once
ALL = slice(None)
PADDING = -1  # place of the shard in a span that stands for b - a rows of padding
Result = TypeVar("Result")


class Group(NamedTuple):
    """Documents, one after the other. `starts` also has the number of tokens."""

    spans: list[Span]
    tokens: Tensor
    starts: list[int]
    rows: Any


# The documents of a batch row: their numbers, and how many tokens of each stand there. None means
# as many as there are, or as fit into the row.
OfRow = list[tuple[int, int | None]]


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
        self._folder: Folder | RemoteFolder
        if isinstance(self.path, Path):
            checks.local_options(self._arguments)
            self._folder = Folder(self.path)
        else:
            self._folder = RemoteFolder(self.path, progress=progress, **self._arguments)
        # store.index is read last: it lists only shards of this store.json.
        self.text = self._folder.read(STORE, _text)
        self.info, self.id = checks.store_fields(self._folder.where(STORE), self.text, Header)
        checks.same_tokenizer(self.path, self.info.tokenizer, tokenizer)
        where = self._folder.where(INDEX)
        self.listing = self._folder.read(INDEX, lambda data: listing_of(where, data))
        self._run_files: list[RunFile] | None = None
        self.shards: list[Shard] = []
        self.firsts = [0]  # number of each shard's first document, then the number of all
        self._add_shards()
        if isinstance(self._folder, RemoteFolder):
            self._folder.opened(self.id, self.listing.shards)

    def _add_shards(self) -> None:
        for listed in self.listing.shards[len(self.shards) :]:
            first = self.firsts[-1]
            self.shards.append(Shard(listed, first, self._folder, self.info, self.text))
            self.firsts.append(first + listed.documents)
            if isinstance(self._folder, Folder):
                checks.listed_file(self.shards[-1].name, listed.size)
        self._run_files = None

    def refresh(self) -> None:
        """Reads what writers have added to a local store since it was opened."""
        self.listing.read_file()
        self._add_shards()

    def reading(self, at: int, read: Callable[[Shard], Result]) -> Result:
        """Calls `read` with a shard. A damaged file in the cache is fetched once more."""
        shard, folder = self.shards[at], self._folder
        if isinstance(folder, Folder):
            return read(shard)
        folder.prefetch.reading(at)
        try:
            return read(shard)
        except ValueError:
            shard.close()
            folder.discard(shard.listed.name, shard.listed.crc)
            return read(shard)
        finally:
            shard.close()  # an open file would keep its bytes on the disk after its deletion

    def _spans(self, wanted: Sequence[tuple[int, slice]]) -> list[Span]:
        """Where the rows of documents are, or those of some of their tokens."""
        by_shard: dict[int, list[int]] = {}
        for i, (number, _) in enumerate(wanted):
            by_shard.setdefault(bisect_right(self.firsts, number) - 1, []).append(i)
        spans: list[Any] = [None] * len(wanted)
        for at, places in by_shard.items():
            self.reading(at, functools.partial(_locate, wanted, places, spans, at))
        return spans

    def _rows(self, spans: Sequence[Span]) -> Any:
        """The rows of several spans, an array (T, row_bytes) of `library`."""
        width, count = self.info.row_bytes, 0
        by_shard: dict[int, list[tuple[int, Span]]] = {}
        for span in spans:
            at, _, _, a, b = span
            by_shard.setdefault(at, []).append((count * width, span))
            count += b - a
        rows, data = empty_rows(count, self.info)
        for begin, span in by_shard.pop(PADDING, ()):
            empty = _empty_row(self.info) * (span.b - span.a)
            data[begin : begin + len(empty)] = empty
        for at, of_shard in by_shard.items():
            self.reading(at, functools.partial(Shard.read, spans=of_shard, data=data))
        return rows

    @property
    def run_files(self) -> list[RunFile]:
        """The hashes of all documents, opened at the first search."""
        if self._run_files is None:
            try:
                self._run_files = self._opened_runs(self.listing)
            except FileNotFoundError:  # a writer has merged the files meanwhile
                if isinstance(self._folder, RemoteFolder):
                    raise
                newer = Listing(self.listing.where)
                newer.read_file()
                self._run_files = self._opened_runs(newer)
        return self._run_files

    def _opened_runs(self, listing: Listing) -> list[RunFile]:
        files = []
        for run in listing.runs:
            n = sum(listed.documents for listed in listing.shards[run.begin : run.end])
            file = self._folder.file(run.name, run_bytes(n), listing.crc)
            files.append(RunFile(file, n, self._folder.where(run.name)))
        return files

    def _numbers(self, low: int, high: int) -> list[int]:
        """The documents with keys in [low, high]. Damaged files in the cache are fetched again."""
        try:
            found = [number for run in self.run_files for number in run.numbers(low, high)]
        except ValueError:
            if isinstance(self._folder, Folder):
                raise
            for run in self.listing.runs:
                self._folder.discard(run.name, self.listing.crc)
            self._run_files = None
            found = [number for run in self.run_files for number in run.numbers(low, high)]
        # A writer may have added documents since this store was opened.
        return [number for number in found if number < len(self)]

    def prefetch(self, order: Any = None, *, ahead: int = 2, mixed: int = 1) -> None:
        """Fetches shards of a remote store in the background, before their rows are read.

        `order` lists the numbers of the documents in the order in which you will read them, from
        first to last by default. While you read a shard, the next `ahead` shards are fetched, or
        fewer if the cache has no room for (ahead + mixed); `mixed` is the number of shards whose
        documents are shuffled together. Shards read in ascending order are fetched two ahead even
        without this call. For a local store, only the arguments are checked.
        """
        order = checks.order(order, len(self), ahead, mixed)
        if isinstance(self._folder, RemoteFolder):
            if order is not None:
                shards = torch.bucketize(order, torch.tensor(self.firsts[1:]), right=True)
                order = list(dict.fromkeys(shards.tolist()))
            self._folder.prefetch.follow(order, ahead, mixed)

    def __len__(self) -> int:
        """The number of documents."""
        return self.firsts[-1]

    @property
    def digest(self) -> str:
        """A hash of what store.index lists, the same for a local store and its remote copy."""
        listed = repr([self.id, *self.listing.shards]).encode()
        return hashlib.sha256(listed).hexdigest()

    @property
    def tokens(self) -> int:
        """The number of tokens in all documents."""
        return sum(listed.tokens for listed in self.listing.shards)

    @property
    @on_cpu
    def lengths(self) -> Tensor:
        """The number of tokens in each document."""
        lengths = [self.reading(at, Shard.entries)[:, 4] for at in range(len(self.shards))]
        return torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64)

    def __getitem__(self, index: Any) -> Any:
        """`store[i]` returns the tokens and targets of document i.

        `store[i, a:b]` returns only its tokens a to b - 1, and their targets. `store[[i, j]]`
        returns a list of documents, which are read together.
        """
        if isinstance(index, list) or (isinstance(index, Tensor) and index.dim()):
            return self._several([checks.document_number(i, len(self)) for i in index])
        i, tokens = index if isinstance(index, tuple) and len(index) == 2 else (index, ALL)
        i = checks.document_number(i, len(self))
        if not isinstance(tokens, slice) or tokens.step not in (None, 1):
            checks.refuse("a range of tokens", "be a slice of step 1", repr(tokens), IndexError)
        rows = self._rows_of(i, tokens)
        return tokens_of(rows, self.info), decoded(rows, self.info)

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, SparseTargets]]:
        """What a DataLoader calls for a batch."""
        return self[numbers]

    @on_cpu
    def _several(self, numbers: list[int]) -> list[tuple[Tensor, SparseTargets]]:
        spans = self._spans([(i, ALL) for i in numbers])
        rows, sizes = self._rows(spans), [span.b for span in spans]
        tokens, t = tokens_of(rows, self.info).split(sizes), decoded(rows, self.info)
        none = (None,) * len(numbers)
        parts = (
            none if part is None else part.split(sizes)
            for part in (t.ids, t.logprobs, t.tail, t.mask)
        )
        return list(zip(tokens, map(unchecked, *parts), strict=True))

    def _rows_of(self, number: int, tokens: slice) -> Any:
        """The rows of some tokens of one document, in one visit of its shard."""
        at = bisect_right(self.firsts, number) - 1

        def read(shard: Shard) -> Any:
            entry = shard.entry(number - shard.first)
            a, b, _ = tokens.indices(entry.tokens)
            rows, data = empty_rows(max(0, b - a), self.info)
            shard.read([(0, Span(at, number, entry, a, max(a, b)))], data)
            return rows

        return self.reading(at, read)

    def _one(self, number: int, read: Callable[[Shard, int], Result]) -> Result:
        """Calls `read` with a document's shard, and its number there."""
        at = bisect_right(self.firsts, number) - 1
        return self.reading(at, lambda shard: read(shard, number - shard.first))

    def entry(self, number: int) -> Entry:
        """Where a document is, and its number of tokens."""
        return self._one(number, Shard.entry)

    def document(self, number: int) -> tuple[Entry, bytes]:
        """A document's entry, and its bytes on disk, compared with their checksums."""
        return self._one(number, Shard.document)

    def groups(self, numbers: Sequence[int]) -> Iterator[Group]:
        """Yields documents in groups of about AT_ONCE rows."""
        spans, starts = [], [0]
        for number in numbers:
            spans += self._spans([(number, ALL)])
            starts.append(starts[-1] + spans[-1].b)
            if starts[-1] >= AT_ONCE or number == numbers[-1]:
                rows = self._rows(spans)
                yield Group(spans, tokens_of(rows, self.info), starts, rows)
                spans, starts = [], [0]

    @on_cpu
    def find(self, tokens: Any) -> int:
        """Returns the number of the document with exactly these tokens, or raises KeyError."""
        tokens = checks.tokens(tokens, self.info.vocab_size)
        number = self.number_of(hashes_of(tokens), len(tokens))
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
            by_row = zip(numbers, sizes or [None] * rows, strict=True)
            of_rows = [_numbered(of_row, lengths) for of_row, lengths in by_row]
        else:
            of_rows = self._searched(flat, sizes, rows, width)
        targets = self._compared(flat, of_rows, sizes, width).reshape(*input_ids.shape)
        return targets if input_ids.device.type == "cpu" else targets.to(input_ids.device)

    def _searched(
        self, flat: Tensor, sizes: list[list[int]] | None, rows: int, width: int
    ) -> list[OfRow]:
        of_rows = []
        for row in range(rows):
            tokens, begin, documents = flat[row * width : (row + 1) * width], 0, []
            for n in [None] if sizes is None else sizes[row]:
                found = self._of_row(tokens) if n is None else self._found(tokens[begin:][:n])
                if found is None:
                    raise checks.unknown_document(tokens, row, begin, n)
                documents.append(found)
                begin += found[1]
            of_rows.append([found for found in documents if found[1]])
        return of_rows

    def _of_row(self, tokens: Tensor) -> tuple[int, int] | None:
        """The number and the length of the document that a row begins with, if padding follows."""
        negative = (tokens < 0).nonzero()
        if len(negative):
            n = int(negative[0])
            if n == 0 or bool((tokens[n:] >= 0).any()):
                return None if n else (0, 0)
            return self._found(tokens[:n])
        if (found := self._found(tokens)) is not None:
            return found
        other = (tokens != tokens[-1]).nonzero()
        least = int(other[-1]) + 1 if len(other) else 1  # the rest may be padding
        if len(tokens) > FIRST:
            found = [(self.entry(i).tokens, i) for i in self._numbers(*keys_from(tokens))]
            for n, number in sorted(found, key=lambda pair: -pair[0]):
                if least <= n < len(tokens) and self._begins(number, tokens[:n]):
                    return number, n
        for n in range(min(FIRST, len(tokens) - 1), least - 1, -1):
            if (number := self.number_of(hashes_of(tokens[:n]), n)) is not None:
                return number, n
        return None

    def _found(self, tokens: Tensor) -> tuple[int, int] | None:
        """The number of a document that begins with these tokens, and how many they are."""
        number = self.number_of(hashes_of(tokens), len(tokens))
        if number is None and len(tokens) >= FIRST:
            for candidate in self._numbers(*keys_from(tokens)):
                longer = self.entry(candidate).tokens > len(tokens)
                if longer and self._begins(candidate, tokens):
                    return candidate, len(tokens)
        return None if number is None else (number, len(tokens))

    def number_of(self, hashes: Hashes, n: int) -> int | None:
        """The document with these hashes, which have 88 bits together, and this length."""
        for number in self._numbers(hashes.key, hashes.key):
            entry = self.entry(number)
            if entry.check == hashes.check and entry.tokens == n:
                return number
        return None

    def _begins(self, number: int, tokens: Tensor) -> bool:
        """Whether a document begins with these tokens. Its last rows are compared first.

        Of documents that share a beginning, few have the same tokens after it.
        """
        last = (len(tokens) - 1) // FIRST * FIRST
        for a, b in ((last, len(tokens)), (0, last)):
            found = tokens_of(self._rows_of(number, slice(a, b)), self.info)
            if not torch.equal(found, tokens[a:b]):
                return False
        return True

    def _compared(
        self, flat: Tensor, of_rows: list[OfRow], sizes: list[list[int]] | None, width: int
    ) -> SparseTargets:
        """Reads the rows of a batch, with padding after the documents, and compares the tokens."""
        whole = iter(self._spans([(number, ALL) for of_row in of_rows for number, _ in of_row]))
        spans, begins, ends = [], [], []
        for row, of_row in enumerate(of_rows):
            end, size = 0, width if sizes is None else sum(sizes[row])
            for number, n in of_row:
                span = next(whole)
                n = min(span.b, size - end) if n is None else n
                if n > span.b:
                    rule = f"be at most {span.b} for document {number} in row {row}"
                    checks.refuse("lengths", rule, n)
                spans.append(span._replace(b=n))
                begins.append(row * width + end)
                end += n
            spans.append(Span(PADDING, -1, Entry(0, 0, 0, 0, 0), 0, width - end))
            begins.append(row * width + end)
            ends.append(end)
        rows = self._rows(spans)
        is_token = torch.arange(width) < torch.tensor(ends, dtype=torch.int64)[:, None]
        differs = (tokens_of(rows, self.info) != flat) & is_token.flatten()
        if bool(differs.any()):
            at = int(differs.nonzero()[0])
            span = spans[bisect_right(begins, at) - 1]
            checks.other_tokens(span.number, *divmod(at, width))
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


def _locate(
    wanted: Sequence[tuple[int, slice]], places: list[int], spans: list[Any], at: int, shard: Shard
) -> None:
    entry_of, first = shard.entry, shard.first
    for i in places:
        number, tokens = wanted[i]
        entry = entry_of(number - first)
        a, b, _ = tokens.indices(entry.tokens)
        spans[i] = named(Span, (at, number, entry, a, b if b > a else a))


def _numbered(numbers: list[int], lengths: list[int] | None) -> OfRow:
    if lengths is not None and len(lengths) == len(numbers):
        return list(zip(numbers, lengths, strict=True))
    return [(number, None) for number in numbers]  # `lengths` may have that of all tokens in a row


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
        header.field(row, "top").fill_(torch.nan)
    if header.values == "u8":
        header.field(row, "codes").fill_(EMPTY)
    return bytes_of(row)
