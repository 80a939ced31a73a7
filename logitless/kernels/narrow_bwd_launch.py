"""Launches the kernels for the gradients of a narrow head (narrow_bwd.py)."""

import functools

import torch
from torch import Tensor

from ..contract import Coefficients, Reading
from . import config
from .launch import REMEMBERED, Launch
from .narrow_bwd import Constants, narrow_hidden_bwd_kernel, narrow_weight_bwd_kernel
from .narrow_expected import Expected, hidden_from_expected
from .narrow_terms import (
    Pairs,
    Visits,
    order_by_columns,
    order_by_rows,
    terms_of,
    tiles_per_split,
)
from .narrow_tile import HeadLayout, layout_of
from .numerics import LOG2E
from .stats_split_fwd import aligned


def narrow_gradients(
    hidden: Tensor,  # (N, D); the numbers in ignored rows must be finite
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # one number, or one number per row
    factor: Tensor | None,  # one number, or one number per row
    d_hidden: Tensor | None,  # (N, D), contiguous
    d_weight: Tensor | None,  # (V, D), with contiguous rows
    d_bias: Tensor | None,  # (V,), fp32
    adds: bool = False,  # whether to add to d_weight; if not, d_weight is overwritten
    expected: Expected | None = None,  # sums that the forward kernel computed for d_hidden
) -> None:
    """Writes the gradients of a head to d_hidden, d_weight and d_bias, if not None."""
    (N, D), V, where = hidden.shape, len(weight), layout_of(hidden, weight)
    by_rows, by_columns = _cuts(hidden, V, where, reading, coefficients.has)
    orders = []
    if d_hidden is not None and expected is None:
        orders.append(order_by_rows(N, V, by_rows))
    if d_weight is not None or d_bias is not None:
        orders.append(order_by_columns(N, V, by_columns))
    terms, pairs, has = terms_of(reading, state, coefficients, upstream, factor, V, tuple(orders))
    visits = [_NONE] * len(orders)
    if pairs is not None:
        visits = [(*each, pairs.columns, pairs.g) for each in pairs.visits]
    class_weight = aligned(reading.class_weight) if "total" in has else None
    inputs = (hidden, weight, None if bias is None else bias.contiguous(), class_weight, terms)
    rate = None if reading.temperature is None else LOG2E.value / reading.temperature
    known = (*_sizes_of(pairs), rate, reading.softcap)
    if d_hidden is not None and expected is not None:
        assert pairs is not None  # see is_expected
        hidden_from_expected(expected, weight, terms, pairs, d_hidden)
    elif d_hidden is not None:
        out = d_hidden
        if by_rows.splits > 1:
            out = torch.empty((by_rows.splits, N, D), device=hidden.device, dtype=torch.float32)
        launch = _hidden_launch(N, V, *known, has, where, by_rows)
        launch(*inputs, *visits[0], out)
        if by_rows.splits > 1:
            d_hidden.copy_(out.sum(0))
    if d_weight is not None or d_bias is not None:
        step = 0 if d_weight is None else d_weight.stride(0)
        launch = _weight_launch(N, V, step, *known, has, where, by_columns, adds)
        launch(*inputs, *visits[-1], d_weight, d_bias)


def _cuts(
    hidden: Tensor, V: int, where: HeadLayout, reading: Reading, has: tuple[str, ...]
) -> tuple[config.Config, config.Config]:
    """Returns the Configs of the kernel for d_hidden, and of the kernel for d_weight and d_bias."""
    (N, D), device = hidden.shape, hidden.device
    heavy = int(reading.softcap is not None or bool({"b", "total", "logprob_t1"} & {*has}))
    heavy += not where.aligned
    size = (where.block_d, hidden.element_size(), config.memory(device), heavy)
    by_rows = config.narrow("d_hidden", *size)
    by_rows = config.narrow_splits(by_rows, N, V, D, config.processors(device), config.NARROW_SUMS)
    return by_rows, config.narrow("d_weight", *size)


_NONE = (None,) * (len(Visits._fields) + 2)


def _sizes_of(pairs: Pairs | None) -> tuple[int, int]:
    return (0, 0) if pairs is None else (pairs.g.numel(), pairs.g.shape[1])


@functools.lru_cache(REMEMBERED)
def _hidden_launch(
    N: int, V: int, pairs: int, slots: int, rate: float | None, softcap: float | None,
    has: tuple[str, ...], where: HeadLayout, cut: config.Config,
) -> Launch:  # fmt: skip
    return Launch(
        narrow_hidden_bwd_kernel, (config.ceil_div(N, cut.block_n), cut.splits),
        (N, V, tiles_per_split(V, cut), pairs, slots, rate, softcap),
        num_warps=cut.num_warps, num_stages=cut.stages, registers=cut.registers,
        CONSTANTS=Constants(has, where, cut.block_n, cut.block_v),
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _weight_launch(
    N: int, V: int, step: int, pairs: int, slots: int, rate: float | None, softcap: float | None,
    has: tuple[str, ...], where: HeadLayout, cut: config.Config, adds: bool,
) -> Launch:  # fmt: skip
    return Launch(
        narrow_weight_bwd_kernel, (config.ceil_div(V, cut.block_v),),
        (N, V, step, pairs, slots, rate, softcap),
        num_warps=cut.num_warps, num_stages=cut.stages, registers=cut.registers,
        CONSTANTS=Constants(has, where, cut.block_n, cut.block_v, adds),
    )  # fmt: skip
