"""Statistics of rows in one pass over the logits.

Each program reads a whole row, or a split of one: if rows are too few to fill the GPU, or if the
vocabulary is sharded over ranks. merge.py merges the splits.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import contract as _contract
from ...contract import Partials, Reading, Sums
from .. import config
from ..launch import REMEMBERED, Launch, field
from ..layout import Rows, aligned, is_live, load_label, pack_of, row_offset, rows_of, split_row
from ..numerics import LOG2E, capped, inverse_temperature, load, only_if
from ..profiling import profiled
from .merge import SPLIT_Y_LABEL, constants_of, split_width, store_split
from .outputs import Outputs, write_ids, write_label, write_row
from .state import NOWHERE, column_of_max, fold_span, load_first, logit_at, reference, with_count


@dataclass(frozen=True)
class _Constants:
    second: bool  # whether to compute s1, the normaliser at temperature 1
    aligned: bool
    starts_aligned: bool
    block_v: int
    block_k: int


@triton.jit(
    **profiled("stats_fwd", shows=("K",)),
    do_not_specialize=["rows_t", "lead"],
    do_not_specialize_on_alignment=["LABEL", "IDS", "temperature"],
)
def _stats_fwd_kernel(
    X, LABEL, IDS, W,  # inputs
    # outputs
    STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, RANK, LOGPROB_T1,
    temperature,
    rows_t, stride_xb, stride_xt, lead, V, K,  # sizes
    softcap, ignore_index,  # options
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    SECOND: tl.constexpr = field(CONSTANTS, "second")
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    SUMS: tl.constexpr = (TOTAL is not None) | (LOG_TOTAL is not None)
    PACK: tl.constexpr = pack_of(X)
    row = tl.program_id(0)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    Xrow = X + offset
    inv_t = inverse_temperature(temperature, row)
    ref = reference(Xrow, columns, softcap, SUMS, field(CONSTANTS, "starts_aligned"))
    head, body = split_row(offset, columns, lead, PACK, ALIGNED)
    y0 = None
    if RANK is not None:
        y0 = logit_at(Xrow, load_first(LABEL, IDS, row, K), columns, softcap)
    state = fold_span(
        Xrow, W, head, body, columns, 0, columns, ref, inv_t * LOG2E, softcap, y0,
        ENTROPY is not None, SUMS, SECOND, PACK, ALIGNED, True, BLOCK_V,
    )  # fmt: skip
    if W is None:
        state = with_count(state, columns.to(tl.float32))
    arg = 0
    if ARGMAX is not None:
        arg = column_of_max(Xrow, state, head, body, columns, softcap, PACK, ALIGNED, BLOCK_V)
    out = Outputs(
        STATE, LSE, PICKED, LOGPROB, NLL, ENTROPY, TOTAL, LOG_TOTAL, ARGMAX, RANK, LOGPROB_T1
    )
    shift, log_s = write_row(out, state, arg, ref, row, V, live, inv_t)
    if LABEL is not None:
        inside = (label >= 0) & (label < columns)
        y, _ = capped(tl.load(Xrow + label, mask=inside, other=0.0), softcap)
        write_label(out, y, label, row, V, live, shift, log_s, state.s1, inv_t, SECOND, K is None)
    if IDS is not None:
        write_ids(out, Xrow, None, IDS, row, V, K, live, shift, log_s, inv_t, softcap, BLOCK_K)


def stats_fwd_launch(
    rows: Rows, K: int | None, temperature: float | None, softcap: float | None,
    ignore_index: int | None, second: bool, cut: config.Config,
) -> Launch:  # fmt: skip
    number = () if temperature is None else (temperature,)
    block_k = min(128 * cut.num_warps, config.ceil_pow2(K or 0))
    return Launch(
        _stats_fwd_kernel, (rows.count,),
        (*number, *rows.strides, rows.lead, rows.vocab, K, softcap, ignore_index),
        num_warps=cut.num_warps, registers=cut.registers if K is None else None,
        CONSTANTS=_Constants(second, rows.aligned, rows.starts_aligned, cut.block_v, block_k),
    )  # fmt: skip


@triton.jit
def _store_ids(Xrow, IDS, PICKED, row, V, K, start, live, softcap, BLOCK_K: tl.constexpr):
    """Stores the logit y at each id in [start, start + V), and 0 for each other id."""
    for first in range(0, K, BLOCK_K):
        offs_k = first + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        at = row.to(tl.int64) * K + offs_k
        ids = tl.load(IDS + at, mask=mask_k, other=-1) - start
        inside = only_if(live, mask_k & (ids >= 0) & (ids < V))
        y, _ = capped(load(Xrow, ids, inside), softcap)
        tl.store(PICKED + at, tl.where(inside, y, 0.0), mask=mask_k)


@triton.jit
def _load_at(Xrow, column, columns, wanted):
    """Returns x at one column, or 0 if `wanted` is False or the column is outside [0, columns)."""
    inside = (column >= 0) & (column < columns)
    return tl.load(Xrow + column, mask=wanted & inside, other=0.0)


@dataclass(frozen=True)
class _SplitConstants:
    aligned: bool
    starts_aligned: bool
    block_v: int
    block_k: int
    early: bool  # whether to load the label's logit before the loop, to hide the load's latency


@triton.jit(
    **profiled("stats_split_fwd", shows=("K",)),
    do_not_specialize=["rows_t", "lead", "start", "span"],
    do_not_specialize_on_alignment=["LABEL", "IDS", "Y0", "temperature"],
)
def _stats_split_fwd_kernel(
    X, LABEL, IDS, W,  # inputs
    Y0,  # input (N,), y0 of each row; if None, the kernel loads y0 from X
    SPLITS, PICKED, ABOVE,  # outputs, (N, fields, splits), (N, K) and (N, splits)
    temperature,
    rows_t, stride_xb, stride_xt, lead, V, K, start, span,  # sizes
    softcap, ignore_index,  # options
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SECOND: tl.constexpr, TOTAL: tl.constexpr,
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program computes a split: `span` columns of a row's body (see layout.py).

    The first one also has the fringe, and loads the logits at the label and at the ids. ABOVE
    counts the logits of the split that are greater than y0, the logit at the row's first id or
    label.
    """
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    EARLY: tl.constexpr = (LABEL is not None) & field(CONSTANTS, "early")
    LATE: tl.constexpr = (LABEL is not None) & (not field(CONSTANTS, "early"))
    PACK: tl.constexpr = pack_of(X)
    row = tl.program_id(0)
    split = tl.program_id(1)
    label = load_label(LABEL, row)
    live = is_live(label, ignore_index)
    columns = tl.where(live, V, 0)
    offset = row_offset(row, rows_t, stride_xb, stride_xt)
    Xrow = X + offset
    inv_t = inverse_temperature(temperature, row)
    ref = reference(Xrow, columns, softcap, TOTAL, field(CONSTANTS, "starts_aligned"))
    # Triton cannot derive that split · span is a multiple of BLOCK_V
    lo = tl.multiple_of(split * span, BLOCK_V)
    head, body = split_row(offset, columns, lead, PACK, ALIGNED)
    if W is not None:
        W += start
    if EARLY:
        x_label = _load_at(Xrow, label - start, columns, split == 0)
    y0 = None
    if ABOVE is not None:
        if Y0 is not None:
            y0 = tl.load(Y0 + row)
        else:
            y0 = logit_at(Xrow, load_first(LABEL, IDS, row, K), columns, softcap)
    state = fold_span(
        Xrow, W, head, body, columns, lo, lo + span, ref, inv_t * LOG2E, softcap, y0,
        ENTROPY, TOTAL, SECOND, PACK, ALIGNED, True, BLOCK_V,
    )  # fmt: skip
    if W is None:
        count = tl.maximum(tl.minimum(lo + span, body) - lo, 0)
        count += tl.where(lo == 0, columns - body, 0)
        state = with_count(state, count.to(tl.float32))
    arg = tl.full((), 0, tl.int32)
    if ARGMAX:
        arg = column_of_max(Xrow, state, head, body, columns, softcap, PACK, ALIGNED, BLOCK_V)
        arg = tl.where(arg == NOWHERE, NOWHERE, arg + start)
    splits = tl.num_programs(1)
    if ABOVE is not None:
        tl.store(ABOVE + row.to(tl.int64) * splits + split, state.above)
    FIELDS: tl.constexpr = split_width(ENTROPY, ARGMAX, SECOND, TOTAL)
    SPLITS += row.to(tl.int64) * (splits * FIELDS) + split
    store_split(SPLITS, splits, state, ref, arg, ENTROPY, ARGMAX, SECOND, TOTAL)
    if LATE:
        x_label = _load_at(Xrow, label - start, columns, split == 0)
    if LABEL is not None:
        y_label, _ = capped(x_label, softcap)
        tl.store(SPLITS + SPLIT_Y_LABEL * splits, y_label)
    if IDS is not None:
        if split == 0:
            BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
            _store_ids(Xrow, IDS, PICKED, row, V, K, start, live, softcap, BLOCK_K)


def partial(
    x: Tensor,  # (..., V), columns [start, start + V) of the vocabulary
    reading: Reading,
    start: int = 0,
) -> Partials:
    """Returns the partial statistics over the columns of x, in as many splits as fill the GPU.

    Label, ids, class weights and argmax refer to columns of the whole vocabulary.
    """
    x, rows = rows_of(x)
    label, ids, temperature = reading.label, reading.ids, reading.row_temperature
    softcap, ignore_index, sums = reading.softcap, reading.ignore_index, reading.sums
    cut = cut_of(rows, x.device, sums, softcap, reading.invariant)
    size = (rows.count, _contract.part_width(*sums), cut.splits)
    state = torch.empty(size, device=x.device, dtype=torch.float32)
    picked, K = None, 0
    if ids is not None:
        K = ids.shape[-1]
        picked = torch.empty((rows.count, K), device=x.device, dtype=torch.float32)
    if rows.count == 0:
        return Partials(state.mT, picked)
    launch = stats_split_fwd_launch(
        rows,
        K,
        start,
        reading.temperature,
        softcap,
        ignore_index,
        sums,
        cut,
    )
    by_row = () if temperature is None else (temperature.contiguous(),)
    launch(
        x, None if label is None else label.contiguous(), ids.contiguous() if K else None,
        aligned(reading.class_weight) if sums.total else None, None, state, picked if K else None,
        None, *by_row,
    )  # fmt: skip
    return Partials(state.mT, picked)


def above(x: Tensor, reading: Reading, y0: Tensor) -> Tensor:
    x, rows = rows_of(x)
    label = None if reading.ignore_index is None else reading.label
    sums = _contract.sums_of((), True)
    cut = cut_of(rows, x.device, sums, reading.softcap, reading.invariant)
    size = (rows.count, _contract.part_width(*sums), cut.splits)
    count = torch.zeros((rows.count, cut.splits), device=x.device, dtype=torch.int32)
    if rows.count:
        launch = stats_split_fwd_launch(
            rows, 0, 0, 1.0, reading.softcap, reading.ignore_index, sums, cut
        )
        launch(
            x, None if label is None else label.contiguous(), None, None, y0.contiguous(),
            torch.empty(size, device=x.device, dtype=torch.float32), None, count,
        )  # fmt: skip
    return count.sum(1)


def cut_of(
    rows: Rows, device: torch.device, sums: Sums, softcap: float | None, invariant: bool
) -> config.Config:
    """Returns the Config of the forward kernels for these rows.

    `invariant` assumes many rows and a heavy kernel (see `config.stats_fwd`), so that the bits
    depend neither on the number of rows nor on the other statistics.
    """
    heavy = invariant or softcap is not None or sums.entropy or sums.argmax or sums.total
    processors = config.processors(device)
    count = config.MANY * processors if invariant else rows.count
    return config.stats_fwd(count, rows.vocab, rows.itemsize, processors, heavy, sums.second)


@functools.lru_cache(REMEMBERED)
def stats_split_fwd_launch(
    rows: Rows, K: int, start: int, temperature: float | None, softcap: float | None,
    ignore_index: int | None, sums: Sums, cut: config.Config,
) -> Launch:  # fmt: skip
    span = config.ceil_div(config.ceil_div(rows.vocab, cut.splits), cut.block_v) * cut.block_v
    number = () if temperature is None else (temperature,)
    block_k = min(128 * cut.num_warps, config.ceil_pow2(K))
    return Launch(
        _stats_split_fwd_kernel, (rows.count, cut.splits),
        (
            *number, *rows.strides, rows.lead, rows.vocab, K, start, span,
            softcap, ignore_index,
        ),
        num_warps=cut.num_warps, registers=None if K else cut.registers,
        CONSTANTS=_SplitConstants(
            rows.aligned, rows.starts_aligned, cut.block_v, block_k, cut.splits > 1
        ),
        **constants_of(sums),
    )  # fmt: skip
