"""Statistics of whole rows, in one pass over the logits.

One program a row where rows fill the GPU. Where they are too few, each is split over several
programs, whose parts a second launch merges.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._contract import PART, STATE, Reading, Statistics
from . import config
from .finish import OUTPUTS, Outputs, finish_launch, write_ids, write_mark, write_row
from .launch import REMEMBERED, Launch
from .layout import Rows, describe, row_offset, split_row
from .numerics import LOG2E, capped, inverse_temperature
from .partial import aligned, cut_of, partial_launch
from .state import (
    column_of_max,
    field,
    fold_span,
    is_live,
    load_mark,
    pack_of,
    reference,
    with_count,
)
from .tail import write_tail

LOGPROB = OUTPUTS.index("logprob")


@dataclass(frozen=True)
class _Constants:
    """What the kernel is compiled for."""

    second: bool  # a second normaliser, at temperature 1
    aligned: bool
    block_v: int
    block_k: int


@triton.jit(
    do_not_specialize=["rows_t", "lead"],
    do_not_specialize_on_alignment=["MARK", "IDS", "temperature"],
)
def _read_kernel(
    X, MARK, IDS, W,  # inputs
    STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, LABEL,  # outputs
    temperature,
    rows_t, stride_xb, stride_xt, lead, V, K,  # sizes
    softcap, ignore_index,  # options
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    SECOND: tl.constexpr = field(CONSTANTS, "second")
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    SUMS: tl.constexpr = (TOTAL is not None) | (LOG_TOTAL is not None)
    PACK: tl.constexpr = pack_of(X)
    row = tl.program_id(0)
    mark = load_mark(MARK, row)
    live = is_live(mark, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    Xrow = X + offset
    inv_t = inverse_temperature(temperature, row)
    ref = reference(Xrow, columns, softcap, SUMS)
    head, body = split_row(offset, columns, lead, PACK, ALIGNED)
    state = fold_span(
        Xrow, W, head, body, columns, 0, columns, ref, inv_t * LOG2E, softcap,
        ENTROPY is not None, SUMS, SECOND, PACK, ALIGNED, True, BLOCK_V,
    )  # fmt: skip
    if W is None:
        state = with_count(state, columns.to(tl.float32))
    arg = 0
    if ARGMAX is not None:
        arg = column_of_max(Xrow, state, head, body, columns, softcap, PACK, ALIGNED, BLOCK_V)
    out = Outputs(STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, LABEL)
    shift, log_s = write_row(out, state, arg, ref, row, V, live, inv_t)
    if MARK is not None:
        y, _ = capped(tl.load(Xrow + mark, mask=(mark >= 0) & (mark < columns), other=0.0), softcap)
        write_mark(out, y, mark, row, V, live, shift, log_s, state.s1, inv_t, SECOND, K is None)
    if IDS is not None:
        write_ids(out, Xrow, None, IDS, row, V, K, live, shift, log_s, inv_t, softcap, BLOCK_K)


class _Plan(NamedTuple):
    """All that a call with such shapes, strides and options needs, but its tensors."""

    rows: Rows
    outputs: tuple[tuple | None, ...]  # shape and dtype of each of OUTPUTS; None if not wanted
    reads_mark: bool
    reads_ids: bool
    parts: tuple[int, ...] | None  # the shape of the parts, where rows are split
    first: Launch
    second: Launch | None  # which merges them


def read(x: Tensor, reading: Reading) -> Statistics:  # x (..., V)
    """The statistics that reading.wants, and the state that the gradient reads again."""
    mark, ids, weight, temperature = reading[:4]
    wants, device = reading.wants, x.device
    plan = _plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), device,
        None if ids is None else ids.shape, temperature is None, reading[4:], config.revision,
    )  # fmt: skip
    if plan is None:  # too many strides
        return read(x.contiguous(), reading)
    state = torch.empty((plan.rows.count, STATE), device=device, dtype=torch.float32)
    outputs = [
        None if like is None else torch.empty(like[0], device=device, dtype=like[1])
        for like in plan.outputs
    ]
    if plan.rows.count:
        mark = mark if not plan.reads_mark or mark.is_contiguous() else mark.contiguous()
        given = (
            x, mark if plan.reads_mark else None, ids.contiguous() if plan.reads_ids else None,
            aligned(weight) if "total" in wants or "log_total" in wants else None,
        )  # fmt: skip
        by_row = () if temperature is None else (temperature.contiguous(),)
        if plan.second is None:
            plan.first(*given, state, *outputs, *by_row)
        else:
            parts = torch.empty(plan.parts, device=device, dtype=torch.float32)
            y = None
            if plan.reads_ids:
                y = torch.empty(ids.shape, device=device, dtype=torch.float32)
            plan.first(*given, parts, y, *by_row)
            plan.second(parts, y, *given[1:3], state, *outputs, *by_row)
    tail = None
    if "tail" in wants:
        tail = write_tail(x, plan.rows, reading, state, outputs[LOGPROB], x.shape[:-1])
        if "logprob" not in wants:
            outputs[LOGPROB] = None
    return Statistics(state, *outputs[:-1], tail, outputs[-1])


@functools.lru_cache(REMEMBERED)
def _plan(
    shape: tuple, strides: tuple, offset: int, itemsize: int, device: torch.device,
    ids_shape: tuple | None, one_temperature: bool, options: tuple, revision: int,
) -> _Plan | None:  # fmt: skip
    temperature, softcap, ignore_index, wants = options
    rows = describe(shape, strides, offset, itemsize)
    if rows is None:
        return None
    second = "label" in wants and not (one_temperature and temperature == 1)
    cut = cut_of(rows, device, wants, softcap, second)
    K = None if ids_shape is None else ids_shape[-1]
    # The mass of the ids is known from their log p.
    wanted = (*wants, "logprob") if "tail" in wants else wants
    at_ids = "picked" in wanted or "logprob" in wanted
    at_mark = "nll" in wants or "label" in wants or (ids_shape is None and at_ids)
    outputs = tuple(
        None if name not in wanted
        else (ids_shape if ids_shape and name in ("picked", "logprob") else shape[:-1],
              torch.int64 if name == "argmax" else torch.float32)
        for name in OUTPUTS
    )  # fmt: skip
    number = temperature if one_temperature else None
    how = (number, softcap, ignore_index)
    if cut.splits == 1:
        first, last = read_launch(rows, K, *how, second, cut), None
    else:
        sums = ("entropy" in wants, "total" in wants or "log_total" in wants, "argmax" in wants)
        first = partial_launch(rows, K or 0, 0, *how, (*sums, second), cut)
        last = finish_launch(rows.count, cut.splits, rows.vocab, K, number, ignore_index, second)
    return _Plan(
        rows, outputs, at_mark or ignore_index is not None, at_ids and bool(K),
        (rows.count, cut.splits, PART), first, last,
    )  # fmt: skip


def read_launch(
    rows: Rows, K: int | None, temperature: float | None, softcap: float | None,
    ignore_index: int | None, second: bool, cut: config.Config,
) -> Launch:  # fmt: skip
    number = () if temperature is None else (temperature,)
    block_k = min(128 * cut.num_warps, config.ceil_pow2(K or 0))
    return Launch(
        _read_kernel, (rows.count,),
        (*number, *rows.strides, rows.lead, rows.vocab, K, softcap, ignore_index),
        num_warps=cut.num_warps,
        CONSTANTS=_Constants(second, rows.aligned, cut.block_v, block_k),
    )  # fmt: skip
