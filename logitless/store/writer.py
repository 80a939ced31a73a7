"""Writing a store: documents are appended to a journal, and a full journal becomes a shard."""

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
from . import checks as rules
from . import shard as _shard
from .format import Columns, Header, encoded
from .journal import Journal
from .lookup import Index


class Writer:
    """Appends documents to a store, which it makes where there is none.

    A document that `add` has taken survives the death of the process: whoever opens the writer next
    finds it. It is in the store, for readers and after a loss of power too, once a shard is full,
    or `flush`, or the end of the `with` block. Adding a document again does nothing, so that a run
    that was killed is resumed by running it again.

    Workers write side by side, each its own `part`: by default their RANK, as torchrun sets it.
    Two writers of one part exclude each other.

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
        part = int(os.environ.get("RANK", "0")) if part is None else part
        rules.part(part)
        rules.shard_bytes(shard_bytes)
        self.path, self.part, self.shard_bytes = Path(path), part, shard_bytes
        self.closed, self.lock = True, None
        rules.folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        there = _shard.write_header(self.path, header)
        rules.same_header(self.path, there, header, ": go on with that, or write elsewhere")
        self.header = header
        self._take_lock()
        try:
            self._resume()
        except BaseException:
            os.close(self.lock)
            raise
        self.closed = False

    def _take_lock(self) -> None:
        """Until the process ends, however it ends."""
        path = self.path / f"{self.part}.lock"
        self.lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            rules.not_locked(path)

    def _resume(self) -> None:
        for left in self.path.glob(f"{self.part}-*.unfinished"):
            left.unlink()
        self.shards = _shard.shards_of(self.path, self.header)
        self.index = Index(self.shards)
        mine = [s.path.stem for s in self.shards if s.path.stem.startswith(f"{self.part}-")]
        number = max((int(name.partition("-")[2]) for name in mine), default=-1) + 1
        self.journal = Journal(self.path / f"{self.part}.journal", self.header, number)
        self.pending: list[tuple[Tensor, Columns]] = []
        self.digests: set[bytes] = set()
        self.bytes = 0
        for tokens, rows in self.journal.recover():
            self._keep(tokens, rows)

    def __len__(self) -> int:
        """Documents, those of other parts too that were there when this writer was opened."""
        return sum(map(len, self.shards)) + len(self.pending)

    def __contains__(self, tokens: Any) -> bool:
        """Whether the document is there already."""
        return self._has(rules.tokens(tokens, self.header.vocab_size))

    def _has(self, tokens: Tensor) -> bool:
        return _digest(tokens) in self.digests or self.index.document(tokens) is not None

    def add(self, tokens: Any, targets: SparseTargets) -> bool:
        """One document: its T token ids, and T rows; row i is of the token after tokens[i].

        Returns False where it was there already. K may be smaller than the store's.
        """
        rules.is_open(self.closed)
        tokens = rules.tokens(tokens, self.header.vocab_size)
        rules.document(targets, tokens, self.header, SparseTargets)
        if self._has(tokens):
            return False
        rows = {name: t.cpu() for name, t in encoded(targets, self.header).items()}
        self.append(tokens, rows)
        return True

    def append(self, tokens: Tensor, rows: Columns) -> None:
        """A document that is not there, encoded already."""
        rows = {name: t.contiguous() for name, t in rows.items()}
        self.journal.append(tokens, rows)
        self._keep(tokens, rows)
        if self.bytes >= self.shard_bytes:
            self.flush()

    def _keep(self, tokens: Tensor, rows: Columns) -> None:
        self.pending.append((tokens, rows))
        self.digests.add(_digest(tokens))
        self.bytes += len(tokens) * (8 + self.header.row_bytes())

    def flush(self) -> None:
        """What was added is in the store: a shard of its own."""
        rules.is_open(self.closed)
        if not self.pending:
            return
        number = self.journal.number
        path = _shard.shard_path(self.path, self.part, number)
        _shard.write(path, self.header, self.pending)
        self.shards.append(_shard.Shard(path, self.header))
        self.index = Index(self.shards)
        self.pending, self.digests, self.bytes = [], set(), 0
        self.journal.clear(number + 1)

    def close(self) -> None:
        """Flushes; whether that succeeds or not, another may write afterwards."""
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
            if error is None:  # else that one is told; what was added is in the journal
                raise


def _digest(tokens: Tensor) -> bytes:
    return hashlib.blake2b(buffer(tokens), digest_size=16).digest()


def recover(path: str | os.PathLike) -> int:
    """Puts into the store what writers that died have left, each document once; how many it has.

    For workers that are not started again: each takes up its own when it is.
    """
    path = Path(path)
    about = asdict(_shard.header_of(path))
    about.pop("alignment")
    for journal in sorted(path.glob("[0-9]*.journal")):
        Writer(path, part=int(journal.stem), **about).close()
    return sum(map(len, _shard.shards_of(path, _shard.header_of(path))))
