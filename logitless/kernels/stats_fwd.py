"""Statistics of whole rows in one pass over the logits, with one program per row.

Rows too few to fill the GPU are split over programs (stats_split_fwd.py, stats_merge.py).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from . import config
from .launch import Launch
from .layout import Rows, row_offset, split_row
from .numerics import LOG2E, capped, inverse_temperature
from .profiling import profiled
from .state import (
    column_of_max,
    field,
    fold_span,
    is_live,
    load_first,
    load_label,
    logit_at,
    pack_of,
    reference,
    with_count,
)
from .stats_outputs import Outputs, write_ids, write_label, write_row


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
