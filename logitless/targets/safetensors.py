"""Tensors in a file, in the safetensors format: no code in it, readable by other tools.

Eight bytes of header length, a header in JSON, then the tensors' bytes, little-endian, without
gaps. The format is small enough that no dependency is needed for it. A file is not trusted: what
the header says is held against the length of the file before anything of that size is allocated.
"""

import ctypes
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_BYTES = 1 << 20  # at most; a header is some 100 bytes a tensor
_DIMENSIONS = 64  # at most, as in PyTorch's own kernels
_METADATA = "__metadata__"


class Entry(NamedTuple):
    """One tensor as the header has it, its bytes counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    metadata: dict[str, str]
    entries: dict[str, Entry]
    start: int  # where in the file the tensors begin


def buffer(t: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, where they are, for as long as it lives."""
    return (ctypes.c_char * (t.numel() * t.itemsize)).from_address(t.data_ptr())


def write(
    path: str | os.PathLike,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    durable: bool = False,
) -> None:
    """Under another name first: a write that fails leaves what was at `path` as it was.

    One that is durable has reached the disk when it returns.
    """
    # Wide types first, so that each tensor is aligned to its own.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    held = {name: tensors[name].detach().cpu().contiguous() for name in order}
    header: dict[str, Any] = {_METADATA: metadata}
    end = 0
    for name, t in held.items():
        if t.dtype not in _NAMES:
            raise TypeError(f"{name} must have a dtype of {', '.join(DTYPES)}, got {t.dtype}.")
        begin, end = end, end + t.numel() * t.itemsize
        what = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
        header[name] = what
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for t in held.values():
                file.write(buffer(t))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
        if durable:
            _sync(Path(path).parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """The names in a folder reach the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def mapped(path: str | os.PathLike, header: Header) -> dict[str, Tensor]:
    """The tensors of a file whose header was found right, read from it when they are used.

    They may be written to, which changes neither the file nor what others see of it.
    """
    size = header.start + max((entry.end for entry in header.entries.values()), default=0)
    whole = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, (dtype, shape, begin, end) in header.entries.items():
        if (header.start + begin) % dtype.itemsize:
            _refuse(path, f"have {name!r} at a multiple of {dtype.itemsize} bytes", str(begin))
        part = whole[header.start + begin : header.start + end]
        found[name] = (
            part.view(dtype).view(shape) if end > begin else torch.empty(shape, dtype=dtype)
        )
    return found


def read(path: str | os.PathLike, header: Header) -> dict[str, Tensor]:
    """The tensors of a file whose header was found right, on the CPU."""
    found = {}
    with open(path, "rb") as file:
        for name, (dtype, shape, begin, end) in header.entries.items():
            file.seek(header.start + begin)
            data = bytearray(end - begin)
            if file.readinto(data) != len(data):
                _refuse(path, "keep its length while it is read", "a shorter one")
            found[name] = _tensor(data, dtype, shape)
    return found


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:  # a byte other than 0 and 1 is no bool
        return (torch.frombuffer(data, dtype=torch.uint8) != 0).view(shape)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def read_header(path: str | os.PathLike) -> Header:
    """What a file holds, every length and place in it checked."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _HEADER_BYTES):
            limit = f"{_HEADER_BYTES} bytes that lies within its {size}"
            _refuse(path, f"have a safetensors header of at most {limit}", f"one of {length}")
        text = file.read(length)
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        _refuse(path, "have a safetensors header in JSON", str(error)[:100])
    if not isinstance(found, dict):
        _refuse(path, "have a JSON object as its header", type(found).__name__)
    metadata = found.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(s, str) for s in metadata.values()):
        _refuse(path, "have strings as its metadata", repr(metadata)[:100])
    entries = {name: _entry(path, name, what) for name, what in found.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != end:
            _refuse(path, f"have the bytes of {name!r} begin at {end}", str(entry.begin))
        end = entry.end
    if end != size - 8 - length:
        _refuse(path, f"hold the {end} bytes that its header tells of", str(size - 8 - length))
    return Header(metadata, entries, 8 + length)


def _entry(path: str | os.PathLike, name: str, what: Any) -> Entry:
    if not isinstance(what, dict) or what.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"give dtype, shape and data_offsets of {name!r}", repr(what)[:100])
    dtype, shape, places = what["dtype"], what["shape"], what["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(
            path, f"have one of {', '.join(DTYPES)} as the dtype of {name!r}", repr(dtype)[:100]
        )
    if not _counts(shape) or len(shape) > _DIMENSIONS:
        _refuse(path, f"have lengths of dimensions as the shape of {name!r}", repr(shape)[:100])
    if not _counts(places) or len(places) != 2:
        _refuse(path, f"have two places as the data_offsets of {name!r}", repr(places)[:100])
    begin, end = places
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        _refuse(path, f"have {needed} bytes for {name!r} of shape {shape}", str(end - begin))
    return Entry(DTYPES[dtype], tuple(shape), begin, end)


def _counts(value: Any) -> bool:
    """Whether it is a list of lengths that 64 bits hold."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that is there twice")
    return found


def _refuse(path: str | os.PathLike, rule: str, got: str):
    raise ValueError(f"{os.fspath(path)} must {rule}, got {got}.")
