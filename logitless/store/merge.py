"""Merging several stores into one, for example the stores of several machines."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from . import checks
from .reader import Store
from .writer import Writer


def merge(
    path: str | os.PathLike,
    stores: Sequence[str | os.PathLike | Store],
    *,
    shard_bytes: int = 1 << 28,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Copies the documents of several stores into a new one; returns its number of documents.

    A document that is in several stores is copied once. All headers must be equal. Rows are copied
    without another rounding. Merging a single store changes its shard size. A merge that was killed
    is resumed by running it again.
    """
    opened = [store if isinstance(store, Store) else Store(store) for store in stores]
    checks.some_stores(opened)
    header = opened[0].info
    for store in opened[1:]:
        checks.same_header(store.path, store.info, header, opened[0].path)
    fields = asdict(header)
    fields.pop("alignment")
    with Writer(path, part=0, shard_bytes=shard_bytes, **fields) as writer:
        for store in opened:
            for shard in store.shards:
                for document in range(len(shard)):
                    begin, end = shard.span(document)
                    tokens = shard.tokens(begin, end)
                    if tokens not in writer:
                        rows = shard.rows_of(begin, end)
                        writer.append(tokens, {name: t.clone() for name, t in rows.items()})
                    if progress is not None:
                        progress(end - begin)
        return len(writer)
