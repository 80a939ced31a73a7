"""Dot products of each hidden state with M rows of a table.

A pair is a hidden state and one of its M rows of the table. The gradient of a row sums its pairs,
which are sorted by row; those of one row are a run. Each program sums a block of LENGTH adjacent
pairs, and writes the runs that lie inside. A run that crosses the end of a block has a partial sum
per block, which a second kernel adds up: no atomics, and a bitwise reproducible result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...eager.table_rows import table_gradient
from .. import config
from ..launch import launch
from ..numerics import NO_ID
from ..profiling import Arguments, at_ids, profiled

LENGTH = 64  # pairs per block
ROWS = 32  # rows of the table that a program loads at once


def _rows_at_ids(args: Arguments) -> int:
    """Returns the number of elements of the table that a launch reads."""
    return at_ids(args) * args["D"]


@triton.jit
def _rows_of(T, rows, stride, ALIGNED: tl.constexpr):
    """Returns pointers to rows of T. If ALIGNED is True, every row starts on a 16-byte boundary."""
    if ALIGNED:
        return tl.multiple_of(T + rows * stride, 16)
    else:
        return T + rows * stride


@triton.jit(
    **profiled("row_dots", W=_rows_at_ids),
    do_not_specialize=["M"],
    do_not_specialize_on_alignment=["HIDDEN", "W", "IDS"],
)
def _row_dots_kernel(
    HIDDEN, W, IDS,  # inputs, (N, D), (V, D) and (N, M)
    DOTS,  # output, (N, M)
    stride_h, stride_w, V, D, M,  # sizes
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_M dot products of one hidden state."""
    row = tl.program_id(0).to(tl.int64)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    at = row * M + offs_m
    ids = tl.load(IDS + at, mask=mask_m, other=NO_ID)
    inside = (ids >= 0) & (ids < V)
    dots = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        h_place = _rows_of(HIDDEN, row, stride_h, ALIGNED) + offs_d
        h = tl.load(h_place, mask=mask_d, other=0.0).to(tl.float32)
        place = _rows_of(W, ids, stride_w, ALIGNED)[:, None] + offs_d[None, :]
        w = tl.load(place, mask=inside[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
        dots += tl.sum(w * h[None, :], axis=1)
    none = tl.where(ids == NO_ID, 0.0, float("nan"))
    tl.store(DOTS + at, tl.where(inside, dots, none), mask=mask_m)


@triton.jit(
    **profiled("row_dots_d_hidden", W=_rows_at_ids),
    do_not_specialize=["M"],
    do_not_specialize_on_alignment=["W", "IDS", "G"],
)
def _row_dots_d_hidden_kernel(
    W, IDS, G,  # inputs, (V, D), (N, M) and (N, M)
    DX,  # output, (N, D)
    stride_w, V, D, M,  # sizes
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_D numbers of the gradient of one hidden state."""
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, M, BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        ids = tl.load(IDS + row * M + offs_m, mask=mask_m, other=NO_ID)
        g = tl.load(G + row * M + offs_m, mask=mask_m, other=0.0)
        used = (ids >= 0) & (ids < V) & (g != 0)
        place = _rows_of(W, ids, stride_w, ALIGNED)[:, None] + offs_d[None, :]
        w = tl.load(place, mask=used[:, None] & mask_d[None, :], other=0.0).to(tl.float32)
        total += tl.sum(tl.where(used, g, 0.0)[:, None] * w, axis=0)
    tl.store(DX + row * D + offs_d, total.to(DX.dtype.element_ty), mask=mask_d)


@triton.jit
def _run_at(RUNS, place, count):
    """Returns the run of the pair at `place`, or -1 if `place` is outside [0, count)."""
    return tl.load(RUNS + place, mask=(place >= 0) & (place < count), other=-1)


@triton.jit(
    **profiled("row_dots_d_table"),
    do_not_specialize=["count", "M", "rows"],
    do_not_specialize_on_alignment=["HIDDEN", "G", "ORDER", "RUNS"],
)
def _row_dots_d_table_kernel(
    HIDDEN, G, ORDER, RUNS,  # inputs, (N, D), (N · M,), (count,) and (count,)
    OUT, PARTS,  # outputs, (rows, D) and (blocks, 2, D); PARTS holds partial sums (see below)
    count, stride_h, D, M, rows,  # sizes
    ALIGNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program sums the pairs of one block, in BLOCK_D columns.

    RUNS holds the index of each pair's run, in ascending order; a run outside [0, rows) has no
    output. PARTS[:, 0] is the partial sum of a run from an earlier block, PARTS[:, 1] that of a run
    which begins here and continues in the next.
    """
    block = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    first = block * BLOCK_P
    PARTS += block * 2 * D + offs_d
    run = _run_at(RUNS, first, count)
    began_before = (_run_at(RUNS, first - 1, count) == run).to(tl.int32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for place in range(first, tl.minimum(first + BLOCK_P, count)):
        next_run = tl.load(RUNS + place)
        if next_run != run:
            if began_before != 0:
                tl.store(PARTS, total, mask=mask_d)
            else:
                width = tl.where(run < rows, D, 0)
                out = total.to(OUT.dtype.element_ty)
                tl.store(OUT + run.to(tl.int64) * D + offs_d, out, mask=offs_d < width)
            total = tl.zeros((BLOCK_D,), tl.float32)
            began_before = tl.full((), 0, tl.int32)
            run = next_run
        pair = tl.load(ORDER + place)
        g = tl.load(G + pair)
        width = tl.where((g != 0) & (run < rows), D, 0)
        at = _rows_of(HIDDEN, pair // M, stride_h, ALIGNED) + offs_d
        h = tl.load(at, mask=offs_d < width, other=0.0).to(tl.float32)
        total += tl.where(width > 0, g, 0.0) * h
    goes_on = _run_at(RUNS, first + BLOCK_P, count) == run
    if began_before != 0:
        tl.store(PARTS, total, mask=mask_d)
    elif goes_on:
        tl.store(PARTS + D, total, mask=mask_d)
    else:
        width = tl.where(run < rows, D, 0)
        out = total.to(OUT.dtype.element_ty)
        tl.store(OUT + run.to(tl.int64) * D + offs_d, out, mask=offs_d < width)


@triton.jit(
    **profiled("row_dots_d_table_ends"),
    do_not_specialize=["count", "rows"],
    do_not_specialize_on_alignment=["RUNS"],
)
def _row_dots_d_table_ends_kernel(
    RUNS, PARTS,  # inputs
    OUT,  # output
    count, D, rows,  # sizes
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each program writes the sum of the run that begins in its block and ends in a later block."""
    block = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = block * BLOCK_P
    run = _run_at(RUNS, first + BLOCK_P - 1, count)
    began_before = _run_at(RUNS, first - 1, count) == run
    goes_on = _run_at(RUNS, first + BLOCK_P, count) == run
    if (run >= 0) & (run < rows) & goes_on & (not began_before):
        total = tl.load(PARTS + (block * 2 + 1) * D + offs_d, mask=offs_d < D, other=0.0)
        other = block + 1
        while _run_at(RUNS, other * BLOCK_P, count) == run:
            total += tl.load(PARTS + other * 2 * D + offs_d, mask=offs_d < D, other=0.0)
            other += 1
        out = total.to(OUT.dtype.element_ty)
        tl.store(OUT + run.to(tl.int64) * D + offs_d, out, mask=offs_d < D)


def row_dots(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    dots = torch.empty(ids.shape, device=ids.device, dtype=torch.float32)
    if dots.numel():
        hidden, weight = _contiguous_rows(hidden), _contiguous_rows(weight)
        (N, M), (V, D) = ids.shape, weight.shape
        launch(
            _row_dots_kernel, (N, config.ceil_div(M, ROWS)),
            (hidden, weight, ids.contiguous(), dots),
            (hidden.stride(0), weight.stride(0), V, D, M), num_warps=4,
            ALIGNED=_aligned(hidden) and _aligned(weight), BLOCK_M=ROWS, BLOCK_D=_block_d(D),
        )  # fmt: skip
    return dots


def row_dots_gradients(
    hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor, needs: tuple[bool, bool], sparse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Like `row_dots_gradients` in eager/; if `sparse`, the host waits for the number of rows."""
    g, ids = g.to(torch.float32).contiguous(), ids.contiguous()
    d_hidden = None
    if needs[0]:
        d_hidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format)
        if g.numel():
            weight = _contiguous_rows(weight)
            (N, M), (V, D) = ids.shape, weight.shape
            launch(
                _row_dots_d_hidden_kernel, (N, config.ceil_div(D, _block_d(D))),
                (weight, ids, g, d_hidden), (weight.stride(0), V, D, M), num_warps=4,
                ALIGNED=_aligned(weight), BLOCK_M=ROWS, BLOCK_D=_block_d(D),
            )  # fmt: skip
    d_weight = _d_weight(hidden, weight, ids, g, sparse) if needs[1] else None
    return d_hidden, d_weight


def _d_weight(hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor, sparse: bool) -> Tensor:
    V, D = weight.shape
    used = (ids >= 0) & (ids < V) & (g != 0)
    runs, order = torch.where(used, ids, V).view(-1).sort(stable=True)
    if not sparse:
        out = torch.zeros((V, D), device=weight.device, dtype=weight.dtype)
        _add_runs(hidden, g, ids.shape[1], order, runs, out)
        return out
    begins = torch.ones_like(runs, dtype=torch.bool)
    begins[1:] = runs[1:] != runs[:-1]
    which = runs[begins & (runs < V)]  # the host waits for the number of distinct ids
    out = torch.zeros((len(which), D), device=weight.device, dtype=weight.dtype)
    _add_runs(hidden, g, ids.shape[1], order, begins.cumsum(0) - 1, out)
    return table_gradient(which, out, weight, True)


def _add_runs(
    hidden: Tensor, g: Tensor, M: int, order: Tensor, runs: Tensor, out: Tensor
) -> None:  # fmt: skip
    """Sums g · hidden over the pairs of each run, and writes the sum of run r to row r of `out`."""
    if not order.numel() or not out.numel():
        return
    hidden, (rows, D), count = _contiguous_rows(hidden), out.shape, order.numel()
    blocks, block = config.ceil_div(count, LENGTH), _block_d(D)
    parts = torch.empty((blocks, 2, D), device=out.device, dtype=torch.float32)
    grid = (blocks, config.ceil_div(D, block))
    launch(
        _row_dots_d_table_kernel, grid, (hidden, g.view(-1), order, runs, out, parts),
        (count, hidden.stride(0), D, M, rows), num_warps=1,
        ALIGNED=_aligned(hidden), BLOCK_P=LENGTH, BLOCK_D=block,
    )  # fmt: skip
    launch(
        _row_dots_d_table_ends_kernel, grid, (runs, parts, out), (count, D, rows), num_warps=1,
        BLOCK_P=LENGTH, BLOCK_D=block,
    )  # fmt: skip


def _contiguous_rows(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _aligned(t: Tensor) -> bool:
    """Whether every row starts on a 16-byte boundary, so that one instruction can load 16 bytes."""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0


def _block_d(D: int) -> int:
    return min(128, config.ceil_pow2(D))
