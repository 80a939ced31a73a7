"""Launchers of the kernels that read row statistics, compute a loss in one pass, or scale a tensor.

A launcher allocates the outputs, finds a launch plan, and launches the kernels. A plan holds all
but the tensors: built once per combination of shapes, strides and options, it takes later calls one
lookup in a dictionary.
"""

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contract import (
    STATE,
    Coefficients,
    Reading,
    Statistics,
    Total,
    made_once,
    part_width,
    sums_of,
)
from . import config, program_exchange
from .launch import REMEMBERED, Launch
from .layout import Rows, describe, place_of
from .nll_fwd_bwd import nll_fwd_bwd_plan
from .scale import scale_launch, scale_two_launch
from .stats_fwd import stats_fwd_launch
from .stats_merge import stats_finish_launch
from .stats_outputs import OUTPUTS, WHOLE_NUMBERS
from .stats_split_fwd import aligned, cut_of, stats_split_fwd_launch
from .tail_mass import write_tail
from .zero_ignored import with_memory_of_copy

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


# what a plan depends on in a Reading; the temperature is None if each row has its own
options_of = attrgetter("temperature", "softcap", "ignore_index")


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


@made_once
def a_number(device: torch.device) -> Tensor:
    return torch.empty((), device=device, dtype=torch.float32)


def one_pass(
    x: Tensor,  # (..., V)
    reading: Reading,
    coefficients: Coefficients,  # "a" and "label"
    factor: Tensor | None,  # one number, or one number per row
    into: Tensor,  # output: x, or a tensor in other memory (see `Place` in layout.py)
    total: Total | None = None,
) -> Tensor | None:
    """Returns -log p of each row's label, and writes the gradient times `factor` to `into`.

    With `total`, it is that number, and its gradient. The result is None, and nothing is written,
    if one pass is not possible: x has no (B, T, V) view with contiguous rows (layout.py), the
    programs of a row may not wait for each other (program_exchange.py), or a total has no rows or
    too many (MAX_COUNTED and MAX_PARTS).
    """
    temperature, device = reading.row_temperature, x.device
    over_logits = into is x or into.data_ptr() == x.data_ptr()
    factor_per_row = factor is not None and any(factor.stride())
    plan = nll_fwd_bwd_plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), device,
        None if over_logits else place_of(into), options_of(reading),
        coefficients.rows.shape[0] > 1, factor_per_row, total, None,
        program_exchange.WAITING, config.revision,
    )  # fmt: skip
    if plan is None:
        return None
    label = reading.label.contiguous()
    # torch.empty_like takes half the time of torch.empty
    if total is not None:
        nll = torch.empty_like(a_number[device])
    else:
        nll = torch.empty_like(label, dtype=torch.float32)
    if plan.launch is None:  # no rows
        return nll
    exchange = None
    if plan.exchange_words:
        exchange = program_exchange.zeros(plan.exchange_words, x)
    plan.launch(
        x, label, coefficients.rows, factor.contiguous() if factor_per_row else factor, None,
        None if over_logits else into, nll, None, exchange,
        *(() if temperature is None else (temperature.contiguous(),)),
    )  # fmt: skip
    return nll


def plan_total(
    total: Total,
    rows: int,
    stride: int,  # the number of elements between two rows of logits
    reading: Reading,
    coefficients: Coefficients,  # "a" and "label", the same numbers for all rows
    hidden: Tensor,  # (N, D), the hidden states of a head
    copies: bool,
) -> "TotalLaunch | None":
    """Returns a launch of `one_pass` with `total` for a small head, or None if not possible.

    The gradient overwrites the logits, which have the dtype of `hidden`. With `copies`, the launch
    also copies the hidden states. While its attribute `is_current` is True, it can be called again
    with x (rows, V) of the same stride and the dtype of `hidden`, on a 16-byte boundary, and with
    `hidden` of the same shape, strides, dtype and address modulo 16.
    """
    # without ignored rows, the copy would equal `hidden`
    copied = None
    if copies and reading.ignore_index is not None:
        copied = (hidden.shape, hidden.stride(), hidden.data_ptr() % 16)
    plan = nll_fwd_bwd_plan(
        (rows, reading.vocab), (stride, 1), 0, hidden.element_size(), hidden.device, None,
        options_of(reading), False, False, total, copied, program_exchange.WAITING, config.revision,
    )  # fmt: skip
    return None if plan is None else TotalLaunch(plan, coefficients.rows, copied is not None)


class TotalLaunch:
    """The mean or sum over the rows of a small head's logits, and its gradient, in one launch."""

    def __init__(self, plan: Any, coefficients: Tensor, copies: bool):
        self.launch, self.words, self.copies = plan.launch, plan.exchange_words, copies
        self.coefficients, self.revision = coefficients, config.revision
        self.number = a_number[coefficients.device]

    @property
    def is_current(self) -> bool:
        """Whether the Configs are unchanged since the launch was planned (see `revision`)."""
        return self.revision == config.revision

    def __call__(
        self, x: Tensor, hidden: Tensor, label: Tensor, temperature: Tensor | None = None
    ) -> tuple[tuple[Tensor], Tensor, Tensor]:
        """Returns (number,), its gradient, which overwrites x, and `hidden` or its copy.

        The copy is 0 in ignored rows. `temperature` is the reading's `row_temperature`.
        """
        value = torch.empty_like(self.number)
        source = copy = None
        if self.copies:
            source, copy = with_memory_of_copy(hidden)
        self.launch(
            x, label.contiguous(), self.coefficients, None, source, None, value, copy,
            program_exchange.zeros(self.words, x),
            *(() if temperature is None else (temperature.contiguous(),)),
        )  # fmt: skip
        return (value,), x, hidden if copy is None else copy


def scale_(x: Tensor, g: Tensor) -> None:
    """Multiplies x in place by g, one number or one per row, without waiting for its value."""
    if x.numel() == 0:
        return
    launch = scale_launch(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), g.dim() == 0, x.device,
        config.revision,
    )  # fmt: skip
    if launch is None:  # x has no (B, T, V) view with contiguous rows
        dense = x.contiguous()
        scale_(dense, g)
        x.copy_(dense)
    else:
        launch(x, g.contiguous())


def scale_two_(x: Tensor, y: Tensor, g: Tensor) -> None:
    """Multiplies two contiguous tensors of one dtype in place by the number g, in one launch."""
    assert x.is_contiguous()
    assert y.is_contiguous()
    size_x, size_y = x.numel(), y.numel()
    if size_x + size_y:
        offsets = x.data_ptr() % 16, y.data_ptr() % 16
        scale_two_launch(size_x, size_y, offsets, x.device)(x, y, g)
