"""Converts stores to parquet files and back. Dataset viewers can show parquet files.

Each row of a parquet file is one document:

    tokens     list<int>           the token ids
    ids        list<list<int>>     per token: the most probable next tokens, most probable first
    logprobs   list<list<float>>   per token: the log-probabilities of these ids
    tail       list<float>         per token: the log of the mass outside the ids; this column does
                                   not exist with values="counts"
    step       list<uint8>         per token: the unit of the 8-bit codes (store/format.py); this
                                   column exists only with values="u8"

A token without a distribution has an empty list of ids. The metadata holds the header of the store.
With the column `step`, rows are not rounded again; without it, for example in files of another
program, they are rounded as in `Writer.add`. Needs the package pyarrow.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..targets.safetensors import buffer
from ..targets.sparse import SparseTargets
from . import checks, file_checks, parquet_checks
from .device import on_cpu
from .folder import created
from .format import Header
from .reader import Store
from .rows import decoded, reencoded
from .writer import Writer

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
    pa, pq = parquet_checks.pyarrow()
    opened, out = Store(store) if isinstance(store, (str, os.PathLike)) else store, Path(folder)
    created(out)
    parquet_checks.no_parquet(out)
    header = opened.info
    schema = _schema(pa, header)
    for number, shard in enumerate(opened.shards):
        path = out / f"part-{number:06}.parquet"
        with _whole(path) as unfinished, pq.ParquetWriter(unfinished, schema) as file:
            spans = list(map(shard.span, range(len(shard))))
            for tokens, starts, rows in shard.groups(spans):
                targets = decoded(rows, header)
                columns = _columns(pa, header, tokens, torch.tensor(starts), targets)
                if header.values == "u8":
                    columns.append(_list(pa, torch.tensor(starts), _flat(pa, rows["step"])))
                file.write_table(pa.Table.from_arrays(columns, schema=schema))
                if progress is not None:
                    progress(len(tokens))
    return len(opened)


@on_cpu
def from_parquet(
    files: Sequence[str | os.PathLike],
    path: str | os.PathLike,
    *,
    shard_bytes: int = 1 << 28,
    progress: Callable[[int], None] | None = None,
    **header: Any,
) -> int:
    """Adds the documents of parquet files to a store, and returns the store's number of documents.

    The store is created if it does not exist. Its header comes from files that `to_parquet` wrote.
    For other files, `header` must have the arguments `vocab_size` and `k` of `Writer`, and can have
    `values`, `teacher`, `tokenizer` and `temperature`. `progress` is called with the number of
    tokens in each group of documents.
    """
    _, pq = parquet_checks.pyarrow()
    parquet_checks.some_files(files)
    opened = [(os.fspath(file), pq.ParquetFile(file)) for file in files]
    headers = [_header_of(name, file, header) for name, file in opened]
    for (name, _), other in zip(opened, headers, strict=True):
        file_checks.same_header(name, other, headers[0], opened[0][0])
    fields = asdict(headers[0])
    fields.pop("alignment")
    with Writer(path, part=0, shard_bytes=shard_bytes, **fields) as writer:
        for name, file in opened:
            for group in range(file.num_row_groups):
                tokens = _add(writer, name, file.read_row_group(group), headers[0])
                if progress is not None:
                    progress(tokens)
        return len(writer)


def _schema(pa: Any, header: Header) -> Any:
    number = pa.int32() if header.bits < 32 else pa.int64()
    fields = [
        ("tokens", pa.list_(number)), ("ids", pa.list_(pa.list_(number))),
        ("logprobs", pa.list_(pa.list_(pa.float32()))),
    ]  # fmt: skip
    fields += [] if header.sampled else [("tail", pa.list_(pa.float32()))]
    fields += [("step", pa.list_(pa.uint8()))] if header.values == "u8" else []
    return pa.schema(fields, metadata={METADATA: header.to_json().encode()})


def _columns(
    pa: Any, header: Header, tokens: Tensor, starts: Tensor, targets: SparseTargets
) -> list[Any]:
    """All columns of several documents, except `step`."""
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
        torch.uint8: pa.uint8(),
    }  # fmt: skip
    t = t.contiguous()
    return pa.Array.from_buffers(kinds[t.dtype], len(t), [None, pa.py_buffer(bytes(buffer(t)))])


def _list(pa: Any, offsets: Tensor, values: Any) -> Any:
    return pa.ListArray.from_arrays(_flat(pa, offsets.int()), values)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path, renamed to `path` if the `with` block succeeds."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _header_of(name: str, file: Any, given: dict[str, Any]) -> Header:
    stored = (file.schema_arrow.metadata or {}).get(METADATA)
    parquet_checks.one_header(name, stored, given)
    return Header(**given) if stored is None else Header.from_json(name, stored)


def _add(writer: Writer, name: str, table: Any, header: Header) -> int:
    parquet_checks.columns(name, table.column_names, header.sampled)
    columns = {column: table[column].combine_chunks() for column in table.column_names}
    starts, tokens = _read(name, "tokens", columns, torch.int64)
    targets = _targets(name, columns, starts, header)
    checks.starts(starts.tolist(), len(tokens))
    tokens = checks.tokens(tokens, header.vocab_size)
    checks.document(targets, tokens, header, SparseTargets)
    if header.values == "u8" and "step" in columns:
        of_step, step = _read(name, "step", columns, torch.uint8)
        parquet_checks.same_lengths(name, "step", torch.equal(of_step, starts))
        writer.append(tokens, reencoded(targets, header, step), starts.tolist())
    elif header.values == "f16":
        writer.append(tokens, reencoded(targets, header, None), starts.tolist())
    else:
        writer.extend(tokens, starts.tolist(), targets)
    return len(tokens)


def _targets(name: str, columns: dict[str, Any], starts: Tensor, header: Header) -> SparseTargets:
    """The targets of all tokens of a row group. Slots without an id are masked."""
    of_ids, rows = _offsets(name, "ids", columns["ids"])
    of_logprobs, values = _offsets(name, "logprobs", columns["logprobs"])
    of_tail, tail = starts, None
    if "tail" in columns:
        of_tail, tail = _read(name, "tail", columns, torch.float32)
    for column, found in (("ids", of_ids), ("logprobs", of_logprobs), ("tail", of_tail)):
        parquet_checks.same_lengths(name, column, torch.equal(found, starts))
    slots, ids = _offsets(name, "ids", rows)
    also, logprobs = _offsets(name, "logprobs", values)
    parquet_checks.same_lengths(name, "logprobs", torch.equal(slots, also))
    counts = slots.diff()
    parquet_checks.slots(name, int(counts.max()) if len(counts) else 0, header.k)
    mask = torch.arange(header.k) < counts[:, None]
    all_ids = torch.zeros(mask.shape, dtype=torch.int64)
    all_logprobs = torch.full(mask.shape, -torch.inf)
    all_ids[mask] = _numbers(name, "ids", ids, torch.int64)
    all_logprobs[mask] = _numbers(name, "logprobs", logprobs, torch.float32)
    return SparseTargets(all_ids, all_logprobs, tail, None if bool(mask.all()) else mask)


def _read(
    name: str, column: str, columns: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The offsets of the lists in a column, and their numbers as one tensor."""
    offsets, values = _offsets(name, column, columns[column])
    return offsets, _numbers(name, column, values, dtype)


def _offsets(name: str, column: str, array: Any) -> tuple[Tensor, Any]:
    """The offsets of the lists in `array`, from 0, and one array with all items."""
    pa, _ = parquet_checks.pyarrow()
    parquet_checks.is_list(name, column, array, pa)
    # From the lengths, because the offsets of a slice do not start at 0.
    offsets = torch.tensor([0, *pa.compute.list_value_length(array).to_pylist()]).cumsum(0)
    return offsets, array.flatten()


def _numbers(name: str, column: str, array: Any, dtype: torch.dtype) -> Tensor:
    pa, _ = parquet_checks.pyarrow()
    parquet_checks.is_numbers(name, column, array, pa)
    kinds = {torch.int64: pa.int64(), torch.float32: pa.float32(), torch.uint8: pa.uint8()}
    array = array.cast(kinds[dtype])
    if not len(array):
        return torch.empty(0, dtype=dtype)
    place = array.offset * dtype.itemsize
    data = bytearray(array.buffers()[1])
    return torch.frombuffer(data, dtype=dtype, count=len(array), offset=place)
