"""One store of several, as of the workers that each wrote their own."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict

from . import checks as rules
from .reader import Store
from .writer import Writer


def merge(
    path: str | os.PathLike,
    stores: Sequence[str | os.PathLike | Store],
    *,
    shard_bytes: int = 1 << 28,
    progress: Callable[[int], None] | None = None,
) -> int:
    """All documents of some stores in a new one, each once; returns how many it has.

    Their headers must agree. Numbers are copied as they are, not rounded again. Merging one store
    alone is a way to other sizes of shards. A merge that was killed is resumed by running it again.
    """
    opened = [store if isinstance(store, Store) else Store(store) for store in stores]
    rules.some_stores(opened)
    header = opened[0].info
    for store in opened[1:]:
        rules.same_header(store.path, store.info, header)
    about = asdict(header)
    about.pop("alignment")
    with Writer(path, part=0, shard_bytes=shard_bytes, **about) as writer:
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
