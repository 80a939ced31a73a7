"""Writing a store: documents are appended to a journal, and a full journal becomes a shard.

store/journal.py describes the journal, store/shard.py the shard, store/format.py the whole layout.
"""

import fcntl
import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core import call as _call
from ..targets.safetensors import buffer
from ..targets.sparse import SparseTargets
from . import checks
from .format import Header, Table, encoded
from .journal import Journal
from .lookup import Index
from .shard import Shard, header_of, shard_path, shards_of, write_header, write_shard


class Writer:
    """Appends documents to a store; creates the store if it does not exist.

    After `add` returns, the document survives the death of the process: the next writer recovers
    it. Readers see the document after its shard is full, after `flush`, or after the end of the
    `with` block; from then on it also survives a loss of power. Adding a document again does
    nothing, so a run that was killed is resumed by running it again.

    Several processes may write to one store at the same time, each with its own `part`. The default
    of `part` is the process's RANK, as torchrun sets it. A second writer with the same `part` is
    refused.

    >>> with Writer("targets", vocab_size=151_936, k=64) as writer:
    ...     writer.add(tokens, capture_topk(teacher(tokens).logits, 64))
    """

    @_call.named()
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
    ):
        header = Header(vocab_size, k, values, teacher, tokenizer, float(temperature))
        rank = int(os.environ.get("RANK", "0")) if part is None else part
        checks.rank(rank)
        checks.shard_bytes(shard_bytes)
        self.path, self.rank, self.shard_bytes = Path(path), rank, shard_bytes
        self.closed, self.lock = True, None
        checks.folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        existing = write_header(self.path, header)
        advice = "; pass the store's value, or write to another folder"
        checks.same_header(self.path, existing, header, "this writer", advice)
        self.header = header
        self._take_lock()
        try:
            self._resume()
        except BaseException:
            os.close(self.lock)
            raise
        self.closed = False

    def _take_lock(self) -> None:
        """Locks the rank. The system releases the lock when the process ends, however it ends."""
        path = self.path / f"{self.rank}.lock"
        self.lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            checks.not_locked(path)

    def _resume(self) -> None:
        """Opens the shards of all ranks, and recovers the documents in this rank's journal."""
        for unfinished in self.path.glob(f"{self.rank}-*.unfinished"):
            unfinished.unlink()
        self.shards = shards_of(self.path, self.header)
        self.index = Index(self.shards)
        names = [s.path.stem for s in self.shards if s.path.stem.startswith(f"{self.rank}-")]
        number = max((int(name.partition("-")[2]) for name in names), default=-1) + 1
        self.journal = Journal(self.path / f"{self.rank}.journal", self.header, number)
        self.pending: list[tuple[Tensor, Table]] = []
        self.digests: set[bytes] = set()
        self.bytes = 0
        for tokens, rows in self.journal.recover():
            self._keep(tokens, rows)

    def __len__(self) -> int:
        """The number of documents, including those of other ranks when this writer was opened."""
        return sum(map(len, self.shards)) + len(self.pending)

    def __contains__(self, tokens: Any) -> bool:
        """Whether the store has this document already."""
        return self._has(checks.tokens(tokens, self.header.vocab_size))

    def _has(self, tokens: Tensor) -> bool:
        return _digest(tokens) in self.digests or self.index.document(tokens) is not None

    def add(self, tokens: Any, targets: SparseTargets) -> bool:
        """Adds one document: T token ids and T rows; row i describes the token after tokens[i].

        Returns False if the store has the document already. K may be smaller than the store's.
        """
        checks.is_open(self.closed)
        tokens = checks.tokens(tokens, self.header.vocab_size)
        checks.document(targets, tokens, self.header, SparseTargets)
        if self._has(tokens):
            return False
        rows = {name: t.cpu() for name, t in encoded(targets, self.header).items()}
        self.append(tokens, rows)
        return True

    def append(self, tokens: Tensor, rows: Table) -> None:
        """Adds a document that is encoded already and that the store does not have."""
        rows = {name: t.contiguous() for name, t in rows.items()}
        self.journal.append(tokens, rows)
        self._keep(tokens, rows)
        if self.bytes >= self.shard_bytes:
            self.flush()

    def _keep(self, tokens: Tensor, rows: Table) -> None:
        self.pending.append((tokens, rows))
        self.digests.add(_digest(tokens))
        self.bytes += len(tokens) * (8 + self.header.row_bytes())

    def flush(self) -> None:
        """Writes the pending documents to the store as a new shard."""
        checks.is_open(self.closed)
        if not self.pending:
            return
        number = self.journal.number
        path = shard_path(self.path, self.rank, number)
        write_shard(path, self.header, self.pending)
        self.shards.append(Shard(path, self.header))
        self.index = Index(self.shards)
        self.pending, self.digests, self.bytes = [], set(), 0
        self.journal.clear(number + 1)

    def close(self) -> None:
        """Flushes, and releases the lock even if the flush fails."""
        if self.closed:
            return
        try:
            self.flush()
        finally:
            self.closed = True
            self.journal.close()
            os.close(self.lock)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # otherwise the first error is raised; the journal has the documents
                raise


def _digest(tokens: Tensor) -> bytes:
    return hashlib.blake2b(buffer(tokens), digest_size=16).digest()


def recover(path: str | os.PathLike) -> int:
    """Moves documents of killed writers from journals to shards; returns the number of documents.

    This is needed only if these writers will not be opened again, because opening a writer recovers
    its own documents.
    """
    path = Path(path)
    fields = asdict(header_of(path))
    fields.pop("alignment")
    for journal in sorted(path.glob("[0-9]*.journal")):
        Writer(path, part=int(journal.stem), **fields).close()
    return sum(map(len, shards_of(path, header_of(path))))
