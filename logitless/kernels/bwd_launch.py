"""Launchers of the backward kernels that all losses over statistics share."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..contract import COEFFICIENTS, NO_ID, Coefficients, Reading
from . import config
from .duplicate_ids import with_repeats
from .host import options_of
from .launch import Launch, Plans
from .layout import Place, describe, place_of
from .stats_bwd import MAX_PRELOADED, stats_bwd_launch
from .stats_coefficients import MOST_IN_ROW, Given, fields_in_row
from .stats_split_fwd import aligned


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
    """Returns the gradient of the logits, times `upstream` and `factor`.

    It is written to `into`: x itself, or a `Place` of layout.py. If `into` is x and rows have more
    than MAX_PRELOADED ids, it is a new tensor: a program must hold the logits at all ids of its row
    before the gradient overwrites x.
    """
    return _gradient(x, reading, state, coefficients, (), (upstream,), factor, into, start)


def stats_gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    gradients: dict[str, Tensor],  # one number per row for each statistic
    factor: Tensor | None = None,  # one number, or one number per row
    into: Tensor | None = None,
) -> Tensor | None:
    """Like `gradient`, but from gradients of statistics, or None if that takes more than one
    launch.
    """
    names = tuple(gradients)
    has = fields_in_row(names, reading.wants) if reading.ids is None else None
    if has is None:
        return None
    given = tuple(gradients.values())
    return _gradient(x, reading, state, Coefficients(None, has), names, given, factor, into, None)


def _gradient(
    x: Tensor, reading: Reading, state: Tensor, coefficients: Coefficients, names: tuple[str, ...],
    upstream: tuple[Tensor, ...], factor: Tensor | None, into: Tensor | None, start: int | None,
) -> Tensor:  # fmt: skip
    """`gradient` if `names` is empty (one `upstream`), else `stats_gradient` (one per name)."""
    coefs, has, g_ids = coefficients
    key = _gradient_key(x, reading, coefficients, names, upstream, factor, into, start)
    plan = _gradient_plans[key]
    if plan is None:  # x has no (B, T, V) view with contiguous rows
        return _by_copy(x, reading, state, coefficients, names, upstream, factor, into, start)
    if into is None or (key.over_logits and not plan.over_logits):
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return into
    label = reading.label.contiguous() if plan.reads_label else None
    # strides that are all 0 mean one number for all rows, which is not copied
    steps = key.upstream_steps
    upstream = tuple(d.contiguous() if s else d for d, s in zip(upstream, steps, strict=True))
    if key.factor_per_row:
        factor = factor.contiguous()  # pyright: ignore[reportOptionalMemberAccess]
    weight, temperature = None, reading.row_temperature
    if "total" in has:
        weight = reading.class_weight
        if start is not None and weight is not None:
            weight = weight[start : start + x.shape[-1]]
        weight = aligned(weight)
    last = () if temperature is None else (temperature.contiguous(),)
    ids = None
    if key.K:
        ids = reading.ids.contiguous()
        ids = ids if start is None else _ids_in(ids, x.shape[-1], start, reading.vocab)
    g_ids = None if ids is None or g_ids is None else g_ids.contiguous()
    if g_ids is not None and "tail" not in reading.wants:
        state = with_repeats(state, ids)
    plan.launch(
        x, label, ids, weight, state, coefs, g_ids, *upstream, *plan.missing, factor, into, *last
    )
    return into


class _GradientKey(NamedTuple):
    """What determines the launch plan of a gradient."""

    logits: tuple  # shape, strides, address modulo 16, bytes per element
    over_logits: bool  # whether `into` is the memory of the logits
    place: Place | None  # the Place of `into`; None if over_logits is True or `into` is None
    K: int  # ids per row; 0 if the loss has no gradient at ids
    has_g_ids: bool  # whether each id has its own coefficient
    has: tuple[str, ...]  # names of the coefficients in use
    names: tuple[str, ...]  # the statistics whose gradients are in `upstream`; () for `gradient`
    coefs_per_row: bool
    upstream_steps: tuple[int, ...]  # row strides of `upstream`; 0 if all rows share one number
    factor_per_row: bool
    options: tuple[float | None, float | None, int | None]
    # the first column of x and the size of the vocabulary, or None if x has all columns
    columns: tuple[int, int] | None
    revision: int


def _gradient_key(
    x: Tensor, reading: Reading, coefficients: Coefficients, names: tuple[str, ...],
    upstream: tuple[Tensor, ...], factor: Tensor | None, into: Tensor | None, start: int | None,
) -> _GradientKey:  # fmt: skip
    coefs, has, g_ids = coefficients
    address = x.data_ptr()
    over_logits = into is not None and into.data_ptr() == address
    return _GradientKey(
        (x.shape, x.stride(), address % 16, x.element_size()), over_logits,
        None if into is None or over_logits else place_of(into),
        reading.ids.shape[-1] if g_ids is not None or "a_ids" in has else 0, g_ids is not None, has,
        names, coefs is not None and coefs.shape[0] > 1,
        tuple([1 if any(d.stride()) else 0 for d in upstream]),
        factor is not None and any(factor.stride()), options_of(reading),
        None if start is None else (start, reading.vocab), config.revision,
    )  # fmt: skip


class _GradientPlan(NamedTuple):
    over_logits: bool  # whether the gradient is written over the logits
    reads_label: bool
    missing: tuple[None, ...]  # None for each parameter D0, D1, ... that gets no tensor
    launch: Launch


def _gradient_plan(key: _GradientKey) -> _GradientPlan | None:
    """Builds a plan, or returns None if the logits have no (B, T, V) view with contiguous rows."""
    rows = describe(*key.logits)
    if rows is None:
        return None
    temperature, _, ignore_index = key.options
    over_logits = key.over_logits and key.K <= MAX_PRELOADED
    d_rows = rows if over_logits else rows.written_to(key.place)
    steps = (COEFFICIENTS * key.coefs_per_row, key.upstream_steps[0], int(key.factor_per_row))
    second = "logprob_t1" in key.has and temperature != 1
    given = Given(key.names, key.upstream_steps) if key.names else None
    at_ids = (key.has_g_ids and key.K > 0) or "a_ids" in key.has or "logprob_t1" in key.has
    launch = stats_bwd_launch(
        rows, d_rows, key.K if at_ids else None, *key.options, key.has, steps,
        key.columns or (None, None), given, at_ids and over_logits, second,
        config.stats_bwd(rows.vocab, rows.itemsize, at_ids),
    )  # fmt: skip
    reads_label = ignore_index is not None or "label" in key.has or "logprob_t1" in key.has
    missing = (None,) * (MOST_IN_ROW - len(key.upstream_steps))
    return _GradientPlan(over_logits, reads_label, missing, launch)


_gradient_plans: Plans[_GradientKey, _GradientPlan | None] = Plans(_gradient_plan)


def _ids_in(ids: Tensor, width: int, start: int, vocab: int) -> Tensor:
    """Makes ids relative to `start`: NO_ID for other columns, -1 outside the vocabulary."""
    local = torch.where((ids >= start) & (ids < start + width), ids - start, NO_ID)
    bad = ((ids < 0) | (ids >= vocab)) & (ids != NO_ID)
    return torch.where(bad, -1, local)


def _by_copy(x, reading, state, coefficients, names, upstream, factor, into, start) -> Tensor:
    over_logits = into is not None and into.data_ptr() == x.data_ptr()
    place = None if over_logits else into
    dx = _gradient(
        x.contiguous(), reading, state, coefficients, names, upstream, factor, place, start
    )
    return into.copy_(dx) if over_logits else dx  # pyright: ignore[reportOptionalMemberAccess]
