"""The shards of a remote store. A shard is fetched into the cache when its rows are read."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..targets import safetensors
from . import remote_checks as checks
from .cache import Cache
from .listing import INDEX, Listing
from .prefetch import Prefetch
from .remote import Listed, Remote
from .rows import Pieces
from .shard import Shard, Span

Result = TypeVar("Result")


class RemoteFiles:
    def __init__(self, remote: Remote, cache: Cache):
        self.remote, self.cache = remote, cache
        self._lookup: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            self.listing = remote.read(INDEX, Listing.of_bytes)
        except FileNotFoundError as error:
            raise checks.has_index(remote.url) from error
        shards = self.listing.shards
        largest = max((shard.file.bytes for shard in shards), default=1)
        checks.cache_bytes(cache.limit, max(largest, self.listing.lookup.bytes))
        # A prefetch makes only one attempt, because the reader would fetch the file itself.
        once = functools.partial(remote.fetch, attempts=1)
        self.prefetch = Prefetch(
            len(shards),
            lambda number: cache.use(shards[number].file),
            lambda number: cache.prefetched(shards[number].file, once),
            room=cache.limit // largest,
        )

    def shards(self) -> list["RemoteShard"]:
        return [RemoteShard(self, number) for number in range(len(self.listing.shards))]

    def from_cache(self, listed: Listed, read: Callable[[Path], Result]) -> Result:
        """Calls `read` with the path of a file in the cache.

        If bytes have changed there, `read` raises a ValueError, and the file is fetched once more.
        """
        try:
            with self.cache.reading(listed, self._fetch) as path:
                return read(path)
        except ValueError:
            self.cache.discard(listed)
        with self.cache.reading(listed, self._fetch) as path:
            return read(path)

    def _fetch(self, listed: Listed, into: Any) -> None:
        try:
            self.remote.fetch(listed, into)
        except FileNotFoundError as error:
            raise checks.missing_listed(error) from error

    def index_of(self, number: int) -> tuple[Tensor, Tensor]:
        """The columns index.hash and index.doc of a shard.

        The first call reads those of all shards. They are not kept here, because the reader's index
        has a sorted copy.
        """
        if number not in self._lookup:
            self._lookup = dict(enumerate(self._read_lookup()))
        return self._lookup.pop(number)

    def _read_lookup(self) -> list[tuple[Tensor, Tensor]]:
        listed, counts = self.listing.lookup, [shard.entries for shard in self.listing.shards]

        def read(path: Path) -> dict[str, Tensor]:
            data = path.read_bytes()
            checks.listed_file(str(path), len(data), hashlib.sha256(data).hexdigest(), listed)
            return safetensors.from_bytes(str(path), data)[1]

        tensors = self.from_cache(listed, read)
        hashes, numbers = tensors["index.hash"], tensors["index.doc"]
        where = self.remote.address(listed.name)
        checks.index_content(where, len(hashes) == len(numbers) == sum(counts))
        return list(zip(hashes.split(counts), numbers.split(counts), strict=True))


class RemoteShard(Shard):
    """A shard of a remote store, whose column `starts` comes from store.index."""

    def __init__(self, files: RemoteFiles, number: int):
        self.files, self.number = files, number
        listed = files.listing.shards[number]
        self.listed, self.header = listed.file, files.listing.header
        self.digest = listed.digest
        self.path = files.remote.address(self.listed.name)
        self._set_starts(listed.starts)
        self._of_cache: Shard | None = None

    @property
    def bytes(self) -> int:
        return self.listed.bytes

    def tokens_of(self, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
        return self._from_cache(lambda shard: shard.tokens_of(spans))

    def pieces_of(self, spans: Sequence[Span]) -> Pieces:
        return self._from_cache(lambda shard: shard.pieces_of(spans))

    def column(self, name: str) -> Tensor:
        return self._from_cache(lambda shard: shard.column(name))

    def is_intact(self) -> bool:
        return self._from_cache(lambda shard: shard.is_intact())

    def index(self) -> tuple[Tensor, Tensor]:
        return self.files.index_of(self.number)

    def _from_cache(self, read: Callable[[Shard], Result]) -> Result:
        self.files.prefetch.reading(self.number)

        def read_file(path: Path) -> Result:
            shard, self._of_cache = self._of_cache, None  # stays None if the file is damaged
            if shard is None:
                shard = Shard(path, self.header)
                checks.same_starts(path, torch.equal(shard.starts, self.starts))
            try:
                found = read(shard)
            finally:
                shard.blocks.close()
            self._of_cache = shard
            return found

        return self.files.from_cache(self.listed, read_file)
