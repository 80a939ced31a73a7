"""Writes a store: documents are appended to a journal, and a full journal becomes a shard."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import call as _call
from ..targets.safetensors import buffer
from ..targets.sparse import SparseTargets
from . import checks, file_checks
from .counts import counts_of, slots_of
from .device import on_cpu
from .folder import created, header_of, journals, last_number, shard_path, write_header
from .format import Header
from .journal import Journal
from .listing import hashed_file, write_listing
from .lock import Lock
from .lookup import Index
from .remote import Listed
from .rows import Table, encoded
from .shard import Shard, shards_of, write_shard
from .upload import Uploads, destination

# Bytes of memory for the index entries and hashes of a document while its shard is written. They
# count towards `shard_bytes`, or a shard of very short documents would take too much memory.
PER_DOCUMENT = 512
# Documents of up to SHORT tokens with targets on the CPU are encoded together when their shard is
# written, because PyTorch encodes a few hundred rows in the time of a few.
SHORT = 64


class Writer:
    """Appends documents to a store. The store is created if it does not exist.

    After `add` has returned, the document survives a kill of the process: the next writer with the
    same `part` recovers it. Readers find it once its shard is full, after `flush`, or after the end
    of the `with` block, and from then on it also survives a loss of power. Adding a document again
    does nothing, so running the same program again resumes a run that was killed. After `close`, a
    static server can serve the folder.

    Several processes can write to one store at the same time, each with its own `part`, by default
    the environment variable RANK, which torchrun sets. A second open writer with the same `part`
    raises an error.

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
        header = Header(vocab_size, k, values, teacher, tokenizer, float(temperature))
        rank = int(os.environ.get("RANK", "0")) if part is None else part
        checks.rank(rank)
        checks.shard_bytes(shard_bytes)
        remote = None if upload is None else destination(upload, storage_options)
        self.path, self.rank, self.shard_bytes = Path(path), rank, shard_bytes
        self.closed, self.written = True, 0.0  # `written` counts the bytes of all added rows
        created(self.path)
        existing = write_header(self.path, header)
        advice = "; pass the store's value, or write to another folder"
        file_checks.same_header(self.path, existing, header, "this writer", advice)
        self.header, self.row_bytes = header, header.row_bytes()
        self.lock = Lock(self.path / f"{self.rank}.lock")
        try:
            self._resume()
            self.uploads = remote and Uploads(remote, self.path, self.rank, header)
        except BaseException:
            self.lock.release()
            raise
        self.closed = False

    def _resume(self) -> None:
        """Opens the shards of all ranks, and recovers the documents in this rank's journal."""
        for unfinished in self.path.glob(f"{self.rank}-*.unfinished"):
            unfinished.unlink()
        self.shards = shards_of(self.path, self.header)
        self.index = Index(self.shards)
        number = last_number(self.path, self.rank) + 1
        self.journal = Journal(self.path / f"{self.rank}.journal", self.header, number)
        self.digests: set[bytes] = set()
        # A shard is hashed in a thread right after it was written, while the page cache has it.
        self.thread = ThreadPoolExecutor(1, "logitless hash")
        self.hashed: list[tuple[str, Future[Listed]]] = []
        self.journal.recover(
            lambda tokens, starts: (m is not None for m in self.index.documents(tokens, starts)),
            lambda tokens: self.digests.add(_digest(tokens)),
        )

    def __len__(self) -> int:
        """The number of documents, without those that other ranks have added since."""
        return sum(map(len, self.shards)) + len(self.journal)

    @on_cpu
    def __contains__(self, tokens: Any) -> bool:
        return self._has(checks.tokens(tokens, self.header.vocab_size))

    def _has(self, tokens: Tensor) -> bool:
        if _digest(tokens) in self.digests:
            return True
        return bool(self.shards) and self.index.document(tokens) is not None

    @on_cpu
    def add(self, tokens: Any, targets: SparseTargets) -> bool:
        """Adds a document of T token ids and T rows. Row i describes the token after tokens[i].

        Returns False if the store has the document already. `targets` can have fewer slots per row
        than the store.
        """
        checks.is_open(self.closed, self.lock.is_mine)
        tokens = checks.tokens(tokens, self.header.vocab_size)
        self._check(targets, tokens)
        if self._has(tokens):
            return False
        if len(tokens) <= SHORT and targets.device.type == "cpu":
            self.journal.append_targets(tokens, targets)
            mask = targets.mask
            self._count(
                len(tokens), targets.ids.numel() if mask is None else int((mask != 0).sum())
            )
            self._added([_digest(tokens)])
        else:
            rows = {n: t.cpu() for n, t in encoded(targets, self.header).items()}
            self._write(tokens, (0, len(tokens)), rows, [_digest(tokens)])
        return True

    def _check(self, targets: SparseTargets, tokens: Tensor) -> None:
        checks.document(targets, tokens, self.header, SparseTargets)
        if self.header.sampled:
            checks.draws(targets, counts_of(targets, self.header.k), self.header.k)

    @on_cpu
    def extend(self, tokens: Any, starts: Sequence[int], targets: SparseTargets) -> int:
        """Adds several documents at once, faster than `add` if they are short; returns how many.

        `tokens` and `targets` hold the documents one after the other, and `starts` the position of
        each document's first token and then the total number of tokens. If any document is invalid,
        an error is raised and none is added.
        """
        checks.is_open(self.closed, self.lock.is_mine)
        tokens = checks.tokens(tokens, self.header.vocab_size)
        checks.starts(starts, len(tokens))
        self._check(targets, tokens)
        new, where, starts = self._new(tokens, starts)
        if new:
            rows = encoded(targets[where], self.header)
            self._write(tokens[where], starts, {n: t.cpu() for n, t in rows.items()}, new)
        return len(new)

    @on_cpu
    def append(self, tokens: Tensor, rows: Table, starts: Sequence[int] | None = None) -> int:
        """Adds encoded documents, tokens[starts[i] : starts[i + 1]], or one without `starts`.

        Returns the number of those that the store did not have already.
        """
        checks.is_open(self.closed, self.lock.is_mine)
        new, where, starts = self._new(tokens, starts or (0, len(tokens)))
        if new:
            self._write(tokens[where], starts, {n: t[where] for n, t in rows.items()}, new)
        return len(new)

    def _new(
        self, tokens: Tensor, starts: Sequence[int]
    ) -> tuple[list[bytes], slice | Tensor, Sequence[int]]:
        """The digests, row indices and starts of documents that are not in the store."""
        data, new = memoryview(buffer(tokens)).cast("B"), {}
        known = self.index.documents(tokens, torch.tensor(starts)) if self.shards else ()
        for (a, b), match in zip_longest(pairwise(starts), known):
            digest = _digest_of(data[8 * a : 8 * b])
            if match is None and digest not in self.digests:
                new.setdefault(digest, (a, b))
        if len(new) == len(starts) - 1:
            return list(new), slice(None), starts
        rows = torch.cat([torch.arange(a, b) for a, b in [(0, 0), *new.values()]])
        return list(new), rows, list(accumulate((b - a for a, b in new.values()), initial=0))

    def _write(
        self, tokens: Tensor, starts: Sequence[int], rows: Table, digests: list[bytes]
    ) -> None:
        """Appends documents, and writes a shard whenever the journal is full."""
        slots = slots_of(rows["draws"]).sum() if self.header.sampled else 0
        self._count(len(tokens), int(slots))
        first = 0
        while first < len(digests):
            room = self.shard_bytes - self._bytes(self.journal.tokens, len(self.journal))
            last = first + 1
            while last < len(digests):
                if self._bytes(starts[last] - starts[first], last - first) >= room:
                    break
                last += 1
            self.journal.append(tokens, starts[first : last + 1], rows)
            self._added(digests[first:last])
            first = last

    def _count(self, tokens: int, slots: int) -> None:
        """Updates `self.written`, the bytes of all added documents in shards.

        `slots` counts the distinct ids of all rows, and matters only with values="counts".
        """
        self.written += tokens * self.header.token_bytes(slots / tokens)

    def _added(self, digests: Iterable[bytes]) -> None:
        self.digests.update(digests)
        if self._bytes(self.journal.tokens, len(self.journal)) >= self.shard_bytes:
            self.flush()

    def _bytes(self, tokens: int, documents: int) -> int:
        """The bytes that count towards `shard_bytes`."""
        return tokens * (8 + self.row_bytes) + documents * PER_DOCUMENT

    @on_cpu
    def flush(self) -> None:
        """Writes the pending documents to the store as a new shard."""
        checks.is_open(self.closed, self.lock.is_mine)
        if not len(self.journal):
            return
        number = self.journal.number
        path = shard_path(self.path, self.rank, number)
        write_shard(path, self.header, *self.journal.columns())
        # The shard survives a loss of power now, so the journal can be cleared.
        self.journal.clear(number + 1)
        self.digests = set()
        self.shards.append(Shard(path, self.header))
        self.index.add(self.shards[-1:])
        if self.uploads is not None:
            self.uploads.add(path)
        self.hashed.append((self.shards[-1].digest, self.thread.submit(hashed_file, path)))

    @on_cpu
    def close(self) -> None:
        """Flushes the writer, lists the shards of the folder for remote readers, and unlocks.

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
                hashed = [(digest, file.result()) for digest, file in self.hashed]
                write_listing(self.path, self.header, hashed)
                if self.uploads is not None and finish:
                    self.uploads.finish()
        finally:
            if self.uploads is not None and self.lock.is_mine:
                self.uploads.stop()
            self.closed = True
            self.journal.close()
            if self.lock.is_mine:
                self.thread.shutdown(wait=False)
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


def _digest(tokens: Tensor) -> bytes:
    return _digest_of(buffer(tokens))


def _digest_of(tokens: Any) -> bytes:
    return hashlib.blake2b(tokens, digest_size=16).digest()


def recover(path: str | os.PathLike) -> int:
    """Moves documents of killed writers from journals to shards, and lists all shards anew.

    Returns the number of documents in the store. A new writer with the `part` of a killed one does
    the same; call `recover` if you will not open such a writer, or if a folder has no store.index.
    """
    path = Path(path)
    fields = asdict(header_of(path))
    fields.pop("alignment")
    for rank in [rank for _, rank in journals(path)] or [0]:
        Writer(path, part=rank, **fields).close()
    return sum(map(len, shards_of(path, header_of(path))))
