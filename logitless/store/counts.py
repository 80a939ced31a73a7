"""Rows of sampled targets (values="counts"), in memory and in a shard.

`capture_sampled` draws n ids per row, and the weight of an id is count / n. The n draws of a row
are sorted by id, and bit j of the column `draws` is 1 if draw j is the first of its id: a row has
as many ids as bits that are 1, and the count of an id is the distance from its bit to the next, or
to n. All bits of a row without slots are 0.

In memory, each row of the column `ids` has n numbers, the distinct ids and then zeros. A shard
stores only the distinct ids, one row after the other (`compact` and `expand`).
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..eager.sampled import logprobs_of_counts
from ..targets.sparse import SparseTargets, unchecked
from . import file_checks
from .format import Header, Table, pack


def encoded_counts(targets: SparseTargets, header: Header) -> Table:
    """Encodes sampled targets (T,), on their device. Rows of NaN have no slots afterwards."""
    n = header.k
    counts = counts_of(targets, n)
    ids = torch.where(counts > 0, targets.ids.long(), header.vocab_size)
    ids, order = pad(ids, (0, n - targets.k), value=header.vocab_size).sort(dim=-1, stable=True)
    counts = pad(counts, (0, n - targets.k)).gather(-1, order)
    first = (counts.cumsum(-1) - counts).clamp_max(n - 1)  # the first draw of each id
    bits = torch.zeros_like(counts).scatter_add_(-1, first, (counts > 0).long())
    bits = pad(bits, (0, -n % 8)).unflatten(-1, (-1, 8))
    draws = (bits << torch.arange(8, device=bits.device)).sum(-1)
    ids = torch.where(counts > 0, ids, 0)
    return {"ids": ids.to(header.id_dtype), "draws": draws.to(torch.uint8)}


def counts_of(targets: SparseTargets, n: int) -> Tensor:
    """The number of draws of each slot, as int64, or 0 if the slot is masked."""
    weights = targets.logprobs.detach().double().exp().nan_to_num(0.0)
    if targets.mask is not None:
        weights = weights.masked_fill(targets.mask == 0, 0.0)
    return (weights * n).round().long()


class CountsDecoding:
    """Decodes rows of sampled targets part by part, like `Decoding` (store/rows.py)."""

    def __init__(self, rows: int, header: Header):
        self.header, self.rows = header, 0
        shape = (rows, header.k)
        self.ids = torch.empty(shape, dtype=header.id_dtype)
        self.logprobs = torch.empty(shape, dtype=torch.float32)
        self.mask = torch.empty(shape, dtype=torch.bool)

    def add(self, table: Table) -> None:
        begin, end = self.rows, self.rows + len(table["draws"])
        self.rows = end
        file_checks.ids_in_vocabulary(table["ids"], self.header.vocab_size)
        bits = bits_of(table["draws"], self.header.k)
        slot = bits.cumsum(-1)  # slot number of each draw; slots are numbered from 1
        # In a row without slots, `slot` is 0 for all draws: column 0 counts them, and is dropped.
        counts = torch.zeros(len(bits), self.header.k + 1, dtype=torch.int64)
        counts = counts.scatter_add_(-1, slot, torch.ones_like(slot))[:, 1:]
        self.ids[begin:end] = table["ids"]
        self.logprobs[begin:end] = _logprobs(self.header.k).index_select(
            0, counts.flatten()
        ).view(counts.shape)  # fmt: skip
        torch.gt(counts, 0, out=self.mask[begin:end])

    def targets(self) -> SparseTargets:
        return unchecked(self.ids, self.logprobs, None, self.mask)


@functools.lru_cache
def _logprobs(n: int) -> Tensor:
    """log(c / n) for each count c from 0 to n, as computed by `capture_sampled`."""
    return logprobs_of_counts(torch.arange(n + 1), n).float()


def bits_of(draws: Tensor, n: int) -> Tensor:
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


def compact(rows: Table, starts: Tensor, header: Header) -> Table:
    """Converts rows in memory to the columns of a shard. `starts` also holds the number of rows."""
    slots = slots_of(rows["draws"])
    flat = rows["ids"][_inside(slots, header.k)]
    ends = pad(slots.cumsum(0), (1, 0))
    columns = {f"ids.{width}": field for width, field in pack(flat, header.bits).items()}
    return {"draws": rows["draws"], "slots": ends[starts], **columns}


def expand(draws: Tensor, ids: Tensor, header: Header) -> Table:
    """Inverts `compact`. `ids` holds the distinct ids of all rows."""
    padded = torch.zeros(len(draws), header.k, dtype=header.id_dtype)
    padded[_inside(slots_of(draws), header.k)] = ids.to(header.id_dtype)
    return {"ids": padded, "draws": draws}


def damaged_rows(table: Table, header: Header) -> Tensor:
    """A mask of the invalid rows.

    In a valid row, the distinct ids ascend, the bits after the last draw are 0, and the first bit
    is 1 or all bits are 0.
    """
    draws, ids = table["draws"], table["ids"]
    slots = slots_of(draws)
    bits = bits_of(draws, 8 * draws.shape[-1])
    bad = (slots > 0) & (bits[:, 0] == 0)
    bad |= bits[:, header.k :].any(-1)
    falls = (ids[:, 1:] <= ids[:, :-1]) & _inside(slots, header.k)[:, 1:]
    return bad | falls.any(-1)
