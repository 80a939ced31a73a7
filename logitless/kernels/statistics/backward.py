"""The gradient of a loss over row statistics.

Each program writes one span of a row's columns, and then rewrites the label and the ids while the
span is in the cache. Each rewritten number is a sum of all its terms, rounded once. Every program
searches all ids of its row, so spans are long; without ids, a span is a single tile. The
coefficients are read, or computed from gradients of statistics (coefficients.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...contract import COEFFICIENTS, Coefficients, Reading
from .. import config
from ..at_ids.duplicate_ids import STATE_REPEATS, with_repeats
from ..at_ids.tail_mass import STATE_TAIL, lift_of
from ..launch import Launch, Plans, field
from ..layout import (
    Place,
    Rows,
    aligned,
    describe,
    load_label,
    options_of,
    pack_of,
    place_of,
    row_offset,
    split_row,
)
from ..numerics import INF, LOG2E, NO_ID, capped, inverse_temperature, load
from ..profiling import profiled
from .coefficients import MOST_IN_ROW, Given, coefs_of_row, fields_in_row
from .gradient_tile import (
    Span,
    Terms,
    c0_of,
    dz_of,
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
from .state import LOG_S, LOG_S1, SHIFT, STATE_WIDTH

MAX_PRELOADED = 512  # largest number of ids whose logits one program holds in registers


@dataclass(frozen=True)
class _Constants:
    has: tuple[str, ...]  # names of the coefficients in use, and "second" if needed (see `uses`)
    aligned: bool  # every row of DX starts and ends on a 16-byte boundary
    x_aligned: bool  # for each row, X and DX have the same address modulo 16
    one: bool  # a span is one tile; only without ids and without log p[label] at temperature 1
    preload_ids: bool  # the gradient overwrites X, so the logits at the ids are loaded first
    step_c: int  # row stride of COEF; 0 if COEF has a single row
    step_u: int  # row stride of D0 if COEF is given; 0 if all rows share one number
    step_f: int  # row stride of FACTOR; 0 if all rows share one number
    given: Given | None  # the statistics whose gradients are D0, D1 and D2; None if COEF is given
    span: int
    block_v: int
    block_k: int


@triton.constexpr_function
def at_label(has):
    return "label" in has or "logprob_t1" in has


@triton.jit
def is_bad(ids, V):
    """Returns 1 for ids outside [0, V) that are not NO_ID, and 0 for the others."""
    return (((ids < 0) | (ids >= V)) & (ids != NO_ID)).to(tl.int32)


@triton.jit
def sums_of_same(IDS, G, ids, K):
    """Returns one number per id in `ids`: the sum of g over all slots that hold this id."""
    g = tl.zeros(ids.shape, tl.float32)
    ids = ids.to(tl.int32)  # an id of more than 32 bits is invalid and makes its row NaN
    for j in range(K):
        same = ids == tl.load(IDS + j).to(tl.int32)
        g += tl.where(same, tl.load(G + j).to(tl.float32), 0.0)
    return g


class _Row(NamedTuple):
    """Pointers to one row of each tensor, and what `_rewrite` needs."""

    X: tl.tensor
    W: tl.tensor  # a pointer or None
    DX: tl.tensor
    IDS: tl.tensor  # a pointer or None
    G_IDS: tl.tensor  # a pointer or None
    K: tl.tensor
    c0_ids: tl.tensor
    gain: tl.tensor  # multiplies G_IDS
    repeated: tl.tensor  # whether two slots hold the same id
    label: tl.tensor  # NO_ID if the label is invalid
    g_label: tl.tensor  # added to the gradient at the label, which can be among the ids


@triton.jit
def _preload_ids(Xrow, IDS, K, span, ALIGNED: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_k = tl.arange(0, BLOCK_K)
    ids = tl.load(IDS + offs_k, mask=offs_k < K, other=NO_ID)
    return load(Xrow, ids, in_span(ids, span, ALIGNED))


@triton.jit
def _write_ids(row, x_ids, terms, span, HAS: tl.constexpr, CONSTANTS: tl.constexpr):
    """Rewrites the gradient at the ids in a span. Returns whether the row has an invalid id."""
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    bad = tl.zeros((BLOCK_K,), tl.int32)
    for start in range(0, row.K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        ids = tl.load(row.IDS + offs_k, mask=offs_k < row.K, other=NO_ID)
        inside = in_span(ids, span, field(CONSTANTS, "aligned"))
        bad |= is_bad(ids, span.V)
        if field(CONSTANTS, "preload_ids"):
            x = x_ids
        else:
            x = load(row.X, ids, inside)
        y, slope = capped(x, terms.softcap)
        dz = dz_of(y, row.W, ids, inside, row.c0_ids, 0.0, terms, HAS)
        if row.G_IDS is not None:
            g = load(row.G_IDS, offs_k, inside).to(tl.float32)
            if row.repeated:
                g = sums_of_same(row.IDS, row.G_IDS, ids, row.K)
            # INF: a row that is all -inf, whose gradient is 0
            dz += tl.where(terms.shift == INF, 0.0, g * row.gain)
        if at_label(HAS):
            dz += tl.where(ids == row.label, row.g_label, 0.0)
        tl.store(row.DX + ids, (dz * slope).to(row.DX.dtype.element_ty), mask=inside)
    return tl.max(bad, axis=0) > 0


@triton.jit
def _rewrite(
    row, x_label, x_ids, terms, span, HAS: tl.constexpr, CONSTANTS: tl.constexpr
):  # fmt: skip
    """Rewrites the gradient at label and ids; the whole span becomes NaN if one is invalid."""
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    bad = False
    if at_label(HAS):
        bad = row.label == NO_ID
        if in_span(row.label, span, ALIGNED):
            write_label(x_label, row.W, row.DX, row.label, row.g_label, terms, HAS)
    if row.IDS is not None:
        if at_label(HAS):
            # last, because of a label among the ids: `write_label` leaves out the terms of the ids,
            # but `_write_ids` includes that of the label
            tl.debug_barrier()
        bad = _write_ids(row, x_ids, terms, span, HAS, CONSTANTS) | bad
    if bad:
        tl.debug_barrier()  # NaN must be stored after the gradients of the label and the ids
        fill_span(
            row.DX, float("nan"), span, pack_of(row.X), ALIGNED, False, field(CONSTANTS, "block_v")
        )


class RowGradient(NamedTuple):
    """The gradient of one row, as in `Terms`; `c0` and `lift` are for columns outside the ids."""

    shift: tl.tensor
    c0: tl.tensor
    c1: tl.tensor
    c_logprob_t1: tl.tensor
    g_c: tl.tensor
    lift: tl.tensor
    c0_ids: tl.tensor  # c0 for columns that are among the ids
    g_label: tl.tensor  # added to the gradient at the label


@triton.jit
def row_gradient(STATE, coefs, a, inv_t, HAS: tl.constexpr):
    """Computes the RowGradient of y, the logits before the division by the temperature.

    `a` is `coefs.a`, or NaN to make the row NaN; a row that is all -inf keeps the gradient 0.

    With coefficient d, the label's log-probability at temperature 1 has the gradient

        d ([i = label] - p1_i), where p1 = softmax(y)

    of which d is added at the label, and -d · p1_i everywhere:

    - at temperature 1, where p1 = p, by replacing `a` with a - d;
    - otherwise ("second"), as c_logprob_t1 = -d / s1 times e^(y_i - shift), where s1 is the
      normaliser at temperature 1.

    With "a_ids", the ids' columns have a_ids · p_i and the others a · p_i · e^-lift, where `a`
    (field A) already contains e^lift (LEAST_TAIL in contract.py). As e^-lift must not apply to
    -d · p_i, there

        (a - d e^lift) p_i e^-lift = a p_i e^-lift - d p_i
    """
    shift, log_s = tl.load(STATE + SHIFT), tl.load(STATE + LOG_S)
    # no distribution, and the gradient 0
    dead = log_s == -INF
    d = tl.where(dead, 0.0, coefs.d_logprob_t1)
    c_logprob_t1, d_of_a = 0.0, d
    if uses(HAS, "second"):
        c_logprob_t1 = tl.where(dead, 0.0, -d * tl.exp2(-tl.load(STATE + LOG_S1) * LOG2E))
        d_of_a = 0.0
    lift = 0.0
    if uses(HAS, "a_ids"):
        c0_ids = c0_of(coefs.a_ids - d_of_a, coefs.b, log_s, inv_t, HAS)
        lift = lift_of(tl.load(STATE + STATE_TAIL)) * LOG2E
        d_of_a *= tl.exp2(lift)
    shift, c0, c1, g_c = row_terms(coefs, a - d_of_a, shift, log_s, inv_t, HAS)
    if not uses(HAS, "a_ids"):
        c0_ids = c0
    g_label = tl.where(dead, 0.0, coefs.g_label * inv_t) + d
    return RowGradient(shift, c0, c1, c_logprob_t1, g_c, lift, c0_ids, g_label)


@triton.jit(
    **profiled("stats_bwd", shows=("K",)),
    do_not_specialize=["rows_t", "lead", "start", "vocab"],
    do_not_specialize_on_alignment=[
        "LABEL", "IDS", "STATE", "COEF", "G_IDS", "D0", "D1", "D2", "FACTOR", "temperature",
    ],
)  # fmt: skip
def _stats_bwd_kernel(
    X, LABEL, IDS, W, STATE, COEF, G_IDS, D0, D1, D2, FACTOR,  # inputs
    DX,  # output
    temperature,
    rows_t, stride_xb, stride_xt, stride_db, stride_dt, lead, V, K,  # sizes
    start, vocab,
    softcap, ignore_index,  # options
    CONSTANTS: tl.constexpr,
):  # fmt: skip
    """Each program writes a span of the gradient, then rewrites the columns of label and ids.

    `start`, the id of X's first column, and `vocab` are None if X has all columns. IDS are relative
    to X. D0 is the upstream gradient; without COEF, D0, D1 and D2 are gradients of statistics.
    """
    HAS: tl.constexpr = field(CONSTANTS, "has")
    ALIGNED: tl.constexpr = field(CONSTANTS, "aligned")
    PRELOAD_IDS: tl.constexpr = field(CONSTANTS, "preload_ids")
    SPAN: tl.constexpr = field(CONSTANTS, "span")
    BLOCK_K: tl.constexpr = field(CONSTANTS, "block_k")
    BLOCK_V: tl.constexpr = field(CONSTANTS, "block_v")
    ONE: tl.constexpr = field(CONSTANTS, "one")
    PACK: tl.constexpr = pack_of(X)
    pid = tl.program_id(0)
    spans = tl.cdiv(V, SPAN)
    row = pid // spans
    offset = row_offset(row, rows_t, stride_db, stride_dt)
    head, body = split_row(offset, V, lead, PACK, ALIGNED)
    Xrow = X + row_offset(row, rows_t, stride_xb, stride_xt)
    DXrow = DX + offset
    lo = pid % spans * SPAN
    hi = tl.multiple_of(tl.minimum(lo + SPAN, body), PACK)
    span = Span(head, body, V, lo, hi)

    label = load_label(LABEL, row)
    if ignore_index is not None:
        if label == ignore_index:
            fill_span(DXrow, 0.0, span, PACK, ALIGNED, ONE, BLOCK_V)
            return

    inv_t = inverse_temperature(temperature, row)
    step_f: tl.constexpr = field(CONSTANTS, "step_f")
    if COEF is not None:
        gain = row_gain(D0, FACTOR, row, field(CONSTANTS, "step_u"), step_f)
        coefs = load_coefs(COEF + row.to(tl.int64) * field(CONSTANTS, "step_c"), gain, HAS)
    else:
        gain = row_gain(None, FACTOR, row, 0, step_f)
        coefs = coefs_of_row(D0, D1, D2, STATE, row, gain, field(CONSTANTS, "given"), HAS)
    a = coefs.a
    if ONE and at_label(HAS):
        # an invalid label makes the whole row NaN; with several tiles, `_rewrite` does
        a = tl.where(is_class(label, V, vocab), a, float("nan"))
    STATE += row.to(tl.int64) * STATE_WIDTH
    d_row = row_gradient(STATE, coefs, a, inv_t, HAS)
    terms = Terms(
        d_row.shift, d_row.c0, d_row.c1, d_row.c_logprob_t1, d_row.g_c, inv_t * LOG2E, d_row.lift,
        softcap,
    )  # fmt: skip

    x_label = tl.full((), 0.0, X.dtype.element_ty)
    x_ids = tl.zeros((BLOCK_K,), X.dtype.element_ty)
    if at_label(HAS):
        label = tl.where(is_class(label, V, vocab), local_column(label, start), NO_ID).to(tl.int32)
        inside = in_span(label, span, ALIGNED)
        x_label = tl.load(Xrow + label, mask=inside, other=0.0)
        if ONE:
            if inside:
                # all threads read the label's logit before the gradient overwrites it
                tl.debug_barrier()
    if IDS is not None:
        IDS += row.to(tl.int64) * K
        if PRELOAD_IDS:
            x_ids = _preload_ids(Xrow, IDS, K, span, ALIGNED, BLOCK_K)
    if PRELOAD_IDS:
        tl.debug_barrier()

    write_span(
        Xrow, W, DXrow, terms, span, HAS, ALIGNED, field(CONSTANTS, "x_aligned"), ONE, BLOCK_V
    )
    if ONE:
        if at_label(HAS):
            if inside:
                write_label(x_label, W, DXrow, label, d_row.g_label, terms, HAS)
        return
    # the next stores overwrite columns of other threads
    tl.debug_barrier()

    repeated = False
    if G_IDS is not None:
        G_IDS += row.to(tl.int64) * K
        repeated = tl.load(STATE + STATE_REPEATS) != 0
    _rewrite(
        _Row(
            Xrow, W, DXrow, IDS, G_IDS, K, d_row.c0_ids, gain * inv_t, repeated, label,
            d_row.g_label,
        ),
        x_label, x_ids, terms, span, HAS, CONSTANTS,
    )  # fmt: skip


def stats_bwd_launch(
    rows: Rows, d_rows: Rows, K: int | None, temperature: float | None, softcap: float | None,
    ignore_index: int | None, has: tuple[str, ...], steps: tuple[int, int, int],
    columns: tuple[int | None, int | None], given: Given | None, preload_ids: bool, second: bool,
    cut: config.Config,
) -> Launch:  # fmt: skip
    """If K is None, each span is one tile."""
    one = K is None
    span = cut.block_v if one else config.ceil_div(cut.span, cut.block_v) * cut.block_v
    number = () if temperature is None else (temperature,)
    block_k = min(MAX_PRELOADED, max(config.ceil_pow2(K or 1), 2))
    return Launch(
        _stats_bwd_kernel, (rows.count * config.ceil_div(rows.vocab, span),),
        (
            *number, *rows.strides, d_rows.stride_b, d_rows.stride_t, d_rows.lead, rows.vocab, K,
            *columns, softcap, ignore_index,
        ),
        num_warps=cut.num_warps,
        CONSTANTS=_Constants(
            (*has, "second") if second else has, d_rows.aligned, rows.aligned_like(d_rows),
            one, preload_ids, *steps, given, span, cut.block_v, block_k,
        ),
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
        factor = factor.contiguous()
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
    local = torch.where((ids >= start) & (ids < start + width), ids - start, NO_ID.value)
    bad = ((ids < 0) | (ids >= vocab)) & (ids != NO_ID.value)
    return torch.where(bad, -1, local)


def _by_copy(x, reading, state, coefficients, names, upstream, factor, into, start) -> Tensor:
    over_logits = into is not None and into.data_ptr() == x.data_ptr()
    place = None if over_logits else into
    dx = _gradient(
        x.contiguous(), reading, state, coefficients, names, upstream, factor, place, start
    )
    return into.copy_(dx) if over_logits else dx
