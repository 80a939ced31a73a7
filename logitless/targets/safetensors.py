"""Reads and writes files in the safetensors format, which contains no code.

A file is eight bytes with the length of the header, a header in JSON, and the bytes of the tensors,
little-endian and without gaps. It can be damaged or malicious, so every size in the header is
compared with the length of the file before memory is allocated.

The package `safetensors` took five times as long to read the slices of a batch, and kills the
process if an open file is truncated.
"""

import ctypes
import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_BYTES = 1 << 20  # maximum length of a header; a header has about 100 bytes per tensor
_DIMENSIONS = 64  # maximum number of dimensions; PyTorch's kernels have the same limit
_METADATA = "__metadata__"
# Makes a memoryview of some address in a tenth of the time that a new array type of ctypes takes.
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes, _view.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200


class Entry(NamedTuple):
    """One tensor. `begin` and `end` are offsets in bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    metadata: dict[str, str]
    entries: dict[str, Entry]
    start: int  # the offset in the file where the bytes of the tensors start


def buffer(t: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; valid while the tensor exists."""
    if not t.numel():  # it may have no address
        return memoryview(bytearray())
    return _view(t.data_ptr(), t.numel() * t.itemsize, _WRITABLE)


@contextmanager
def replaced(path: str | os.PathLike, durable: bool = True) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path` at the end of the `with` block, unless an error is raised.

    If `durable` is True, the new file is then on the disk. A failed write keeps the old file.
    """
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
        if durable:
            sync(Path(path).parent)
    finally:
        unfinished.unlink(missing_ok=True)


def write(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # wide dtypes first, so that each tensor is aligned to its dtype
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    contiguous = {name: tensors[name].detach().cpu().contiguous() for name in order}
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, t in contiguous.items():
        if t.dtype not in _NAMES:
            raise TypeError(f"{name} must have a dtype of {', '.join(DTYPES)}, got {t.dtype}.")
        begin, end = end, end + t.numel() * t.itemsize
        entry = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path, durable=False) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in contiguous.values():
            file.write(buffer(t))


def sync(folder: Path) -> None:
    """Flushes the directory entries of a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def mapped(path: str | os.PathLike, header: Header) -> dict[str, Tensor]:
    """Maps tensors into memory. Writing to them changes neither the file nor other processes."""
    size = header.start + max((entry.end for entry in header.entries.values()), default=0)
    whole = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, (dtype, shape, begin, end) in header.entries.items():
        if (header.start + begin) % dtype.itemsize:
            _refuse(path, f"have {name!r} at a multiple of {dtype.itemsize} bytes", str(begin))
        data = whole[header.start + begin : header.start + end]
        tensors[name] = (
            data.view(dtype).view(shape) if end > begin else torch.empty(shape, dtype=dtype)
        )
    return tensors


def read(path: str | os.PathLike, header: Header) -> dict[str, Tensor]:
    """Reads tensors into CPU memory, with the result of `read_header`."""
    tensors = {}
    with open(path, "rb") as file:
        for name, (dtype, shape, begin, end) in header.entries.items():
            file.seek(header.start + begin)
            data = bytearray(end - begin)
            if file.readinto(data) != len(data):
                _refuse(path, "keep its length while it is read", "a shorter file")
            tensors[name] = _tensor(data, dtype, shape)
    return tensors


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # only the bytes 0 and 1 are valid in a bool tensor
        return (torch.frombuffer(data, dtype=torch.uint8) != 0).view(shape)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def read_header(path: str | os.PathLike) -> Header:
    with open(path, "rb") as file:
        return header_in(path, file, os.fstat(file.fileno()).st_size)


def from_bytes(name: str, data: bytes) -> tuple[Header, dict[str, Tensor]]:
    """The header and the tensors of a file with the bytes `data`; `name` is for errors."""
    header = header_in(name, io.BytesIO(data), len(data))
    tensors = {}
    for column, (dtype, shape, begin, end) in header.entries.items():
        piece = bytearray(data[header.start + begin : header.start + end])
        tensors[column] = _tensor(piece, dtype, shape)
    return header, tensors


def header_in(path: str | os.PathLike, file: BinaryIO, size: int) -> Header:
    """Reads the header of an open file of `size` bytes, and checks every size and offset."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _HEADER_BYTES):
        limit = f"{_HEADER_BYTES} bytes within the file's {size} bytes"
        _refuse(path, f"have a safetensors header of at most {limit}", f"{length} bytes")
    text = file.read(length)
    try:
        fields = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        _refuse(path, "have a safetensors header in JSON", str(error)[:100])
    if not isinstance(fields, dict):
        _refuse(path, "have a JSON object as its header", type(fields).__name__)
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(s, str) for s in metadata.values()):
        _refuse(path, "have strings as its metadata", repr(metadata)[:100])
    entries = {name: _entry(path, name, field) for name, field in fields.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != end:
            _refuse(path, f"have the bytes of {name!r} begin at {end}", str(entry.begin))
        end = entry.end
    if end != size - 8 - length:
        _refuse(path, f"hold the {end} bytes that its header describes", str(size - 8 - length))
    return Header(metadata, entries, 8 + length)


def _entry(path: str | os.PathLike, name: str, field: Any) -> Entry:
    if not isinstance(field, dict) or field.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"give dtype, shape and data_offsets of {name!r}", repr(field)[:100])
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(
            path, f"have one of {', '.join(DTYPES)} as the dtype of {name!r}", repr(dtype)[:100]
        )
    if not _are_sizes(shape) or len(shape) > _DIMENSIONS:
        _refuse(path, f"have sizes of dimensions as the shape of {name!r}", repr(shape)[:100])
    if not _are_sizes(offsets) or len(offsets) != 2:
        _refuse(path, f"have two numbers as the data_offsets of {name!r}", repr(offsets)[:100])
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        _refuse(path, f"have {needed} bytes for {name!r} of shape {shape}", str(end - begin))
    return Entry(DTYPES[dtype], tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a repeated name")
    return fields


def _refuse(path: str | os.PathLike, rule: str, got: str):
    raise ValueError(f"{os.fspath(path)} must {rule}, got {got}.")
