"""Encodes targets as rows, and decodes rows into targets.

A slot, one of the K stored ids of a row, keeps its log-probability as the distance below `top`,
that of the row's first slot. With `values="u8"`, each row has its own unit of distance. Distances
of up to NEAR units are rounded to whole units; beyond, each code multiplies the distance by 2^0.4,
about 1.32, so that a slot with a probability of almost 0 does not force a larger unit on its row.
The codes of a row ascend, because its slots are sorted. The stored `top` keeps the sum of a row's
probabilities exact, and rounding changes only their ratios. The KL divergence that it causes grows
with the square of the unit.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..targets.sparse import SparseTargets, unchecked
from .counts import decoded_counts, encoded_counts
from .device import on_cpu
from .format import WIDTHS, Header, Library, library, pack, places, unpack

CODES = 253  # the largest code for a probability above 0
ZERO, EMPTY = 254, 255
NEAR, GROWTH = 223, 0.4  # codes above NEAR mean (NEAR · 2^(GROWTH · (code - NEAR))) units
PER_OCTAVE, LOWEST = 32, -288  # a unit is 2^((step + LOWEST) / 32) nats; step is 0 to 255
TRIED = 8  # number of other units to try; each unit is 2 % larger than the previous unit
AT_ONCE = 1 << 19  # largest number of tensor elements in a pass that tries several units
# With the smallest unit in `TRIED`, slots with at most this mass may be more than NEAR units away.
FAR_MASS = 2.0**-17
NEGLIGIBLE = 2.0**-20  # a row keeps its first unit if the divergence is at most this many nats
SLOTS = 1 << 19  # number of slots that are decoded at once, so that they stay in the cache


def encoded(targets: SparseTargets, header: Header, sorted_: bool = False) -> Tensor:
    """Encodes targets (T,) on their device as rows, uint8 (T, row_bytes), with tokens of 0.

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
    if header.values == "f16":
        fields, rounded = _in_halves(below, zero, valid)
    else:
        fields, rounded = _in_bytes(below, logprobs, zero, valid)
    rounded_mass = torch.where(logprobs == -torch.inf, -torch.inf, -rounded).logsumexp(-1)
    top = torch.where(top == -torch.inf, top, mass - rounded_mass)
    tail = targets.tail
    if tail is None:  # as in `topk_distill`, a missing tail is log(1 - Σ p)
        tail = torch.log1p(-mass.double().exp().clamp_max(1))
    has_slots = valid[:, :1]
    fields["top"] = torch.where(has_slots, top[:, None], torch.nan)
    fields["tail"] = torch.where(has_slots, tail.float()[:, None], 0.0)
    fields |= pack(torch.where(valid, ids, 0), header.bits)
    rows = torch.zeros(len(ids), header.row_bytes, dtype=torch.uint8, device=ids.device)
    for name, value in fields.items():
        header.field(rows, name).copy_(value)
    return rows


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


def _in_halves(below: Tensor, zero: Tensor, valid: Tensor):
    """The field of the distances `below` as fp16 codes, and the rounded distances."""
    codes = below.clamp_max(torch.finfo(torch.float16).max).half()
    rounded = codes.float()
    codes = codes.masked_fill(zero, torch.inf).masked_fill(~valid, torch.nan)
    return {"codes": codes[:, 1:]}, rounded


def _in_bytes(below: Tensor, logprobs: Tensor, zero: Tensor, valid: Tensor):
    """The fields of the distances `below` as 8-bit codes, and the rounded distances.

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
    unit = _unit(step)
    near, far = _in_units(below, unit)
    codes, rounded = near + far, _rounded(near, far, unit)
    codes = codes.masked_fill_(zero, ZERO).masked_fill_(~valid, EMPTY).to(torch.uint8)
    return {"codes": torch.cat((step.to(torch.uint8), codes[:, 1:]), -1)}, rounded


def _divergence(below: Tensor, p: Tensor, steps: Tensor) -> Tensor:
    """KL(p ‖ p̂) as (T, n), where p̂ is the row p after rounding with each of its n units."""
    below, p, unit = below[:, None], p[:, None], _unit(steps)[..., None]
    off = _rounded(*_in_units(below, unit), unit).neg_().add_(below)
    # `off` is the rounding error of each distance: log p̂ = log p + off - log Σ p e^off. Its limit
    # keeps e^off finite and changes no choice: a slot with p = 0 does not count, and with p > 0,
    # such an error makes the divergence so large that another unit is chosen.
    return off.clamp_max(80.0).exp_().mul_(p).sum(-1).log_() - off.mul_(p).sum(-1)


def _in_units(below: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of the distances `below`, in two summands: up to NEAR, and beyond.

    Here and below, most operations are in place: a new tensor of megabytes is slower to allocate
    than to compute.
    """
    near = below / unit
    far = near.clamp_min(NEAR).div_(NEAR).log2_().div_(GROWTH).round_().clamp_max_(CODES - NEAR)
    return near.round_().clamp_max_(NEAR), far


def _rounded(near: Tensor, far: Tensor, unit: Tensor) -> Tensor:
    """The distances that these codes mean."""
    return (far * GROWTH).exp2_().mul_(near).mul_(unit)


def _unit(step: Tensor) -> Tensor:
    return torch.exp2((step.float() + LOWEST) / PER_OCTAVE)


def empty_rows(n: int, header: Header) -> tuple[Any, memoryview]:
    """Rows without values, as an array of `library`, and their memory."""
    array, data = library().empty(n * header.row_bytes)
    return array.reshape(n, header.row_bytes), data


def tokens_of(rows: Any, header: Header) -> Tensor:
    lib = library()
    dtype, at = places(header, lib)["token"]
    tokens = lib.array(rows).view(dtype)[:, at.start]
    return lib.tensor(lib.cast(tokens, lib.module.int64))


def decoded(rows: Any, header: Header) -> SparseTargets:
    """The targets of rows, a tensor or an array of `library`."""
    lib = library()
    if header.sampled:
        return decoded_counts(lib.tensor(lib.array(rows)), header)
    array, n, portion = lib.array(rows), len(rows), max(1, SLOTS // header.k)
    if n <= portion:
        return unchecked(*_decode(array, header, lib))
    ids = torch.empty(n, header.k, dtype=header.id_dtype, device="cpu")
    logprobs = torch.empty_like(ids, dtype=torch.float32)
    tail, mask = torch.empty_like(logprobs[:, 0]), None
    for a in range(0, n, portion):
        some = slice(a, a + portion)
        ids[some], logprobs[some], tail[some], there = _decode(array[some], header, lib)
        if there is not None:
            mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            mask[some] = there
    return unchecked(ids, logprobs, tail, mask)


def _decode(
    rows: Any, header: Header, lib: Library
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Ids, log-probabilities, tail, and a mask of the slots unless all are there.

    A document of 100 rows costs as much time for each operation here as for its numbers.
    """
    k, at = header.k, places(header, lib)

    def field(name: Any) -> Any:
        dtype, place = at[name]
        return rows.view(dtype)[:, place]

    ids = unpack(
        ((width, field(width)) for width in WIDTHS if width in at), k, header.id_dtype, lib
    )
    tail = lib.cast(field("tail")[:, 0], lib.module.float32)
    codes, may_lack = field("codes"), True
    if header.values == "u8":
        units = lib.cast(codes, lib.module.float32)
        if k > 1:  # else the only code is the step
            far = codes[:, -1] > NEAR  # a row's codes ascend, so the last is the largest
            may_lack = bool(lib.module.count_nonzero(far))  # faster than `any`
            if may_lack:
                units[far] = lib.take(_distances(lib), codes[far])
        units *= lib.take(_units(lib), codes[:, 0])[:, None]
    else:
        units = lib.module.empty_like(ids, dtype=lib.module.float32)
        units[:, 1:] = codes
    units[:, 0] = 0  # the distance of the first slot from `top`
    logprobs = lib.module.subtract(field("top"), units, out=units)
    mask = None
    if may_lack:
        empty = logprobs != logprobs
        empty = empty | empty[:, :1]
        if bool(empty.any()):
            logprobs[empty] = -torch.inf
            mask = lib.tensor(~empty)
    return lib.tensor(ids), lib.tensor(logprobs), lib.tensor(tail), mask


@functools.lru_cache
@on_cpu
def _units(lib: Library) -> Any:
    return lib.array(_unit(torch.arange(256)))


@functools.lru_cache
@on_cpu
def _distances(lib: Library) -> Any:
    """The distance of each of the 256 codes in units: inf for ZERO, NaN for EMPTY."""
    codes = torch.arange(256, dtype=torch.float32)
    units = codes.clamp_max(NEAR) * torch.exp2((codes - NEAR).clamp_min(0) * GROWTH)
    units[ZERO], units[EMPTY] = torch.inf, torch.nan
    return lib.array(units)
