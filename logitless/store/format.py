"""The layout of a teacher store on disk, and the packing of its integers.

A store is a folder:

    store.json               the header (class Header below) as JSON
    store.lock               locked while a writer writes store.json or store.index
    RANK-NUMBER.safetensors  a shard: finished documents; a shard never changes
    RANK.journal             documents that will be in the next shard of RANK (store/journal.py)
    RANK.lock                locked by the writer of RANK while the writer is open
    RANK.uploaded            names of the shards that RANK has uploaded (store/upload.py)
    store.index              a list of the shards, for readers of a remote store (store/listing.py)
    store-HASH.lookup        the index of all shards, for readers of a remote store

RANK is the number of a writer, 0 if there is only one. NUMBER has at least six digits.

A shard is a safetensors file (targets/safetensors.py), tensors with the widest dtype first. Its
metadata holds the name and the version of the format, the store's header and a SHA-256 of the
tensors. With D documents of T tokens in total, K slots (stored ids) per token and ids of b bits, it
has these tensors:

    starts      I64 (D + 1)       first token of each document; the last entry is T
    index.hash  I64 (E)           sorted hashes of the documents' prefixes        (store/index.py)
    index.doc   I32 (E)           number d of a document with this prefix, or -1 - d if
                                  several documents of the shard have this prefix
    tokens.W    (T · W / 8)       the tokens, packed as described below
    ids.W       (T, K · W / 8)    ids of the slots, packed; the most probable slot comes first
    top         F32 (T)           log p of the first slot; NaN if the row has no slots
    tail        F32 (T)           log of the mass outside the ids, as given in the targets
    step        U8  (T)           unit of the row's codes: 2^((step - 288) / 32) nats
    codes       U8  (T, K - 1)    log p of the other slots is top - units(code) · unit
    crc         U8  (4 · B)       CRC-32 of each block of 4,096 bytes of the tensors above, in
                                  the order of the file                           (store/blocks.py)

A larger code means a smaller probability, and the codes of a row ascend, because its slots are
sorted. Up to 223, units(code) is the code itself; up to 253, it is 223 · 2^(0.4 · (code - 223)).
Code 254 means p = 0, and code 255 an empty slot (store/rows.py).

With values="f16", there is no `step`, and `codes` has this form:

    codes       F16 (T, K - 1)    log p is top - code; inf means p = 0, NaN means an empty slot

With values="counts", the store holds sampled targets (`capture_sampled`), K is the number n of
draws per token, and S the number of distinct ids of all rows. Instead of `top`, `tail`, `step` and
`codes`, the shard has these columns:

    slots       I64 (D + 1)       first slot of each document; the last entry is S
    ids.W       (S · W / 8)       the distinct ids of all rows, packed; ascending within a row
    draws       U8  (T, n / 8)    bit j is 1 if draw j is the first draw of its id; the draws of a
                                  row are sorted by id                          (store/counts.py)

Bit j of a row is bit j mod 8, from the lowest, of byte floor(j / 8). All bits of a row without
slots are 0.

An integer of b bits is cut into fields of 32, 16, 8, 4, 2 or 1 bits, whose widths add up to b; the
widest field holds the lowest bits. The fields of one width W form one tensor of dtype U32, U16 or
U8. If W is below 8, one byte holds the fields of 8 / W integers, the first in the lowest bits. An
id of 18 bits takes a U16 and a quarter of a byte.

At K = 64 and V = 151,936, a token takes 218.25 bytes: 144 for the ids, 63 for the codes, 9 for
`top`, `tail` and `step`, and 2.25 for itself. A row of sampled targets with m distinct ids takes
ceil(n / 8) + (m + 1) b / 8 bytes. A document adds 8 bytes (16 if sampled) and 12 per index entry,
and checksums 1 byte per 1,024.

Shards of version 1 have no `crc`, so only `verify` and `merge` detect a changed byte; every code c
up to 253 means c units; and the index is computed from the tokens, not read. `merge` rewrites them
as version 2.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import checks, file_checks

FORMAT, VERSION, OLDER = "logitless.store", "2", ("1",)
BLOCK = 4096  # bytes per checksum
DISTINCT = 0.3  # assumed number of distinct ids per draw, for estimates of a store's size
WIDTHS = {32: torch.uint32, 16: torch.uint16, 8: torch.uint8, 4: None, 2: None, 1: None}
# Fields are computed in signed dtypes, because uint32 and uint16 lack many operations.
SIGNED = {32: torch.int32, 16: torch.int16}
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Table = dict[str, Tensor]  # one tensor per column; all columns have the same number of rows


@dataclass(frozen=True)
class Header:
    """Properties that all documents of a store share."""

    vocab_size: int
    k: int
    values: str = "u8"  # "u8" for 8-bit codes, "f16" for fp16 codes, "counts" for sampled targets
    teacher: str = ""  # the teacher's name
    tokenizer: str = ""  # `tokenizer_hash` of the tokenizer
    temperature: float = 1.0  # temperature of the log-probabilities
    alignment: str = "next"  # row i describes the token after tokens[i]

    def __post_init__(self):
        checks.header(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(where: object, text: str | bytes) -> "Header":
        return Header(**file_checks.header_fields(where, text, Header))

    @property
    def bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int32 if self.bits < 32 else torch.int64

    @property
    def sampled(self) -> bool:
        """Whether the rows are sampled targets, which hold counts of draws."""
        return self.values == "counts"

    @property
    def row_column(self) -> str:
        """The name of a column that has one row per token."""
        return "draws" if self.sampled else "top"

    def layout(self) -> Layout:
        """The dtype and the shape of one row of each column in memory.

        A shard has the same columns, except with values="counts" (store/counts.py).
        """
        return _layout(self)

    def sizes(self) -> dict[str, int]:
        """The bytes of one row in each column."""
        return _sizes(self)

    def row_bytes(self) -> int:
        """The bytes of one row in memory."""
        return sum(self.sizes().values())

    def token_bytes(self, distinct: float | None = None) -> float:
        """The bytes of a token and its row in a shard, with checksums, without `starts` and index.

        With values="counts", `distinct` is the mean number of distinct ids per row, by default
        DISTINCT times the number of draws.
        """
        row = self.row_bytes()
        if self.sampled:
            distinct = DISTINCT * self.k if distinct is None else distinct
            row = self.sizes()["draws"] + distinct * self.bits / 8
        return (row + self.bits / 8) * (1 + 4 / BLOCK)


@functools.lru_cache
def _layout(header: Header) -> Layout:
    if header.sampled:
        draws = (torch.uint8, (-(-header.k // 8),))
        return {"ids": (header.id_dtype, (header.k,)), "draws": draws}
    columns = {
        f"ids.{width}": (dtype or torch.uint8, (packed_length(header.k, width),))
        for width, dtype in widths(header.bits)
    }
    columns |= {"top": (torch.float32, ()), "tail": (torch.float32, ())}
    if header.values == "f16":
        return columns | {"codes": (torch.float16, (header.k - 1,))}
    return columns | {"codes": (torch.uint8, (header.k - 1,)), "step": (torch.uint8, ())}


@functools.lru_cache
def _sizes(header: Header) -> dict[str, int]:
    return {
        name: dtype.itemsize * (shape[0] if shape else 1)
        for name, (dtype, shape) in _layout(header).items()
    }


def widths(bits: int) -> list[tuple[int, torch.dtype | None]]:
    """(width, dtype) of each field of an integer with `bits` bits, widest first; None below 8."""
    return [(width, dtype) for width, dtype in WIDTHS.items() if bits & width]


def packed_length(n: int, width: int) -> int:
    return n if width >= 8 else -(-n * width // 8)


def pack(x: Tensor, bits: int) -> dict[int, Tensor]:
    """Cuts each integer of `x`, of shape (..., n), into fields, one tensor per width."""
    fields, shift = {}, 0
    for width, dtype in widths(bits):
        field = x >> shift & (1 << width) - 1
        if dtype is None:
            per = 8 // width
            field = pad(field, (0, -field.shape[-1] % per)).unflatten(-1, (-1, per))
            field = (field << torch.arange(0, 8, width, device=x.device)).sum(-1)
        fields[width] = field.to(SIGNED.get(width, torch.uint8)).view(dtype or torch.uint8)
        shift += width
    return fields


def unpack(fields: Mapping[int, Tensor], integers: Tensor) -> None:
    """Inverts `pack` into `integers`, of shape (..., n)."""
    shift = 0
    for width, field in fields.items():
        if width < 8:
            field = _of_bytes(field, width, shift, integers.dtype)[..., : integers.shape[-1]]
        elif shift:
            field = field.to(integers.dtype) << shift
        if shift:
            integers.bitwise_or_(field)
        else:
            integers.copy_(field)
        shift += width


def _of_bytes(field: Tensor, width: int, shift: int, dtype: torch.dtype) -> Tensor:
    """Cuts each byte into fields of `width` bits, shifted left by `shift` bits."""
    fields = _fields_of_byte(width, shift, dtype)
    found = fields.index_select(0, field.flatten().int())
    return found.view(dtype).view(*field.shape[:-1], field.shape[-1] * (8 // width))


@functools.lru_cache
def _fields_of_byte(width: int, shift: int, dtype: torch.dtype) -> Tensor:
    """A table (256, 8 / width). Row b holds the fields of byte b, shifted left by `shift`.

    A row of 8 bytes is one int64 number, and a row of 16 bytes one complex128 number, because
    `index_select` of numbers is twice as fast as of rows. The caller views them as `dtype` again.
    """
    fields = torch.arange(256)[:, None] >> torch.arange(0, 8, width) & (1 << width) - 1
    fields = (fields << shift).to(dtype)
    number = {8: torch.int64, 16: torch.complex128}.get(fields[0].nbytes)
    return fields if number is None else fields.view(number)[:, 0]
