"""Writes stores as parquet files, which dataset viewers can show.

Each row of a parquet file is one document:

    tokens     list<int>           the token ids
    ids        list<list<int>>     per token: the most probable next tokens, most probable first
    logprobs   list<list<float>>   per token: the log-probabilities of these ids
    tail       list<float>         per token: the log of the mass outside the ids; this column does
                                   not exist with values="counts"

A token without a distribution has an empty list of ids. The metadata holds the header of the store.
Needs the package pyarrow.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.safetensors import replaced
from ..targets.sparse import SparseTargets
from . import checks
from .codes import decoded
from .device import on_cpu
from .format import Header, bytes_of
from .reader import Store

METADATA = b"logitless.store"


@on_cpu
def to_parquet(
    store: Store | str | os.PathLike,
    folder: str | os.PathLike,
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes one parquet file per shard of a store, and returns the number of documents.

    `store` is a `Store`, or the folder or address of a store. `folder` must have no parquet files.
    `progress` is called with the number of tokens in each group of documents.
    """
    pa, pq = checks.pyarrow()
    opened, out = Store(store) if isinstance(store, (str, os.PathLike)) else store, Path(folder)
    checks.folder(out)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(out.glob("*.parquet")):
        checks.refuse(out, "have no parquet files before the export", path.name)
    header = opened.info
    schema = _schema(pa, header)
    for number, shard in enumerate(opened.shards):
        path = out / f"part-{number:06}.parquet"
        with (
            replaced(path) as unfinished,
            pq.ParquetWriter(unfinished, schema) as file,
        ):
            numbers = range(shard.first, shard.first + len(shard))
            for _, tokens, starts, rows in opened.groups(numbers):
                targets = decoded(rows, header)
                columns = _columns(pa, header, tokens, torch.tensor(starts), targets)
                file.write_table(pa.Table.from_arrays(columns, schema=schema))
                if progress is not None:
                    progress(len(tokens))
    return len(opened)


def _schema(pa: Any, header: Header) -> Any:
    number = pa.int32() if header.bits < 32 else pa.int64()
    fields = [
        ("tokens", pa.list_(number)), ("ids", pa.list_(pa.list_(number))),
        ("logprobs", pa.list_(pa.list_(pa.float32()))),
    ]  # fmt: skip
    fields += [] if header.sampled else [("tail", pa.list_(pa.float32()))]
    return pa.schema(
        fields, metadata={METADATA: json.dumps(asdict(header), sort_keys=True).encode()}
    )


def _columns(
    pa: Any, header: Header, tokens: Tensor, starts: Tensor, targets: SparseTargets
) -> list[Any]:
    valid = torch.ones_like(targets.ids, dtype=torch.bool) if targets.mask is None else targets.mask
    slots = torch.cat([torch.zeros(1, dtype=torch.int64), valid.sum(-1).cumsum(0)])
    ids, logprobs = (_flat(pa, t[valid]) for t in (targets.ids, targets.logprobs))
    columns = [
        _list(pa, starts, _flat(pa, tokens.to(header.id_dtype))),
        _list(pa, starts, _list(pa, slots, ids)),
        _list(pa, starts, _list(pa, slots, logprobs)),
    ]
    return columns + ([] if targets.tail is None else [_list(pa, starts, _flat(pa, targets.tail))])


def _flat(pa: Any, t: Tensor) -> Any:
    kinds = {
        torch.int32: pa.int32(), torch.int64: pa.int64(), torch.float32: pa.float32(),
    }  # fmt: skip
    return pa.Array.from_buffers(kinds[t.dtype], len(t), [None, pa.py_buffer(bytes_of(t))])


def _list(pa: Any, offsets: Tensor, values: Any) -> Any:
    return pa.ListArray.from_arrays(_flat(pa, offsets.int()), values)
