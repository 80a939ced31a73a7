"""Launchers of the kernels that all losses share.

A launcher allocates the outputs, finds a launch plan, and launches the kernels. A plan holds
everything that a launch needs, except the tensors. A plan is built once per combination of shapes,
strides and options. Later calls find the plan by one lookup in a dictionary.
"""

import functools
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import (
    COEFFICIENTS,
    NO_ID,
    STATE,
    Coefficients,
    Reading,
    Statistics,
    made_once,
    part_width,
    sums_of,
)
from . import config, program_exchange
from .duplicate_ids import with_repeats
from .ids_bwd import MAX_PRELOADED, ids_bwd_launch
from .label_bwd import label_bwd_launch
from .launch import REMEMBERED, Launch, Plans
from .layout import Place, Rows, describe
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
    outputs: tuple[tuple, ...]  # (index in OUTPUTS, shape, dtype) of each requested statistic
    reads_label: bool
    reads_ids: bool
    reads_weight: bool
    splits: tuple[int, int, int]  # the shape of the partial statistics, if rows are split
    first: Launch
    second: Launch | None  # the launch that merges the splits; None if rows are not split


# The options of a Reading that a launch plan depends on. The temperature is None if each row has
# its own temperature.
options_of = attrgetter("temperature", "softcap", "ignore_index")


def read(x: Tensor, reading: Reading) -> Statistics:  # x (..., V)
    """Returns the statistics in `reading.wants`, and the state that the backward needs."""
    label, ids, weight = reading.label, reading.ids, reading.class_weight
    temperature, device = reading.row_temperature, x.device
    plan = _read_plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), device,
        None if ids is None else ids.shape, options_of(reading), reading.wants, reading.invariant,
        config.revision,
    )  # fmt: skip
    if plan is None:  # x has no (B, T, V) view with contiguous rows
        return read(x.contiguous(), reading)
    state = torch.empty((plan.rows.count, STATE), device=device, dtype=torch.float32)
    outputs: list[Tensor | None] = [None] * len(OUTPUTS)
    for index, shape, dtype in plan.outputs:
        outputs[index] = torch.empty(shape, device=device, dtype=dtype)
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
    # The statistic "tail" is computed from log p at the ids.
    wanted = (*wants, "logprob") if "tail" in wants else wants
    at_ids = "picked" in wanted or "logprob" in wanted
    at_label = "nll" in wants or "logprob_t1" in wants
    at_label |= ids_shape is None and (at_ids or "rank" in wants)
    at_ids |= "rank" in wants
    outputs = tuple(
        (index, tuple(ids_shape if ids_shape and name in ("picked", "logprob") else shape[:-1]),
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
        rows, outputs, at_label or ignore_index is not None, at_ids and bool(K), sums.total,
        (rows.count, fields, cut.splits), first, last,
    )  # fmt: skip


def gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,
    start: int | None = None,  # first column of x in the vocabulary; None if x has all columns
) -> Tensor:
    """Returns the gradient of the logits, multiplied by `upstream` and `factor`.

    `into` is x, a tensor that shares the memory of x, or a tensor in other memory (see `Place` in
    layout.py). The gradient has the dtype of `into`, or of x if `into` is None. The gradient is
    written to `into`, with one exception. If `into` is x and rows have more than MAX_PRELOADED ids,
    the gradient is a new tensor. The reason is that a program must load the logits at all ids of
    its row before the gradient overwrites x. One program can hold at most MAX_PRELOADED logits.
    """
    coefs, has, g_ids = coefficients
    key = _gradient_key(x, reading, coefficients, upstream, factor, into, start)
    plan = _gradient_plans[key]
    if plan is None:  # x has no (B, T, V) view with contiguous rows
        return _by_copy(x, reading, state, coefficients, upstream, factor, into, start)
    if into is None or (key.over_logits and not plan.over_logits):
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return into
    _, upstream_per_row, factor_per_row = key.per_row
    label = reading.label.contiguous() if plan.reads_label else None
    if upstream_per_row:
        upstream = upstream.contiguous()
    if factor_per_row:
        factor = factor.contiguous()  # pyright: ignore[reportOptionalMemberAccess]
    weight, temperature = None, reading.row_temperature
    if "total" in has:
        weight = reading.class_weight
        if start is not None and weight is not None:
            weight = weight[start : start + x.shape[-1]]
        weight = aligned(weight)
    last = () if temperature is None else (temperature.contiguous(),)
    if not plan.rewrites_ids:
        plan.launch(x, label, weight, state, coefs, upstream, factor, into, *last)
        return into
    ids = None
    if key.K:
        ids = reading.ids.contiguous()
        ids = ids if start is None else _ids_in(ids, x.shape[-1], start, reading.vocab)
    g_ids = None if ids is None or g_ids is None else g_ids.contiguous()
    if g_ids is not None and "tail" not in reading.wants:
        state = with_repeats(state, ids)
    plan.launch(x, label, ids, weight, state, coefs, g_ids, upstream, factor, into, *last)
    return into


class _GradientKey(NamedTuple):
    """The properties of a call that determine the launch plan of its gradient."""

    logits: tuple  # shape, strides, address modulo 16, bytes per element
    over_logits: bool  # whether `into` is the memory of the logits
    place: Place | None  # the Place of `into`; None if over_logits is True or `into` is None
    K: int  # ids per row; 0 if the loss has no gradient at ids
    has_g_ids: bool  # whether each id has its own coefficient
    has: tuple[str, ...]  # names of the coefficients in use
    per_row: tuple[bool, bool, bool]  # whether coefficients, upstream and factor are per row
    options: tuple[float | None, float | None, int | None]
    # The first column of x and the size of the vocabulary, or None if x has all columns.
    columns: tuple[int, int] | None
    revision: int


def _gradient_key(
    x: Tensor, reading: Reading, coefficients: Coefficients, upstream: Tensor,
    factor: Tensor | None, into: Tensor | None, start: int | None,
) -> _GradientKey:  # fmt: skip
    coefs, has, g_ids = coefficients
    address = x.data_ptr()
    over_logits = into is not None and into.data_ptr() == address
    return _GradientKey(
        (x.shape, x.stride(), address % 16, x.element_size()), over_logits,
        None if into is None or over_logits else _place_of(into),
        reading.ids.shape[-1] if g_ids is not None or "a_ids" in has else 0, g_ids is not None, has,
        (coefs.shape[0] > 1, any(upstream.stride()), factor is not None and any(factor.stride())),
        options_of(reading), None if start is None else (start, reading.vocab), config.revision,
    )  # fmt: skip


def _place_of(into: Tensor) -> Place:
    return into.data_ptr() % 16, into.stride(), into.element_size()


class _GradientPlan(NamedTuple):
    over_logits: bool  # whether the gradient is written over the logits
    reads_label: bool
    rewrites_ids: bool  # whether ids_bwd.py runs instead of label_bwd.py
    launch: Launch


def _gradient_plan(key: _GradientKey) -> _GradientPlan | None:
    """Builds a launch plan.

    The result is None if the logits have no (B, T, V) view with contiguous rows.
    """
    rows = describe(*key.logits)
    if rows is None:
        return None
    temperature, _, ignore_index = key.options
    over_logits = key.over_logits and key.K <= MAX_PRELOADED
    d_rows = rows if over_logits else rows.written_to(key.place)
    steps = (COEFFICIENTS * key.per_row[0], int(key.per_row[1]), int(key.per_row[2]))
    common = (*key.options, key.has, steps, key.columns or (None, None))
    rewrites_ids = (key.has_g_ids and key.K > 0) or "a_ids" in key.has or "logprob_t1" in key.has
    if rewrites_ids:
        second = "logprob_t1" in key.has and temperature != 1
        cut = config.ids_bwd(rows.vocab, rows.itemsize)
        launch = ids_bwd_launch(rows, d_rows, key.K, *common, over_logits, second, cut)
    else:
        launch = label_bwd_launch(rows, d_rows, *common, config.label_bwd(rows.vocab))
    reads_label = ignore_index is not None or "label" in key.has or "logprob_t1" in key.has
    return _GradientPlan(over_logits, reads_label, rewrites_ids, launch)


_gradient_plans: Plans[_GradientKey, _GradientPlan | None] = Plans(_gradient_plan)


def _ids_in(ids: Tensor, width: int, start: int, vocab: int) -> Tensor:
    """Converts ids of the vocabulary to ids of the columns [start, start + width).

    Ids of other columns become NO_ID. Ids outside the vocabulary become -1.
    """
    local = torch.where((ids >= start) & (ids < start + width), ids - start, NO_ID)
    bad = ((ids < 0) | (ids >= vocab)) & (ids != NO_ID)
    return torch.where(bad, -1, local)


def _by_copy(x, reading, state, coefficients, upstream, factor, into, start) -> Tensor:
    """Computes the gradient from a contiguous copy of x.

    The copy is needed if x has no (B, T, V) view with contiguous rows (layout.py).
    """
    over_logits = into is not None and into.data_ptr() == x.data_ptr()
    place = None if over_logits else into
    dx = gradient(x.contiguous(), reading, state, coefficients, upstream, factor, place, start)
    return into.copy_(dx) if over_logits else dx  # pyright: ignore[reportOptionalMemberAccess]


@made_once
def a_number(device: torch.device) -> Tensor:
    return torch.empty((), device=device, dtype=torch.float32)


def one_pass(
    x: Tensor,  # (..., V)
    reading: Reading,
    coefficients: Coefficients,  # "a" and "label"
    factor: Tensor | None,  # one number, or one number per row
    into: Tensor,  # output: x, or a tensor in other memory (see `Place` in layout.py)
    mean: bool = False,
    hidden: Tensor | None = None,  # (N, D), the hidden states of a head
) -> tuple[Tensor, Tensor | None] | None:
    """Returns -log p of each row's label, and writes the gradient times `factor` to `into`.

    The second result is a copy of `hidden` with 0 in ignored rows, which the same launch writes. If
    `reading.ignore_index` is None, the second result is `hidden` itself.

    If one pass over the logits is not possible, the function returns None and writes nothing. One
    pass requires that x has a (B, T, V) view with contiguous rows (layout.py). One pass also
    requires that the programs of a row may wait for each other (see program_exchange.py).

    If `mean` is True, the first result is one number, the mean over the rows that are not ignored.
    The function then writes the gradient of this mean. In this case, one pass also requires at
    least one row and at most MAX_COUNTED rows.
    """
    label, temperature = reading.label, reading.row_temperature
    over_logits = into.data_ptr() == x.data_ptr()
    factor_per_row = factor is not None and any(factor.stride())
    copies = hidden is not None and reading.ignore_index is not None
    plan = nll_fwd_bwd_plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), x.device,
        None if over_logits else _place_of(into), options_of(reading),
        coefficients.rows.shape[0] > 1, factor_per_row, mean,
        (hidden.shape, hidden.stride(), hidden.data_ptr() % 16) if copies else None,
        program_exchange.WAITING, config.revision,
    )  # fmt: skip
    if plan is None:
        return None
    source, counted = with_memory_of_copy(hidden) if copies else (None, hidden)
    label = label.contiguous()
    # torch.empty_like takes half the time of torch.empty.
    nll = torch.empty_like(a_number[x.device] if mean else label, dtype=torch.float32)
    if plan.launch is None:  # no rows
        return nll, counted
    exchange = None
    if plan.exchange_words:
        exchange = label.new_zeros(plan.exchange_words, dtype=torch.int64)
    plan.launch(
        x, label, coefficients.rows, factor.contiguous() if factor_per_row else factor, source,
        None if over_logits else into, nll, counted if copies else None, exchange,
        *(() if temperature is None else (temperature.contiguous(),)),
    )  # fmt: skip
    return nll, counted


def scale_(x: Tensor, g: Tensor) -> None:
    """Multiplies x in place by g, which is one number, or one number per row.

    The host does not wait until the GPU has computed g.
    """
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
    """Multiplies x and y in place by the number g, in one launch.

    x and y are contiguous and have the same dtype.
    """
    assert x.is_contiguous()
    assert y.is_contiguous()
    size_x, size_y = x.numel(), y.numel()
    if size_x + size_y:
        offsets = x.data_ptr() % 16, y.data_ptr() % 16
        scale_two_launch(size_x, size_y, offsets, x.device)(x, y, g)
