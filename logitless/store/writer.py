"""Writes a store: documents are appended to a journal, and a full journal becomes a shard."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import call as _call
from ..targets.sparse import SparseTargets
from . import checks
from .codes import encoded
from .counts import counts_of
from .device import on_cpu
from .format import Header
from .journal import Journal
from .listing import INDEX, STORE, Folder, Listing, created, journals, shards_in, write
from .lock import Lock
from .lookup import Hashes, extended, hashes_of
from .reader import Store
from .remote import Uploads, destination
from .shard import ENTRY, Entry, File, Listed, Shard, document_of, listed_of


class Writer:
    """Appends documents to a store. The store is created if it does not exist.

    After `add` has returned, the document survives a kill of the process: the next writer with the
    same `part` recovers it. Readers find it once its shard is full, after `flush`, or after the end
    of the `with` block, and from then on it also survives a loss of power. Adding a document again
    does nothing, so running the same program again resumes a run that was killed. After `close`, a
    static server can serve the folder.

    Several processes can write to one store at the same time, each with its own `part`, by default
    the environment variable RANK, which torchrun sets. A second open writer with the same `part`
    raises an error. A document that two of them add at the same time is stored twice; `merge`
    keeps it once.

    `values` is "u8" for 8-bit log-probabilities, "f16" for 16-bit ones, or "counts" for sampled
    targets: then k is the number n of draws, `add` takes the results of `capture_sampled(logits,
    n)`, and the store returns the same weights, bit for bit. With a `proposal` other than 1,
    weights are not multiples of 1 / n; store them with "u8" or "f16".

    With `upload`, an address such as s3://bucket/targets, each full shard is also uploaded in the
    background. `close` waits for the uploads, and raises an OSError if one failed; the next writer
    with the same arguments uploads the missing shards. `storage_options` are the keyword arguments
    of fsspec's file system.

    >>> with Writer("targets", vocab_size=151_936, k=64) as writer:
    ...     writer.add(tokens, capture_topk(teacher(tokens).logits, 64))
    """

    @_call.named()
    @on_cpu
    def __init__(
        self,
        path: str | os.PathLike,
        *,
        vocab_size: int,
        k: int,
        values: str = "u8",
        teacher: str = "",
        tokenizer: str = "",
        temperature: float = 1.0,
        part: int | None = None,
        shard_bytes: int = 1 << 28,
        upload: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ):
        self.header = Header(vocab_size, k, values, teacher, tokenizer, float(temperature))
        self.part = int(os.environ.get("RANK", "0")) if part is None else part
        checks.whole("part", self.part, 0, 10**6)
        checks.whole("shard_bytes", shard_bytes, 1, 2**40)
        remote = None if upload is None else destination(upload, storage_options)
        self.path, self.shard_bytes, self.closed = Path(path), shard_bytes, True
        self.written = 0  # bytes of all added documents
        created(self.path, self.header)
        text = (self.path / STORE).read_text(errors="replace")
        existing, _ = checks.store_fields(self.path / STORE, text, Header)
        advice = "; pass the store's value, or write to another folder"
        checks.same_header(self.path, existing, self.header, "this writer", advice)
        self.lock, self.uploads = Lock(self.path / f"{self.part}.lock"), None
        try:
            for left in self.path.glob(f"{self.part}-*.unfinished"):
                left.unlink()
            self.store = Store(self.path)
            self._list_shards()
            self.journal = self._new_journal()
            if remote is not None:
                self.uploads = Uploads(remote, self.path, [listed.name for listed in self._mine])
        except BaseException:
            self.lock.release()
            raise
        self.closed = False

    @property
    def _mine(self) -> list[Listed]:
        """The listed shards of this part."""
        return [s.listed for s in self.store.shards if s.listed.shard.startswith(f"{self.part}-")]

    def _new_journal(self) -> Journal:
        numbers = [int(listed.shard.partition("-")[2]) for listed in self._mine]
        number = 1 + max(numbers, default=-1)
        return Journal(self.path, f"{self.part}-{number:06}", self.header, self.store.text)

    def __len__(self) -> int:
        """The number of documents, without those that other ranks have added since."""
        return len(self.store) + len(self.journal)

    @on_cpu
    def __contains__(self, tokens: Any) -> bool:
        tokens = checks.tokens(tokens, self.header.vocab_size)
        return self._has(hashes_of(tokens), len(tokens))

    def _has(self, hashes: Hashes, n: int) -> bool:
        return hashes in self.journal.known or self.store.number_of(hashes, n) is not None

    @on_cpu
    def add(self, tokens: Any, targets: SparseTargets) -> bool:
        """Adds a document of T token ids and T rows. Row i describes the token after tokens[i].

        Returns False if the store has the document already. `targets` can have fewer slots per row
        than the store.
        """
        return self.extend(tokens, None, targets) == 1

    @on_cpu
    def extend(self, tokens: Any, starts: Sequence[int] | None, targets: SparseTargets) -> int:
        """Adds several documents at once, faster than `add` if they are short; returns how many.

        `tokens` and `targets` hold the documents one after the other, and `starts` the position of
        each document's first token and then the total number of tokens. If any document is invalid,
        an error is raised and none is added.
        """
        checks.is_open(self.closed, self.lock.is_mine)
        tokens = checks.tokens(tokens, self.header.vocab_size)
        checks.document(targets, tokens, self.header, SparseTargets)
        if self.header.sampled:
            checks.draws(targets, counts_of(targets, self.header.k), self.header.k)
        new = self._new(tokens, starts)
        if not new:
            return 0
        if len(new) == (1 if starts is None else len(starts) - 1):
            return self._write(tokens, encoded(targets, self.header).cpu(), new)
        where = torch.cat([torch.arange(a, b) for a, b in new.values()])
        rows = torch.empty(len(tokens), self.header.row_bytes, dtype=torch.uint8)
        rows[where] = encoded(targets[where.to(targets.device)], self.header).cpu()
        return self._write(tokens, rows, new)

    @on_cpu
    def append(self, tokens: Tensor, rows: Tensor, starts: Sequence[int] | None = None) -> int:
        """Adds encoded documents, and returns how many are new. `rows` get their tokens here."""
        checks.is_open(self.closed, self.lock.is_mine)
        return self._write(tokens, rows, self._new(tokens, starts))

    def copy(self, entry: Entry, data: bytes) -> bool:
        """Adds a document with the bytes that it has in another store of the same header."""
        checks.is_open(self.closed, self.lock.is_mine)
        hashes = Hashes(entry.key, entry.check)
        if self._has(hashes, entry.tokens):
            return False
        self._append([(hashes, entry.tokens, data)])
        return True

    def _new(self, tokens: Tensor, starts: Sequence[int] | None) -> dict[Hashes, tuple[int, int]]:
        """The hashes and the ranges of tokens of the documents that are not in the store."""
        if starts is None:
            starts = (0, len(tokens))
        checks.starts(starts, len(tokens))
        new: dict[Hashes, tuple[int, int]] = {}
        for a, b in pairwise(starts):
            hashes = hashes_of(tokens[a:b])
            if hashes not in new and not self._has(hashes, b - a):
                new[hashes] = (a, b)
        return new

    def _write(self, tokens: Tensor, rows: Tensor, new: dict[Hashes, tuple[int, int]]) -> int:
        self.header.field(rows, "token")[:, 0] = tokens
        waiting, size = [], 0
        for hashes, (a, b) in new.items():
            data = document_of(rows[a:b], self.header, hashes.check)
            waiting.append((hashes, b - a, data))
            size += len(data) + 2 * ENTRY.size
            if self.journal.filled + size >= self.shard_bytes:
                self._append(waiting)
                waiting, size = [], 0
        if waiting:
            self._append(waiting)
        return len(new)

    def _append(self, documents: list[tuple[Hashes, int, bytes]]) -> None:
        if self.journal.finished:
            self.flush()
        self.journal.append(documents)
        self.written += sum(len(data) for _, _, data in documents)
        if self.journal.filled >= self.shard_bytes:
            self.flush()

    @on_cpu
    def flush(self) -> None:
        """Writes the pending documents to the store as a new shard."""
        checks.is_open(self.closed, self.lock.is_mine)
        if len(self.journal):
            self.journal.finish()
        if self.journal.finished:  # also if an earlier flush could not list the shard
            self._list_shards()
            self.journal = self._new_journal()

    def _list_shards(self) -> None:
        """Adds the finished shards of this part to store.index; a killed writer may leave one."""
        listed = {listed.shard for listed in self._mine}
        mine = [shard for shard in shards_in(self.path) if shard.startswith(f"{self.part}-")]
        waiting = [shard for shard in mine if shard not in listed]
        if not waiting:
            return
        with Lock(self.path / "store.lock", wait=True):
            self.store.refresh()
            for shard in waiting:
                add_shard(self.path, self.store, shard)
                if self.uploads is not None:
                    self.uploads.add(f"{shard}.shard")

    @on_cpu
    def close(self) -> None:
        """Flushes the writer and unlocks its part.

        With `upload`, waits until all shards are uploaded. The lock is released even if the flush
        fails. A forked process writes nothing, because its parent writes the documents.
        """
        self._close(finish=True)

    def _close(self, finish: bool) -> None:
        if self.closed:
            return
        try:
            if self.lock.is_mine:
                self.flush()
                if self.uploads is not None and finish:
                    with Lock(self.path / "store.lock", wait=True):
                        self.store.refresh()
                        runs = [run.name for run in self.store.listing.runs]
                        names = [shard.listed.name for shard in self.store.shards]
                        self.uploads.finish(names, [*runs, INDEX])
        finally:
            if self.uploads is not None and self.lock.is_mine:
                self.uploads.stop()
            self.closed = True
            self.journal.close()
            if self.lock.is_mine:
                self.lock.release()

    def __reduce__(self):
        raise TypeError(
            "a writer must stay in its process, got a request to pickle the writer. Open a writer"
            " with its own part= in each process."
        )

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            # After an error, the uploads are not awaited, so that the user sees it now.
            self._close(finish=error is None)
        except (OSError, ValueError):  # ValueError: another rank's shard was damaged meanwhile
            # An error of the block comes first. No document is lost, because the journal has them.
            if error is None:
                raise


def add_shard(path: Path, store: Store, shard: str) -> None:
    """Lists a finished shard and its documents. The caller holds store.lock."""
    file = path / f"{shard}.shard"
    listed = listed_of(File(file), shard)
    opened = Shard(listed, len(store), Folder(path), store.info, store.text)
    entries = opened.entries()
    numbers = torch.arange(len(store), len(store) + listed.documents)
    listing = store.listing
    sizes = [other.documents for other in listing.shards]
    before = {run.name for run in listing.runs}
    runs = extended(path, listing.runs, sizes, (entries[:, 2], numbers))
    listing.append(listed, runs)
    store.refresh()
    # The files of the line before stay, for readers that have read it.
    for old in path.glob("*.lookup*"):
        if old.name not in before and old.name not in {run.name for run in runs}:
            old.unlink()


def recover(path: str | os.PathLike) -> int:
    """Moves documents of killed writers from journals to shards, and mends store.index.

    Returns the number of documents in the store. A new writer with the `part` of a killed one
    recovers its documents too; call `recover` if you will not open such a writer, if you have
    removed a shard, or if store.index or a .lookup file is damaged. Removing a shard changes the
    numbers of the documents after it.
    """
    path = Path(path)
    text = Folder(path).read(STORE, bytes).decode(errors="replace")
    header, _ = checks.store_fields(path / STORE, text, Header)
    with Lock(path / "store.lock", wait=True):
        if not _is_whole(path):
            _list_anew(path)
    for part in [part for _, part in journals(path)] or [0]:
        Writer(path, part=part, **asdict(header)).close()
    return len(Store(path))


def _is_whole(path: Path) -> bool:
    """Whether store.index lists all shards, and the lookup all documents."""
    try:
        store = Store(path)
        for run in store.run_files:
            for _ in run.pieces():
                pass
        return sorted(s.listed.shard for s in store.shards) == shards_in(path)
    except (OSError, ValueError):
        return False


def _list_anew(path: Path) -> None:
    """Lists all shards in the folder, those of the old store.index first."""
    listing = Listing(path / INDEX)
    with contextlib.suppress(OSError, ValueError):  # lines after the damage are not read
        listing.read_file()
    found = shards_in(path)
    old = [listed.shard for listed in listing.shards if listed.shard in found]
    for run in path.glob("*.lookup"):
        run.unlink()
    write(path / INDEX, b"")
    store = Store(path)
    for shard in dict.fromkeys([*old, *found]):
        add_shard(path, store, shard)
