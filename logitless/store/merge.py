"""Merges several stores, for example from several machines, into one store."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from . import checks, file_checks
from .device import on_cpu
from .reader import Store
from .writer import Writer


@on_cpu
def merge(
    path: str | os.PathLike,
    stores: Sequence[str | os.PathLike | Store],
    *,
    shard_bytes: int = 1 << 28,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Copies the documents of several stores into a new store, and returns their number.

    A document in several stores is copied once. All headers must be equal, and the SHA-256 of each
    file is checked before anything is copied. Rows are copied unchanged, except those of version 1
    (store/format.py), which are rounded again. To change the size of a store's shards, merge it
    alone with another `shard_bytes`. Running the same merge again resumes one that was killed.
    """
    opened = [store if isinstance(store, Store) else Store(store) for store in stores]
    checks.some_stores(opened)
    header = opened[0].info
    for store in opened[1:]:
        file_checks.same_header(store.path, store.info, header, opened[0].path)
    fields = asdict(header)
    fields.pop("alignment")
    for shard in (shard for store in opened for shard in store.shards):
        file_checks.same_digest(shard.path, shard.is_intact())
    with Writer(path, part=0, shard_bytes=shard_bytes, **fields) as writer:
        for store in opened:
            for shard in store.shards:
                for tokens, starts, rows in shard.groups(list(map(shard.span, range(len(shard))))):
                    writer.append(tokens, rows, starts)
                    if progress is not None:
                        progress(len(tokens))
        return len(writer)
