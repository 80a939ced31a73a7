"""Launches the kernels that read statistics of rows, by a plan.

A plan holds all but the tensors: built once per combination of shapes, strides and options, it
takes later calls one lookup in a dictionary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import (
    STATE,
    Reading,
    Statistics,
    part_width,
    sums_of,
)
from .. import config
from ..at_ids.tail_mass import write_tail
from ..launch import REMEMBERED, Launch
from ..layout import Rows, aligned, describe, options_of
from .forward import cut_of, stats_fwd_launch, stats_split_fwd_launch
from .merge import stats_finish_launch
from .outputs import OUTPUTS, WHOLE_NUMBERS

LOGPROB = OUTPUTS.index("logprob")


class _ReadPlan(NamedTuple):
    rows: Rows
    state: tuple[tuple, tuple]  # the shape and the strides of the state
    outputs: tuple[tuple, ...]  # (index in OUTPUTS, shape, strides, dtype) of each statistic
    reads_label: bool
    reads_ids: bool
    reads_weight: bool
    splits: tuple[int, int, int]  # the shape of the partial statistics, if rows are split
    first: Launch
    second: Launch | None  # the launch that merges the splits; None if rows are not split


def read(x: Tensor, reading: Reading) -> Statistics:  # x (..., V)
    label, ids, weight = reading.label, reading.ids, reading.class_weight
    temperature, device = reading.row_temperature, x.device
    plan = _read_plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), device,
        None if ids is None else ids.shape, options_of(reading), reading.wants, reading.invariant,
        config.revision,
    )  # fmt: skip
    if plan is None:  # x has no (B, T, V) view with contiguous rows
        return read(x.contiguous(), reading)
    # torch.empty_strided takes two thirds of the time of torch.empty
    state = torch.empty_strided(*plan.state, device=device, dtype=torch.float32)
    outputs: list[Tensor | None] = [None] * len(OUTPUTS)
    for index, shape, strides, dtype in plan.outputs:
        outputs[index] = torch.empty_strided(shape, strides, device=device, dtype=dtype)
    if plan.rows.count:
        inputs = (
            x, label.contiguous() if plan.reads_label else None,
            ids.contiguous() if plan.reads_ids else None,
            aligned(weight) if plan.reads_weight else None,
        )  # fmt: skip
        last = () if temperature is None else (temperature.contiguous(),)
        if plan.second is None:
            plan.first(*inputs, state, *outputs, *last)
        else:
            splits = torch.empty(plan.splits, device=device, dtype=torch.float32)
            y = None
            if plan.reads_ids:
                y = torch.empty(ids.shape, device=device, dtype=torch.float32)
            above = None
            if "rank" in reading.wants:
                above = torch.empty(plan.splits[::2], device=device, dtype=torch.int32)
            plan.first(*inputs, None, splits, y, above, *last)
            plan.second(splits, y, *inputs[1:3], above, state, *outputs, *last)
    tail = None
    if "tail" in reading.wants:
        tail = write_tail(x, plan.rows, reading, state, outputs[LOGPROB], x.shape[:-1])
        if "logprob" not in reading.wants:
            outputs[LOGPROB] = None
    return Statistics(state, *outputs[:-1], tail, outputs[-1])


@functools.lru_cache(REMEMBERED)
def _read_plan(
    shape: tuple, strides: tuple, offset: int, itemsize: int, device: torch.device,
    ids_shape: tuple | None, options: tuple, wants: tuple[str, ...], invariant: bool,
    revision: int,
) -> _ReadPlan | None:  # fmt: skip
    temperature, softcap, ignore_index = options
    rows = describe(shape, strides, offset, itemsize)
    if rows is None:
        return None
    sums = sums_of(wants, temperature == 1)
    cut = cut_of(rows, device, sums, softcap, invariant)
    K = None if ids_shape is None else ids_shape[-1]
    # "tail" is computed from log p at the ids
    wanted = (*wants, "logprob") if "tail" in wants else wants
    at_ids = "picked" in wanted or "logprob" in wanted
    at_label = "nll" in wants or "logprob_t1" in wants
    at_label |= ids_shape is None and (at_ids or "rank" in wants)
    at_ids |= "rank" in wants
    outputs = tuple(
        (index, *_dense(ids_shape if ids_shape and name in ("picked", "logprob") else shape[:-1]),
         torch.int64 if name in WHOLE_NUMBERS else torch.float32)
        for index, name in enumerate(OUTPUTS) if name in wanted
    )  # fmt: skip
    fields = part_width(*sums)
    if cut.splits == 1:
        first, last = stats_fwd_launch(rows, K, *options, sums.second, cut), None
    else:
        first = stats_split_fwd_launch(rows, K or 0, 0, *options, sums, cut)
        shape, strides = (rows.count, cut.splits, fields), (fields * cut.splits, 1, cut.splits)
        last = stats_finish_launch(
            shape, strides, rows.vocab, K, temperature, ignore_index, sums.second
        )
    return _ReadPlan(
        rows, _dense((rows.count, STATE)), outputs, at_label or ignore_index is not None,
        at_ids and bool(K), sums.total, (rows.count, fields, cut.splits), first, last,
    )  # fmt: skip


def _dense(shape: Sequence[int]) -> tuple[tuple, tuple]:
    """Returns the shape and the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(shape), tuple(strides)
