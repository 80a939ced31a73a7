"""Encodes targets as the columns of a shard, and decodes columns into targets.

A slot, one of the K stored ids of a row, keeps its log-probability as the distance below `top`,
that of the row's first slot. With `values="u8"`, each row has its own unit of distance. Distances
of up to NEAR units are rounded to whole units; beyond, each code multiplies the distance by 2^0.4,
about 1.32, so that a slot with a probability of almost 0 does not force a larger unit on its row.

The stored `top` keeps the sum of a row's probabilities exact, and rounding changes only their
ratios. The KL divergence that it causes grows with the square of the unit.
"""

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..targets.sparse import SparseTargets, unchecked
from . import file_checks
from .counts import CountsDecoding, encoded_counts
from .format import Header, Table, pack, unpack, widths

CODES = 253  # the largest code for a probability above 0
ZERO, EMPTY = 254, 255
NEAR, GROWTH = 223, 0.4  # codes above NEAR mean (NEAR · 2^(GROWTH · (code - NEAR))) units
PER_OCTAVE, LOWEST = 32, -288  # a unit is 2^((step + LOWEST) / 32) nats; step is 0 to 255
TRIED = 8  # number of other units to try; each unit is 2 % larger than the previous unit
AT_ONCE = 1 << 16  # largest number of tensor elements in a pass that tries several units
# With the smallest unit in `TRIED`, slots with at most this mass may be more than NEAR units away.
FAR_MASS = 2.0**-17
NEGLIGIBLE = 2.0**-20  # a row keeps its first unit if the divergence is at most this many nats

Pieces = Mapping[str, Sequence[Any]]  # the bytes of a column, in one or several parts


def encoded(targets: SparseTargets, header: Header, sorted_: bool = False) -> Table:
    """Encodes targets (T,) on their device.

    `sorted_=True` promises slots sorted by probability, as `capture_topk` returns them: the order
    is not checked, so the host does not wait for the device.
    """
    if header.sampled:
        return encoded_counts(targets, header)
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
    if tail is None:  # as in `topk_distill`, a missing tail is log(1 - Σ p)
        tail = torch.log1p(-mass.double().exp().clamp_max(1))
    table["tail"] = torch.where(valid[:, 0], tail.float(), 0.0)
    packed = pack(torch.where(valid, ids, 0), header.bits)
    return table | {f"ids.{width}": field for width, field in packed.items()}


def _ordered(targets: SparseTargets, k: int, sorted_: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and a mask of valid slots, each (T, k), sorted by probability."""
    ids, logprobs = targets.ids.long(), targets.logprobs.detach().float()
    valid = torch.ones_like(ids, dtype=torch.bool) if targets.mask is None else targets.mask != 0
    if targets.k < k:
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
    """Columns of the distances `below` as fp16 codes, and the rounded distances."""
    codes = below.clamp_max(torch.finfo(torch.float16).max).half()
    rounded = codes.float()
    codes = codes.masked_fill(zero, torch.inf).masked_fill(~valid, torch.nan)
    return {"codes": codes[:, 1:].contiguous()}, rounded


def _in_bytes(below: Tensor, logprobs: Tensor, zero: Tensor, valid: Tensor):
    """Columns of the distances `below` as 8-bit codes, and the rounded distances.

    A row's first unit is the smallest with which no slot is beyond NEAR units. If the divergence of
    the decoded row exceeds NEGLIGIBLE, TRIED other units are tried too, the smallest of which
    leaves slots with a mass of at most FAR_MASS beyond NEAR, and the best is taken. Trying helps
    because a row has most of its mass in a few slots, and some units round all of these well.
    """
    p = torch.softmax(logprobs.clamp_min(torch.finfo(torch.float32).min), -1)
    beyond = p.flip(-1).cumsum(-1).flip(-1) <= FAR_MASS
    widest = torch.stack((below, below.masked_fill(beyond, 0.0))).amax(-1)
    whole, least = torch.log2(widest / NEAR).mul_(PER_OCTAVE).ceil_().sub_(LOWEST)[..., None]
    steps = torch.cat((whole, least + torch.arange(TRIED, device=p.device)), -1).clamp_(0, 255)
    together = max(1, AT_ONCE // max(p.numel(), 1))
    errors = torch.cat([_divergence(below, p, some) for some in steps.split(together, -1)], -1)
    errors[:, 0].masked_fill_(errors[:, 0] <= NEGLIGIBLE, -torch.inf)
    step = steps.gather(-1, errors.argmin(-1, keepdim=True))
    codes, rounded = _codes(below, _unit(step))
    codes = codes.masked_fill_(zero, ZERO).masked_fill_(~valid, EMPTY).to(torch.uint8)
    return {"codes": codes[:, 1:].contiguous(), "step": step[:, 0].to(torch.uint8)}, rounded


def _divergence(below: Tensor, p: Tensor, steps: Tensor) -> Tensor:
    """KL(p ‖ p̂) as (T, n), where p̂ is the row p after rounding with each of its n units."""
    below, p = below[:, None], p[:, None]
    off = below - _codes(below, _unit(steps)[..., None])[1]
    # `off` is the rounding error of each distance: log p̂ = log p + off - log Σ p e^off. Its limit
    # keeps e^off finite and changes no choice: a slot with p = 0 does not count, and with p > 0,
    # such an error makes the divergence so large that another unit is chosen.
    return (p * off.clamp_max(80.0).exp_()).sum(-1).log_() - (p * off).sum(-1)


def _codes(below: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the distances `below`, and the distances after decoding."""
    units = below / unit
    far = torch.log2(units.clamp_min(NEAR) / NEAR).div_(GROWTH).round_().clamp_max_(CODES - NEAR)
    near = units.round_().clamp_max_(NEAR)
    return near + far, near.mul(torch.exp2(far * GROWTH)).mul_(unit)


def _unit(step: Tensor) -> Tensor:
    return torch.exp2((step.float() + LOWEST) / PER_OCTAVE)


def decoded(table: Table, header: Header) -> SparseTargets:
    decoding = decoding_of(len(table[header.row_column]), header)
    decoding.add(table)
    return decoding.targets()


def decoding_of(rows: int, header: Header) -> "Decoding | CountsDecoding":
    return CountsDecoding(rows, header) if header.sampled else Decoding(rows, header)


def recoded(table: Table, header: Header) -> Table:
    """Converts rows of version 1, where every code c up to CODES means c units."""
    if header.values == "f16":
        return table
    decoding = Decoding(len(table["top"]), header, near=CODES)
    decoding.add(table)
    return encoded(decoding.targets(), header)


def reencoded(targets: SparseTargets, header: Header, step: Tensor | None) -> Table:
    """Encodes targets that were decoded from a store, without rounding them again.

    `step` is the column of the stored rows, or None with values="f16".
    """
    ids, logprobs, valid = _ordered(targets, header.k, sorted_=True)
    top, logprobs = logprobs[:, 0], logprobs.masked_fill(~valid, -torch.inf)
    below = torch.where(logprobs == -torch.inf, 0.0, top[:, None] - logprobs)
    zero = valid & (logprobs == -torch.inf)
    if step is None:
        table, _ = _in_halves(below, logprobs, zero, valid)
    else:
        codes, _ = _codes(below, _unit(step[:, None]))
        codes = codes.masked_fill_(zero, ZERO).masked_fill_(~valid, EMPTY).to(torch.uint8)
        table = {"codes": codes[:, 1:].contiguous(), "step": step}
    table["top"] = torch.where(valid[:, 0], top, torch.nan)
    table["tail"] = torch.where(valid[:, 0], targets.tail.float(), 0.0)
    packed = pack(torch.where(valid, ids, 0), header.bits)
    return table | {f"ids.{width}": field for width, field in packed.items()}


class Decoding:
    """Decodes rows into targets part by part.

    The targets are allocated once; all other tensors have the size of one part and reuse their
    memory, because allocating it takes longer than filling it.
    """

    def __init__(self, rows: int, header: Header, near: int = NEAR):
        self.header, self.near, self.rows = header, near, 0
        self.ids = torch.empty(rows, header.k, dtype=header.id_dtype)
        self.logprobs = torch.empty(rows, header.k, dtype=torch.float32)
        self.tail = torch.empty(rows, dtype=torch.float32)
        self.mask: Tensor | None = None

    def add(self, table: Table) -> None:
        begin, end = self.rows, self.rows + len(table["top"])
        self.rows = end
        if begin == end:
            return
        ids, logprobs = self.ids[begin:end], self.logprobs[begin:end]
        unpack({w: table[f"ids.{w}"] for w, _ in widths(self.header.bits)}, ids)
        file_checks.ids_in_vocabulary(ids, self.header.vocab_size)
        self.tail[begin:end] = table["tail"]
        top, codes = table["top"], table["codes"]
        codes = pad(codes, (1, 0))  # the first slot has distance 0 from `top`
        logprobs.copy_(codes)
        all_slots = False
        if self.header.values == "u8":
            most = self._far(logprobs, codes)
            # A NaN in `top` marks a row without slots, and makes the sum NaN, as nothing is +inf.
            all_slots = most < EMPTY and not math.isnan(float(top.sum()))
            logprobs.mul_(_all_units().index_select(0, table["step"].int())[:, None])
        torch.sub(top[:, None], logprobs, out=logprobs)
        if not all_slots:
            self._masked(begin, logprobs)

    def _far(self, units: Tensor, codes: Tensor) -> int:
        """Replaces codes above `self.near` by their distances, and returns the largest code.

        Smaller codes equal their distances in units.
        """
        last = codes[:, -1]  # a row's codes ascend, so its last code is the largest
        most = int(last.max())
        if most > self.near:
            rows = (last > self.near).nonzero()[:, 0]
            of_rows = codes.index_select(0, rows)
            far = _units_of_codes(self.near).index_select(0, of_rows.flatten().int())
            units.index_copy_(0, rows, far.view(of_rows.shape))
        return most

    def _masked(self, begin: int, logprobs: Tensor) -> None:
        """Masks the slots whose value is NaN, or the whole row if the first slot is NaN."""
        mask = ~logprobs.isnan()
        mask &= mask[:, :1].clone()
        if bool(mask.all()):
            return
        logprobs.masked_fill_(~mask, -torch.inf)
        if self.mask is None:
            self.mask = torch.ones(self.ids.shape, dtype=torch.bool)
        self.mask[begin : begin + len(mask)] = mask

    def targets(self) -> SparseTargets:
        return unchecked(self.ids, self.logprobs, self.tail, self.mask)


@functools.lru_cache
def _all_units() -> Tensor:
    return _unit(torch.arange(256))


@functools.lru_cache
def _units_of_codes(near: int) -> Tensor:
    """The distance of each of the 256 codes in units: inf for ZERO, NaN for EMPTY."""
    codes = torch.arange(256, dtype=torch.float32)
    units = codes.clamp_max(near) * torch.exp2((codes - near).clamp_min(0) * GROWTH)
    units[ZERO], units[EMPTY] = torch.inf, torch.nan
    return units


def empty_pieces(n: int, header: Header) -> dict[str, bytearray]:
    """The columns of n rows without slots, as bytes."""
    pieces = {name: bytearray(n * size) for name, size in header.sizes().items()}
    return (
        pieces if header.sampled else pieces | {"top": bytearray(struct.pack("<f", math.nan) * n)}
    )


def table_of(pieces: Pieces, header: Header) -> Table:
    sizes, table = header.sizes(), {}
    rows = sum(map(len, pieces[header.row_column])) // sizes[header.row_column]
    for name, (dtype, shape) in header.layout().items():
        parts = pieces[name]
        data = parts[0] if len(parts) == 1 else bytearray().join(parts)
        table[name] = tensor_of(data, rows, dtype, shape)
    return table


def tensor_of(data: Any, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(data):
        return torch.empty((rows, *shape), dtype=dtype)
    column = torch.frombuffer(data, dtype=dtype)
    return column.view(rows, *shape) if shape else column
