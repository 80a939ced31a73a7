"""The layout of a teacher store on disk, and the encoding of its rows.

A store is a folder:

    store.json               the header (class Header below) as JSON
    RANK-NUMBER.safetensors  a shard: finished documents; a shard never changes
    RANK.journal             documents that will be in the next shard of RANK (store/journal.py)
    RANK.lock                locked by the writer of RANK while the writer is open

RANK is a writer's number, which is 0 if there is only one writer.

A shard is a safetensors file (targets/safetensors.py). Bytes 0-7 hold the length n of a JSON
header, bytes 8 to 8 + n hold the header, and the tensors follow at the `data_offsets` in the
header, widest dtype first. The metadata holds the format, its version, the store's header and a
SHA-256 of the tensors.

A shard of D documents with T tokens in total, K slots per token and ids of b bits has the tensors

    starts      I64 (D + 1)       first token of each document; the last entry is T
    index.hash  I64 (E)           sorted hashes of the documents' beginnings      (store/lookup.py)
    index.doc   I32 (E)           the document of each hash
    tokens.W    (T · W / 8)       the tokens, packed as described below
    ids.W       (T, K · W / 8)    ids of the slots, packed; the most probable slot comes first
    top         F32 (T)           log p of the first slot; NaN if the row has no slots
    tail        F32 (T)           log mass outside the ids, as it was given
    step        U8  (T)           unit of the row's codes: 2^((step - 288) / 32) nats
    codes       U8  (T, K - 1)    log p of the other slots is top - code · unit;
                                  254 means p = 0, 255 means an empty slot

With values="f16" there is no `step`, and `codes` is

    codes       F16 (T, K - 1)    log p is top - code; inf means p = 0, NaN means an empty slot

An integer of b bits is cut into fields of 32, 16, 8, 4, 2 or 1 bits. The widths of the fields add
up to b, and the widest field holds the lowest bits. The fields of one width W form one tensor of
dtype U32, U16 or U8. Fields narrower than 8 bits share bytes: a byte holds the fields of 8 / W
integers, the first in the lowest bits. An id of 18 bits is therefore a U16 and a quarter of a byte,
and reading it never shifts bits across bytes.

At K = 64 and V = 151,936 a token takes 128 + 16 (ids) + 63 (codes) + 9 (top, tail, step) + 2.25
(the token) = 218.25 bytes. A document takes 8 bytes for its start and 12 bytes per index entry.

Rounding keeps the mass of a row, because `top` is chosen so that the rounded probabilities have the
same sum. The remaining error is in the proportions between slots and is of second order in the
unit.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..targets.sparse import SparseTargets, unchecked
from . import checks

FORMAT, VERSION = "logitless.store", "1"
WIDTHS = {32: torch.uint32, 16: torch.uint16, 8: torch.uint8, 4: None, 2: None, 1: None}
# Fields are computed in signed dtypes, because PyTorch lacks many operations on uint32 and uint16.
SIGNED = {32: torch.int32, 16: torch.int16}
CODES = 253  # the largest code of a positive probability
ZERO, EMPTY = 254, 255
PER_OCTAVE, LOWEST = 32, -288  # units are 2^((0 + LOWEST) / 32), ..., 2^((255 + LOWEST) / 32)
TRIED = 8  # number of units tried per row, each 2 % larger than the one before

Table = dict[str, Tensor]  # one tensor per column; all columns have the same rows


@dataclass(frozen=True)
class Header:
    """Properties that all documents of a store share."""

    vocab_size: int
    k: int
    values: str = "u8"  # or "f16"
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
        return Header(**checks.header_fields(where, text, Header))

    @property
    def bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int32 if self.bits < 32 else torch.int64

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype of each column, and the shape of one row in the column."""
        columns = {
            f"ids.{width}": (dtype or torch.uint8, (packed_length(self.k, width),))
            for width, dtype in widths(self.bits)
        }
        columns |= {"top": (torch.float32, ()), "tail": (torch.float32, ())}
        if self.values == "f16":
            return columns | {"codes": (torch.float16, (self.k - 1,))}
        return columns | {"codes": (torch.uint8, (self.k - 1,)), "step": (torch.uint8, ())}

    def row_bytes(self) -> int:
        return sum(
            dtype.itemsize * (shape[0] if shape else 1) for dtype, shape in self.layout().values()
        )


# Packing of integers


def widths(bits: int) -> list[tuple[int, torch.dtype | None]]:
    """Widths of the fields of an integer, widest first; the dtype is None below 8 bits."""
    return [(width, dtype) for width, dtype in WIDTHS.items() if bits & width]


def packed_length(n: int, width: int) -> int:
    """The number of tensor elements that hold n fields."""
    return n if width >= 8 else -(-n * width // 8)


def pack(x: Tensor, bits: int) -> dict[int, Tensor]:
    """Cuts integers (..., n) into fields; returns one tensor per width."""
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


def unpack(fields: Mapping[int, Tensor], n: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack`: integers (..., n) of the given dtype."""
    integers, shift = None, 0
    for width, field in fields.items():
        if width >= 8:
            shifted = field.to(dtype) << shift if shift else field.to(dtype)
        else:
            fields_of_byte = _fields_of_byte(width, shift, dtype)
            shifted = fields_of_byte.index_select(0, field.reshape(-1).int())
            shifted = shifted.view(*field.shape[:-1], field.shape[-1] * (8 // width))[..., :n]
        integers = shifted if integers is None else integers.bitwise_or_(shifted)
        shift += width
    return integers


@functools.lru_cache
def _fields_of_byte(width: int, shift: int, dtype: torch.dtype) -> Tensor:
    """The fields in each of the 256 bytes, shifted to their place, (256, 8 / width)."""
    fields = torch.arange(256)[:, None] >> torch.arange(0, 8, width) & (1 << width) - 1
    return (fields << shift).to(dtype)


def field_at(field: Tensor, width: int, places: Tensor) -> Tensor:
    """One field of the integers at the given places of a packed sequence."""
    if width == 8:
        return field[places].long()
    if width > 8:
        return field.view(SIGNED[width])[places].long() & (1 << width) - 1
    per = 8 // width
    return field[places // per].long() >> places % per * width & (1 << width) - 1


# Encoding of rows


def encoded(targets: SparseTargets, header: Header, sorted_: bool = False) -> Table:
    """Encodes the rows of targets, (T,), on their device.

    `sorted_` promises that the slots are sorted, as `capture_topk` returns them. The host then does
    not wait for the device.
    """
    ids, logprobs, valid = _ordered(targets, header.k, sorted_)
    top, logprobs = logprobs[:, 0], logprobs.masked_fill(~valid, -torch.inf)
    below = torch.where(logprobs == -torch.inf, 0.0, top[:, None] - logprobs)
    mass = logprobs.logsumexp(-1)
    zero = valid & (logprobs == -torch.inf)
    encode = _in_halves if header.values == "f16" else _in_bytes
    table, rounded = encode(below, logprobs, zero, valid)
    rounded_mass = torch.where(logprobs == -torch.inf, -torch.inf, -rounded).logsumexp(-1)
    top = torch.where(top == -torch.inf, top, mass - rounded_mass)
    table["top"] = torch.where(valid[:, 0], top, torch.nan)
    tail = targets.tail
    if tail is None:  # topk_distill computes a missing tail in the same way
        tail = torch.log1p(-mass.double().exp().clamp_max(1))
    table["tail"] = torch.where(valid[:, 0], tail.float(), 0.0)
    packed = pack(torch.where(valid, ids, 0), header.bits)
    return table | {f"ids.{width}": field for width, field in packed.items()}


def _ordered(targets: SparseTargets, k: int, sorted_: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and a mask of valid slots, (T, k), the most probable slot first."""
    ids, logprobs = targets.ids.long(), targets.logprobs.detach().float()
    valid = torch.ones_like(ids, dtype=torch.bool) if targets.mask is None else targets.mask != 0
    padding = (0, k - targets.k)
    ids, logprobs, valid = pad(ids, padding), pad(logprobs, padding), pad(valid, padding)
    if sorted_:
        return ids, logprobs, valid
    key = torch.where(valid, logprobs.clamp_min(torch.finfo(torch.float32).min), -torch.inf)
    if bool((key[:, 1:] > key[:, :-1]).any()):
        order = key.sort(dim=-1, descending=True, stable=True).indices
        ids, logprobs, valid = (t.gather(-1, order) for t in (ids, logprobs, valid))
    return ids, logprobs, valid


def _in_halves(below: Tensor, logprobs: Tensor, zero: Tensor, valid: Tensor):
    """Codes in fp16, and the distances below `top` that they stand for."""
    codes = below.clamp_max(torch.finfo(torch.float16).max).half()
    rounded = codes.float()
    codes = codes.masked_fill(zero, torch.inf).masked_fill(~valid, torch.nan)
    return {"codes": codes[:, 1:].contiguous()}, rounded


def _in_bytes(below: Tensor, logprobs: Tensor, zero: Tensor, valid: Tensor):
    """Codes in 8 bits, and the distances below `top` that they stand for.

    A row uses the unit with the smallest KL divergence among the TRIED smallest units that cover
    the row. Most of a row's mass is in a few slots, and some units round all of these slots well.
    """
    least = torch.log2(below.amax(-1, keepdim=True) / CODES) * PER_OCTAVE
    least = (least.ceil() - LOWEST).clamp(0, 255)
    p = torch.softmax(logprobs.nan_to_num(neginf=-1e30), -1)
    step, error = least, torch.full_like(least, torch.inf)
    for more in range(TRIED):
        tried = (least + more).clamp_max(255)
        off = below - _codes(below, tried) * _unit(tried)
        # KL divergence to the decoded row, where log p̂ = log p + off - log Σ p e^off
        kl = (p * off.exp()).sum(-1, keepdim=True).log() - (p * off).sum(-1, keepdim=True)
        step, error = torch.where(kl < error, tried, step), torch.minimum(kl, error)
    numbers = _codes(below, step)
    codes = numbers.masked_fill(zero, ZERO).masked_fill(~valid, EMPTY).to(torch.uint8)
    table = {"codes": codes[:, 1:].contiguous(), "step": step[:, 0].to(torch.uint8)}
    return table, numbers * _unit(step)


def _codes(below: Tensor, step: Tensor) -> Tensor:
    return (below / _unit(step)).round_().clamp_max_(CODES)


def _unit(step: Tensor) -> Tensor:
    """The unit of the codes, in nats."""
    return torch.exp2((step.float() + LOWEST) / PER_OCTAVE)


def decoded(table: Table, header: Header) -> SparseTargets:
    """Decodes rows into targets, (T,), on the CPU."""
    k, top, codes = header.k, table["top"], table["codes"]
    fields = {width: table[f"ids.{width}"] for width, _ in widths(header.bits)}
    ids = unpack(fields, k, header.id_dtype)
    checks.ids_in_vocabulary(ids, header.vocab_size)
    logprobs = torch.empty(ids.shape)
    logprobs[:, 0] = top
    if header.values == "f16":
        torch.sub(top[:, None], codes, out=logprobs[:, 1:])
        some_empty = bool(logprobs.isnan().any())
    else:
        unit = _all_units()[table["step"].int()]
        torch.addcmul(top[:, None], codes.float(), unit[:, None], value=-1, out=logprobs[:, 1:])
        some_empty = bool(top.isnan().any())
        if codes.numel() and int(codes.max()) > CODES:
            logprobs[:, 1:].masked_fill_(codes == ZERO, -torch.inf)
            logprobs[:, 1:].masked_fill_(codes == EMPTY, torch.nan)
            some_empty = True
    if not some_empty:
        return unchecked(ids, logprobs, table["tail"].clone())
    mask = ~logprobs.isnan()
    mask = mask & mask[:, :1]
    tail, logprobs = table["tail"].clone(), logprobs.masked_fill(~mask, -torch.inf)
    return unchecked(ids, logprobs, tail, None if bool(mask.all()) else mask)


@functools.lru_cache
def _all_units() -> Tensor:
    return _unit(torch.arange(256))


def without_slots(n: int, header: Header) -> Table:
    """n rows whose slots are all empty."""
    table = {
        name: torch.zeros((n, *shape), dtype=dtype)
        for name, (dtype, shape) in header.layout().items()
    }
    table["top"].fill_(torch.nan)
    table["codes"].fill_(torch.nan if header.values == "f16" else EMPTY)
    return table


def joined(tables: list[Table]) -> Table:
    """The rows of all tables, one table after the other."""
    if len(tables) == 1:
        return tables[0]
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}
