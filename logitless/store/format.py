"""The header of a store, and its rows: fields, packed ids and checksums.

docs/store-format.md has the layout of all files, byte by byte. With values="counts", a document is
stored as in store/counts.py, and a row exists only in memory, with the fields token, ids and draws.
"""

import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..targets.safetensors import buffer
from . import checks
from .device import on_cpu

FORMAT, VERSION = "logitless.store", 5
DISTINCT = 0.3  # assumed number of distinct ids per draw, for estimates of a store's size
# Parts are packed in signed dtypes, because uint32 and uint16 lack many operations.
WIDTHS = {32: torch.int32, 16: torch.int16, 8: torch.uint8, 4: None, 2: None, 1: None}
KINDS = {torch.int32: "int32", torch.int64: "int64"}


class Field(NamedTuple):
    dtype: torch.dtype
    at: slice  # of a row in this dtype


@dataclass(frozen=True)
class Header:
    """Properties that all documents of a store share."""

    vocab_size: int
    k: int
    values: str = "u8"  # "u8" for 8-bit codes, "f16" for fp16 codes, "counts" for sampled targets
    teacher: str = ""  # the teacher's name
    tokenizer: str = ""  # `tokenizer_hash` of the tokenizer
    temperature: float = 1.0  # temperature of the log-probabilities

    def __post_init__(self):
        checks.header(self)

    def __hash__(self) -> int:  # quick, because each read of a document looks up its layout
        return hash((self.vocab_size, self.k))

    @property
    def bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int32 if self.bits < 32 else torch.int64

    @functools.cached_property
    def sampled(self) -> bool:
        """Whether the rows are sampled targets, which hold counts of draws."""
        return self.values == "counts"

    @functools.cached_property
    def fields(self) -> dict[Any, Field]:
        """The fields of a row, those of the widest numbers first; W is the name of ids.W."""
        k = self.k
        counts: dict[Any, tuple[torch.dtype, int]] = {"token": (torch.int32, 1)}
        if self.sampled:
            counts |= {"ids": (self.id_dtype, k), "draws": (torch.uint8, -(-k // 8))}
        else:
            counts |= {"top": (torch.float32, 1), "tail": (torch.float32, 1)}
            for width, dtype in widths(self.bits):
                counts[width] = (dtype or torch.uint8, packed_length(k, width))
            halves = self.values == "f16"
            counts["codes"] = (torch.float16, k - 1) if halves else (torch.uint8, k)
        fields, end = {}, 0
        for name, (dtype, count) in sorted(counts.items(), key=lambda item: -item[1][0].itemsize):
            begin = end // dtype.itemsize
            fields[name] = Field(dtype, slice(begin, begin + count))
            end += count * dtype.itemsize
        if not self.sampled:  # the checksum of a sampled document follows all its rows
            fields["crc"] = Field(torch.int32, slice(-(-end // 4), -(-end // 4) + 1))
        return fields

    @functools.cached_property
    def row_bytes(self) -> int:
        """The bytes of one row in memory, and on disk except with values="counts"."""
        end = max(dtype.itemsize * at.stop for dtype, at in self.fields.values())
        return end + -end % max(dtype.itemsize for dtype, _ in self.fields.values())

    def field(self, rows: Tensor, name: Any) -> Tensor:
        """A view (T, count) of one field of `rows`, which are uint8 of shape (T, row_bytes)."""
        dtype, at = self.fields[name]
        return rows.view(dtype)[:, at]

    def token_bytes(self, distinct: float | None = None) -> float:
        """The bytes of a token and its row on disk, without those per document.

        With values="counts", `distinct` is the mean number of distinct ids per row, by default
        DISTINCT times the number of draws.
        """
        if not self.sampled:
            return self.row_bytes
        distinct = DISTINCT * self.k if distinct is None else distinct
        return 4 + -(-self.k // 8) + distinct * self.bits / 8


def sealed(rows: Tensor, header: Header, check: int) -> bytes:
    """The bytes of a document's rows with their checksums, which are written into `rows`."""
    width, view, u, crcs = header.row_bytes, buffer(rows), check & 0xFFFFFFFF, []
    for begin in range(0, len(view), width):  # `checksum` of each row, in 0.6 of the time
        mark, u = zlib.crc32(u.to_bytes(4, "little")), u + 1 & 0xFFFFFFFF
        crcs.append(zlib.crc32(view[begin : begin + width - 4], mark) ^ u)
    header.field(rows, "crc")[:, 0] = torch.tensor(crcs)
    return bytes(view)


def checksum(data: Any, check: int, i: int) -> int:
    """The `crc` of row i, whose other bytes are `data`."""
    return zlib.crc32(data, _mark(check, i)) ^ (check + i + 1) & 0xFFFFFFFF


def is_whole(rows: Any, check: int, a: int, b: int) -> bool:
    """Whether these are the bytes of rows a to b - 1 of the document with this hash."""
    return zlib.crc32(rows, _mark(check, a)) == _mark(check, b)


def _mark(check: int, i: int) -> int:
    return zlib.crc32((check + i & 0xFFFFFFFF).to_bytes(4, "little"))


def bytes_of(t: Tensor) -> bytes:
    t = t.contiguous()  # a name, because `buffer` does not keep the memory
    return bytes(buffer(t))


def widths(bits: int) -> list[tuple[int, torch.dtype | None]]:
    """(width, dtype) of each part of an integer with `bits` bits, widest first; None below 8."""
    return [(width, dtype) for width, dtype in WIDTHS.items() if bits & width]


def packed_length(n: int, width: int) -> int:
    return n if width >= 8 else -(-n * width // 8)


def pack(x: Tensor, bits: int) -> dict[int, Tensor]:
    """Cuts each integer of `x`, of shape (..., n), into parts, one tensor per width."""
    parts, shift = {}, 0
    for width, dtype in widths(bits):
        part = x >> shift if shift else x
        if dtype is None:
            per, part = 8 // width, part & (1 << width) - 1
            part = pad(part, (0, -part.shape[-1] % per)).unflatten(-1, (-1, per))
            part = (part << torch.arange(0, 8, width, device=x.device)).sum(-1)
        parts[width] = part.to(dtype or torch.uint8)  # drops the bits of other parts
        shift += width
    return parts


class Library(NamedTuple):
    """The operations that decode rows, of NumPy if it is installed, or else of PyTorch.

    An operation on a few numbers takes a third of the time in NumPy.
    """

    module: Any
    empty: Callable[[int], tuple[Any, memoryview]]  # an array of bytes, and its memory
    array: Callable[[Any], Any]  # of a tensor; an array is returned as it is
    tensor: Callable[[Any], Tensor]
    cast: Callable[[Any, Any], Any]
    take: Callable[[Any, Any], Any]  # rows of a table


def _tensor_of_bytes(n: int) -> tuple[Tensor, memoryview]:
    t = torch.empty(n, dtype=torch.uint8, device="cpu")
    return t, buffer(t)


IN_TORCH = Library(
    torch, _tensor_of_bytes, lambda t: t, Tensor.contiguous,
    lambda t, dtype: t.to(dtype, copy=True),
    lambda t, i: t.index_select(0, i.reshape(-1).int()).view(*i.shape, *t.shape[1:]),
)  # fmt: skip


@functools.lru_cache
@on_cpu
def library() -> Library:
    try:
        torch.empty(0, dtype=torch.uint8).numpy()
    except RuntimeError:  # PyTorch has found no NumPy
        return IN_TORCH
    numpy = import_module("numpy")

    def empty(n: int) -> tuple[Any, memoryview]:
        array = numpy.empty(n, dtype=numpy.uint8)
        return array, memoryview(array)

    return Library(
        numpy, empty, lambda t: t if type(t) is numpy.ndarray else t.numpy(), torch.from_numpy,
        numpy.ndarray.astype, lambda t, i: t.take(i, 0),
    )  # fmt: skip


@functools.lru_cache
def places(header: Header, lib: Library) -> dict[Any, tuple[Any, slice]]:
    """The dtype of each field, unsigned for whole numbers, and its place in a row of this dtype."""
    found = {}
    for name, (dtype, at) in header.fields.items():
        kind = str(dtype).removeprefix("torch.")
        found[name] = getattr(lib.module, f"u{kind}" if kind.startswith("int") else kind), at
    return found


def unpack(parts: Iterable[tuple[int, Any]], n: int, dtype: torch.dtype, lib: Library) -> Any:
    """Inverts `pack`: an array of shape (..., n), from arrays of unsigned numbers."""
    kind, shift, integers = getattr(lib.module, KINDS[dtype]), 0, None
    for width, part in parts:
        if width < 8:
            part = lib.take(_parts_of_byte(width, shift, dtype, lib), part)
            part = part.reshape(*part.shape[:-2], part.shape[-2] * part.shape[-1])[..., :n]
        elif shift:
            part = lib.cast(part, kind) << shift
        if integers is None:
            integers = lib.cast(part, kind)
        else:
            integers |= part
        shift += width
    return integers


@functools.lru_cache
@on_cpu
def _parts_of_byte(width: int, shift: int, dtype: torch.dtype, lib: Library) -> Any:
    """A table (256, 8 / width). Row b holds the parts of byte b, shifted left by `shift`."""
    parts = torch.arange(256)[:, None] >> torch.arange(0, 8, width) & (1 << width) - 1
    return lib.array((parts << shift).to(dtype))
