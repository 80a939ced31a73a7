"""The layout of a teacher store, and the arithmetic of its columns.

A store is a folder:

    store.json              the header (class Header below), in JSON
    PART-NUMBER.safetensors a shard: finished documents, never written to again
    PART.journal            documents of the shard that PART is filling (store/journal.py)
    PART.lock               held by the one writer of PART (a worker's rank; 0 where there is one)

A shard is a safetensors file (targets/safetensors.py): bytes 0-7 hold the length n of a JSON
header, bytes 8 to 8 + n the header, and the tensors follow in it, widest dtype first, at the
`data_offsets` that it gives. Its metadata has the format, its version, the store's header and a
SHA-256 of the tensors.
For D documents of T tokens together, K slots a token, and ids of b bits:

    starts      I64 (D + 1)       where each document begins; the last is T
    index.hash  I64 (E)           of beginnings of documents, sorted              (store/lookup.py)
    index.doc   I32 (E)           whose
    tokens.W    (T · W / 8)       the tokens, as below
    ids.W       (T, K · W / 8)    ids of the slots, the most probable first
    top         F32 (T)           log p of the first slot; NaN: the row has no slots
    tail        F32 (T)           log mass outside the ids, as it was given
    step        U8  (T)           of the row's codes: 2^((step - 288) / 32) nats
    codes       U8  (T, K - 1)    log p of the other slots is top - code · step;
                                  254: p is 0;  255: no slot

and with values="f16", instead of the last two:

    codes       F16 (T, K - 1)    log p is top - code; inf: p is 0; NaN: no slot

An integer of b bits is cut into fields of 32, 16, 8, 4, 2 and 1 bits, those that add up to b, the
widest from its lowest bits. Field W of n integers is a tensor of its own: U32, U16 or U8, or the
fields of 8 / W integers in each byte, the first in its lowest bits. So 18 bits are a U16 and a
quarter of a byte, and nothing is shifted across bytes when they are read.

At K = 64 and V = 151,936 a token takes 128 + 16 (ids) + 63 (codes) + 9 (top, tail, step) + 2.25
(the token) = 218.25 bytes, and a document 8 + 12 E.

`top` is such that the probabilities of a row add up to what they did before they were rounded: the
error is one of proportions, of second order in `step`.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..targets.sparse import SparseTargets, unchecked
from . import checks as rules

FORMAT, VERSION = "logitless.store", "1"
WIDTHS = {32: torch.uint32, 16: torch.uint16, 8: torch.uint8, 4: None, 2: None, 1: None}
SIGNED = {32: torch.int32, 16: torch.int16}  # in which PyTorch computes: unsigned ones lack much
CODES = 253  # the largest that stands for a number
ZERO, EMPTY = 254, 255
PER_OCTAVE, LOWEST = 32, -288  # steps are 2^((0 + LOWEST) / 32), ..., 2^((255 + LOWEST) / 32)
TRIED = 8  # steps, each 2 % wider than the last, of which a row takes the best

Columns = dict[str, Tensor]  # rows of a shard, one tensor a column


@dataclass(frozen=True)
class Header:
    """What all documents of a store have in common."""

    vocab_size: int
    k: int
    values: str = "u8"  # or "f16"
    teacher: str = ""  # its name
    tokenizer: str = ""  # `tokenizer_hash` of the tokenizer
    temperature: float = 1.0  # at which the log-probabilities were taken
    alignment: str = "next"  # row i is of the token after tokens[i]

    def __post_init__(self):
        rules.header(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(where: object, text: str | bytes) -> "Header":
        return Header(**rules.header_fields(where, text, Header))

    @property
    def bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def id_dtype(self) -> torch.dtype:
        return torch.int32 if self.bits < 32 else torch.int64

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype of each column of rows, and the shape of a row in it."""
        found = {
            f"ids.{width}": (dtype or torch.uint8, (packed_length(self.k, width),))
            for width, dtype in widths(self.bits)
        }
        found |= {"top": (torch.float32, ()), "tail": (torch.float32, ())}
        if self.values == "f16":
            return found | {"codes": (torch.float16, (self.k - 1,))}
        return found | {"codes": (torch.uint8, (self.k - 1,)), "step": (torch.uint8, ())}

    def row_bytes(self) -> int:
        return sum(
            dtype.itemsize * (shape[0] if shape else 1) for dtype, shape in self.layout().values()
        )


# Integers of a few bits


def widths(bits: int) -> list[tuple[int, torch.dtype | None]]:
    return [(width, dtype) for width, dtype in WIDTHS.items() if bits & width]


def packed_length(n: int, width: int) -> int:
    """How many elements hold n fields."""
    return n if width >= 8 else -(-n * width // 8)


def pack(x: Tensor, bits: int) -> dict[int, Tensor]:
    """Integers (..., n) to their fields, by width."""
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
    """What `pack` was given, (..., n)."""
    found, shift = None, 0
    for width, field in fields.items():
        if width >= 8:
            part = field.to(dtype) << shift if shift else field.to(dtype)
        else:
            table = _table(width, shift, dtype)
            part = table.index_select(0, field.reshape(-1).int())
            part = part.view(*field.shape[:-1], field.shape[-1] * (8 // width))[..., :n]
        found = part if found is None else found.bitwise_or_(part)
        shift += width
    return found


@functools.lru_cache
def _table(width: int, shift: int, dtype: torch.dtype) -> Tensor:
    """For each byte the fields in it, each where it stands in its integer, (256, 8 / width)."""
    fields = torch.arange(256)[:, None] >> torch.arange(0, 8, width) & (1 << width) - 1
    return (fields << shift).to(dtype)


def field_at(field: Tensor, width: int, places: Tensor) -> Tensor:
    """Fields of a stream of integers, at some places of it."""
    if width == 8:
        return field[places].long()
    if width > 8:
        return field.view(SIGNED[width])[places].long() & (1 << width) - 1
    per = 8 // width
    return field[places // per].long() >> places % per * width & (1 << width) - 1


# Rows


def encoded(targets: SparseTargets, header: Header, sorted_: bool = False) -> Columns:
    """Rows of targets, (T,), as columns, on the same device.

    Nothing waits for it where the slots are known to be sorted, as `capture_topk` sorts them.
    """
    ids, logprobs, there = _ordered(targets, header.k, sorted_)
    top, logprobs = logprobs[:, 0], logprobs.masked_fill(~there, -torch.inf)
    below = torch.where(logprobs == -torch.inf, 0.0, top[:, None] - logprobs)
    mass = logprobs.logsumexp(-1)
    zero = there & (logprobs == -torch.inf)
    rounded = _in_halves if header.values == "f16" else _in_bytes
    columns, steps = rounded(below, logprobs, zero, there)
    kept = torch.where(logprobs == -torch.inf, -torch.inf, -steps).logsumexp(-1)
    top = torch.where(top == -torch.inf, top, mass - kept)
    columns["top"] = torch.where(there[:, 0], top, torch.nan)
    tail = targets.tail
    if tail is None:  # what topk_distill takes for it
        tail = torch.log1p(-mass.double().exp().clamp_max(1))
    columns["tail"] = torch.where(there[:, 0], tail.float(), 0.0)
    packed = pack(torch.where(there, ids, 0), header.bits)
    return columns | {f"ids.{width}": field for width, field in packed.items()}


def _ordered(targets: SparseTargets, k: int, sorted_: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and which slots are there, (T, k); the most probable come first."""
    ids, logprobs = targets.ids.long(), targets.logprobs.detach().float()
    there = torch.ones_like(ids, dtype=torch.bool) if targets.mask is None else targets.mask != 0
    more = (0, k - targets.k)
    ids, logprobs, there = pad(ids, more), pad(logprobs, more), pad(there, more)
    if sorted_:
        return ids, logprobs, there
    key = torch.where(there, logprobs.clamp_min(torch.finfo(torch.float32).min), -torch.inf)
    if bool((key[:, 1:] > key[:, :-1]).any()):
        order = key.sort(dim=-1, descending=True, stable=True).indices
        ids, logprobs, there = (t.gather(-1, order) for t in (ids, logprobs, there))
    return ids, logprobs, there


def _in_halves(below: Tensor, logprobs: Tensor, zero: Tensor, there: Tensor):
    codes = below.clamp_max(torch.finfo(torch.float16).max).half()
    steps = codes.float()
    codes = codes.masked_fill(zero, torch.inf).masked_fill(~there, torch.nan)
    return {"codes": codes[:, 1:].contiguous()}, steps


def _in_bytes(below: Tensor, logprobs: Tensor, zero: Tensor, there: Tensor):
    """Codes in a step that covers the row, of several such the one that changes it least.

    A row's weight is on a few slots, and some step comes near to all of them.
    """
    least = torch.log2(below.amax(-1, keepdim=True) / CODES) * PER_OCTAVE
    least = (least.ceil() - LOWEST).clamp(0, 255)
    p = torch.softmax(logprobs.nan_to_num(neginf=-1e30), -1)
    step, error = least, torch.full_like(least, torch.inf)
    for more in range(TRIED):
        tried = (least + more).clamp_max(255)
        off = below - _codes(below, tried) * _width_of(tried)
        # KL to the row as it will be read: log p̂ = log p + off - log Σ p e^off
        kl = (p * off.exp()).sum(-1, keepdim=True).log() - (p * off).sum(-1, keepdim=True)
        step, error = torch.where(kl < error, tried, step), torch.minimum(kl, error)
    found = _codes(below, step)
    codes = found.masked_fill(zero, ZERO).masked_fill(~there, EMPTY).to(torch.uint8)
    columns = {"codes": codes[:, 1:].contiguous(), "step": step[:, 0].to(torch.uint8)}
    return columns, found * _width_of(step)


def _codes(below: Tensor, step: Tensor) -> Tensor:
    return (below / _width_of(step)).round_().clamp_max_(CODES)


def _width_of(step: Tensor) -> Tensor:
    return torch.exp2((step.float() + LOWEST) / PER_OCTAVE)


def decoded(columns: Columns, header: Header) -> SparseTargets:
    """Columns of rows as targets, (T,), on the CPU."""
    k, top, codes = header.k, columns["top"], columns["codes"]
    fields = {width: columns[f"ids.{width}"] for width, _ in widths(header.bits)}
    ids = unpack(fields, k, header.id_dtype)
    rules.ids_in_vocabulary(ids, header.vocab_size)
    logprobs = torch.empty(ids.shape)
    logprobs[:, 0] = top
    if header.values == "f16":
        torch.sub(top[:, None], codes, out=logprobs[:, 1:])
        gone = bool(logprobs.isnan().any())
    else:
        step = _all_widths()[columns["step"].int()]
        torch.addcmul(top[:, None], codes.float(), step[:, None], value=-1, out=logprobs[:, 1:])
        gone = bool(top.isnan().any())
        if codes.numel() and int(codes.max()) > CODES:
            logprobs[:, 1:].masked_fill_(codes == ZERO, -torch.inf)
            logprobs[:, 1:].masked_fill_(codes == EMPTY, torch.nan)
            gone = True
    if not gone:
        return unchecked(ids, logprobs, columns["tail"].clone())
    mask = ~logprobs.isnan()
    mask = mask & mask[:, :1]
    tail, logprobs = columns["tail"].clone(), logprobs.masked_fill(~mask, -torch.inf)
    return unchecked(ids, logprobs, tail, None if bool(mask.all()) else mask)


@functools.lru_cache
def _all_widths() -> Tensor:
    return _width_of(torch.arange(256))


def without_slots(n: int, header: Header) -> Columns:
    """n rows of which the teacher says nothing."""
    found = {
        name: torch.zeros((n, *shape), dtype=dtype)
        for name, (dtype, shape) in header.layout().items()
    }
    found["top"].fill_(torch.nan)
    found["codes"].fill_(torch.nan if header.values == "f16" else EMPTY)
    return found


def joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
