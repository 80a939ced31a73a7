"""The gradient of a loss without ids (ids_bwd.py) and without log p[label] at temperature 1.

Each program writes one block of a row. It reads the coefficients, or computes those of its row from
the gradients of up to three statistics (stats_coefficients.py).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from . import config
from .bwd_tile import (
    Span,
    Terms,
    fill_span,
    in_span,
    is_class,
    load_coefs,
    local_column,
    row_gain,
    row_terms,
    uses,
    write_label,
    write_span,
)
from .launch import Launch
from .layout import Rows, row_offset, split_row
from .numerics import INF, LOG2E, inverse_temperature
from .profiling import profiled
from .state import LOG_S, SHIFT, STATE_WIDTH, field, load_label, pack_of
from .stats_coefficients import Given, coefs_of_row


@dataclass(frozen=True)
class _Constants:
    aligned: bool  # every row of DX starts and ends on a 16-byte boundary
    x_aligned: bool  # for each row, X and DX have the same address modulo 16
    step_c: int  # row stride of COEF; 0 if COEF has a single row
    step_u: int  # row stride of D0 if COEF is given; 0 if all rows share one number
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    given: Given | None  # the statistics whose gradients are D0, D1 and D2; None if COEF is given
    block_v: int


@triton.jit(
    **profiled("label_bwd"),
    do_not_specialize=["rows_t", "lead", "blocks", "start", "vocab"],
    do_not_specialize_on_alignment=[
        "LABEL", "STATE", "COEF", "D0", "D1", "D2", "FACTOR", "temperature",
    ],
)  # fmt: skip
def _label_bwd_kernel(
    X, LABEL, W, STATE, COEF, D0, D1, D2, FACTOR,  # inputs
    DX,  # output
    temperature,
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, blocks,  # sizes
    start, vocab,
    softcap, ignore_index,  # options
    HAS: tl.constexpr, CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program writes one block of a row, the first also the fringe (see layout.py).

    `start` and `vocab` are those of ids_bwd.py. D0 is the upstream gradient; without COEF, D0, D1
    and D2 are gradients of statistics.
    """
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    PACK: tl.constexpr = pack_of(X)
    pid = tl.program_id(0)
    row = pid // blocks
    block = pid % blocks
    offset = row_offset(row, rows_t, stride_db, stride_dt)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    DXrow = DX + offset
    lo = block * BLOCK_V
    hi = tl.minimum(lo + BLOCK_V, body)
    span = Span(head, body, V, lo, hi)

    label = load_label(LABEL, row)
    if ignore_index is not None:
        if label == ignore_index:
            fill_span(DXrow, 0.0, span, PACK, ALIGNED, True, BLOCK_V)
            return

    inv_t = inverse_temperature(temperature, row)
    at = STATE + row.to(tl.int64) * STATE_WIDTH
    shift, log_s = tl.load(at + SHIFT), tl.load(at + LOG_S)
    step_f: tl.constexpr = field(CONSTANTS, "step_f")
    if COEF is not None:
        gain = row_gain(D0, FACTOR, row, field(CONSTANTS, "step_u"), step_f)
        coefs = load_coefs(COEF + row.to(tl.int64) * field(CONSTANTS, "step_c"), gain, HAS)
    else:
        gain = row_gain(None, FACTOR, row, 0, step_f)
        coefs = coefs_of_row(D0, D1, D2, STATE, row, gain, field(CONSTANTS, "given"), HAS)
    a = coefs.a
    if uses(HAS, "label"):
        valid = is_class(label, V, vocab)
        a = tl.where(valid, a, float("nan"))  # an invalid label makes the whole row NaN
        label = tl.where(valid, local_column(label, start), -1).to(tl.int32)
        inside = in_span(label, span, ALIGNED)
        x_label = tl.load(Xrow + label, mask=inside, other=0.0)
        if inside:
            # all threads read the label's logit before the gradient overwrites it
            tl.debug_barrier()

    shift, c0, c1, g_c = row_terms(coefs, a, shift, log_s, inv_t, HAS)
    terms = Terms(shift, c0, c1, 0.0, g_c, inv_t * LOG2E, 0.0, softcap)
    write_span(
        Xrow, W, DXrow, terms, span, HAS, ALIGNED, field(CONSTANTS, "x_aligned"), True, BLOCK_V
    )
    if uses(HAS, "label"):
        if inside:
            g_label = tl.where(log_s == -INF, 0.0, coefs.g_label * inv_t)
            write_label(x_label, W, DXrow, label, g_label, terms, HAS)


def label_bwd_launch(
    rows: Rows, d_rows: Rows, temperature: float | None, softcap: float | None,
    ignore_index: int | None, has: tuple[str, ...], steps: tuple[int, int, int],
    columns: tuple[int | None, int | None], given: Given | None, cut: config.Config,
) -> Launch:  # fmt: skip
    blocks = config.ceil_div(rows.vocab, cut.block_v)
    number = () if temperature is None else (temperature,)
    return Launch(
        _label_bwd_kernel, (rows.count * blocks,),
        (
            *number, *rows.strides, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab,
            blocks, *columns, softcap, ignore_index,
        ),
        num_warps=cut.num_warps, HAS=has,
        CONSTANTS=_Constants(
            d_rows.aligned, rows.aligned_like(d_rows), *steps, given, cut.block_v
        ),
    )  # fmt: skip
