"""Sampled targets (values="counts"), in memory and on disk.

`capture_sampled` draws n ids per row, and the weight of an id is count / n. A row has as many ids
as bits that are 1 in its field `draws`, and the count of an id is the distance from its bit to the
next. In memory, a row has n ids, the distinct ones and then zeros.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..eager.sampled import logprobs_of_counts
from ..targets.sparse import SparseTargets, unchecked
from . import checks
from .device import on_cpu
from .format import IN_TORCH, Header, bytes_of, pack, packed_length, unpack, widths

UNSIGNED = {torch.int32: torch.uint32, torch.int16: torch.uint16}


def encoded_counts(targets: SparseTargets, header: Header) -> Tensor:
    """Encodes sampled targets (T,), on their device. Rows of NaN have no slots afterwards."""
    n = header.k
    counts = counts_of(targets, n)
    ids = torch.where(counts > 0, targets.ids.long(), header.vocab_size)
    ids, order = pad(ids, (0, n - targets.k), value=header.vocab_size).sort(dim=-1, stable=True)
    counts = pad(counts, (0, n - targets.k)).gather(-1, order)
    first = (counts.cumsum(-1) - counts).clamp_max(n - 1)  # the first draw of each id
    bits = torch.zeros_like(counts).scatter_add_(-1, first, (counts > 0).long())
    bits = pad(bits, (0, -n % 8)).unflatten(-1, (-1, 8))
    rows = torch.zeros(len(ids), header.row_bytes, dtype=torch.uint8, device=ids.device)
    header.field(rows, "ids").copy_(torch.where(counts > 0, ids, 0))
    header.field(rows, "draws").copy_((bits << torch.arange(8, device=bits.device)).sum(-1))
    return rows


def counts_of(targets: SparseTargets, n: int) -> Tensor:
    """The number of draws of each slot, as int64, or 0 if the slot is masked."""
    weights = targets.logprobs.detach().double().exp().nan_to_num(0.0)
    if targets.mask is not None:
        weights = weights.masked_fill(targets.mask == 0, 0.0)
    return (weights * n).round().long()


@on_cpu
def decoded_counts(rows: Tensor, header: Header) -> SparseTargets:
    if not len(rows):  # an empty array of NumPy has strides that no view in another dtype takes
        rows = torch.empty(0, header.row_bytes, dtype=torch.uint8)
    ids = header.field(rows, "ids").clone()
    bits = _bits(header.field(rows, "draws"), header.k)
    slot = bits.cumsum(-1)  # slot number of each draw; slots are numbered from 1
    # In a row without slots, `slot` is 0 for all draws: column 0 counts them, and is dropped.
    counts = torch.zeros(len(bits), header.k + 1, dtype=torch.int64)
    counts = counts.scatter_add_(-1, slot, torch.ones_like(slot))[:, 1:]
    logprobs = _logprobs(header.k).index_select(0, counts.flatten()).view(counts.shape)
    return unchecked(ids, logprobs, None, counts > 0)


@functools.lru_cache
def _logprobs(n: int) -> Tensor:
    """log(c / n) for each count c from 0 to n, as computed by `capture_sampled`."""
    return logprobs_of_counts(torch.arange(n + 1), n).float()


def _bits(draws: Tensor, n: int) -> Tensor:
    """The first n bits of each row of `draws`, as int64 (T, n)."""
    bits = draws.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :n].long()


def slots_of(draws: Tensor) -> Tensor:
    """The number of distinct ids of each row, as int64 (T,)."""
    return _ones_of_byte().index_select(0, draws.flatten().int()).view(draws.shape).sum(-1)


@functools.lru_cache
def _ones_of_byte() -> Tensor:
    return (torch.arange(256)[:, None] >> torch.arange(8) & 1).sum(-1)


def _inside(slots: Tensor, k: int) -> Tensor:
    return torch.arange(k) < slots[:, None]


def packed(rows: Tensor, header: Header) -> bytes:
    """The bytes of a document on disk."""
    draws = header.field(rows, "draws")
    ids = header.field(rows, "ids")[_inside(slots_of(draws), header.k)].long()
    parts = [header.field(rows, "token"), draws, *pack(ids, header.bits).values()]
    return b"".join(map(bytes_of, parts))


@on_cpu
def unpacked(where: str, data: bytes, n: int, header: Header) -> Tensor:
    """Inverts `packed`, for n rows."""
    token, size = 4 * n, -(-header.k // 8)
    rows = torch.zeros(n, header.row_bytes, dtype=torch.uint8)
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    header.field(rows, "token")[:, 0] = whole[:token].view(torch.int32)
    draws, at = whole[token : token + n * size].view(n, size), token + n * size
    header.field(rows, "draws").copy_(draws)
    slots, parts = slots_of(draws), {}
    total = int(slots.sum())
    for width, dtype in widths(header.bits):
        kind = dtype or torch.uint8
        end = at + packed_length(total, width) * kind.itemsize
        parts[width], at = whole[at:end].clone().view(UNSIGNED.get(kind, kind)), end
    if at != len(data):
        checks.refuse(where, f"have documents of {at} bytes for their draws", str(len(data)))
    ids = unpack(parts.items(), total, torch.int64, IN_TORCH)
    header.field(rows, "ids")[_inside(slots, header.k)] = ids.to(header.id_dtype)
    return rows


def damaged_rows(rows: Tensor, header: Header) -> Tensor:
    """A mask of the invalid rows.

    In a valid row, the distinct ids ascend, the bits after the last draw are 0, and the first bit
    is 1 or all bits are 0.
    """
    draws, ids = header.field(rows, "draws"), header.field(rows, "ids")
    slots = slots_of(draws)
    bits = _bits(draws, 8 * draws.shape[-1])
    bad = (slots > 0) & (bits[:, 0] == 0)
    bad |= bits[:, header.k :].any(-1)
    falls = (ids[:, 1:] <= ids[:, :-1]) & _inside(slots, header.k)[:, 1:]
    return bad | falls.any(-1)
