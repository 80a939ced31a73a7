"""The shards of a remote store. A shard is fetched into the cache when its rows are read."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..targets import safetensors
from . import remote_checks as checks
from .cache import Cache
from .listing import INDEX, Listing
from .prefetch import Prefetch
from .remote import Remote
from .rows import Pieces
from .shard import Shard, Span

Result = TypeVar("Result")


class RemoteFiles:
    """The files of a remote store: its store.index, the cache, and the threads that prefetch."""

    def __init__(self, remote: Remote, cache: Cache):
        self.remote, self.cache = remote, cache
        try:
            self.listing = remote.read(INDEX, Listing.of_bytes)
        except FileNotFoundError as error:
            raise checks.has_index(remote.url) from error
        largest = [shard.file.bytes for shard in self.listing.shards]
        checks.cache_bytes(cache.limit, max([*largest, self.listing.lookup.bytes]))
        shards = self.listing.shards
        self.prefetch = Prefetch(
            len(shards),
            lambda number: cache.has(shards[number].file),
            lambda number: cache.fetched(shards[number].file, remote.fetch),
        )

    def shards(self) -> list["RemoteShard"]:
        return [RemoteShard(self, number) for number in range(len(self.listing.shards))]

    @functools.cached_property
    def lookup(self) -> list[tuple[Tensor, Tensor]]:
        """The columns index.hash and index.doc of each shard."""
        listed, counts = self.listing.lookup, [shard.entries for shard in self.listing.shards]
        with self.cache.reading(listed, self.remote.fetch) as path:
            tensors = safetensors.read(path, safetensors.read_header(path))
        hashes, numbers = tensors["index.hash"], tensors["index.doc"]
        where = self.remote.address(listed.name)
        checks.index_content(where, len(hashes) == len(numbers) == sum(counts))
        return list(zip(hashes.split(counts), numbers.split(counts), strict=True))


class RemoteShard(Shard):
    """A shard of a remote store. Its starts come from store.index, before its file is fetched."""

    def __init__(self, files: RemoteFiles, number: int):
        self.files, self.number = files, number
        listed = files.listing.shards[number]
        self.listed, self.header = listed.file, files.listing.header
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
        return self.files.lookup[self.number]

    def _from_cache(self, read: Callable[[Shard], Result]) -> Result:
        """Returns the result of `read` for the shard's file in the cache.

        If a check of the file fails, because its bytes have changed in the cache, the file is
        fetched once more.
        """
        self.files.prefetch.reading(self.number)
        try:
            return self._read(read)
        except ValueError:
            self._of_cache = None
            self.files.cache.discard(self.listed)
            return self._read(read)

    def _read(self, read: Callable[[Shard], Result]) -> Result:
        with self.files.cache.reading(self.listed, self.files.remote.fetch) as path:
            shard = self._of_cache
            if shard is None:
                shard = self._of_cache = Shard(path, self.header)
                checks.same_starts(path, torch.equal(shard.starts, self.starts))
            try:
                return read(shard)
            finally:
                shard.blocks.close()
