"""Merges several stores, for example from several machines, into one store."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from . import checks
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

    A document in several stores is copied once. All headers must be equal, and checksums are
    compared. Rows are copied unchanged. To change the size of a store's shards, merge it alone with
    another `shard_bytes`. Running the same merge again resumes one that was killed.
    """
    opened = [store if isinstance(store, Store) else Store(store) for store in stores]
    if not opened:
        checks.refuse("stores", "name at least one store", "none")
    header = opened[0].info
    for store in opened[1:]:
        checks.same_header(store.path, store.info, header, opened[0].path)
    with Writer(path, part=0, shard_bytes=shard_bytes, **asdict(header)) as writer:
        for store in opened:
            for number in range(len(store)):
                entry, data = store.document(number)
                writer.copy(entry, data)
                if progress is not None:
                    progress(entry.tokens)
        return len(writer)
