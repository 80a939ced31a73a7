"""The gradient of the logits, from the state of their rows and the coefficients of a loss."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .._contract import COEFFICIENTS, Coefficients, Reading
from . import config
from .blocks import blocks_launch
from .launch import REMEMBERED, Launch
from .layout import describe
from .partial import aligned
from .repeats import write_repeats
from .spans import MAX_HELD, spans_launch


def gradient(
    x: Tensor,  # (..., V)
    reading: Reading,
    state: Tensor,  # (N, STATE)
    coefficients: Coefficients,
    upstream: Tensor,  # () or (...)
    factor: Tensor | None = None,  # () or N numbers
    into: Tensor | None = None,  # like x: x itself, x's own memory, or contiguous
) -> Tensor:
    """The one backward, times upstream and factor, (..., V) in the dtype of x.

    It is written to `into`, except over x where a row has more than MAX_HELD ids: their logits are
    read again, so that it is a new tensor then.
    """
    coefs, has, g_ids = coefficients
    mark, ids, weight, temperature = reading[:4]
    if g_ids is None and "a_ids" not in has:
        ids = None
    inplace = into is not None and into.data_ptr() == x.data_ptr()
    offset = None if into is None or inplace else into.data_ptr() % 16
    plan = _plan(
        x.shape, x.stride(), x.data_ptr() % 16, x.element_size(), inplace, offset,
        0 if ids is None else ids.shape[-1], g_ids is not None, has,
        (len(coefs) > 1, any(upstream.stride()), factor is not None and any(factor.stride())),
        temperature is None, reading[4:7], config.revision,
    )  # fmt: skip
    if plan is None:  # too many strides
        return _by_copy(x, reading, state, coefficients, upstream, factor, into)
    if into is None or (inplace and not plan.inplace):
        into = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return into
    mark = mark.contiguous() if plan.reads_mark else None
    upstream = upstream if not any(upstream.stride()) else upstream.contiguous()
    if factor is not None and any(factor.stride()):
        factor = factor.contiguous()
    weight = aligned(weight) if "total" in has else None
    by_row = () if temperature is None else (temperature.contiguous(),)
    if not plan.spans:
        plan.launch(x, mark, weight, state, coefs, upstream, factor, into, *by_row)
        return into
    if plan.reads_ids:
        ids = ids.contiguous()
        if g_ids is not None:
            g_ids = g_ids.contiguous()
            if "tail" not in reading.wants:
                write_repeats(ids, state)
    else:
        ids = g_ids = None
    plan.launch(x, mark, ids, weight, state, coefs, g_ids, upstream, factor, into, *by_row)
    return into


class _Plan(NamedTuple):
    """All that a call with such shapes, strides and options needs, but its tensors."""

    inplace: bool  # whether the gradient may be written over x
    reads_mark: bool
    reads_ids: bool
    spans: bool  # whether there is more than a mark to put right
    launch: Launch


@functools.lru_cache(REMEMBERED)
def _plan(
    shape: tuple, strides: tuple, offset: int, itemsize: int, inplace: bool,
    into_offset: int | None, K: int, has_ids: bool, has: tuple[str, ...],
    by_row: tuple[bool, bool, bool],  # coefficients, upstream and factor: one a row, or one for all
    one_temperature: bool, options: tuple, revision: int,
) -> _Plan | None:  # fmt: skip
    temperature, softcap, ignore_index = options
    rows = describe(shape, strides, offset, itemsize)
    if rows is None:
        return None
    inplace = inplace and K <= MAX_HELD
    d_rows = rows if inplace else rows.dense()._replace(lead=(into_offset or 0) // itemsize)
    steps = (COEFFICIENTS * by_row[0], int(by_row[1]), int(by_row[2]))
    how = (temperature if one_temperature else None, softcap, ignore_index, has, steps)
    spans = (has_ids and K > 0) or "a_ids" in has or "label" in has
    if spans:
        second = "label" in has and not (one_temperature and temperature == 1)
        cut = config.spans(rows.vocab, itemsize)
        launch = spans_launch(rows, d_rows, K, *how, inplace, second, cut)
    else:
        launch = blocks_launch(rows, d_rows, *how, config.backward(rows.vocab))
    marked = ignore_index is not None or "mark" in has or "label" in has
    return _Plan(inplace, marked, K > 0, spans, launch)


def _by_copy(x, reading, state, coefficients, upstream, factor, into) -> Tensor:
    """The same for logits whose rows have more than two strides."""
    found = gradient(x.contiguous(), reading, state, coefficients, upstream, factor)
    return found if into is None else into.copy_(found)


def numbers(t: Tensor | None) -> tuple[Tensor | None, int]:
    """One number for all rows or one each, and the step from one to the next."""
    if t is None or not any(t.stride()):
        return t, 0
    return t.contiguous(), 1
